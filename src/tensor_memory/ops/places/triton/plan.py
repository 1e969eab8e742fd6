"""What the kernels of a place scan are told: sizes, precision, launch options."""

from __future__ import annotations

from typing import Any

import torch
import triton

from tensor_memory.ops.launch import INTERPRETED, BoundKernel, bind
from tensor_memory.ops.places.addresses import voxels
from tensor_memory.ops.places.inputs import PlaceInputs

LENGTH = 32
"""L, tokens per chunk. From 64 on products take Hopper's wide instructions, and Triton 3.6 then
writes astray."""
WARPS = 2

Plan = dict[str, Any]


def low_dtype(products: torch.dtype) -> torch.dtype:
    """The type of what is stored between kernels to be multiplied."""
    return torch.bfloat16 if products == torch.bfloat16 else torch.float32


def make_plan(inputs: PlaceInputs, products: torch.dtype) -> Plan:
    """Constants by the names they have in the kernels."""
    V, C = voxels(inputs.grid), inputs.content.shape[-1]
    precision = "tf32x3" if torch.get_float32_matmul_precision() == "highest" else "tf32"
    exact, low = ("ieee", "bf16-emulated") if INTERPRETED else (precision, "bf16")
    is_low = products == torch.bfloat16
    return {
        "H": inputs.content.shape[2],
        "V": V,
        "C": C,
        "VB": min(64, max(16, triton.next_power_of_2(V))),
        "CB": max(16, triton.next_power_of_2(C)),
        "L": LENGTH,
        "STEPS": (LENGTH - 1).bit_length(),
        "E": 2 ** len(inputs.grid),
        "DELTA": inputs.rule == "delta",
        "HAS_RESETS": inputs.resets is not None,
        "MODE": low if is_low else exact,
        "EXACT": "tf32" if is_low and not INTERPRETED else exact,
    }


def chunk_grid(inputs: PlaceInputs) -> tuple[int, int]:
    """A program per chunk of every row and head."""
    B, N, H, _ = inputs.content.shape
    return triton.cdiv(N, LENGTH), B * H


def bound(
    kernel: Any,
    plan: Plan,
    tiles: dict[str, int] | None = None,
    *,
    warps: int = WARPS,
    **more: Any,
) -> BoundKernel:
    """The kernel with those of the constants that it takes."""
    constants = plan | (tiles or {}) | more
    taken = {name: constants[name] for name in kernel.arg_names if name in constants}
    return bind(kernel, **taken, **({} if INTERPRETED else {"num_warps": warps}))
