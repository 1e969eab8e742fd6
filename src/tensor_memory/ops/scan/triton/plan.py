"""What the fused scan can serve, and how a scan is laid out on the device.

Letters: B batch, S steps, V voxels, C channels, Q reads and M writes per step.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tensor_memory.ops.launch import INTERPRETED
from tensor_memory.ops.scan.inputs import ScanInputs

MAX_VOXELS = 4096
MAX_CHANNELS = 128

# The sequential kernels (the scans), by C.
SCAN_WARPS = 8
SCAN_TILE = {16: 256, 32: 128, 64: 128, 128: 32}  # voxels that a program of SCAN_WARPS holds
FORWARD_SHARE = {16: 1, 32: 2, 64: 1, 128: 1}  # programs per multiprocessor in bfloat16, all
BACKWARD_SHARE = {16: 1, 32: 2, 64: 2, 128: 1}  # resident at once; in float32 there is one
LEAST_VOXELS = 64  # of a row per program: with fewer, waiting takes longer than the work
INSIDE = {16: True, 32: True, 64: True, 128: False}  # whether the backward scan recomputes the
# gates itself in bfloat16; in float32 `slopes_kernel` does

# The kernels that treat all steps at once: smaller programs, several to a multiprocessor, hide
# each other's loads.
BLOCK_WARPS = 4
BLOCK_BYTES = 4096  # that a program holds of one volume
TILE_CHOICES = 3  # sizes of a piece of a plane: whole, half, quarter
PROGRAMS = 132  # that share a sum over all voxels of all steps: one per multiprocessor of an H200
# By itself the assembler takes 32 where values are many, and ten times the time; the rest spills.
ALL_REGISTERS = {"maxnreg": 255}


def why_not(state: Sequence[int], device: torch.device, dtype: torch.dtype) -> str | None:
    """The reason a scan of hidden (B, C, *grid) in this type cannot be served, or None."""
    C, *grid = state[1:]
    if device.type != "cuda" and not INTERPRETED:
        return f"it needs a CUDA device, got {device.type}"
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
    return why_not(hidden.shape, hidden.device, hidden.dtype)


class Shape(NamedTuple):
    """All that decides how a scan is laid out: requests that share it share their plan."""

    device: torch.device
    B: int
    S: int
    Q: int
    M: int
    C: int
    grid: tuple[int, ...]
    gaussian: bool
    filtered: bool
    writes: bool
    resets: bool
    products: torch.dtype
    exact: bool
    """Whether float32 products are true float32, as `torch.get_float32_matmul_precision` says."""

    @classmethod
    def of(cls, inputs: ScanInputs, products: torch.dtype) -> Shape:
        """The shape of a inputs at rest."""
        assert inputs.read_at is not None
        B, S, Q, _ = inputs.read_at.shape
        hidden = inputs.hidden.shape
        return cls(
            inputs.hidden.device, B, S, Q, inputs.write_at.shape[2], hidden[1], hidden[2:],
            inputs.spread is not None, inputs.taps is not None, inputs.writes is not None,
            inputs.resets is not None, products,
            torch.get_float32_matmul_precision() == "highest",
        )  # fmt: skip

    @property
    def V(self) -> int:  # noqa: N802
        """Voxels."""
        return math.prod(self.grid)

    @property
    def low(self) -> bool:
        """Whether products are in bfloat16."""
        return self.products == torch.bfloat16


class Layout(NamedTuple):
    """How the programs of a sequential kernel share the rows' voxels."""

    parts: int
    """Programs that share a row."""
    options: dict[str, Any]
    """Launch options: programs that wait for each other must all be resident at once."""
    constants: dict[str, int]
    """BLOCK_V voxels that a program holds at a time, TILES of them per step (with one, the cell
    stays in registers), PARTS programs per row."""


class Plan(NamedTuple):
    """How one scan is laid out on the device; everything here is fixed at compile time."""

    block: int
    """Voxels per program of the kernels that treat all steps at once."""
    sizes: dict[str, int]
    write: dict[str, Any]
    products: str
    fast: bool
    resident: bool
    """Whether the scan's weights fit into shared memory beside the rest."""
    inside: bool
    """Whether the backward scan recomputes the gates, or finds their slopes."""
    kept: torch.dtype
    """Type of what is kept for the backward pass and of what that stores."""
    alone: dict[str, Any]
    """Launch options of programs that need nobody."""
    streamed: dict[str, Any]
    """Launch options of programs that read much and meet nobody: loads run ahead."""

    @property
    def gates(self) -> int:
        """Volumes per step where the gates' gradients go: their slopes lie there before."""
        return 4 if self.inside else 6


@functools.lru_cache(maxsize=256)
def plan_of(shape: Shape) -> Plan:
    """What the kernels of a scan of this shape have in common."""
    low, C = shape.low, shape.C
    kept = torch.bfloat16 if low else torch.float32
    if low:
        mode = "bf16-emulated" if INTERPRETED else "bf16"
    else:
        mode = "ieee" if INTERPRETED else "tf32x3" if shape.exact else "tf32"
    return Plan(
        block=max(16, BLOCK_BYTES // (C * kept.itemsize)),
        sizes=sizes_of(C, shape.grid),
        write={"M": shape.M, "GAUSSIAN": shape.gaussian, "FILTERED": shape.filtered},
        products=mode,
        fast=low and not INTERPRETED,
        resident=(low and C <= 64) or C <= 32,
        inside=low and INSIDE[C],
        kept=kept,
        alone={} if INTERPRETED else {"num_warps": BLOCK_WARPS, "num_stages": 1},
        streamed={} if INTERPRETED else {"num_warps": 8, "num_stages": 3 if C <= 64 else 2},
    )


def layout(shape: Shape, share: dict[int, int], *, alone: bool = False) -> Layout:
    """Divide each row's voxels among programs so that the device is full but all are resident.

    `share` gives the programs per multiprocessor in bfloat16, by C; several have fewer warps and
    smaller tiles each. `alone` gives each row a single program, which needs no counter.
    """
    B, V, C = shape.B, shape.V, shape.C
    parts, warps = 1, SCAN_WARPS
    if shape.device.type == "cuda" and not alone:
        multiprocessors = torch.cuda.get_device_properties(shape.device).multi_processor_count
        sharing = share[C] if shape.low else 1
        while 2 * parts * B <= sharing * multiprocessors and 2 * parts * LEAST_VOXELS <= V:
            parts *= 2
        if parts * B > multiprocessors:
            warps //= sharing
    most = SCAN_TILE[C] * warps // SCAN_WARPS
    tile = max(16, min(power_of_2(-(-V // parts)), most))
    options: dict[str, Any] = {"num_warps": warps, "num_stages": 1}
    if C > 64 or (C == 64 and not shape.low):
        options |= ALL_REGISTERS
    if parts > 1:
        options["launch_cooperative_grid"] = True
    return Layout(
        parts=parts,
        options={} if INTERPRETED else options,
        constants={"BLOCK_V": tile, "TILES": -(-V // (parts * tile)), "PARTS": parts},
    )


class PlaneTile(NamedTuple):
    """The pieces of a plane that programs go through a grid with."""

    voxels: int
    pieces: int
    options: dict[str, Any]


def plane_tile(
    sizes: dict[str, int], widest: int, warps: int = BLOCK_WARPS, least: int = 1
) -> PlaneTile:
    """Pieces of `widest` voxels for so many warps, or of a half or a quarter of that for fewer,
    where less of them is empty."""
    plane, widest = sizes["H"] * sizes["W"], max(4, widest, least)
    choices = [widest >> k for k in range(TILE_CHOICES) if widest >> k >= least]
    tile = min(choices, key=lambda tile: -plane % tile)
    return PlaneTile(tile, -(-plane // tile), {"num_warps": max(1, warps * tile // widest)})


def sizes_of(C: int, grid: Sequence[int]) -> dict[str, int]:
    """A kernel's constants for a volume; grids of 1 and 2 axes are grids of 3."""
    depth, height, width = (*(1,) * (3 - len(grid)), *grid)
    return {"C": C, "D": depth, "H": height, "W": width, "AXES": len(grid)}


def power_of_2(n: int) -> int:
    """The smallest power of 2 that is at least n."""
    return 1 << max(0, n - 1).bit_length()


def padded_channels(C: int) -> int:
    """Kernels hold a power of two, at least 16: channels beyond C start, stay and end at zero."""
    return max(16, power_of_2(C))


def widened(inputs: ScanInputs, C: int) -> ScanInputs:
    """The same inputs with zero channels added up to C, which change nothing."""
    given = inputs.hidden.shape[1]
    if given == C:
        return inputs
    more = C - given
    volume = (0, 0) * (inputs.hidden.ndim - 2)
    taps = inputs.taps
    if taps is not None:
        n = taps.shape[0]
        taps = F.pad(taps.reshape(n, 2, given, 3), (0, 0, 0, more)).reshape(n, 2 * C, 3)
    mix = F.pad(inputs.mix.reshape(4, given, 2, given), (0, more, 0, 0, 0, more))
    return inputs._replace(
        content=F.pad(inputs.content, (0, more)),
        taps=taps,
        mix=mix.reshape(4 * C, 2 * C),
        bias=F.pad(inputs.bias.reshape(4, given), (0, more)).reshape(4 * C),
        hidden=F.pad(inputs.hidden, (*volume, 0, more)),
        cell=F.pad(inputs.cell, (*volume, 0, more)),
    )


def narrowed(grads: ScanInputs, C: int) -> ScanInputs:
    """The gradients of the first C channels, of inputs that were widened."""
    wide = grads.hidden.shape[1]
    taps = grads.taps
    if taps is not None:
        n = taps.shape[0]
        taps = taps.reshape(n, 2, wide, 3)[:, :, :C].reshape(n, 2 * C, 3)
    return grads._replace(
        content=grads.content[..., :C],
        taps=taps,
        mix=grads.mix.reshape(4, wide, 2, wide)[:, :C, :, :C].reshape(4 * C, 2 * C),
        bias=grads.bias.reshape(4, wide)[:, :C].reshape(4 * C),
        hidden=grads.hidden[:, :C],
        cell=grads.cell[:, :C],
    )
