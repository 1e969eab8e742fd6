"""Launching a kernel that has been launched before, without asking again what to compile.

Triton derives a kernel's variant from every argument of every launch and asks the driver about
every pointer. That takes longer than most of our kernels run: a training step launched from Python
takes a fifth longer with it (docs/evidence/kernel-log.md). Here a kernel is bound to its constants
once (`bind`). A launch then looks at types and alignment only, and hands over plain addresses.
Within `Alike` it does not even look at these: they are found once for many launches.

This goes past Triton's public interface. It is done only where compiled code takes its arguments in
a way known here; otherwise every launch is an ordinary one. Triton's own launch hooks see only the
first launch of a variant; PyTorch's profiler sees them all.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import operator
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor


@triton.jit
def _nothing():
    pass


INTERPRETED = not isinstance(_nothing, triton.JITFunction)
"""Whether Triton's interpreter runs the kernels (TRITON_INTERPRET=1)."""

_pointer, _dtype = Tensor.data_ptr, operator.attrgetter("dtype")  # mapped: half a loop's time
_ALIGNED = 16  # bytes: what compiled code may rely on
_MOST = 2**31  # from here on integers have code of their own
_GRID = ("gridX", "gridY", "gridZ", "stream", "function")
_HOOKS = ("kernel_metadata", "launch_metadata", "launch_enter_hook", "launch_exit_hook")
Grid = tuple[int, ...]
KNOWN_CALLS = {(*_GRID, "args"), (*_GRID, *_HOOKS, "args")}  # Triton 3.4 to 3.6, and 3.7 to 3.9


class Variant(NamedTuple):
    """Machine code for certain types of arguments, and how to call it."""

    run: Callable[..., Any]
    before: tuple[Any, ...]
    """What comes between the stream and the kernel's own arguments."""
    constants: tuple[Any, ...]
    compiled: Any
    """Holds the code: some versions unload it with this object."""


class _Thread(threading.local):
    """What a thread knows of the tensors that it launches kernels with."""

    kind: int | None = None
    """A number for their types; None where every launch must ask."""
    stream: int = 0


_thread = _Thread()
_kinds: dict[tuple[Any, ...], int] = {}
_new_kind = itertools.count()  # not how many there are: threads that ask at once would get the same


class Alike:
    """Within, on this thread, all types and addresses of launches follow from these tensors.

    Whoever enters it promises that: tensors made inside have types that depend on nothing but the
    types of these tensors and `choices`, start where memory was allocated, and no number is larger
    than the size of the first. Then a kernel's code is found by one number, `kind`. It is None,
    and launches ask as ever, where one is at an odd address, the first is huge or on a device
    that is not the current one, None is among the choices, or no stream can be asked for.
    """

    def __init__(self, tensors: Sequence[Tensor], *choices: Any) -> None:
        self.kind, self.stream, device = None, 0, tensors[0].get_device()
        odd = functools.reduce(operator.or_, map(_pointer, tensors)) % _ALIGNED
        can_ask = INTERPRETED or hasattr(torch._C, "_cuda_getCurrentRawStream")
        here = can_ask and (INTERPRETED or torch._C._cuda_getDevice() == device)
        if here and not odd and tensors[0].numel() < _MOST and None not in choices:
            key = (device, *map(_dtype, tensors), *choices)
            self.kind = _kinds.setdefault(key, next(_new_kind))
            if not INTERPRETED:
                self.stream = torch._C._cuda_getCurrentRawStream(device)

    def __enter__(self) -> None:
        self.outer = _thread.kind, _thread.stream
        _thread.kind, _thread.stream = self.kind, self.stream

    def __exit__(self, *_: object) -> None:
        _thread.kind, _thread.stream = self.outer


class BoundKernel:
    """A kernel with its constants and launch options; call it with a grid, tensors and numbers.

    The kernel takes pointers first, then numbers, then constants, and must not specialise on the
    value of any number.
    """

    def __init__(self, kernel: Any, settings: dict[str, Any]) -> None:
        self.kernel, self.settings = kernel, settings
        self.variants: dict[tuple[Any, ...] | int | None, Variant | None] = {}
        """By device and types, and by the `kind` of `Alike`."""

    def __call__(
        self, grid: tuple[int, ...], tensors: Sequence[Tensor], numbers: tuple[float, ...] = ()
    ) -> None:
        """Launch on the device and the current stream of the first tensor."""
        if INTERPRETED:
            self.kernel[grid](*tensors, *numbers, **self.settings)
            return
        variant = self.variants.get(_thread.kind)
        if variant is not None:
            variant.run(
                *(*grid, 1, 1)[:3], _thread.stream, *variant.before,
                *map(_pointer, tensors), *numbers, *variant.constants,
            )  # fmt: skip
            return
        device = tensors[0].get_device()
        if torch._C._cuda_getDevice() != device:
            with torch.cuda.device(device):
                self(grid, tensors, numbers)
            return
        pointers = list(map(_pointer, tensors))
        odd = functools.reduce(operator.or_, pointers) % _ALIGNED
        if odd or (numbers and max(numbers) >= _MOST):
            # Odd addresses and huge integers have code of their own, and are rare.
            self.kernel[grid](*tensors, *numbers, **self.settings)
            return
        types = (device, *map(_dtype, tensors))
        variant = self.variants.get(types)
        if variant is None:
            compiled = self.kernel[grid](*tensors, *numbers, **self.settings)
            if types not in self.variants:
                constants = self.kernel.arg_names[len(tensors) + len(numbers) :]
                self.variants[types] = _variant(compiled, [self.settings[c] for c in constants])
        else:
            stream = torch._C._cuda_getCurrentRawStream(device)
            variant.run(
                *(*grid, 1, 1)[:3], stream, *variant.before,
                *pointers, *numbers, *variant.constants,
            )  # fmt: skip
        if _thread.kind is not None:
            self.variants[_thread.kind] = self.variants[types]


def _variant(compiled: Any, constants: list[Any]) -> Variant | None:
    """How to call what Triton compiled, or None where this version calls it in a way not known."""
    run = getattr(compiled, "run", None)
    handles = [getattr(compiled, name, None) for name in ("function", "packed_metadata")]
    if not callable(run) or None in handles or not hasattr(torch._C, "_cuda_getCurrentRawStream"):
        return None
    if tuple(inspect.signature(run).parameters) not in KNOWN_CALLS:
        return None
    without_hooks = (None, None, None)
    return Variant(run, (*handles, *without_hooks), tuple(constants), compiled)


_bound: dict[tuple[Any, ...], BoundKernel] = {}


def bind(kernel: Any, **settings: Any) -> BoundKernel:
    """The kernel with these constants and launch options, the same object for the same ones."""
    key = (id(kernel), *settings.items())  # hashing a kernel hashes its source
    if key not in _bound:
        _bound[key] = BoundKernel(kernel, settings)
    return _bound[key]


def blocks(count: int, size: int) -> int:
    """How many blocks of this size a count needs; `triton.cdiv` takes microseconds."""
    return -(-count // size)


def or_else(tensor: Tensor | None, stand_in: Tensor) -> Tensor:
    """The tensor, or one whose pointer no program follows."""
    return stand_in if tensor is None else tensor
