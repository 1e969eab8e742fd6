"""The gradients of the weights: the mix with its bias, and the taps.

Sums over programs are stored as partial sums and added by `sums_kernel`, so every gradient is the
same in every run.
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

from tensor_memory.ops.launch import INTERPRETED, BoundKernel, Grid, bind
from tensor_memory.ops.scan.inputs import ScanInputs
from tensor_memory.ops.scan.triton.forward_scan import Kept
from tensor_memory.ops.scan.triton.plan import PROGRAMS, Shape, plan_of, plane_tile, power_of_2
from tensor_memory.ops.scan.triton.step import as_float, product

TAPS_VALUES = 1024  # voxels × channels per program for the nine sums of the taps' gradient; in
TAPS_LOW, TAPS_FLOAT = 4, 3  # bfloat16 and float32 so many, or more smaller ones, fit side by side
MIX_LOW = (128, 128)  # bfloat16's mix: rows, voxels at a time
MIX_FLOAT = (64, 64, 2)  # float32's: rows, voxels at a time, programs per multiprocessor
SUM_ROWS, SUM_COLUMNS = 32, 128  # partial sums that a program adds at a time
SUM_PARTS = 2 if INTERPRETED else 32  # programs that share the rows of a column, thousands


@triton.jit(do_not_specialize=["rows", "loops"])
def mix_kernel(
    gates,
    written,
    kept_filtered,
    partial,
    rows,
    loops,
    C: tl.constexpr,
    GATES: tl.constexpr,
    BLOCK: tl.constexpr,
    OUT: tl.constexpr,
    ADD: tl.constexpr,
    PRODUCTS: tl.constexpr,
):
    """Gate gradients times gate inputs over BLOCK · loops voxels: OUT of the mix's 4C rows.

    gates (rows, GATES, C), of which the first four are the gradients; partial (chunks,
    4C · 2C + 4C): the mix, then the bias. ADD adds up the bias's share voxel by
    voxel; tensor cores find it sooner as a product with ones.
    """
    # Sums for OUT gates' rows: by the written half, by the hidden half, and for the bias.
    chunk = tl.program_id(0)
    out = tl.program_id(1) * OUT + tl.arange(0, OUT)
    c = tl.arange(0, C)
    by_write = tl.zeros([OUT, C], dtype=tl.float32)
    by_hidden = tl.zeros([OUT, C], dtype=tl.float32)
    if ADD:
        added = tl.zeros([BLOCK, OUT], dtype=tl.float32)
    else:
        sums = tl.zeros([OUT, 16], dtype=tl.float32)
        ones = tl.full([BLOCK, 16], 1.0, dtype=gates.dtype.element_ty)
    for loop in range(loops):
        i = (chunk.to(tl.int64) * loops + loop) * BLOCK + tl.arange(0, BLOCK)
        own = (i < rows)[:, None]
        given = tl.load(gates + i[:, None] * (GATES * C) + out[None, :], mask=own, other=0.0)
        # ∂a zᵀ, a block of voxels at a time.
        d = tl.trans(given)
        here = i[:, None] * C + c[None, :]
        by_write = product(d, tl.load(written + here, mask=own, other=0.0), by_write, PRODUCTS)
        z = tl.load(kept_filtered + here, mask=own, other=0.0)
        by_hidden = product(d, z, by_hidden, PRODUCTS)
        if ADD:
            added += given
        else:
            sums = product(d, ones, sums, PRODUCTS)
    # The mix's rows, then the bias behind all of them.
    partial += chunk * (4 * C * (2 * C + 1))
    at = partial + out[:, None] * (2 * C) + c[None, :]
    tl.store(at, by_write)
    tl.store(at + C, by_hidden)
    if ADD:
        tl.store(partial + 8 * C * C + out, tl.sum(added, axis=0))
    else:
        column = tl.arange(0, 16)[None, :]
        tl.store(partial + 8 * C * C + out[:, None] + column, sums, mask=column == 0)


@triton.jit
def three_along_x(at, before, line, after, C: tl.constexpr):
    """What lies one voxel before, at and after a place."""
    return (
        tl.load(at - C, mask=before, other=0.0),
        tl.load(at, mask=line, other=0.0),
        tl.load(at + C, mask=after, other=0.0),
    )


@triton.jit(do_not_specialize=["items", "loops"])
def taps_kernel(
    grad_filtered,
    kept_hidden,
    partial,
    items,
    loops,
    C: tl.constexpr,
    D: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PIN: tl.constexpr,
):
    """Correlation of grad_filtered with the shifts of hidden, over `loops` steps of one tile.

    A tile is a piece of a plane and goes through the planes: what is loaded of hidden meets the
    gradients of three. The last program axis is the shift along y; the nine shifts along z and x
    are nine sums, kept per voxel until the end. partial (tiles, chunks, 3 along z, y and x, C).
    """
    # A piece of a plane, shifted along y by this program's dy; what lies outside counts as zero.
    tile, chunk = tl.program_id(0), tl.program_id(1)
    dy = tl.program_id(2) - 1 if H > 1 else 0
    w = tile * BLOCK_V + tl.arange(0, BLOCK_V)
    y, x = w // W, w % W
    c = tl.arange(0, C)
    PLANE: tl.constexpr = H * W
    own = w < PLANE
    line = own & (y + dy >= 0) & (y + dy < H)
    before, after = (line & (x > 0))[:, None], (line & (x < W - 1))[:, None]
    own, line = own[:, None], line[:, None]
    here = w[:, None] * C + c[None, :]
    near = here + dy * (W * C)
    size = tl.full([], D * PLANE * C, dtype=tl.int64)
    down_m = tl.zeros([BLOCK_V, C], dtype=tl.float32)
    down_o, down_p = down_m, down_m
    same_m, same_o, same_p = down_m, down_m, down_m
    up_m, up_o, up_p = down_m, down_m, down_m
    for item in range(chunk * loops, tl.minimum((chunk + 1) * loops, items)):
        # The first plane of this step and row.
        plane = size * item
        g_below = tl.zeros([BLOCK_V, C], dtype=grad_filtered.dtype.element_ty)
        g = tl.load(grad_filtered + plane + here, mask=own, other=0.0)
        next_m, next_o, next_p = three_along_x(kept_hidden + plane + near, before, line, after, C)
        for z in range(D):
            plane += PLANE * C
            h_m, h_o = as_float(next_m, PIN), as_float(next_o, PIN)
            h_p, g_here = as_float(next_p, PIN), as_float(g, PIN)
            if D > 1:  # the next plane is on its way while this one is dealt with
                more = z < D - 1
                next_m, next_o, next_p = three_along_x(
                    kept_hidden + plane + near, before & more, line & more, after & more, C
                )
                g_above = tl.load(grad_filtered + plane + here, mask=own & more, other=0.0)
                # hidden of this plane lies above the gradients of the plane below
                g_other = as_float(g_below, PIN)
                up_m += g_other * h_m
                up_o += g_other * h_o
                up_p += g_other * h_p
            same_m += g_here * h_m
            same_o += g_here * h_o
            same_p += g_here * h_p
            if D > 1:
                g_other = as_float(g_above, PIN)
                down_m += g_other * h_m
                down_o += g_other * h_o
                down_p += g_other * h_p
                g_below, g = g, g_above
    # Sum over the voxels of the piece, and store the nine shifts.
    place_of = (tile * tl.num_programs(1) + chunk) * 27 + (dy + 1) * 3
    out = partial + place_of * C + c
    tl.store(out, tl.sum(down_m, axis=0))
    tl.store(out + C, tl.sum(down_o, axis=0))
    tl.store(out + 2 * C, tl.sum(down_p, axis=0))
    tl.store(out + 9 * C, tl.sum(same_m, axis=0))
    tl.store(out + 10 * C, tl.sum(same_o, axis=0))
    tl.store(out + 11 * C, tl.sum(same_p, axis=0))
    tl.store(out + 18 * C, tl.sum(up_m, axis=0))
    tl.store(out + 19 * C, tl.sum(up_o, axis=0))
    tl.store(out + 20 * C, tl.sum(up_p, axis=0))


@triton.jit
def add_rows(rows, first, count, width, column, own, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Own columns of rows (…, width), summed over the rows from `first` up to `count`."""
    total = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for start in range(first, count, ROWS):
        row = start + tl.arange(0, ROWS)
        mask = (row < count)[:, None] & own[None, :]
        at = rows + row[:, None].to(tl.int64) * width + column[None, :]
        total += tl.load(at, mask=mask, other=0.0)
    return tl.sum(total, axis=0)


@triton.jit
def add_share(rows, sums, count, part, block, WIDTH: tl.constexpr, UNUSED: tl.constexpr,
              PARTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    """One of PARTS shares of the rows, into sums (PARTS, WIDTH); at both ends UNUSED columns."""
    share = (count + PARTS - 1) // PARTS
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    until = tl.minimum((part + 1) * share, count)
    own = (column >= UNUSED) & (column < WIDTH - UNUSED)
    total = add_rows(rows, part * share, until, WIDTH, column, own, ROWS, COLUMNS)
    tl.store(sums + part * WIDTH + column, total, mask=column < WIDTH)


@triton.jit(do_not_specialize=["mix_count", "write_count", "hidden_count"])
def sums_kernel(
    partial_mix,
    partial_writes,
    partial_hidden,
    grad_mix,
    grad_bias,
    written,
    cube,
    mix_count,
    write_count,
    hidden_count,
    C: tl.constexpr,
    AXES: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """All partial sums in one launch: the mix with its bias, the taps of both halves.

    The taps' rows, thousands, are shared by PARTS programs, whose sums `share_taps_kernel` adds.
    """
    MIX: tl.constexpr = 8 * C * C
    WRITES: tl.constexpr = AXES * 3 * C
    UNUSED: tl.constexpr = (27 - 3**AXES) // 2 * C  # of a cube whose axes are not all there
    block = tl.program_id(0)
    mixes: tl.constexpr = (MIX + 4 * C + COLUMNS - 1) // COLUMNS
    writes: tl.constexpr = (WRITES + COLUMNS - 1) // COLUMNS
    shared: tl.constexpr = writes + (27 * C + COLUMNS - 1) // COLUMNS
    if block < mixes:  # columns of the mix and its bias
        column = block * COLUMNS + tl.arange(0, COLUMNS)
        own = column < MIX + 4 * C
        total = add_rows(partial_mix, 0, mix_count, MIX + 4 * C, column, own, ROWS, COLUMNS)
        tl.store(grad_mix + column, total, mask=column < MIX)
        column -= MIX
        tl.store(grad_bias + column, total, mask=(column >= 0) & (column < 4 * C))
    else:  # columns of the taps, a share of the rows each
        part, block = (block - mixes) // shared, (block - mixes) % shared
        if block < writes:
            add_share(
                partial_writes, written, write_count, part, block, WRITES, 0, PARTS, ROWS, COLUMNS
            )
        else:
            add_share(
                partial_hidden, cube, hidden_count, part, block - writes, 27 * C, UNUSED, PARTS,
                ROWS, COLUMNS,
            )  # fmt: skip


@triton.jit
def share_taps_kernel(
    cube,
    written,
    taps,
    grad_taps,
    C: tl.constexpr,
    AXES: tl.constexpr,
    ALL: tl.constexpr,
    ALL_PADDED: tl.constexpr,
    PARTS: tl.constexpr,
):
    """The 3ⁿ products of taps are one filter: share its gradient out by axis.

    cube (PARTS, 3, 3, 3, C), of which missing axes use the middle alone; written (PARTS, n, 3, C)
    is the written half's gradient; grad_taps and taps (n, 2C, 3).
    """
    # The gradient of the 3ⁿ-tap filter for sixteen channels.
    c = tl.program_id(0) * 16 + tl.arange(0, 16)
    k, part = tl.arange(0, ALL_PADDED), tl.arange(0, PARTS)
    own = (k < ALL)[:, None]
    MIDDLE: tl.constexpr = (27 - ALL) // 2  # 0, 9 or 12: where the used part begins
    d = tl.zeros([ALL_PADDED, 16], dtype=tl.float32)
    for i in tl.static_range(PARTS):
        at = cube + ((i * 27 + MIDDLE + k)[:, None] * C + c[None, :])
        d += tl.load(at, mask=own, other=0.0)
    for axis in tl.static_range(AXES):
        # Times the taps of all other axes; then the sum over places with the same tap here.
        rest = d
        for other in tl.static_range(AXES):
            if other != axis:
                digit = (k // 3 ** (AXES - 1 - other)) % 3
                at = taps + (other * 2 * C + C + c[None, :]) * 3 + digit[:, None]
                rest *= tl.load(at, mask=own, other=0.0)
        digit = (k // 3 ** (AXES - 1 - axis)) % 3
        for t in tl.static_range(3):
            at = grad_taps + (axis * 2 * C + c) * 3 + t
            from_writes = written + (part[:, None] * AXES + axis) * (3 * C) + t * C + c[None, :]
            tl.store(at, tl.sum(tl.load(from_writes), axis=0))
            tl.store(at + 3 * C, tl.sum(tl.where((digit == t)[:, None], rest, 0.0), axis=0))


class MixLaunch(NamedTuple):
    """`mix_kernel`, and how many voxels each of its chunks goes through."""

    kernel: BoundKernel
    chunks: int
    grid: Grid
    loops: int


@functools.lru_cache(maxsize=256)
def mix_launch(shape: Shape) -> MixLaunch:
    """`mix_kernel` for a shape."""
    p, C, rows = plan_of(shape), shape.C, shape.S * shape.B * shape.V
    out, block, share, mode = min(4 * C, MIX_LOW[0]), MIX_LOW[1], 1, p.products
    if not shape.low and C <= 32:  # tensor cores cannot transpose 32-bit operands; small products
        (out, block, share), mode = MIX_FLOAT, "ieee"  # do as well without
    elif not shape.low:
        out, block = C, 2048 // C
    loops = max(1, -(-rows * (4 * C // out) // (block * share * PROGRAMS)))
    chunks = -(-rows // (block * loops))
    kernel = bind(
        mix_kernel,
        C=C, GATES=p.gates, BLOCK=block, OUT=out, ADD=mode == "ieee", PRODUCTS=mode, **p.streamed,
    )  # fmt: skip
    return MixLaunch(kernel, chunks, (chunks, 4 * C // out), loops)


class TapsLaunch(NamedTuple):
    """`taps_kernel`: the steps and rows are cut in chunks, a plane in tiles."""

    kernel: BoundKernel
    tiles: int
    chunks: int
    grid: Grid
    loops: int


@functools.lru_cache(maxsize=256)
def taps_launch(shape: Shape) -> TapsLaunch:
    """`taps_kernel` for a shape."""
    p, C, items = plan_of(shape), shape.C, shape.S * shape.B
    tile, tiles, options = plane_tile(p.sizes, TAPS_VALUES // C)
    lines = 3 if len(shape.grid) > 1 else 1
    if shape.low and not INTERPRETED:
        options["maxnreg"] = 128  # for four of them; the assembler would take 149
    programs = PROGRAMS * (TAPS_LOW if shape.low else TAPS_FLOAT) * TAPS_VALUES // (tile * C)
    loops = -(-items * tiles * lines // programs)
    chunks = -(-items // loops)
    kernel = bind(
        taps_kernel,
        C=C, D=p.sizes["D"], H=p.sizes["H"], W=p.sizes["W"], BLOCK_V=tile, PIN=not INTERPRETED,
        **p.alone | options,
    )  # fmt: skip
    return TapsLaunch(kernel, tiles, chunks, (tiles, chunks, lines), loops)


def weight_gradients(
    inputs: ScanInputs,
    shape: Shape,
    gates: Tensor,
    written: Tensor,
    kept: Kept,
    grad_filtered: Tensor,
    partial_taps: Tensor,
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Of taps, mix and bias.

    gates (S, B, V, GATES, C): the gates' gradients come first. written and grad_filtered
    (S, B, V, C): the filtered writes, and what reaches the filtered hidden half. partial_taps: what
    every write sends to the written half's taps.
    """
    C, n, S, B = shape.C, len(shape.grid), shape.S, shape.B
    mix = mix_launch(shape)
    partial_mix = inputs.mix.new_empty(mix.chunks, 4 * C * (2 * C + 1))
    mix.kernel(mix.grid, (gates, written, kept.filtered, partial_mix), (S * B * shape.V, mix.loops))

    nothing = partial_mix  # stands in for a pointer that no program follows
    partial_hidden = sums_writes = sums_hidden = nothing
    counts, share = (mix.chunks, 0, 0), 0
    if shape.filtered:
        taps = taps_launch(shape)
        partial_hidden = partial_mix.new_empty(taps.tiles, taps.chunks, 27, C)
        taps.kernel(taps.grid, (grad_filtered, kept.hidden, partial_hidden), (S * B, taps.loops))
        sums_writes = partial_mix.new_empty(SUM_PARTS, n, 3, C)
        sums_hidden = partial_mix.new_empty(SUM_PARTS, 27, C)
        counts = (mix.chunks, S * B * shape.M, taps.tiles * taps.chunks)
        share = SUM_PARTS * (-(-3 * n * C // SUM_COLUMNS) + -(-27 * C // SUM_COLUMNS))

    grad_mix, grad_bias = torch.empty_like(inputs.mix), torch.empty_like(inputs.bias)
    sums = bind(
        sums_kernel,
        C=C, AXES=n, PARTS=SUM_PARTS, ROWS=SUM_ROWS, COLUMNS=SUM_COLUMNS, **plan_of(shape).alone,
    )  # fmt: skip
    sums(
        (-(-4 * C * (2 * C + 1) // SUM_COLUMNS) + share,),
        (
            partial_mix, partial_taps, partial_hidden, grad_mix, grad_bias, sums_writes,
            sums_hidden,
        ),
        counts,
    )  # fmt: skip
    if inputs.taps is None:
        return None, grad_mix, grad_bias
    grad_taps = torch.empty_like(inputs.taps)
    share_taps = bind(
        share_taps_kernel,
        C=C, AXES=n, ALL=3**n, ALL_PADDED=power_of_2(3**n), PARTS=SUM_PARTS,
    )  # fmt: skip
    share_taps((C // 16,), (sums_hidden, sums_writes, inputs.taps, grad_taps))
    return grad_taps, grad_mix, grad_bias
