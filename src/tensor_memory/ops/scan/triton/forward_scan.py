"""The recurrence forward, and reads of the grid: kernels and their launches.

The equations are in the README of `ops`.

One launch runs all S steps. PARTS programs share a row (b): each owns a range of its voxels and
they meet at a counter in global memory once per step. Rows are (V, C) with channels together, so
that a neighbouring voxel is a constant offset away and every access is wide.

Grids of 1 and 2 axes are grids of 3 whose leading axes hold one voxel. Loops over memory are
never pipelined (`num_stages=1`): a step reads what the step before it wrote.
"""

# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# pyright: reportPossiblyUnboundVariable=false
from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tensor_memory.ops.launch import INTERPRETED, BoundKernel, Grid, bind, or_else
from tensor_memory.ops.scan.inputs import ScanInputs
from tensor_memory.ops.scan.triton.addressing import (
    filtered_write,
    read_point,
    sharpness_of,
    tapped,
    write_taps,
    written_plane,
)
from tensor_memory.ops.scan.triton.filter import axis_taps, neighbours
from tensor_memory.ops.scan.triton.plan import (
    FORWARD_SHARE,
    Shape,
    layout,
    padded_channels,
    plan_of,
    plane_tile,
    sizes_of,
)
from tensor_memory.ops.scan.triton.step import arrive, gate_sum, mix_tiles, sigmoid, tanh, wait


@triton.jit(do_not_specialize=["row_size", "step_size", "S", "Q"])
def read_kernel(
    volumes,
    read_at,
    reads,
    row_size,
    step_size,
    S,
    Q,
    VOXEL: tl.constexpr,
    CHANNEL: tl.constexpr,
    C: tl.constexpr,
    D: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    AXES: tl.constexpr,
):
    """One program per read: read_at (B, S, Q, n) -> reads (B, S, Q, C)."""
    # The grid that this read sees: the state of row b before step s.
    i = tl.program_id(0)
    b, s = i // (S * Q), (i // Q) % S
    volume = volumes + s.to(tl.int64) * step_size + b.to(tl.int64) * row_size
    r = read_point(volume, read_at + i * AXES, VOXEL, CHANNEL, C, D, H, W)
    tl.store(reads + i * C + tl.arange(0, C), r)


@triton.jit(do_not_specialize=["S", "B"])
def written_kernel(
    write_at,
    spread,
    content,
    taps,
    written,
    arrivals,
    S,
    B,
    M: tl.constexpr,
    C: tl.constexpr,
    D: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    AXES: tl.constexpr,
    BLOCK_V: tl.constexpr,
    GAUSSIAN: tl.constexpr,
    FILTERED: tl.constexpr,
):
    """The filtered write of every step at once, off the scan's path: written (S, B, V, C).

    A program goes through the planes with a piece of one, BLOCK_V voxels. Planes of a single write
    differ by a factor per channel. It runs before a scan and clears the counters where the scan's
    programs meet.
    """
    item, w = tl.program_id(0), tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    if item < B and tl.program_id(1) == 0:
        tl.store(arrivals + item, 0)
    # The step and row of this program, and its place in `written`.
    row = (item % B) * S + item // B
    c = tl.arange(0, C)[None, :]
    PLANE: tl.constexpr = H * W
    own = (w < PLANE)[:, None]
    out = written + item.to(tl.int64) * (D * PLANE * C) + w[:, None] * C + c
    kind = written.dtype.element_ty
    if M == 1:
        # content · Py · Px once, then times Pz for every plane.
        at = write_at + row * AXES
        _, sharpness = sharpness_of(spread, row, GAUSSIAN)
        what = tl.load(content + row * C + c)
        y, x = w // W, w % W
        plane = written_plane(at, sharpness, what, taps, y, x, H, W, C, AXES, GAUSSIAN, FILTERED)
        if D > 1:
            z_at = tl.load(at + 2)
            before, here, after = write_taps(taps, AXES - 3, C, FILTERED)
            for z in range(D):
                level = tl.zeros([1], dtype=tl.int32) + z
                pz = tapped(level, z_at, sharpness, before, here, after, D, GAUSSIAN, FILTERED)
                tl.store(out + z * (PLANE * C), (plane * pz).to(kind), mask=own)
        else:
            tl.store(out, plane.to(kind), mask=own)
    else:
        # A sum over writes has no common factor: every plane is computed in full.
        for z in range(D):
            u = filtered_write(
                write_at, spread, content, taps, row, z * PLANE + w, M,
                BLOCK_V, C, D, H, W, AXES, GAUSSIAN, FILTERED,
            )  # fmt: skip
            tl.store(out + z * (PLANE * C), u.to(kind), mask=own)


@triton.jit(do_not_specialize=["S", "Q", "B", "ring"])
def forward_kernel(
    read_at,
    write_at,
    spread,
    content,
    written,
    taps,
    mix,
    bias,
    hidden,
    cell,
    writes,
    resets,
    reads,
    last_hidden,
    last_cell,
    kept_hidden,
    kept_cell,
    kept_filtered,
    cell_ring,
    arrivals,
    S,
    Q,
    B,
    ring,
    M: tl.constexpr,
    C: tl.constexpr,
    D: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    AXES: tl.constexpr,
    BLOCK_V: tl.constexpr,
    TILES: tl.constexpr,
    PARTS: tl.constexpr,
    GAUSSIAN: tl.constexpr,
    FILTERED: tl.constexpr,
    INLINE: tl.constexpr,
    WRITES: tl.constexpr,
    RESETS: tl.constexpr,
    READ: tl.constexpr,
    KEEP: tl.constexpr,
    RESIDENT: tl.constexpr,
    PRODUCTS: tl.constexpr,
    FAST: tl.constexpr,
    PIN: tl.constexpr,
):
    """All steps of a row. Hidden before step s lies in slot s % ring of kept_hidden.

    The cell stays in registers, or with several tiles in the two slots of cell_ring.

    INLINE computes the write here, in place of reading it from `written`: one launch for one step.
    READ reads here too; otherwise reads are gathered afterwards from the kept states. KEEP keeps
    the cell before every step and its filtered hidden half for the backward pass. RESIDENT
    weights stay in shared memory: meeting empties the first-level cache, so that others would
    come from afar in every step.
    """
    # This program's row, and its range of voxels: TILES tiles from `first` on.
    b, part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    c = tl.arange(0, C)
    V: tl.constexpr = D * H * W
    slot_size = B.to(tl.int64) * (V * C)
    offset = b.to(tl.int64) * (V * C)
    kept_hidden += offset
    arrivals += b
    first = part * (TILES * BLOCK_V)

    # The state moves from (C, V) to (V, C); hidden into the first slot, for the neighbours.
    memory = tl.zeros([BLOCK_V, C], dtype=tl.float32)
    for tile in range(TILES):
        v = first + tile * BLOCK_V + tl.arange(0, BLOCK_V)
        own = (v < V)[:, None]
        given = offset + c[None, :] * V + v[:, None]
        here = v[:, None] * C + c[None, :]
        h = tl.load(hidden + given, mask=own, other=0.0)
        memory = tl.load(cell + given, mask=own, other=0.0)
        if RESETS:
            empty = tl.load(resets + b * S).to(tl.int1)
            h, memory = tl.where(empty, 0.0, h), tl.where(empty, 0.0, memory)
        tl.store(kept_hidden + here, h.to(kept_hidden.dtype.element_ty), mask=own)
        if TILES > 1:
            tl.store(cell_ring + offset + here, memory, mask=own)
    arrive(arrivals, PARTS)

    # Weights that all steps share: taps and bias in registers, the mix where it fits.
    tx0, tx1, tx2 = axis_taps(taps, AXES - 1, W if FILTERED else 1, False, C)
    ty0, ty1, ty2 = axis_taps(taps, AXES - 2, H if FILTERED else 1, False, C)
    tz0, tz1, tz2 = axis_taps(taps, AXES - 3, D if FILTERED else 1, False, C)
    ui, uf, uo, ug, hi, hf, ho, hg = 0, 0, 0, 0, 0, 0, 0, 0
    if RESIDENT:
        ui, uf, uo, ug = mix_tiles(mix, 0, C, PRODUCTS)
        hi, hf, ho, hg = mix_tiles(mix, 1, C, PRODUCTS)
    by_c = bias + c[None, :]
    bias_i, bias_f = tl.load(by_c), tl.load(by_c + C)
    bias_o, bias_g = tl.load(by_c + 2 * C), tl.load(by_c + 3 * C)
    touched = tl.full([], not WRITES, dtype=tl.int1)

    for s in range(S):
        # Where the state before and after this step lies, and what the masks say of this row.
        row = b * S + s
        now = kept_hidden + (s % ring) * slot_size
        now_cell = cell_ring + offset + (s % 2) * slot_size
        after = kept_hidden + ((s + 1) % ring) * slot_size
        after_cell = cell_ring + offset + ((s + 1) % 2) * slot_size
        if RESETS:  # a product with zero would let what is not finite through
            empty = tl.load(resets + row + 1, mask=s + 1 < S, other=0).to(tl.int1)
        if WRITES:
            write = tl.load(writes + row).to(tl.int1)
            touched = touched | write
            if RESETS:
                touched = touched | tl.load(resets + row).to(tl.int1)

        if TILES > 1:
            wait(arrivals, PARTS * (s + 1), PARTS)
        for tile in range(TILES):
            v = first + tile * BLOCK_V + tl.arange(0, BLOCK_V)
            own = (v < V)[:, None]
            here = v[:, None] * C + c[None, :]
            # u: the filtered write. It depends on tokens alone, so it comes before the wait.
            if INLINE:
                u = filtered_write(
                    write_at, spread, content, taps, row, v, M,
                    BLOCK_V, C, D, H, W, AXES, GAUSSIAN, FILTERED,
                )  # fmt: skip
            else:
                u = tl.load(written + s * slot_size + offset + here, mask=own, other=0.0)
            if TILES > 1:
                memory = tl.load(now_cell + here, mask=own, other=0.0)
            if KEEP:
                kept = s * slot_size + offset + here
                tl.store(kept_cell + kept, memory.to(kept_cell.dtype.element_ty), mask=own)
            # z: hidden after its filters, from neighbours that other programs have stored.
            if TILES == 1:
                wait(arrivals, PARTS * (s + 1), PARTS)
            z = neighbours(
                now, v, v < V, tx0, tx1, tx2, ty0, ty1, ty2, tz0, tz1, tz2,
                FILTERED, C, D, H, W, PIN,
            )  # fmt: skip
            if KEEP:
                tl.store(kept_filtered + kept, z.to(kept_filtered.dtype.element_ty), mask=own)
            if C > 32:  # held from step to step they take registers that neighbours need
                bias_i, bias_f = tl.load(by_c), tl.load(by_c + C)
                bias_o, bias_g = tl.load(by_c + 2 * C), tl.load(by_c + 3 * C)
            # c′ = σ(f)·c + σ(i)·tanh(g) and h′ = σ(o)·tanh(c′), one gate after another: four at
            # once do not fit into registers.
            i = gate_sum(u, z, ui, hi, bias_i, mix, 0, RESIDENT, C, PRODUCTS)
            new = sigmoid(i, FAST)
            g = gate_sum(u, z, ug, hg, bias_g, mix, 3, RESIDENT, C, PRODUCTS)
            new *= tanh(g, FAST)
            f = gate_sum(u, z, uf, hf, bias_f, mix, 1, RESIDENT, C, PRODUCTS)
            new += sigmoid(f, FAST) * memory
            o = gate_sum(u, z, uo, ho, bias_o, mix, 2, RESIDENT, C, PRODUCTS)
            h = sigmoid(o, FAST) * tanh(new, FAST)
            # A row that does not write keeps what it had.
            if WRITES:
                h = tl.where(write, h, tl.load(now + here, mask=own, other=0.0).to(tl.float32))
                new = tl.where(write, new, memory)
            # The last state goes out as (C, V).
            if s == S - 1:
                given = offset + c[None, :] * V + v[:, None]
                final = h
                if WRITES:  # a row that never wrote gets back what it gave, not what was kept
                    final = tl.where(touched, h, tl.load(hidden + given, mask=own, other=0.0))
                tl.store(last_hidden + given, final, mask=own)
                tl.store(last_cell + given, new, mask=own)
            # Store what the next step sees. The cell of a single tile stays in registers.
            memory = new
            if RESETS:
                h, memory = tl.where(empty, 0.0, h), tl.where(empty, 0.0, memory)
            if s < S - 1:
                tl.store(after + here, h.to(kept_hidden.dtype.element_ty), mask=own)
            if TILES > 1:
                tl.store(after_cell + here, memory, mask=own)

        if READ:  # of the state before this step; its slot is written again once all have arrived
            for q in range(part, Q, PARTS):
                r = read_point(now, read_at + (row * Q + q) * AXES, C, 1, C, D, H, W)
                tl.store(reads + (row * Q + q) * C + c, r)
        if s < S - 1:
            arrive(arrivals, PARTS)


class Kept(NamedTuple):
    """What the backward needs of the state before every step, (S, B, V, C) each."""

    hidden: Tensor
    cell: Tensor
    filtered: Tensor
    """Hidden after its axis filters."""

    @classmethod
    def empty(cls, inputs: ScanInputs, products: torch.dtype) -> Kept:
        """Uninitialised, in bfloat16 where products are."""
        B, C, *grid = inputs.hidden.shape
        room = (inputs.length, B, math.prod(grid), padded_channels(C))
        dtype = torch.bfloat16 if products == torch.bfloat16 else torch.float32
        return cls(*(inputs.hidden.new_empty(room, dtype=dtype) for _ in cls._fields))


@functools.lru_cache(maxsize=256)
def _write_launch(shape: Shape) -> tuple[BoundKernel, Grid]:
    p = plan_of(shape)
    tile = plane_tile(p.sizes, p.block)
    options = p.alone | tile.options
    kernel = bind(written_kernel, **p.write, **p.sizes, BLOCK_V=tile.voxels, **options)
    return kernel, (shape.S * shape.B, tile.pieces)


def filtered_writes(inputs: ScanInputs, shape: Shape) -> tuple[Tensor, Tensor]:
    """Every step's filtered write (S, B, V, C), and a cleared counter for every row's meetings."""
    kernel, grid = _write_launch(shape)
    B, S, content = shape.B, shape.S, inputs.content
    written = content.new_empty(S, B, shape.V, shape.C, dtype=plan_of(shape).kept)
    counters = content.new_empty(B, dtype=torch.int32)
    writing = (inputs.write_at, or_else(inputs.spread, content), content)
    kernel(grid, (*writing, or_else(inputs.taps, content), written, counters), (S, B))
    return written, counters


class _Scan(NamedTuple):
    kernel: BoundKernel
    grid: Grid
    inline: bool
    """Whether the scan computes its writes itself."""
    tiles: int


@functools.lru_cache(maxsize=256)
def _scan_launch(shape: Shape, keep: bool) -> _Scan:
    p, inline = plan_of(shape), shape.S == 1 and not keep
    rows = layout(shape, FORWARD_SHARE, alone=inline)
    kernel = bind(
        forward_kernel,
        **p.write, **p.sizes, **rows.constants, INLINE=inline,
        WRITES=shape.writes, RESETS=shape.resets, READ=not keep and shape.Q > 0, KEEP=keep,
        RESIDENT=p.resident, PRODUCTS=p.products, FAST=p.fast, PIN=not INTERPRETED,
        **rows.options,
    )  # fmt: skip
    return _Scan(kernel, (shape.B * rows.parts,), inline, rows.constants["TILES"])


def run_forward(
    inputs: ScanInputs, products: torch.dtype, kept: Kept | None
) -> tuple[Tensor, Tensor, Tensor]:
    """One launch of the scan over all S > 0 steps, which fills `kept`: reads, hidden, cell."""
    read_at, write_at, spread, content, taps, mix, bias, hidden, cell, writes, resets = inputs
    assert read_at is not None
    shape = Shape.of(inputs, products)
    do = _scan_launch(shape, kept is not None)
    B, S, Q, V, C = shape.B, shape.S, shape.Q, shape.V, shape.C
    nothing = content  # stands in for a pointer that no program follows
    written, counters = (nothing, nothing) if do.inline else filtered_writes(inputs, shape)
    if kept is None:  # two slots for hidden: one is read while the other is written
        ring = hidden.new_empty(2, B, V, C, dtype=plan_of(shape).kept)
        kept_hidden, kept_cell, kept_filtered = ring, nothing, nothing
    else:
        kept_hidden, kept_cell, kept_filtered = kept
    cells = hidden.new_empty(2, B, V, C) if do.tiles > 1 else nothing
    reads = inputs.empty_reads()
    last_hidden, last_cell = torch.empty_like(hidden), torch.empty_like(cell)
    do.kernel(
        do.grid,
        (
            read_at, write_at, or_else(spread, nothing), content, written, or_else(taps, nothing),
            mix, bias, hidden, cell, or_else(writes, nothing), or_else(resets, nothing),
            reads, last_hidden, last_cell, kept_hidden, kept_cell, kept_filtered, cells, counters,
        ),
        (S, Q, B, kept_hidden.shape[0]),
    )  # fmt: skip
    if kept is not None and Q > 0:
        sizes = plan_of(shape).sizes
        kernel = bind(read_kernel, VOXEL=C, CHANNEL=1, **sizes, num_warps=1)
        kernel((B * S * Q,), (kept_hidden, read_at, reads), (V * C, B * V * C, S, Q))
    return reads, last_hidden, last_cell


def read(read_at: Tensor, hidden: Tensor) -> Tensor:
    """Reads that no write follows, in one launch: (B, S, Q, n), (B, C, *grid) -> (B, S, Q, C)."""
    B, S, Q, _ = read_at.shape
    C, *grid = hidden.shape[1:]
    V = math.prod(grid)
    reads = hidden.new_empty(B, S, Q, C)
    if reads.numel():
        kernel = bind(read_kernel, VOXEL=1, CHANNEL=V, **sizes_of(C, grid), num_warps=1)
        kernel((B * S * Q,), (hidden, read_at, reads), (C * V, 0, S, Q))
    return reads
