"""The launches of a fused backward scan: which kernels, on which grids, into which buffers.

Letters: B batch, S steps, n axes, V voxels, C channels, Q reads and M writes per step.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tensor_memory.ops import triton_backward, triton_plan, triton_weights, triton_writes
from tensor_memory.ops.request import Request
from tensor_memory.ops.triton_forward_run import written_launch
from tensor_memory.ops.triton_launch import INTERPRETED, Bound, bound
from tensor_memory.ops.triton_plan import Grid, Shape, layout, plan, plane_tile, power_of_2

SLOPES_SHARE = {16: 3, 32: 3, 64: 2, 128: 3}  # programs per multiprocessor for the gates, by C
SLOPES_STAGES = 1  # blocks of theirs on their way at a time
TAPS_VALUES = 1024  # voxels × channels per program for the nine sums of the taps' gradient; in
TAPS_LOW, TAPS_FLOAT = 4, 3  # bfloat16 and float32 so many, or more smaller ones, fit side by side
WRITES_LOW, WRITES_FLOAT = (4096, 8), (1024, 4)  # values of a plane for what writes receive, warps
WRITES_STAGES = 4  # planes of what writes receive on their way at a time
MIX_LOW = (128, 128)  # bfloat16's mix: rows, voxels at a time
MIX_FLOAT = (64, 64, 2)  # float32's: rows, voxels at a time, programs per multiprocessor
SUM_ROWS, SUM_COLUMNS = 32, 128  # partial sums that a program adds at a time
SUM_PARTS = 2 if INTERPRETED else 32  # programs that share the rows of a column, thousands
PROGRAMS = 132  # that share a sum over all voxels of all steps: one per multiprocessor of an H200


class _Backward(NamedTuple):
    """The launches of a backward scan with their grids, and the room they share."""

    written: Bound
    written_grid: Grid
    inside: bool
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
    """Values of what the kept type holds: the writes, the gates, what reaches ĥ and Û."""
    floats: list[int]
    """Values of what float32 holds: partial sums, their sums, what passes between tiles."""


@functools.lru_cache(maxsize=256)
def backward_launches(shape: Shape, last: bool) -> _Backward:
    p = plan(shape)
    B, S, M, V, C, n = shape.B, shape.S, shape.M, shape.V, shape.C, len(shape.grid)
    rows = layout(shape, triton_plan.BACKWARD_SHARE)
    blocks = -(-S * B * V // p.block)
    slopes_programs = min(blocks, PROGRAMS * SLOPES_SHARE[C])

    out, block, share, mode = min(4 * C, MIX_LOW[0]), MIX_LOW[1], 1, p.products
    if not shape.low and C <= 32:  # tensor cores cannot transpose 32-bit operands; small products
        (out, block, share), mode = MIX_FLOAT, "ieee"  # do as well without
    elif not shape.low:
        out, block = C, 2048 // C
    mix_loops = max(1, -(-S * B * V * (4 * C // out) // (block * share * PROGRAMS)))
    mix_chunks = -(-S * B * V // (block * mix_loops))

    values, warps = WRITES_LOW if shape.low else WRITES_FLOAT
    write_tile = plane_tile(p.sizes, values // C, warps, least=16)  # of what a product can take
    if p.resident and not INTERPRETED:  # for two of eight warps, three of four, twelve of one
        write_tile.options["maxnreg"] = 128 if write_tile.options["num_warps"] > 4 else 168
    tile, tiles, taps_options = plane_tile(p.sizes, TAPS_VALUES // C)
    lines = 3 if n > 1 else 1
    if shape.low and not INTERPRETED:
        taps_options["maxnreg"] = 128  # for four of them; the assembler would take 149
    taps_programs = PROGRAMS * (TAPS_LOW if shape.low else TAPS_FLOAT) * TAPS_VALUES // (tile * C)
    taps_loops = -(-S * B * tiles * lines // taps_programs)
    taps_chunks = -(-S * B // taps_loops)

    counts = (mix_chunks, S * B * M, tiles * taps_chunks) if shape.filtered else (mix_chunks, 0, 0)
    widths = (4 * C * (2 * C + 1), 3 * n * C, 27 * C)
    columns = [-(-width // SUM_COLUMNS) for width in widths]
    sums = columns[0] + SUM_PARTS * (columns[1] + columns[2]) * shape.filtered
    between = 2 * B * V * C if rows.constants["TILES"] > 1 else 16
    passing = max(between, B * V * C)
    size, gates = S * B * V * C, 4 if p.inside else 6
    return _Backward(
        **written_launch(shape),
        inside=p.inside,
        slopes=bound(
            triton_backward.slopes_kernel,
            C=C, V=V, BLOCK=p.block, WRITES=shape.writes, RESIDENT=p.resident,
            PRODUCTS=p.products, FAST=p.fast, STAGES=SLOPES_STAGES, **p.alone,
        ),
        slopes_grid=(slopes_programs,),
        slopes_loops=-(-blocks // slopes_programs),
        scan=bound(
            triton_backward.backward_kernel,
            **p.sizes, **rows.constants, FILTERED=shape.filtered, WRITES=shape.writes,
            RESETS=shape.resets, LAST=last, RESIDENT=p.resident, PRODUCTS=p.products,
            GATES=gates, INSIDE=p.inside, FAST=p.fast,
            PIN=not INTERPRETED, **rows.options,
        ),
        scan_grid=(B * rows.parts,),
        mix=bound(
            triton_weights.mix_kernel,
            C=C, GATES=gates, BLOCK=block, OUT=out, ADD=mode == "ieee", PRODUCTS=mode, **p.streamed,
        ),
        mix_grid=(mix_chunks, 4 * C // out),
        mix_loops=mix_loops,
        writes=bound(
            triton_writes.writes_kernel,
            **p.write, **p.sizes, BLOCK_V=write_tile.voxels,
            SUMS={"bf16": "tf32", "bf16-emulated": "ieee"}.get(p.products, p.products),
            STAGES=WRITES_STAGES, PIN=not INTERPRETED, **p.alone | write_tile.options,
        ),
        taps=bound(
            triton_weights.taps_kernel,
            C=C, D=p.sizes["D"], H=p.sizes["H"], W=p.sizes["W"], BLOCK_V=tile, PIN=not INTERPRETED,
            **p.alone | taps_options,
        ),
        taps_grid=(tiles, taps_chunks, lines),
        taps_loops=taps_loops,
        sums=bound(
            triton_weights.sums_kernel,
            C=C, AXES=n, PARTS=SUM_PARTS, ROWS=SUM_ROWS, COLUMNS=SUM_COLUMNS, **p.alone,
        ),
        sums_grid=(sums,),
        counts=counts,
        share_taps=bound(
            triton_weights.share_taps_kernel,
            C=C, AXES=n, ALL=3**n, ALL_PADDED=power_of_2(3**n), PARTS=SUM_PARTS,
        ),
        reads=bound(triton_writes.reads_kernel, **p.sizes, num_warps=1),
        kept=p.kept,
        volumes=[size, gates * size, size, size],
        floats=[
            *(count * width for count, width in zip(counts, widths, strict=True)),
            *(SUM_PARTS * width * shape.filtered for width in widths[1:]),
            between, passing,
        ],
    )  # fmt: skip


def run_backward(
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
    do = backward_launches(shape, grad_hidden is not None)
    B, S, Q, M = shape.B, shape.S, shape.Q, shape.M
    kept_hidden, kept_cell, kept_filtered = kept
    nothing = content  # stands in for a pointer that no program follows
    writing = (write_at, nothing if spread is None else spread, content)
    some_taps = nothing if taps is None else taps
    some_writes = nothing if writes is None else writes

    volumes = hidden.new_empty(sum(do.volumes), dtype=do.kept)
    written, gates, grad_filtered, grad_written = volumes.split_with_sizes(do.volumes)
    floats = hidden.new_empty(sum(do.floats)).split_with_sizes(do.floats)
    partial_mix, partial_writes, partial_hidden, sums_writes, sums_hidden, cells, passing = floats
    counters = hidden.new_empty(B, dtype=torch.int32)
    grad_read_at, grad_at = torch.empty_like(read_at), torch.empty_like(write_at)
    grad_spread = None if spread is None else torch.empty_like(spread)
    grad_content, grad_mix, grad_bias = map(torch.empty_like, (content, mix, bias))
    grad_taps = None if taps is None else torch.empty_like(taps)
    first_hidden, first_cell = torch.empty_like(hidden), torch.empty_like(cell)

    do.written(do.written_grid, (*writing, some_taps, written, counters), (S, B))
    if not do.inside:
        do.slopes(
            do.slopes_grid,
            (mix, bias, some_writes, written, kept_filtered, kept_cell, gates),
            (S, B, do.slopes_loops),
        )
    do.scan(
        do.scan_grid,
        (
            read_at, some_taps, mix, bias, some_writes, nothing if resets is None else resets,
            written, kept_filtered, kept_cell, grad_reads,
            nothing if grad_hidden is None else grad_hidden,
            nothing if grad_cell is None else grad_cell, gates, grad_filtered, grad_written,
            cells, passing, first_hidden, first_cell, counters,
        ),
        (S, Q, B),
    )  # fmt: skip
    rows = S * B * shape.V
    do.mix(do.mix_grid, (gates, written, kept_filtered, partial_mix), (rows, do.mix_loops))
    do.writes(
        (S * B, M),
        (
            *writing, some_taps, grad_written, grad_content, grad_at,
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
