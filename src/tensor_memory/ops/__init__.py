"""The recurrences, each with a readable reference beside fast backends; README.md has the maths."""

from tensor_memory.ops.dispatch import BACKENDS, backends, why_not
from tensor_memory.ops.scan.inputs import Steering
from tensor_memory.ops.scan.memory_scan import memory_read, memory_scan, scan_backend

__all__ = [
    "BACKENDS",
    "Steering",
    "backends",
    "memory_read",
    "memory_scan",
    "scan_backend",
    "why_not",
]
