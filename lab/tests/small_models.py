"""Sizes of a model that walks through a world or a maze in a blink."""

from tensor_memory import MemoryConfig, PlaceConfig
from tensor_memory_lab.models.peers import PeerConfig

SMALL = {
    "dim": 16,
    "heads": 2,
    "layers": 3,
    "memory_layers": (1,),
    "window": 4,
    "memory": MemoryConfig(channels=4, grid=(3, 3), chunk_size=1),
    "place": PlaceConfig(channels=4, heads=2, grid=(3, 3)),
    "peer": PeerConfig(state_bytes=288, heads=2),
}
