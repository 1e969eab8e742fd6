"""Sizes of a model that walks through a world or a maze in a blink."""

from __future__ import annotations

from typing import Any

from tensor_memory import MemoryConfig, PlaceConfig
from tensor_memory_lab.models.decoder import PLACE_METHODS
from tensor_memory_lab.models.peers import PEERS, PeerConfig


def small(method: str) -> dict[str, Any]:
    """The method, and sizes of what it reads."""
    sizes: dict[str, Any] = {
        "method": method,
        "dim": 16,
        "heads": 2,
        "layers": 3,
        "memory_layers": (1,),
        "window": 4,
        "memory": MemoryConfig(channels=4, grid=(3, 3), chunk_size=1),
    }
    if method in PLACE_METHODS:
        sizes["place"] = PlaceConfig(channels=4, heads=2, grid=(3, 3))
    if method in PEERS:
        heads = {} if method == "mamba2" else {"heads": 2}  # it has its own
        sizes["peer"] = PeerConfig(state_bytes=288, **heads)
    return sizes
