"""The launches of a fused forward scan: which kernels, on which grids, into which buffers.

Letters: B batch, S steps, V voxels, C channels, Q reads per step.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tensor_memory.ops import triton_forward, triton_plan
from tensor_memory.ops.request import Request
from tensor_memory.ops.triton_launch import INTERPRETED, Bound, bound
from tensor_memory.ops.triton_plan import Grid, Plan, Shape, layout, plan, plane_tile


class _Forward(NamedTuple):
    """The launches of a forward scan with their grids."""

    inline: bool
    written: Bound
    written_grid: Grid
    scan: Bound
    scan_grid: Grid
    reads: Bound
    p: Plan
    tiles: int


@functools.lru_cache(maxsize=256)
def forward_launches(shape: Shape, keep: bool) -> _Forward:
    p, inline = plan(shape), shape.S == 1 and not keep
    rows = layout(shape, triton_plan.FORWARD_SHARE, alone=inline)
    return _Forward(
        inline=inline,
        **written_launch(shape),
        scan=bound(
            triton_forward.forward_kernel,
            **p.write, **p.sizes, **rows.constants, INLINE=inline,
            WRITES=shape.writes, RESETS=shape.resets, READ=not keep and shape.Q > 0, KEEP=keep,
            RESIDENT=p.resident, PRODUCTS=p.products, FAST=p.fast, PIN=not INTERPRETED,
            **rows.options,
        ),
        scan_grid=(shape.B * rows.parts,),
        reads=bound(
            triton_forward.read_kernel, VOXEL=shape.C, CHANNEL=1, **p.sizes, num_warps=1
        ),
        p=p,
        tiles=rows.constants["TILES"],
    )  # fmt: skip


def written_launch(shape: Shape) -> dict[str, Any]:
    """Every step's filtered write (S, B, V, C), and cleared counters for the rows' meetings."""
    p = plan(shape)
    tile = plane_tile(p.sizes, p.block)
    kernel, options = triton_forward.written_kernel, p.alone | tile.options
    return {
        "written": bound(kernel, **p.write, **p.sizes, BLOCK_V=tile.voxels, **options),
        "written_grid": (shape.S * shape.B, tile.pieces),
    }


def run_forward(
    request: Request, products: torch.dtype, reads_in: torch.dtype, kept: list[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """One launch of the scan over all S > 0 steps; fills `kept` unless it is empty."""
    read_at, write_at, spread, content, taps, mix, bias, hidden, cell, writes, resets = request
    assert read_at is not None
    shape = Shape.of(request, products)
    do = forward_launches(shape, bool(kept))
    B, S, Q, V, C = shape.B, shape.S, shape.Q, shape.V, shape.C
    nothing = content  # stands in for a pointer that no program follows
    writing = (write_at, nothing if spread is None else spread, content)
    some_taps = nothing if taps is None else taps
    written, counters = nothing, nothing
    if not do.inline:
        written = content.new_empty(S * B * V * C, dtype=do.p.kept)
        counters = content.new_empty(B, dtype=torch.int32)
        do.written(do.written_grid, (*writing, some_taps, written, counters), (S, B))
    if kept:
        kept_hidden, kept_cell, kept_filtered = kept
    else:
        kept_hidden = hidden.new_empty(2, B, V, C, dtype=do.p.kept)
        kept_cell = kept_filtered = nothing
    cells = hidden.new_empty(2, B, V, C) if do.tiles > 1 else nothing
    reads = request.empty_reads(reads_in)
    last_hidden, last_cell = torch.empty_like(hidden), torch.empty_like(cell)
    do.scan(
        do.scan_grid,
        (
            read_at, *writing, written, some_taps, mix, bias, hidden, cell,
            nothing if writes is None else writes, nothing if resets is None else resets,
            reads, last_hidden, last_cell, kept_hidden, kept_cell, kept_filtered, cells, counters,
        ),
        (S, Q, B, kept_hidden.shape[0]),
    )  # fmt: skip
    if kept and Q > 0:
        numbers = (V * C, B * V * C, S, Q)
        do.reads((B * S * Q,), (kept_hidden, read_at, reads), numbers)
    return reads, last_hidden, last_cell
