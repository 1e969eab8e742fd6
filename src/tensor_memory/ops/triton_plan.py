"""What the fused scan can serve, and how one request is laid out on the device.

Letters: B batch, V voxels, C channels, M writes per step.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from tensor_memory.ops.request import Request
from tensor_memory.ops.triton_launch import INTERPRETED

MAX_VOXELS = 4096
MAX_CHANNELS = 128
SCAN_TILE = {16: 256, 32: 128, 64: 128, 128: 32}  # voxels a program of the scan holds, by C,
SCAN_WARPS = 8  # with so many warps;
SCAN_SHARE = 1  # such programs per multiprocessor, all resident at once;
LEAST_VOXELS = 64  # of a row per such program: fewer, and waiting outweighs the work
BLOCK_WARPS = 4  # the kernels that treat all steps at once are smaller, so that several programs
BLOCK_BYTES = 4096  # of so many bytes share a multiprocessor and hide each other's loads


def why_not(hidden: Tensor, dtype: torch.dtype) -> str | None:
    """The reason a scan of this state in this type cannot be served, or None."""
    C, *grid = hidden.shape[1:]
    if hidden.device.type != "cuda" and not INTERPRETED:
        return f"it needs a CUDA device, got {hidden.device.type}"
    if dtype != torch.float32:
        return f"it computes in float32 or bfloat16, got {dtype}"
    if len(grid) > 3:
        return f"it serves 1 to 3 grid axes, got {len(grid)}"
    if math.prod(grid) > MAX_VOXELS:
        return f"it serves up to {MAX_VOXELS} voxels, got {math.prod(grid)}"
    if C > MAX_CHANNELS:
        return f"it serves up to {MAX_CHANNELS} channels, got {C}"
    return None


def why_not_read(hidden: Tensor) -> str | None:
    """The reason `read` cannot serve this state, or None."""
    C = hidden.shape[1]
    if padded_channels(C) > C:
        return f"it reads a power of two of channels, at least 16, got {C}"
    return why_not(hidden, hidden.dtype)


class Plan(NamedTuple):
    """How one scan is laid out on the device; everything here is fixed at compile time."""

    tile: int
    """Voxels that one program of the scan holds at a time."""
    tiles: int
    """Tiles it goes through per step; with one, the cell stays in registers."""
    parts: int
    """Programs of the scan that share a row."""
    block: int
    """Voxels per program of the kernels that treat all steps at once."""
    shape: dict[str, int]
    write: dict[str, Any]
    products: str
    fast: bool
    resident: bool
    """Whether the scan's weights fit into shared memory beside the rest."""
    kept: torch.dtype
    """Type of what is kept for the backward pass and of what that stores."""
    alone: dict[str, Any]
    """Launch options of programs that need nobody."""
    streamed: dict[str, Any]
    """Launch options of programs that read much and meet nobody: loads run ahead."""
    together: dict[str, Any]
    """Launch options of programs that wait for each other: all must be resident at once."""


def plan(request: Request, products: torch.dtype, *, alone: bool = False) -> Plan:
    """Divide each row's voxels among programs so that the device is full but all are resident.

    `alone` gives each row a single program, which needs no counter.
    """
    hidden = request.hidden
    B, C, *grid = hidden.shape
    V = math.prod(grid)
    parts = 1
    if hidden.device.type == "cuda" and not alone:
        multiprocessors = torch.cuda.get_device_properties(hidden.device).multi_processor_count
        room = SCAN_SHARE * multiprocessors
        while 2 * parts * B <= room and 2 * parts * LEAST_VOXELS <= V:
            parts *= 2
    tile = max(16, min(triton.next_power_of_2(-(-V // parts)), SCAN_TILE[C]))
    low = products == torch.bfloat16
    kept = torch.bfloat16 if low else torch.float32
    if low:
        mode = "bf16-emulated" if INTERPRETED else "bf16"
    else:
        exact = torch.get_float32_matmul_precision() == "highest"
        mode = "ieee" if INTERPRETED else "tf32x3" if exact else "tf32"
    together: dict[str, Any] = {"num_warps": SCAN_WARPS, "num_stages": 1}
    if parts > 1:
        together["launch_cooperative_grid"] = True
    return Plan(
        tile=tile,
        tiles=-(-V // (parts * tile)),
        parts=parts,
        block=max(16, BLOCK_BYTES // (C * kept.itemsize)),
        shape=shape_of(hidden),
        write={
            "M": request.write_at.shape[2],
            "GAUSSIAN": request.spread is not None,
            "FILTERED": request.taps is not None,
        },
        products=mode,
        fast=low and not INTERPRETED,
        resident=(low and C <= 64) or C <= 32,
        kept=kept,
        alone={} if INTERPRETED else {"num_warps": BLOCK_WARPS, "num_stages": 1},
        streamed={} if INTERPRETED else {"num_warps": 8, "num_stages": 3 if C <= 64 else 2},
        together={} if INTERPRETED else together,
    )


def shape_of(hidden: Tensor) -> dict[str, int]:
    _, C, *grid = hidden.shape
    depth, height, width = (*(1,) * (3 - len(grid)), *grid)
    return {"C": C, "D": depth, "H": height, "W": width, "AXES": len(grid)}


def padded_channels(C: int) -> int:
    """Kernels hold a power of two, at least 16: channels beyond C start, stay and end at zero."""
    return max(16, triton.next_power_of_2(C))


def widened(request: Request, C: int) -> Request:
    """The same request with zero channels added up to C, which change nothing."""
    given = request.hidden.shape[1]
    if given == C:
        return request
    more = C - given
    volume = (0, 0) * (request.hidden.ndim - 2)
    taps = request.taps
    if taps is not None:
        n = taps.shape[0]
        taps = F.pad(taps.reshape(n, 2, given, 3), (0, 0, 0, more)).reshape(n, 2 * C, 3)
    mix = F.pad(request.mix.reshape(4, given, 2, given), (0, more, 0, 0, 0, more))
    return request._replace(
        content=F.pad(request.content, (0, more)),
        taps=taps,
        mix=mix.reshape(4 * C, 2 * C),
        bias=F.pad(request.bias.reshape(4, given), (0, more)).reshape(4 * C),
        hidden=F.pad(request.hidden, (*volume, 0, more)),
        cell=F.pad(request.cell, (*volume, 0, more)),
    )
