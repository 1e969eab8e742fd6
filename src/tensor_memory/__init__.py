"""A fixed-size, recurrent, spatial memory that any Transformer can carry."""

from tensor_memory.attachment import Attachment, attach, detach, memory_disabled
from tensor_memory.checkpoint import load_memory, save_memory
from tensor_memory.config import MemoryConfig
from tensor_memory.inspect import Recording, record
from tensor_memory.leaks import LeakReport, find_leak
from tensor_memory.module import TensorMemory
from tensor_memory.ops import memory_scan
from tensor_memory.residual import MemoryResidual
from tensor_memory.state import MemoryState

__version__ = "0.1.0"
__all__ = [
    "Attachment",
    "LeakReport",
    "MemoryConfig",
    "MemoryResidual",
    "MemoryState",
    "Recording",
    "TensorMemory",
    "attach",
    "detach",
    "find_leak",
    "load_memory",
    "memory_disabled",
    "memory_scan",
    "record",
    "save_memory",
]
