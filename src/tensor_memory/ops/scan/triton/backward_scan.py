"""The recurrence backward: kernels and their launches. The README of `ops` derives the gradients.

Only `backward_kernel` is sequential. It recomputes what it needs of each step's gates while it
waits for the other programs of its row, or `slopes_kernel` recomputes them for all steps at once.
The gradients of weights, writes and reads come afterwards (`weight_gradients.py`,
`write_gradients.py`).
"""

# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# pyright: reportPossiblyUnboundVariable=false, reportAssignmentType=false
from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tensor_memory.ops.launch import INTERPRETED, BoundKernel, Grid, bind, or_else
from tensor_memory.ops.scan.inputs import ScanInputs
from tensor_memory.ops.scan.triton.filter import axis_taps, neighbours, place
from tensor_memory.ops.scan.triton.forward_scan import Kept, filtered_writes
from tensor_memory.ops.scan.triton.plan import (
    ALL_REGISTERS,
    BACKWARD_SHARE,
    PROGRAMS,
    Shape,
    layout,
    plan_of,
)
from tensor_memory.ops.scan.triton.step import (
    arrive,
    gate_slopes,
    mix_tiles,
    not_before,
    pair,
    pinned,
    product,
    unpair,
    wait,
)
from tensor_memory.ops.scan.triton.weight_gradients import weight_gradients
from tensor_memory.ops.scan.triton.write_gradients import read_gradients, write_gradients

SLOPES_SHARE = {16: 3, 32: 3, 64: 2, 128: 3}  # programs per multiprocessor for the gates, by C
SLOPES_STAGES = 1  # blocks of theirs on their way at a time


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
    # The mix, once for all voxels of this program.
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
        # What the gates of these voxels were computed from.
        here = v[:, None] * C + c[None, :]
        u = tl.load(written + here, mask=own, other=0.0)
        z = tl.load(kept_filtered + here, mask=own, other=0.0)
        memory = tl.load(kept_cell + here, mask=own, other=0.0).to(tl.float32)
        # 1 where the row wrote at this step, else 0.
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

    gates (S, B, V, GATES, C) holds the slopes. With INSIDE they are recomputed here from what the
    forward pass kept. LAST: something arrives for the state after the last step.

    grad_filtered (S, B, V, C) is what reaches the filtered hidden half of each step. Its transpose
    filter is all that neighbours exchange. grad_written is what reaches the filtered write.
    """
    # This program's row and range of voxels, as in `forward_kernel`.
    b, part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    c = tl.arange(0, C)
    V: tl.constexpr = D * H * W
    kind = gates.dtype.element_ty
    ONCE: tl.constexpr = INSIDE and LAST and not WRITES and TILES == 1  # no dh passes a step by
    size = B.to(tl.int64) * (V * C)
    offset = b.to(tl.int64) * (V * C)
    cell_ring += offset
    pass_ring += offset
    arrivals += b
    first = part * (TILES * BLOCK_V)
    # The transpose of a filter has its taps reversed.
    tx0, tx1, tx2 = axis_taps(taps, AXES - 1, W if FILTERED else 1, True, C)
    ty0, ty1, ty2 = axis_taps(taps, AXES - 2, H if FILTERED else 1, True, C)
    tz0, tz1, tz2 = axis_taps(taps, AXES - 3, D if FILTERED else 1, True, C)
    ui, uf, uo, ug, hi, hf, ho, hg = 0, 0, 0, 0, 0, 0, 0, 0
    if RESIDENT:
        ui, uf, uo, ug = mix_tiles(mix, 0, C, PRODUCTS)
        hi, hf, ho, hg = mix_tiles(mix, 1, C, PRODUCTS)

    # What arrives for the last state moves from (C, V) to (V, C). `rest` is the part of ∂h that
    # goes past a step, of rows that do not write at it.
    rest = tl.zeros([BLOCK_V, C], dtype=tl.float32)
    dc = tl.zeros([BLOCK_V, C], dtype=tl.float32)
    for tile in range(TILES):
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
        # From the gradient of the state after step s to that of the state before it.
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
            # Slopes: how the gates' sums move with ∂c and ∂h. Recomputed here, or found.
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
            if INSIDE:
                i_f, o_g = pair(slope_i, slope_f, PIN), pair(slope_o, slope_g, PIN)
                h_c = pair(slope_h, slope_c, PIN)
            # ∂h after step s: what passed by, what the reads of step s + 1 send, what its filtered
            # hidden half sends through neighbours.
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
            dh = pinned(dh, PIN and INSIDE)
            # Without masks all goes through the gates; a product with zero would be carried along.
            rest = dh * idle if WRITES else tl.zeros([BLOCK_V, C], dtype=tl.float32)
            if INSIDE:
                slope_i, slope_f = unpair(i_f)
                slope_o, slope_g = unpair(o_g)
                slope_h, slope_c = unpair(h_c)
            # ∂c and the gradients of the four gates' sums.
            dc += dh * slope_h.to(tl.float32)
            di = (dc * slope_i.to(tl.float32)).to(kind)
            df = (dc * slope_f.to(tl.float32)).to(kind)
            do = (dh * slope_o.to(tl.float32)).to(kind)
            dg = (dc * slope_g.to(tl.float32)).to(kind)
            dc *= slope_c.to(tl.float32)
            # ∂ĥ: the only thing that neighbours wait for, so it is stored first.
            filtered = back_through_mix(
                di, df, do, dg, hi, hf, ho, hg, mix, 1, RESIDENT, C, PRODUCTS
            )
            tl.store(grad_filtered + kept, filtered.to(kind), mask=own)
            if TILES == 1:  # what follows, nobody waits for
                arrive(arrivals, PARTS)
            if INSIDE:
                di, df = not_before(di, PIN), not_before(df, PIN)
                do, dg = not_before(do, PIN), not_before(dg, PIN)
            # The gates' gradients for the mix, and ∂Û for the writes.
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

    # The gradient of the first state: what the first step sends back, as (C, V).
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


class _Scan(NamedTuple):
    kernel: BoundKernel
    grid: Grid
    tiles: int


@functools.lru_cache(maxsize=256)
def _scan_launch(shape: Shape, last: bool) -> _Scan:
    p, rows = plan_of(shape), layout(shape, BACKWARD_SHARE)
    kernel = bind(
        backward_kernel,
        **p.sizes, **rows.constants, FILTERED=shape.filtered, WRITES=shape.writes,
        RESETS=shape.resets, LAST=last, RESIDENT=p.resident, PRODUCTS=p.products,
        GATES=p.gates, INSIDE=p.inside, FAST=p.fast, PIN=not INTERPRETED, **rows.options,
    )  # fmt: skip
    return _Scan(kernel, (shape.B * rows.parts,), rows.constants["TILES"])


def _recompute_slopes(inputs: ScanInputs, shape: Shape, written: Tensor, kept: Kept) -> Tensor:
    """`slopes_kernel` for all steps: (S, B, V, 6, C)."""
    p, S, B, V, C = plan_of(shape), shape.S, shape.B, shape.V, shape.C
    slopes = written.new_empty(S, B, V, p.gates, C)
    blocks = -(-S * B * V // p.block)
    programs = min(blocks, PROGRAMS * SLOPES_SHARE[C])
    options = p.alone | ALL_REGISTERS if C > 64 and not INTERPRETED else p.alone
    kernel = bind(
        slopes_kernel,
        C=C, V=V, BLOCK=p.block, WRITES=shape.writes, RESIDENT=p.resident,
        PRODUCTS=p.products, FAST=p.fast, STAGES=SLOPES_STAGES, **options,
    )  # fmt: skip
    writes = or_else(inputs.writes, written)
    kernel(
        (programs,),
        (inputs.mix, inputs.bias, writes, written, kept.filtered, kept.cell, slopes),
        (S, B, -(-blocks // programs)),
    )
    return slopes


def run_backward(
    grad_reads: Tensor,
    grad_hidden: Tensor | None,
    grad_cell: Tensor | None,
    inputs: ScanInputs,
    kept: Kept,
    products: torch.dtype,
) -> ScanInputs:
    """All launches of a backward scan over S > 0 steps: the gradients in the places of inputs."""
    shape = Shape.of(inputs, products)
    p, do = plan_of(shape), _scan_launch(shape, grad_hidden is not None)
    S, B, V, C = shape.S, shape.B, shape.V, shape.C
    written, counters = filtered_writes(inputs, shape)
    if p.inside:
        gates = written.new_empty(S, B, V, p.gates, C)
    else:
        gates = _recompute_slopes(inputs, shape, written, kept)

    grad_filtered, grad_written = torch.empty_like(written), torch.empty_like(written)
    first_hidden, first_cell = torch.empty_like(inputs.hidden), torch.empty_like(inputs.cell)
    nothing = inputs.content  # stands in for a pointer that no program follows
    cells = inputs.hidden.new_empty(2, B, V, C) if do.tiles > 1 else nothing
    passing = inputs.hidden.new_empty(2 if do.tiles > 1 else 1, B, V, C)
    do.kernel(
        do.grid,
        (
            inputs.read_at, or_else(inputs.taps, nothing), inputs.mix, inputs.bias,
            or_else(inputs.writes, nothing), or_else(inputs.resets, nothing),
            written, kept.filtered, kept.cell, grad_reads,
            or_else(grad_hidden, nothing), or_else(grad_cell, nothing),
            gates, grad_filtered, grad_written, cells, passing,
            first_hidden, first_cell, counters,
        ),
        (S, shape.Q, B),
    )  # fmt: skip
    by_writes = write_gradients(inputs, shape, grad_written)
    taps, mix, bias = weight_gradients(
        inputs, shape, gates, written, kept, grad_filtered, by_writes.partial_taps
    )
    return ScanInputs(
        read_at=read_gradients(inputs, shape, kept.hidden, grad_reads),
        write_at=by_writes.write_at,
        spread=by_writes.spread,
        content=by_writes.content,
        taps=taps,
        mix=mix,
        bias=bias,
        hidden=first_hidden,
        cell=first_cell,
    )
