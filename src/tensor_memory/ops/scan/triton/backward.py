"""Kernels that go through the recurrence backward; the derivation is in README.md.

Only `backward_kernel` is sequential. What it needs of each step's gates it recomputes while the
other programs of a row are on their way, or finds recomputed for all steps at once
(`slopes_kernel`); what weights, writes and reads receive is found afterwards (`triton_weights`,
`triton_writes`).
"""

# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# pyright: reportPossiblyUnboundVariable=false
from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tensor_memory.ops.scan.inputs import ScanInputs
from tensor_memory.ops.scan.triton import plan, weight_gradients, write_gradients
from tensor_memory.ops.scan.triton.filter import axis_taps, neighbours, place
from tensor_memory.ops.scan.triton.forward import written_launch
from tensor_memory.ops.scan.triton.launch import INTERPRETED, Bound, bound
from tensor_memory.ops.scan.triton.plan import Grid, Shape, layout, plan_of, plane_tile, power_of_2
from tensor_memory.ops.scan.triton.step import (
    arrive,
    gate_slopes,
    later_on,
    mix_tiles,
    pair,
    pinned,
    product,
    unpair,
    wait,
)

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


@triton.jit(do_not_specialize=["S", "B", "loops"])
def slopes_kernel(
    mix,
    bias,
    writes,
    written,
    kept_filtered,
    kept_cell,
    slopes,
    S,
    B,
    loops,
    C: tl.constexpr,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
    WRITES: tl.constexpr,
    RESIDENT: tl.constexpr,
    PRODUCTS: tl.constexpr,
    FAST: tl.constexpr,
    STAGES: tl.constexpr,
):
    """`gate_slopes` of every step: slopes (S, B, V, 6, C).

    A program takes BLOCK · loops voxels, so that the weights are loaded once for many.
    """
    c = tl.arange(0, C)
    kind = slopes.dtype.element_ty
    ui, uf, uo, ug, hi, hf, ho, hg = 0, 0, 0, 0, 0, 0, 0, 0
    if RESIDENT:
        ui, uf, uo, ug = mix_tiles(mix, 0, C, PRODUCTS)
        hi, hf, ho, hg = mix_tiles(mix, 1, C, PRODUCTS)
    rows = S.to(tl.int64) * B * V
    for loop in tl.range(0, loops, num_stages=STAGES):
        block = (tl.program_id(0) + loop * tl.num_programs(0)).to(tl.int64)
        v = block * BLOCK + tl.arange(0, BLOCK)
        own = (v < rows)[:, None]
        here = v[:, None] * C + c[None, :]
        u = tl.load(written + here, mask=own, other=0.0)
        z = tl.load(kept_filtered + here, mask=own, other=0.0)
        memory = tl.load(kept_cell + here, mask=own, other=0.0).to(tl.float32)
        live = 1.0
        if WRITES:
            item = v // V
            live = tl.load(writes + (item % B) * S + item // B, mask=v < rows, other=0)
            live = live.to(tl.float32)[:, None]
        slope_i, slope_f, slope_o, slope_g, slope_h, slope_c = gate_slopes(
            u, z, memory, live, ui, uf, uo, ug, hi, hf, ho, hg,
            mix, bias, WRITES, RESIDENT, C, PRODUCTS, FAST,
        )  # fmt: skip
        at = slopes + v[:, None] * (6 * C) + c[None, :]
        tl.store(at, slope_i.to(kind), mask=own)
        tl.store(at + C, slope_f.to(kind), mask=own)
        tl.store(at + 2 * C, slope_o.to(kind), mask=own)
        tl.store(at + 3 * C, slope_g.to(kind), mask=own)
        tl.store(at + 4 * C, slope_h.to(kind), mask=own)
        tl.store(at + 5 * C, slope_c.to(kind), mask=own)


@triton.jit
def back_through_mix(di, df, do, dg, wi, wf, wo, wg, mix, HALF: tl.constexpr,
                     RESIDENT: tl.constexpr, C: tl.constexpr, PRODUCTS: tl.constexpr):  # fmt: skip
    """What the gates' gradients send to the written (0) or the hidden (1) half: (BLOCK_V, C)."""
    if not RESIDENT:
        wi, wf, wo, wg = mix_tiles(mix, HALF, C, PRODUCTS)
    total = tl.zeros(di.shape, dtype=tl.float32)
    total = product(di, tl.trans(wi), total, PRODUCTS)
    total = product(df, tl.trans(wf), total, PRODUCTS)
    total = product(do, tl.trans(wo), total, PRODUCTS)
    return product(dg, tl.trans(wg), total, PRODUCTS)


@triton.jit
def spread_reads(
    dh,
    read_at,
    grad_reads,
    row,
    v,
    Q,
    C: tl.constexpr,
    D: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    AXES: tl.constexpr,
):
    """dh + what the reads of step `row` send back to voxels v: a hat of width 1 per axis."""
    c = tl.arange(0, C)
    z, y, x = place(v, H, W)
    for q in range(Q):
        at = read_at + (row * Q + q) * AXES
        weight = hat(tl.load(at), x, W)
        if H > 1:
            weight *= hat(tl.load(at + 1), y, H)
        if D > 1:
            weight *= hat(tl.load(at + 2), z, D)
        dh += weight[:, None] * tl.load(grad_reads + (row * Q + q) * C + c[None, :])
    return dh


@triton.jit
def hat(at, i, SIZE: tl.constexpr):
    position = (tl.minimum(tl.maximum(at, -1.0), 1.0) + 1.0) * (0.5 * (SIZE - 1))
    return tl.maximum(1.0 - tl.abs(position - i), 0.0)


@triton.jit(do_not_specialize=["S", "Q", "B"])
def backward_kernel(
    read_at,
    taps,
    mix,
    bias,
    writes,
    resets,
    written,
    kept_filtered,
    kept_cell,
    grad_reads,
    grad_last_hidden,
    grad_last_cell,
    gates,
    grad_filtered,
    grad_written,
    cell_ring,
    pass_ring,
    grad_hidden,
    grad_cell,
    arrivals,
    S,
    Q,
    B,
    C: tl.constexpr,
    D: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    AXES: tl.constexpr,
    BLOCK_V: tl.constexpr,
    TILES: tl.constexpr,
    PARTS: tl.constexpr,
    GATES: tl.constexpr,
    INSIDE: tl.constexpr,
    FILTERED: tl.constexpr,
    WRITES: tl.constexpr,
    RESETS: tl.constexpr,
    LAST: tl.constexpr,
    RESIDENT: tl.constexpr,
    PRODUCTS: tl.constexpr,
    FAST: tl.constexpr,
    PIN: tl.constexpr,
):
    """All steps of a row, last to first. Leaves the gates' gradients in gates[..., :4, :].

    gates (S, B, V, GATES, C) holds the slopes, unless they are recomputed here: INSIDE, from what
    the forward pass kept. LAST: something arrives for the state after the last step.

    grad_filtered (S, B, V, C) is what reaches the filtered hidden half of each step; its transpose
    filter is the only thing neighbours exchange, so that it is stored first. grad_written is what
    reaches the filtered write.
    """
    b, part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    c = tl.arange(0, C)
    V: tl.constexpr = D * H * W
    kind = gates.dtype.element_ty
    HOLD: tl.constexpr = INSIDE and kind == tl.bfloat16  # the slopes in half the registers
    ONCE: tl.constexpr = INSIDE and LAST and not WRITES and TILES == 1  # no dh passes a step by
    size = B.to(tl.int64) * (V * C)
    offset = b.to(tl.int64) * (V * C)
    cell_ring += offset
    pass_ring += offset
    arrivals += b
    first = part * (TILES * BLOCK_V)
    tx0, tx1, tx2 = axis_taps(taps, AXES - 1, W if FILTERED else 1, True, C)
    ty0, ty1, ty2 = axis_taps(taps, AXES - 2, H if FILTERED else 1, True, C)
    tz0, tz1, tz2 = axis_taps(taps, AXES - 3, D if FILTERED else 1, True, C)
    ui, uf, uo, ug, hi, hf, ho, hg = 0, 0, 0, 0, 0, 0, 0, 0
    if RESIDENT:
        ui, uf, uo, ug = mix_tiles(mix, 0, C, PRODUCTS)
        hi, hf, ho, hg = mix_tiles(mix, 1, C, PRODUCTS)

    rest = tl.zeros([BLOCK_V, C], dtype=tl.float32)
    dc = tl.zeros([BLOCK_V, C], dtype=tl.float32)
    for tile in range(TILES):  # the gradients move from (C, V) to (V, C)
        v = first + tile * BLOCK_V + tl.arange(0, BLOCK_V)
        own = (v < V)[:, None]
        given = offset + c[None, :] * V + v[:, None]
        here = v[:, None] * C + c[None, :]
        if LAST:
            rest = tl.load(grad_last_hidden + given, mask=own, other=0.0)
            dc = tl.load(grad_last_cell + given, mask=own, other=0.0)
        if TILES > 1 or ONCE:
            tl.store(pass_ring + here, rest, mask=own)
        if TILES > 1:
            tl.store(cell_ring + here, dc, mask=own)
    if TILES > 1 or ONCE:
        tl.debug_barrier()
    if ONCE:
        rest = tl.zeros([BLOCK_V, C], dtype=tl.float32)

    for done in range(S):
        s = S - 1 - done
        row = b * S + s
        now, then = (done % 2) * size, ((done + 1) % 2) * size
        idle = 0.0
        if RESETS:  # a product with zero would let what is not finite through
            empty = tl.load(resets + row + 1, mask=done > 0, other=0).to(tl.int1)
        if WRITES:
            idle = 1.0 - tl.load(writes + row).to(tl.float32)
        if TILES > 1:
            wait(arrivals, PARTS * done, PARTS)
        for tile in range(TILES):
            v = first + tile * BLOCK_V + tl.arange(0, BLOCK_V)
            own = (v < V)[:, None]
            here = v[:, None] * C + c[None, :]
            kept = s * size + offset + here
            at = gates + GATES * (s * size + offset) + v[:, None] * (GATES * C) + c[None, :]
            if INSIDE:
                u = tl.load(written + kept, mask=own, other=0.0)
                z = tl.load(kept_filtered + kept, mask=own, other=0.0)
                memory = tl.load(kept_cell + kept, mask=own, other=0.0).to(tl.float32)
                slope_i, slope_f, slope_o, slope_g, slope_h, slope_c = gate_slopes(
                    u, z, memory, 1.0 - idle, ui, uf, uo, ug, hi, hf, ho, hg,
                    mix, bias, WRITES, RESIDENT, C, PRODUCTS, FAST,
                )  # fmt: skip
            else:
                slope_i = tl.load(at, mask=own, other=0.0)
                slope_f = tl.load(at + C, mask=own, other=0.0)
                slope_o = tl.load(at + 2 * C, mask=own, other=0.0)
                slope_g = tl.load(at + 3 * C, mask=own, other=0.0)
                slope_h = tl.load(at + 4 * C, mask=own, other=0.0)
                slope_c = tl.load(at + 5 * C, mask=own, other=0.0)
            if HOLD:
                i_f, o_g = pair(slope_i, slope_f, PIN), pair(slope_o, slope_g, PIN)
                h_c = pair(slope_h, slope_c, PIN)
            if TILES > 1:
                rest = tl.load(pass_ring + now + here, mask=own, other=0.0)
                dc = tl.load(cell_ring + now + here, mask=own, other=0.0)
            dh = rest
            if ONCE:
                dh = tl.load(pass_ring + here, mask=own & (done == 0), other=0.0)
            reads = tl.where(done > 0, Q, 0)  # of the step after this one
            dh = spread_reads(dh, read_at, grad_reads, row + 1, v, reads, C, D, H, W, AXES)
            if TILES == 1:  # all that could be done before the neighbours arrive is done
                wait(arrivals, PARTS * done, PARTS)
            later = grad_filtered + (s + 1) * size + offset
            dh += neighbours(
                later, v, (v < V) & (done > 0), tx0, tx1, tx2, ty0, ty1, ty2, tz0, tz1, tz2,
                FILTERED, C, D, H, W, PIN,
            )  # fmt: skip
            if RESETS:
                dh, dc = tl.where(empty, 0.0, dh), tl.where(empty, 0.0, dc)
            dh = pinned(dh, PIN and HOLD)
            # Without masks all goes through the gates; a product with zero would be carried along.
            rest = dh * idle if WRITES else tl.zeros([BLOCK_V, C], dtype=tl.float32)
            if HOLD:
                slope_i, slope_f = unpair(i_f)
                slope_o, slope_g = unpair(o_g)
                slope_h, slope_c = unpair(h_c)
            dc += dh * slope_h.to(tl.float32)
            di = (dc * slope_i.to(tl.float32)).to(kind)
            df = (dc * slope_f.to(tl.float32)).to(kind)
            do = (dh * slope_o.to(tl.float32)).to(kind)
            dg = (dc * slope_g.to(tl.float32)).to(kind)
            dc *= slope_c.to(tl.float32)
            filtered = back_through_mix(
                di, df, do, dg, hi, hf, ho, hg, mix, 1, RESIDENT, C, PRODUCTS
            )
            tl.store(grad_filtered + kept, filtered.to(kind), mask=own)
            if TILES == 1:  # what follows, nobody waits for
                arrive(arrivals, PARTS)
            if HOLD:
                di, df = later_on(di, PIN), later_on(df, PIN)
                do, dg = later_on(do, PIN), later_on(dg, PIN)
            tl.store(at, di, mask=own)
            tl.store(at + C, df, mask=own)
            tl.store(at + 2 * C, do, mask=own)
            tl.store(at + 3 * C, dg, mask=own)
            filtered = back_through_mix(
                di, df, do, dg, ui, uf, uo, ug, mix, 0, RESIDENT, C, PRODUCTS
            )
            tl.store(grad_written + kept, filtered.to(kind), mask=own)
            if TILES > 1:
                tl.store(pass_ring + then + here, rest, mask=own)
                tl.store(cell_ring + then + here, dc, mask=own)
        if TILES > 1:
            arrive(arrivals, PARTS)

    wait(arrivals, PARTS * S, PARTS)
    if RESETS:
        empty = tl.load(resets + b * S).to(tl.int1)
    for tile in range(TILES):
        v = first + tile * BLOCK_V + tl.arange(0, BLOCK_V)
        own = (v < V)[:, None]
        given = offset + c[None, :] * V + v[:, None]
        here = v[:, None] * C + c[None, :]
        if TILES > 1:
            rest = tl.load(pass_ring + (S % 2) * size + here, mask=own, other=0.0)
            dc = tl.load(cell_ring + (S % 2) * size + here, mask=own, other=0.0)
        dh = spread_reads(rest, read_at, grad_reads, b * S, v, Q, C, D, H, W, AXES)
        dh += neighbours(
            grad_filtered + offset, v, v < V, tx0, tx1, tx2, ty0, ty1, ty2, tz0, tz1, tz2,
            FILTERED, C, D, H, W, PIN,
        )  # fmt: skip
        if RESETS:
            dh, dc = tl.where(empty, 0.0, dh), tl.where(empty, 0.0, dc)
        tl.store(grad_hidden + given, dh, mask=own)
        tl.store(grad_cell + given, dc, mask=own)


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
    p = plan_of(shape)
    B, S, M, V, C, n = shape.B, shape.S, shape.M, shape.V, shape.C, len(shape.grid)
    rows = layout(shape, plan.BACKWARD_SHARE)
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
            slopes_kernel,
            C=C, V=V, BLOCK=p.block, WRITES=shape.writes, RESIDENT=p.resident,
            PRODUCTS=p.products, FAST=p.fast, STAGES=SLOPES_STAGES, **p.alone,
        ),
        slopes_grid=(slopes_programs,),
        slopes_loops=-(-blocks // slopes_programs),
        scan=bound(
            backward_kernel,
            **p.sizes, **rows.constants, FILTERED=shape.filtered, WRITES=shape.writes,
            RESETS=shape.resets, LAST=last, RESIDENT=p.resident, PRODUCTS=p.products,
            GATES=gates, INSIDE=p.inside, FAST=p.fast,
            PIN=not INTERPRETED, **rows.options,
        ),
        scan_grid=(B * rows.parts,),
        mix=bound(
            weight_gradients.mix_kernel,
            C=C, GATES=gates, BLOCK=block, OUT=out, ADD=mode == "ieee", PRODUCTS=mode, **p.streamed,
        ),
        mix_grid=(mix_chunks, 4 * C // out),
        mix_loops=mix_loops,
        writes=bound(
            write_gradients.writes_kernel,
            **p.write, **p.sizes, BLOCK_V=write_tile.voxels,
            SUMS={"bf16": "tf32", "bf16-emulated": "ieee"}.get(p.products, p.products),
            STAGES=WRITES_STAGES, PIN=not INTERPRETED, **p.alone | write_tile.options,
        ),
        taps=bound(
            weight_gradients.taps_kernel,
            C=C, D=p.sizes["D"], H=p.sizes["H"], W=p.sizes["W"], BLOCK_V=tile, PIN=not INTERPRETED,
            **p.alone | taps_options,
        ),
        taps_grid=(tiles, taps_chunks, lines),
        taps_loops=taps_loops,
        sums=bound(
            weight_gradients.sums_kernel,
            C=C, AXES=n, PARTS=SUM_PARTS, ROWS=SUM_ROWS, COLUMNS=SUM_COLUMNS, **p.alone,
        ),
        sums_grid=(sums,),
        counts=counts,
        share_taps=bound(
            weight_gradients.share_taps_kernel,
            C=C, AXES=n, ALL=3**n, ALL_PADDED=power_of_2(3**n), PARTS=SUM_PARTS,
        ),
        reads=bound(write_gradients.reads_kernel, **p.sizes, num_warps=1),
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
    inputs: ScanInputs,
    kept: list[Tensor],
    products: torch.dtype,
) -> ScanInputs:
    """All launches of a backward scan over S > 0 steps."""
    read_at, write_at, spread, content, taps, mix, bias, hidden, cell, writes, resets = inputs
    assert read_at is not None
    shape = Shape.of(inputs, products)
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
    return ScanInputs(
        grad_read_at, grad_at, grad_spread, grad_content, grad_taps, grad_mix, grad_bias,
        first_hidden, first_cell,
    )  # fmt: skip
