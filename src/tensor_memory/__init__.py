"""A fixed-size, recurrent, spatial memory that any Transformer can carry."""

from tensor_memory.causality import LeakReport, find_leak
from tensor_memory.config import MemoryConfig
from tensor_memory.module import MemoryResidual, TensorMemory
from tensor_memory.ops import memory_scan
from tensor_memory.state import MemoryState

__version__ = "0.1.0"
__all__ = [
    "LeakReport",
    "MemoryConfig",
    "MemoryResidual",
    "MemoryState",
    "TensorMemory",
    "find_leak",
    "memory_scan",
]
