"""Launching a kernel that has been launched before, without asking again what to compile.

Triton derives a kernel's variant from every argument of every launch, which takes longer than most
of our kernels run. Here a variant is found by what can change it: types, alignment and constants.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from tensor_memory.ops import triton_forward

INTERPRETED = not isinstance(triton_forward.forward_kernel, triton.JITFunction)
# Earlier versions take other arguments when a compiled kernel is called.
_DIRECT = tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 4)

_compiled: dict[tuple[Any, ...], Any] = {}


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Tensor | float, **settings: Any) -> None:
    """kernel[grid](*arguments, **settings): constants and launch options by name.

    The kernel must not specialise on the value of any integer argument.
    """
    variant = None if INTERPRETED or not _DIRECT else _variant(kernel, arguments, settings)
    if variant is None:
        kernel[grid](*arguments, **settings)
    elif variant in _compiled:
        constants = (settings[name] for name in kernel.arg_names[len(arguments) :])
        _compiled[variant][(*grid, 1, 1)[:3]](*arguments, *constants)
    else:
        _compiled[variant] = kernel[grid](*arguments, **settings)


def _variant(
    kernel: Any, arguments: tuple[Tensor | float, ...], settings: dict[str, Any]
) -> tuple[Any, ...] | None:
    """What decides which machine code runs; None for what is rare: odd pointers, huge integers."""
    types: list[Any] = []
    for argument in arguments:
        if isinstance(argument, Tensor):
            if argument.data_ptr() % 16:
                return None
            types.append(argument.dtype)
        elif argument >= 2**31:
            return None
    return kernel, torch.cuda.current_device(), tuple(types), tuple(settings.items())
