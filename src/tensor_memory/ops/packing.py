"""A layer's weights side by side in one buffer, and what they receive in another.

A cast of a small weight takes the host longer than the device, and so does the sum of a few rows;
a layer has nine of the one and three of the other. Here they are one launch each way.

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

from tensor_memory.ops.triton_launch import Bound, bound
from tensor_memory.ops.triton_plan import power_of_2

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
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
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
        i = program * BLOCK + tl.arange(0, BLOCK)
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


class Layout(NamedTuple):
    """The buffer: the writes' heads, write_proj, output, and the reads' head unless shared."""

    sizes: list[int]
    """How many values each of the six has."""
    write_proj: int
    """Where it begins, likewise the next two."""
    output: int
    reads: int
    pack: Bound
    pack_grid: tuple[int]
    gather: Bound
    gather_grid: tuple[int]


@functools.lru_cache(maxsize=64)
def layout(d: int, wide: int, heads: Sizes, reads: int, shared: bool, columns: int) -> Layout:
    """For write_proj (d, wide), a head of `reads` rows and output (d, columns)."""
    sizes = [d * rows for rows in (*heads, wide, columns, 0 if shared else reads)]
    *_, write_proj, output, own_reads, total = itertools.accumulate(sizes, initial=0)
    same = {"D": d, "SPREAD": heads.spread, "WIDE": wide, "COLUMNS": columns, "BLOCK": COPIED}
    copies, norms = -(-total // COPIED), -(-2 * d // SUM_COLUMNS)
    return Layout(
        sizes,
        write_proj,
        output,
        0 if shared else own_reads,  # a shared head is the first of the writes'
        pack=bound(
            pack_kernel,
            **same, AT=heads.at, CONTENT=heads.content, READS=0 if shared else reads,
        ),
        pack_grid=(copies,),
        gather=bound(
            gather_kernel,
            **same, WRITES=sum(heads), READS=reads, SHARED=shared,
            SPREAD_PADDED=power_of_2(heads.spread), TILE=SUMMED, TILE_COLUMNS=SUM_COLUMNS,
        ),
        gather_grid=(copies + norms + 1,),
    )  # fmt: skip


def pack(heads: Heads, output: Tensor | None, dtype: torch.dtype) -> Packed:
    """Cast and lay side by side what a layer multiplies with."""
    (d, wide), reads, sizes = heads.write_proj.shape, len(heads.read_coordinate), Sizes.of(heads)
    columns = 0 if output is None else output.shape[1]
    do = layout(d, wide, sizes, reads, heads.shared, columns)
    nothing = heads.write_proj  # stands in for a pointer that no program follows
    sources = (
        heads.write_coordinate, heads.content, nothing if heads.spread is None else heads.spread,
        heads.write_proj, nothing if output is None else output, heads.read_coordinate,
    )  # fmt: skip
    flat = nothing.new_empty(sum(do.sizes), dtype=dtype)
    sources = [t if t.is_contiguous() else t.contiguous() for t in sources]
    do.pack(do.pack_grid, (*sources, flat))
    return Packed(
        flat.as_strided((d, wide), (wide, 1), do.write_proj),
        flat.as_strided((reads, d), (d, 1), do.reads),
        flat.as_strided((sum(sizes), d), (d, 1), 0),
        flat.as_strided((d, columns), (columns, 1), do.output),
    )


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
    """
    by_write_proj, by_reads, by_writes, by_output = products
    (d, wide), reads, columns = by_write_proj.shape, len(by_reads), by_output.shape[1]
    do = layout(d, wide, sizes, reads, shared, columns)
    parts = [*do.sizes, d, d, sizes.spread, 1]
    flat = by_norm.new_empty(sum(parts), dtype=dtype)
    do.gather(
        do.gather_grid,
        (by_writes, by_write_proj, by_output, by_reads, by_norm, by_raw_writes, by_gate, flat),
        (by_norm.shape[0], by_raw_writes.shape[0], by_gate.shape[0]),
    )
    at, content, spread, write_proj, output, own_reads, norm, norm_bias, spread_bias, gate = (
        flat.split_with_sizes(parts)
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
