"""A fixed-size, recurrent, spatial memory that any Transformer can carry.

A name is imported when it is first asked for: torch takes seconds to load, and the command line
needs none of it to print its help.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tensor_memory.attachment import Attachment, attach, detach, memory_disabled
    from tensor_memory.checkpoint import load_memory, save_memory
    from tensor_memory.config import MemoryConfig, PlaceConfig
    from tensor_memory.forgetting import ForgettingWarning
    from tensor_memory.inspect import Recording, record
    from tensor_memory.leaks import LeakReport, find_leak
    from tensor_memory.ops import backends, memory_scan
    from tensor_memory.ops.places.place_scan import place_scan
    from tensor_memory.ops.prepared import fixed_weights
    from tensor_memory.place import PlaceMemory, Trace
    from tensor_memory.place_state import PlaceState
    from tensor_memory.residual import MemoryResidual
    from tensor_memory.state import MemoryState
    from tensor_memory.tensor import TensorMemory

__version__ = "0.1.0"
__all__ = [
    "Attachment",
    "ForgettingWarning",
    "LeakReport",
    "MemoryConfig",
    "MemoryResidual",
    "MemoryState",
    "PlaceConfig",
    "PlaceMemory",
    "PlaceState",
    "Recording",
    "TensorMemory",
    "Trace",
    "attach",
    "backends",
    "detach",
    "find_leak",
    "fixed_weights",
    "load_memory",
    "memory_disabled",
    "memory_scan",
    "place_scan",
    "record",
    "save_memory",
]

_MODULES = {
    "Attachment": "attachment",
    "ForgettingWarning": "forgetting",
    "LeakReport": "leaks",
    "MemoryConfig": "config",
    "MemoryResidual": "residual",
    "MemoryState": "state",
    "PlaceConfig": "config",
    "PlaceMemory": "place",
    "PlaceState": "place_state",
    "Recording": "inspect",
    "TensorMemory": "tensor",
    "Trace": "place",
    "attach": "attachment",
    "backends": "ops",
    "detach": "attachment",
    "find_leak": "leaks",
    "fixed_weights": "ops.prepared",
    "load_memory": "checkpoint",
    "memory_disabled": "attachment",
    "memory_scan": "ops",
    "place_scan": "ops.places.place_scan",
    "record": "inspect",
    "save_memory": "checkpoint",
}
"""Where each public name is defined. No module may be named like one of them: importing it would
put the module in the name's place."""


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value  # the next time, Python finds it without asking here
    return value


def __dir__() -> list[str]:
    return ["__version__", *__all__]
