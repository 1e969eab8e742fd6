"""What the kernels of a place scan are told: sizes, precision, launch options."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import triton

from tensor_memory.ops.launch import INTERPRETED, BoundKernel, bind, blocks
from tensor_memory.ops.places.inputs import PlaceInputs

T = TypeVar("T")

LENGTH = 32
"""L, tokens per chunk. From 64 on products take Hopper's wide instructions, and Triton 3.6 then
writes astray."""
WARPS, STAGES = 2, 3
"""Of a program, and chunks of a loop whose loads are under way at a time."""
WARP_VALUES = 1024
"""Of addresses that a warp makes, which decides T, the tokens of a program."""
MOST_PROGRAMS = 65_535
"""That CUDA launches along the second and third axis of a grid."""


def low_dtype(products: torch.dtype) -> torch.dtype:
    """The type of what is stored between kernels to be multiplied."""
    return torch.bfloat16 if products == torch.bfloat16 else torch.float32


class Plan(dict[str, Any]):
    """Constants by the names they have in the kernels, and the kernels bound to them once."""

    def __init__(self, constants: dict[str, Any], products: torch.dtype) -> None:
        super().__init__(constants)
        self.products = products
        """The type to multiply matrices in."""
        self._bound: dict[tuple[Any, ...], BoundKernel] = {}
        self._made: dict[Any, Any] = {}

    def once(self, make: Callable[[Plan], T]) -> T:
        """What a function makes of these constants, made once: asking for a kernel takes time."""
        if make not in self._made:
            self._made[make] = make(self)
        return self._made[make]

    def bound(
        self, kernel: Any, *, warps: int = WARPS, stages: int = STAGES, **more: Any
    ) -> BoundKernel:
        """The kernel with those of the constants that it takes; `more` goes before."""
        key = (id(kernel), warps, stages, *more.items())
        if key not in self._bound:
            constants = self | more
            taken = {name: constants[name] for name in kernel.arg_names if name in constants}
            options = {} if INTERPRETED else {"num_warps": warps, "num_stages": stages}
            self._bound[key] = bind(kernel, **taken, **options)
        return self._bound[key]


def make_plan(inputs: PlaceInputs, products: torch.dtype) -> Plan:
    """How a call is launched, the same object for calls of the same sizes."""
    return _plan(
        inputs.state.shape[1:], tuple(inputs.wrap), inputs.rule, inputs.width is not None,
        inputs.resets is not None, products, torch.get_float32_matmul_precision(),
    )  # fmt: skip


@functools.lru_cache(maxsize=256)
def _plan(
    sizes: tuple[int, ...],
    wrap: tuple[bool, ...],
    rule: str,
    gaussian: bool,
    has_resets: bool,
    products: torch.dtype,
    float32_products: str,
) -> Plan:
    H, *grid, C = sizes
    constants = grid_constants(grid, wrap)
    sides = [constants[f"P{axis}"] for axis in range(4)]
    V, padded, columns = constants["V"], math.prod(sides), sum(sides[4 - len(grid) :])
    precision = "tf32x3" if float32_products == "highest" else "tf32"
    exact, low = ("ieee", "bf16-emulated") if INTERPRETED else (precision, "bf16")
    is_low = products == torch.bfloat16
    return Plan(
        constants
        | {
            "H": H,
            "C": C,
            "VB": min(64, max(16, triton.next_power_of_2(V))),
            "VP": max(16, triton.next_power_of_2(V)),
            "CB": max(16, triton.next_power_of_2(C)),
            "T": max(1, WARP_VALUES // padded),
            "F": columns,
            "K": max(16, triton.next_power_of_2(columns)),
            "L": LENGTH,
            "STEPS": (LENGTH - 1).bit_length(),
            "E": 2 ** len(grid),
            "GAUSSIAN": gaussian,
            "DELTA": rule == "delta",
            "HAS_RESETS": has_resets,
            "MODE": low if is_low else exact,
            "EXACT": "tf32" if is_low and not INTERPRETED else exact,
        },
        products,
    )


def grid_constants(grid: Sequence[int], wrap: Sequence[bool]) -> dict[str, int]:
    """A grid by the names it has in the kernels, with axes of one voxel before it up to four.

    Coordinate 0 addresses axis 3. What varies fastest in memory comes last, where kernels over
    whole grids need it.
    """
    sizes, wraps = (1, 1, 1, *grid)[-4:], (False, False, False, *wrap)[-4:]
    return {
        "n": len(grid),
        "V": math.prod(grid),
        **{f"G{axis}": size for axis, size in enumerate(sizes)},
        **{f"P{axis}": triton.next_power_of_2(size) for axis, size in enumerate(sizes)},
        **{f"W{axis}": wrapped for axis, wrapped in enumerate(wraps)},
    }


def chunk_grid(inputs: PlaceInputs) -> tuple[int, int]:
    """A program per chunk of every row and head."""
    B, N, H, _ = inputs.content.shape
    return blocks(N, LENGTH), B * H
