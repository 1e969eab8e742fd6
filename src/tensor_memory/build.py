"""The memory that a config describes."""

from __future__ import annotations

from tensor_memory.config import MemoryConfig, PlaceConfig
from tensor_memory.place import PlaceMemory
from tensor_memory.place_state import PlaceState
from tensor_memory.state import MemoryState
from tensor_memory.tensor import TensorMemory

AnyConfig = MemoryConfig | PlaceConfig
AnyMemory = TensorMemory | PlaceMemory
AnyState = MemoryState | PlaceState


def build_memory(dim: int, config: AnyConfig, *, zero_init: bool = False) -> AnyMemory:
    """A `TensorMemory` or a `PlaceMemory` for tokens of width `dim`."""
    if isinstance(config, PlaceConfig):
        return PlaceMemory(dim, config, zero_init=zero_init)
    return TensorMemory(dim, config, zero_init=zero_init)
