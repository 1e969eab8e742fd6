"""A layer's weights side by side in one buffer, and what they receive in another.

A cast of a small weight takes the host longer than the device, and so does the sum of a few rows;
a layer has up to six matrices to cast and three sums. Here they are one launch each way.

Letters: d width, K tokens per chunk, n axes, R reads, M writes, C channels.
"""

# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# pyright: reportAssignmentType=false
from __future__ import annotations

import functools
import itertools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tensor_memory.ops.scan.triton.launch import Bound, bound
from tensor_memory.ops.scan.triton.plan import power_of_2

COPIED = 1024  # values per program
SUMMED = 2048  # values that a program adds at a time,
SUM_COLUMNS = 16  # in so many columns


@triton.jit
def part_of(source, i, begin, end):
    """The values of a source that fill places `begin` to `end`, and zero elsewhere."""
    return tl.load(source + (i - begin), mask=(i >= begin) & (i < end), other=0.0).to(tl.float32)


@triton.jit
def pack_kernel(
    write_coordinate,
    content,
    spread,
    write_proj,
    output,
    read_coordinate,
    out,
    D: tl.constexpr,
    AT: tl.constexpr,
    CONTENT: tl.constexpr,
    SPREAD: tl.constexpr,
    WIDE: tl.constexpr,
    COLUMNS: tl.constexpr,
    READS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Matrices side by side in the type of `out`.

    (AT, D), (CONTENT, D), (SPREAD, D), (D, WIDE), (D, COLUMNS), (READS, D); some may be empty.
    """
    CONTENT_AT: tl.constexpr = AT * D
    SPREAD_AT: tl.constexpr = CONTENT_AT + CONTENT * D
    PROJ_AT: tl.constexpr = SPREAD_AT + SPREAD * D
    OUTPUT_AT: tl.constexpr = PROJ_AT + WIDE * D
    READS_AT: tl.constexpr = OUTPUT_AT + COLUMNS * D
    END: tl.constexpr = READS_AT + READS * D
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = part_of(write_coordinate, i, 0, CONTENT_AT)
    value += part_of(content, i, CONTENT_AT, SPREAD_AT)
    value += part_of(spread, i, SPREAD_AT, PROJ_AT)
    value += part_of(write_proj, i, PROJ_AT, OUTPUT_AT)
    value += part_of(output, i, OUTPUT_AT, READS_AT)
    value += part_of(read_coordinate, i, READS_AT, END)
    tl.store(out + i, value.to(out.dtype.element_ty), mask=i < END)


@triton.jit
def sum_columns(
    source, out, rows, stride, first, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Sums over all rows of the columns from `first` on, (COLUMNS) of them but for the last."""
    c = first + tl.arange(0, COLUMNS)
    total = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for begin in range(0, rows, ROWS):
        r = begin + tl.arange(0, ROWS)
        own = (r < rows)[:, None] & (c < columns)[None, :]
        at = r[:, None].to(tl.int64) * stride + c[None, :]
        total += tl.load(source + at, mask=own, other=0.0).to(tl.float32)
    tl.store(out + c, tl.sum(total, axis=0).to(out.dtype.element_ty), mask=c < columns)


@triton.jit(do_not_specialize=["shares", "writes", "units"])
def gather_kernel(
    by_writes,
    by_write_proj,
    by_output,
    by_reads,
    by_norm,
    by_raw_writes,
    by_gate,
    out,
    shares,
    writes,
    units,
    D: tl.constexpr,
    WRITES: tl.constexpr,
    SPREAD: tl.constexpr,
    SPREAD_PADDED: tl.constexpr,
    WIDE: tl.constexpr,
    COLUMNS: tl.constexpr,
    READS: tl.constexpr,
    SHARED: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
):
    """What weights receive, in the type of `out`: the order of `pack_kernel`, and sums behind.

    (WRITES, D), (D, WIDE), (D, COLUMNS), (READS, D), which is added to the first rows where SHARED.
    Sums for the norm's weight and bias from by_norm (shares, 2, D), the spread's bias from the last
    SPREAD columns of by_raw_writes (writes, WRITES), the gate from by_gate (units).
    """
    PROJ_AT: tl.constexpr = WRITES * D
    OUTPUT_AT: tl.constexpr = PROJ_AT + WIDE * D
    OUTPUT_END: tl.constexpr = OUTPUT_AT + COLUMNS * D
    READS_AT: tl.constexpr = 0 if SHARED else OUTPUT_END
    END: tl.constexpr = OUTPUT_END + (0 if SHARED else READS * D)
    COPIES: tl.constexpr = (END + BLOCK - 1) // BLOCK
    NORMS: tl.constexpr = (2 * D + TILE_COLUMNS - 1) // TILE_COLUMNS
    TILE_ROWS: tl.constexpr = TILE // TILE_COLUMNS
    program = tl.program_id(0)
    if program < COPIES:
        i = program.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        value = part_of(by_writes, i, 0, PROJ_AT)
        value += part_of(by_write_proj, i, PROJ_AT, OUTPUT_AT)
        value += part_of(by_output, i, OUTPUT_AT, OUTPUT_END)
        value += part_of(by_reads, i, READS_AT, READS_AT + READS * D)
        tl.store(out + i, value.to(out.dtype.element_ty), mask=i < END)
    elif program < COPIES + NORMS:
        first = (program - COPIES) * TILE_COLUMNS
        sum_columns(by_norm, out + END, shares, 2 * D, first, 2 * D, TILE_ROWS, TILE_COLUMNS)
    else:
        sums = out + END + 2 * D
        if SPREAD > 0:
            last = by_raw_writes + (WRITES - SPREAD)
            sum_columns(last, sums, writes, WRITES, 0, SPREAD, TILE // SPREAD_PADDED, SPREAD_PADDED)
        sum_columns(by_gate, sums + SPREAD, units, 1, 0, 1, TILE, 1)


class Heads(NamedTuple):
    """The weights that steer a memory; with shared coordinates the two are one tensor."""

    write_proj: Tensor
    read_coordinate: Tensor
    write_coordinate: Tensor
    content: Tensor
    spread: Tensor | None
    spread_bias: Tensor | None

    @property
    def shared(self) -> bool:
        """Whether reads and writes have one head for their coordinates."""
        return self.read_coordinate is self.write_coordinate


class Sizes(NamedTuple):
    """Rows of the writes' heads: M·n for coordinates, M·C for content, M for the spread or none."""

    at: int
    content: int
    spread: int

    @classmethod
    def of(cls, heads: Heads) -> Sizes:
        """The sizes of these heads."""
        spread = 0 if heads.spread is None else heads.spread.shape[0]
        return cls(heads.write_coordinate.shape[0], heads.content.shape[0], spread)


class Packed(NamedTuple):
    """What a layer multiplies with, or what that receives; the writes' heads are one matrix."""

    write_proj: Tensor
    """(d, K·d)"""
    reads: Tensor
    """(R·n, d)"""
    writes: Tensor
    """(M·(n + C + 1), d)"""
    output: Tensor
    """(d, R·C), or of no columns where nobody asked for it"""


class Packing(NamedTuple):
    """Where the buffer begins what follows the writes' heads, and the launch that fills it."""

    write_proj: int
    output: int
    reads: int
    total: int
    launch: Bound
    grid: tuple[int]


@functools.lru_cache(maxsize=64)
def packing_of(d: int, heads: Sizes, wide: int, columns: int, reads: int) -> Packing:
    """For write_proj (d, wide), output (d, columns), a head of `reads` rows; 0: not copied."""
    rows = (*heads, wide, columns, reads)
    *_, write_proj, output, own_reads, total = itertools.accumulate(rows, initial=0)
    launch = bound(
        pack_kernel,
        D=d, AT=heads.at, CONTENT=heads.content, SPREAD=heads.spread, WIDE=wide, COLUMNS=columns,
        READS=reads, BLOCK=COPIED,
    )  # fmt: skip
    grid = (-(-total * d // COPIED),)
    return Packing(write_proj * d, output * d, own_reads * d, total * d, launch, grid)


class Gathering(NamedTuple):
    """How many values each gradient has in their buffer, and the launch that fills it."""

    sizes: list[int]
    """The writes' heads, write_proj, output, the reads' head unless shared, then the sums."""
    launch: Bound
    grid: tuple[int]


@functools.lru_cache(maxsize=64)
def gathering_of(
    d: int, heads: Sizes, wide: int, columns: int, reads: int, shared: bool
) -> Gathering:
    """For write_proj (d, wide), output (d, columns) and a head of `reads` rows."""
    sizes = [d * rows for rows in (*heads, wide, columns, 0 if shared else reads)]
    copies, norms = -(-sum(sizes) // COPIED), -(-2 * d // SUM_COLUMNS)
    launch = bound(
        gather_kernel,
        D=d, WRITES=sum(heads), SPREAD=heads.spread, SPREAD_PADDED=power_of_2(heads.spread),
        WIDE=wide, COLUMNS=columns, READS=reads, SHARED=shared, BLOCK=COPIED, TILE=SUMMED,
        TILE_COLUMNS=SUM_COLUMNS,
    )  # fmt: skip
    return Gathering([*sizes, d, d, heads.spread, 1], launch, (copies + norms + 1,))


def pack(heads: Heads, output: Tensor | None, dtype: torch.dtype) -> Packed:
    """What a layer multiplies with: the writes' heads in one matrix, all of it in one type.

    A matrix that is in this type already and contiguous is used as it is. A copy of it would be
    kept until the backward, by every call.
    """
    (d, wide), sizes, shared = heads.write_proj.shape, Sizes.of(heads), heads.shared
    columns, own_reads = 0 if output is None else output.shape[1], len(heads.read_coordinate)
    write_proj, its_output = _as_it_is(heads.write_proj, dtype), _as_it_is(output, dtype)
    reads = None if shared else _as_it_is(heads.read_coordinate, dtype)
    do = packing_of(
        d,
        sizes,
        wide if write_proj is None else 0,
        columns if its_output is None else 0,
        own_reads if reads is None and not shared else 0,
    )
    nothing = heads.write_proj  # stands in for a pointer that no program follows
    sources = (
        heads.write_coordinate, heads.content, nothing if heads.spread is None else heads.spread,
        heads.write_proj, nothing if output is None else output, heads.read_coordinate,
    )  # fmt: skip
    flat = nothing.new_empty(do.total, dtype=dtype)
    sources = [t if t.is_contiguous() else t.contiguous() for t in sources]
    do.launch(do.grid, (*sources, flat))
    if write_proj is None:
        write_proj = flat.as_strided((d, wide), (wide, 1), do.write_proj)
    if reads is None:  # a shared head is the first of the writes'
        reads = flat.as_strided((own_reads, d), (d, 1), 0 if shared else do.reads)
    if its_output is None:
        its_output = flat.as_strided((d, columns), (columns, 1), do.output)
    return Packed(write_proj, reads, flat.as_strided((sum(sizes), d), (d, 1), 0), its_output)


def _as_it_is(matrix: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A matrix that needs no copy, or None."""
    ready = matrix is not None and matrix.dtype == dtype and matrix.is_contiguous()
    return matrix if ready else None


def gather(
    products: Packed,
    sizes: Sizes,
    shared: bool,
    by_norm: Tensor,
    by_raw_writes: Tensor,
    by_gate: Tensor,
    dtype: torch.dtype,
) -> tuple[Tensor | None, ...]:
    """What norm, its bias, gate, `Heads` and output receive, in their order and in one type.

    by_norm (shares, 2, d), by_raw_writes (B·S, M·(n + C + 1)), by_gate (units): to be summed.
    The results are parts of one buffer, which lives as long as any of them.
    """
    by_write_proj, by_reads, by_writes, by_output = products
    (d, wide), reads, columns = by_write_proj.shape, len(by_reads), by_output.shape[1]
    do = gathering_of(d, sizes, wide, columns, reads, shared)
    flat = by_norm.new_empty(sum(do.sizes), dtype=dtype)
    do.launch(
        do.grid,
        (by_writes, by_write_proj, by_output, by_reads, by_norm, by_raw_writes, by_gate, flat),
        (by_norm.shape[0], by_raw_writes.shape[0], by_gate.shape[0]),
    )
    at, content, spread, write_proj, output, own_reads, norm, norm_bias, spread_bias, gate = (
        flat.split_with_sizes(do.sizes)
    )
    return (
        norm,
        norm_bias,
        gate,
        write_proj.view(d, wide),
        None if shared else own_reads.view(reads, d),
        at.view(-1, d),
        content.view(-1, d),
        spread.view(-1, d) if sizes.spread else None,
        spread_bias if sizes.spread else None,
        output.view(d, columns),
    )
