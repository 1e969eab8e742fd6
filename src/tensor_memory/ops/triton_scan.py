"""The fused scan: its buffers and its launches. Kernels and the plan are next door.

Letters: B batch, S steps, n axes, V voxels, C channels, Q reads and M writes per step.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tensor_memory.ops import triton_backward, triton_forward, triton_plan
from tensor_memory.ops.request import Request
from tensor_memory.ops.triton_launch import INTERPRETED, Bound, bound
from tensor_memory.ops.triton_plan import (
    Plan,
    Shape,
    layout,
    padded_channels,
    plan,
    power_of_2,
    sizes_of,
    widened,
)

SLOPES_SHARE = {16: 3, 32: 3, 64: 2, 128: 3}  # programs per multiprocessor for the gates, by C
TAPS_VALUES = 1024  # voxels × channels per program for the nine sums of the taps' gradient,
TAPS_PROGRAMS = 1024  # of which there are about so many
SUM_ROWS, SUM_COLUMNS = 32, 128  # partial sums that a program adds at a time
SUM_PARTS = 32  # programs that share the rows of one column: thousands of rows follow each other
PROGRAMS = 132  # that share a sum over all voxels of all steps: one per multiprocessor of an H200
SEGMENT = 64  # steps per launch where nothing is kept

Grid = tuple[int, ...]


def forward(
    request: Request, *, keep: bool, products: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """Run the scan; with `keep` also return what `backward` needs, as `empty_kept` lays it out.

    Without it nothing is kept per step: long inputs go through in segments of SEGMENT steps.
    """
    hidden, cell = request.hidden, request.cell
    C, S = hidden.shape[1], request.write_at.shape[1]
    if S == 0:
        kept = empty_kept(hidden, S, products) if keep else []
        return request.empty_reads(), hidden.clone(), cell.clone(), kept
    request = widened(request, padded_channels(C))
    if keep:
        kept = empty_kept(hidden, S, products)
        reads, hidden, cell = _segment(request, products, kept)
    else:
        kept, parts = [], []
        for start in range(0, S, SEGMENT):
            part = request if S <= SEGMENT else request.steps(start, start + SEGMENT)
            reads, hidden, cell = _segment(part, products, kept)
            request = request._replace(hidden=hidden, cell=cell)
            parts.append(reads)
        reads = torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]
    if hidden.shape[1] != C:
        reads = reads[..., :C].contiguous()
        hidden, cell = hidden[:, :C].contiguous(), cell[:, :C].contiguous()
    return reads, hidden, cell, kept


def empty_kept(hidden: Tensor, steps: int, products: torch.dtype) -> list[Tensor]:
    """Room for hidden, cell and the filtered hidden half before every step: (S, B, V, C) each."""
    B, C, *grid = hidden.shape
    room = (B, math.prod(grid), padded_channels(C))
    low = torch.bfloat16 if products == torch.bfloat16 else torch.float32
    return [hidden.new_empty(steps, *room, dtype=low) for _ in range(3)]


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
def _forward_launches(shape: Shape, keep: bool) -> _Forward:
    p, inline = plan(shape), shape.S == 1 and not keep
    rows = layout(shape, triton_plan.FORWARD_SHARE, alone=inline)
    return _Forward(
        inline=inline,
        **_written_launch(shape),
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


def _written_launch(shape: Shape) -> dict[str, Any]:
    """Every step's filtered write (S, B, V, C), and cleared counters for the rows' meetings."""
    p = plan(shape)
    kernel = triton_forward.written_kernel
    return {
        "written": bound(kernel, **p.write, **p.sizes, BLOCK_V=p.block, **p.alone),
        "written_grid": (shape.S * shape.B, -(-shape.V // p.block)),
    }


def _segment(
    request: Request, products: torch.dtype, kept: list[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """One launch of the scan over all S > 0 steps; fills `kept` unless it is empty."""
    read_at, write_at, spread, content, taps, mix, bias, hidden, cell, writes, resets = request
    assert read_at is not None
    shape = Shape.of(request, products)
    do = _forward_launches(shape, bool(kept))
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
    reads = request.empty_reads()
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
        numbers = (V * C, B * V * C, B, S, Q)
        do.reads((B * S * Q,), (kept_hidden, read_at, reads), numbers)
    return reads, last_hidden, last_cell


def read(read_at: Tensor, hidden: Tensor) -> Tensor:
    """Reads that no write follows, in one launch: (B, S, Q, n), (B, C, *grid) -> (B, S, Q, C)."""
    B, S, Q, _ = read_at.shape
    C, *grid = hidden.shape[1:]
    V = math.prod(grid)
    reads = hidden.new_empty(B, S, Q, C)
    if reads.numel():
        kernel = triton_forward.read_kernel
        launch = bound(kernel, VOXEL=1, CHANNEL=V, **sizes_of(C, grid), num_warps=1)
        launch((B * S * Q,), (hidden, read_at, reads), (C * V, 0, B, S, Q))
    return reads


def backward(
    grad_reads: Tensor,
    grad_hidden: Tensor | None,
    grad_cell: Tensor | None,
    request: Request,
    kept: list[Tensor],
    *,
    products: torch.dtype,
) -> tuple[Tensor | None, ...]:
    """Gradients of read_at, write_at, spread, content, taps, mix, bias, hidden and cell."""
    C, wide = request.hidden.shape[1], padded_channels(request.hidden.shape[1])
    if request.write_at.shape[1] == 0:
        passed_on = zip(request.floats[7:], (grad_hidden, grad_cell), strict=True)
        return (
            *(None if t is None else torch.zeros_like(t) for t in request.floats[:7]),
            *(torch.zeros_like(t) if g is None else g.clone() for t, g in passed_on),
        )
    if wide == C:
        return _backward(grad_reads, grad_hidden, grad_cell, request, kept, products)
    volume = (*(0, 0) * (request.hidden.ndim - 2), 0, wide - C)
    grads = _backward(
        F.pad(grad_reads, (0, wide - C)),
        grad_hidden if grad_hidden is None else F.pad(grad_hidden, volume),
        grad_cell if grad_cell is None else F.pad(grad_cell, volume),
        widened(request, wide),
        kept,
        products,
    )
    d_read_at, d_write_at, d_spread, d_content, d_taps, d_mix, d_bias, d_hidden, d_cell = grads
    if d_taps is not None:
        n = d_taps.shape[0]
        d_taps = d_taps.reshape(n, 2, wide, 3)[:, :, :C].reshape(n, 2 * C, 3)
    return (
        d_read_at,
        d_write_at,
        d_spread,
        d_content[..., :C],
        d_taps,
        d_mix.reshape(4, wide, 2, wide)[:, :C, :, :C].reshape(4 * C, 2 * C),
        d_bias.reshape(4, wide)[:, :C].reshape(4 * C),
        d_hidden[:, :C],
        d_cell[:, :C],
    )


class _Backward(NamedTuple):
    """The launches of a backward scan with their grids, and the room they share."""

    written: Bound
    written_grid: Grid
    slopes: Bound
    slopes_grid: Grid
    slopes_loops: int
    scan: Bound
    scan_grid: Grid
    mix: Bound
    mix_grid: Grid
    mix_loops: int
    writes: Bound
    taps: Bound
    taps_grid: Grid
    taps_loops: int
    sums: Bound
    sums_grid: Grid
    counts: tuple[int, int, int]
    """Partial sums of the mix, the written and the hidden half's taps."""
    share_taps: Bound
    reads: Bound
    kept: torch.dtype
    volumes: list[int]
    """Values of what the kept type holds: the writes, the slopes, what reaches ĥ."""
    floats: list[int]
    """Values of what float32 holds: partial sums, their sums, what passes between tiles."""


@functools.lru_cache(maxsize=256)
def _backward_launches(shape: Shape, last: bool) -> _Backward:
    p = plan(shape)
    B, S, M, V, C, n = shape.B, shape.S, shape.M, shape.V, shape.C, len(shape.grid)
    rows = layout(shape, triton_plan.BACKWARD_SHARE)
    blocks = -(-S * B * V // p.block)
    slopes_programs = min(blocks, PROGRAMS * SLOPES_SHARE[C])

    if shape.low:
        out, block, mode = min(4 * C, 128), 128, p.products
    else:  # tensor cores cannot transpose 32-bit operands; small products do as well without
        out, block, mode = C, 2048 // C, "ieee" if C <= 32 else p.products
    mix_loops = max(1, -(-S * B * V * (4 * C // out) // (block * PROGRAMS)))
    mix_chunks = -(-S * B * V // (block * mix_loops))

    plane = p.sizes["H"] * p.sizes["W"]
    tile = max(4, TAPS_VALUES // C)
    tiles, lines = -(-plane // tile), 3 if n > 1 else 1
    taps_loops = max(1, S * B * tiles * lines // TAPS_PROGRAMS)
    taps_chunks = -(-S * B // taps_loops)

    counts = (mix_chunks, S * B * M, tiles * taps_chunks) if shape.filtered else (mix_chunks, 0, 0)
    widths = (4 * C * (2 * C + 1), 3 * n * C, 27 * C)
    columns = [-(-width // SUM_COLUMNS) for width in widths]
    sums = columns[0] + SUM_PARTS * (columns[1] + columns[2]) * shape.filtered
    between = 2 * B * V * C if rows.constants["TILES"] > 1 else 16
    size = S * B * V * C
    return _Backward(
        **_written_launch(shape),
        slopes=bound(
            triton_backward.slopes_kernel,
            C=C, V=V, BLOCK=p.block, WRITES=shape.writes, RESIDENT=p.resident,
            PRODUCTS=p.products, FAST=p.fast, **p.alone,
        ),
        slopes_grid=(slopes_programs,),
        slopes_loops=-(-blocks // slopes_programs),
        scan=bound(
            triton_backward.backward_kernel,
            **p.sizes, **rows.constants, FILTERED=shape.filtered, WRITES=shape.writes,
            RESETS=shape.resets, LAST=last, RESIDENT=p.resident, PRODUCTS=p.products,
            PIN=not INTERPRETED, **rows.options,
        ),
        scan_grid=(B * rows.parts,),
        mix=bound(
            triton_backward.mix_kernel, C=C, BLOCK=block, OUT=out, PRODUCTS=mode, **p.streamed
        ),
        mix_grid=(mix_chunks, 4 * C // out),
        mix_loops=mix_loops,
        writes=bound(
            triton_backward.writes_kernel,
            **p.write, **p.sizes, BLOCK_V=min(power_of_2(max(16, plane)), p.block),
            RESIDENT=p.resident, PRODUCTS=p.products,
            SUMS={"bf16": "tf32", "bf16-emulated": "ieee"}.get(p.products, p.products), **p.alone,
        ),
        taps=bound(triton_backward.taps_kernel, **p.sizes, BLOCK_V=tile, **p.alone),
        taps_grid=(tiles, taps_chunks, lines),
        taps_loops=taps_loops,
        sums=bound(
            triton_backward.sums_kernel,
            C=C, AXES=n, PARTS=SUM_PARTS, ROWS=SUM_ROWS, COLUMNS=SUM_COLUMNS, **p.alone,
        ),
        sums_grid=(sums,),
        counts=counts,
        share_taps=bound(
            triton_backward.share_taps_kernel,
            C=C, AXES=n, ALL=3**n, ALL_PADDED=power_of_2(3**n), PARTS=SUM_PARTS,
        ),
        reads=bound(triton_backward.reads_kernel, **p.sizes, num_warps=1),
        kept=p.kept,
        volumes=[size, 6 * size, size],
        floats=[
            *(count * width for count, width in zip(counts, widths, strict=True)),
            *(SUM_PARTS * width * shape.filtered for width in widths[1:]),
            between, between,
        ],
    )  # fmt: skip


def _backward(
    grad_reads: Tensor,
    grad_hidden: Tensor | None,
    grad_cell: Tensor | None,
    request: Request,
    kept: list[Tensor],
    products: torch.dtype,
) -> tuple[Any, ...]:
    read_at, write_at, spread, content, taps, mix, bias, hidden, cell, writes, resets = request
    assert read_at is not None
    shape = Shape.of(request, products)
    do = _backward_launches(shape, grad_hidden is not None)
    B, S, Q, M = shape.B, shape.S, shape.Q, shape.M
    kept_hidden, kept_cell, kept_filtered = kept
    nothing = content  # stands in for a pointer that no program follows
    writing = (write_at, nothing if spread is None else spread, content)
    some_taps = nothing if taps is None else taps
    some_writes = nothing if writes is None else writes

    volumes = hidden.new_empty(sum(do.volumes), dtype=do.kept)
    written, slopes, grad_filtered = volumes.split_with_sizes(do.volumes)
    floats = hidden.new_empty(sum(do.floats)).split_with_sizes(do.floats)
    partial_mix, partial_writes, partial_hidden, sums_writes, sums_hidden, cells, passing = floats
    counters = hidden.new_empty(B, dtype=torch.int32)
    grad_read_at, grad_at = torch.empty_like(read_at), torch.empty_like(write_at)
    grad_spread = None if spread is None else torch.empty_like(spread)
    grad_content, grad_mix, grad_bias = map(torch.empty_like, (content, mix, bias))
    grad_taps = None if taps is None else torch.empty_like(taps)
    first_hidden, first_cell = torch.empty_like(hidden), torch.empty_like(cell)

    do.written(do.written_grid, (*writing, some_taps, written, counters), (S, B))
    do.slopes(
        do.slopes_grid,
        (mix, bias, some_writes, written, kept_filtered, kept_cell, slopes),
        (S, B, do.slopes_loops),
    )
    do.scan(
        do.scan_grid,
        (
            read_at, some_taps, mix, some_writes, nothing if resets is None else resets,
            grad_reads, nothing if grad_hidden is None else grad_hidden,
            nothing if grad_cell is None else grad_cell, slopes, grad_filtered, cells, passing,
            first_hidden, first_cell, counters,
        ),
        (S, Q, B),
    )  # fmt: skip
    rows = S * B * shape.V
    do.mix(do.mix_grid, (slopes, written, kept_filtered, partial_mix), (rows, do.mix_loops))
    do.writes(
        (S * B, M),
        (
            *writing, some_taps, mix, slopes, grad_content, grad_at,
            nothing if grad_spread is None else grad_spread, partial_writes,
        ),
        (S, B),
    )  # fmt: skip
    if grad_taps is not None:
        hidden_half = (grad_filtered, kept_hidden, partial_hidden)
        do.taps(do.taps_grid, hidden_half, (S * B, do.taps_loops))
    partial = (partial_mix, partial_writes, partial_hidden)
    do.sums(do.sums_grid, (*partial, grad_mix, grad_bias, sums_writes, sums_hidden), do.counts)
    if grad_taps is not None:
        do.share_taps((shape.C // 16,), (sums_hidden, sums_writes, some_taps, grad_taps))
    if Q > 0:
        do.reads((B * S * Q,), (kept_hidden, read_at, grad_reads, grad_read_at), (B, S, Q))
    return (
        grad_read_at, grad_at, grad_spread, grad_content, grad_taps, grad_mix, grad_bias,
        first_hidden, first_cell,
    )  # fmt: skip
