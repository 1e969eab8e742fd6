"""Launching a kernel that has been launched before, without asking again what to compile.

Triton derives a kernel's variant from every argument of every launch, and asks the driver about
every pointer, which together take longer than most of our kernels run. Here a kernel is bound to
its constants once (`bound`); a launch then looks at types and alignment alone and hands over plain
addresses. Triton's own launch hooks are not called; PyTorch's profiler sees the kernels as ever.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from tensor_memory.ops import triton_forward

INTERPRETED = not isinstance(triton_forward.forward_kernel, triton.JITFunction)
# Earlier versions take other arguments when a compiled kernel is called.
_DIRECT = tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 4)
_ALIGNED = 16  # bytes: what compiled code may rely on


class Bound:
    """A kernel with its constants and launch options; call it with a grid, tensors and numbers.

    The kernel takes pointers first, then numbers, then constants, and must not specialise on the
    value of any number.
    """

    def __init__(self, kernel: Any, settings: dict[str, Any]) -> None:
        self.kernel, self.settings = kernel, settings
        self.variants: dict[Any, Any] = {}

    def __call__(
        self, grid: tuple[int, ...], tensors: Sequence[Tensor], numbers: tuple[float, ...] = ()
    ) -> None:
        """Launch on the device and the current stream of the first tensor."""
        if INTERPRETED or not _DIRECT:
            self.kernel[grid](*tensors, *numbers, **self.settings)
            return
        device = tensors[0].device.index
        variant = (device, *[tensor.dtype for tensor in tensors])
        pointers = [tensor.data_ptr() for tensor in tensors]
        if functools.reduce(operator.or_, pointers) % _ALIGNED or max(numbers, default=0) >= 2**31:
            variant = None  # odd pointers and huge integers have code of their own, and are rare
        known = self.variants.get(variant)
        if torch._C._cuda_getDevice() != device:
            with torch.cuda.device(device):
                self(grid, tensors, numbers)
        elif known is None:
            compiled = self.kernel[grid](*tensors, *numbers, **self.settings)
            if variant is not None:
                names = self.kernel.arg_names[len(tensors) + len(numbers) :]
                constants = tuple(self.settings[name] for name in names)
                handles = (compiled.function, compiled.packed_metadata, None, None, None)
                self.variants[variant] = (compiled.run, handles, constants)
        else:
            run, handles, constants = known
            stream = torch._C._cuda_getCurrentRawStream(device)
            run(*(*grid, 1, 1)[:3], stream, *handles, *pointers, *numbers, *constants)


_bound: dict[tuple[Any, ...], Bound] = {}


def bound(kernel: Any, **settings: Any) -> Bound:
    """The kernel with these constants and launch options, the same object for the same ones."""
    key = (kernel.__name__, *settings.items())
    if key not in _bound:
        _bound[key] = Bound(kernel, settings)
    return _bound[key]
