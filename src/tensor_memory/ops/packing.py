"""A layer's weights side by side in one buffer, and what they receive in another.

A cast of a small weight takes the host longer than the device, and so does the sum of a few rows;
a layer has nine of the one and three of the other. Here they are one launch forward and two back.

Letters: d width, K tokens per chunk, n axes, R reads, M writes, C channels.
"""

# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportAttributeAccessIssue=false, reportIndexIssue=false
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
def part_of(source, i, begin, end, D: tl.constexpr):
    """The values of a source that fill places `begin` to `end`, and zero elsewhere."""
    own = (i >= begin * D) & (i < end * D)
    return tl.load(source + (i - begin * D), mask=own, other=0.0).to(tl.float32)


@triton.jit(
    do_not_specialize=[
        "begin0", "begin1", "begin2", "begin3", "begin4", "begin5",
        "end0", "end1", "end2", "end3", "end4", "end5", "total",
    ]
)  # fmt: skip
def pack_kernel(
    source0, source1, source2, source3, source4, source5, out,
    begin0, begin1, begin2, begin3, begin4, begin5,
    end0, end1, end2, end3, end4, end5, total,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Each source into its places of `out`, in the type of that; where two meet they are added.

    Places are counted in rows of D values, so that the compiler sees what is aligned.
    """
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = part_of(source0, i, begin0, end0, D) + part_of(source1, i, begin1, end1, D)
    value += part_of(source2, i, begin2, end2, D) + part_of(source3, i, begin3, end3, D)
    value += part_of(source4, i, begin4, end4, D) + part_of(source5, i, begin5, end5, D)
    tl.store(out + i, value.to(out.dtype.element_ty), mask=i < total * D)


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


@triton.jit(do_not_specialize=["start", "shares", "writes", "units"])
def layer_sums_kernel(
    by_norm,
    by_writes,
    by_gate,
    out,
    start,
    shares,
    writes,
    units,
    D: tl.constexpr,
    WRITES: tl.constexpr,
    SPREAD: tl.constexpr,
    SPREAD_PADDED: tl.constexpr,
    TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Sums for the norm's weight and bias, the spread's bias and the gate, to out[start:].

    by_norm (shares, 2, D), by_writes (writes, WRITES) with the spread in its last SPREAD columns,
    by_gate (units).
    """
    BLOCKS: tl.constexpr = (2 * D + COLUMNS - 1) // COLUMNS
    i = tl.program_id(0)
    out += start
    if i < BLOCKS:
        sum_columns(by_norm, out, shares, 2 * D, i * COLUMNS, 2 * D, TILE // COLUMNS, COLUMNS)
    else:
        out += 2 * D
        if SPREAD > 0:
            by_writes += WRITES - SPREAD
            rows: tl.constexpr = TILE // SPREAD_PADDED
            sum_columns(by_writes, out, writes, WRITES, 0, SPREAD, rows, SPREAD_PADDED)
        sum_columns(by_gate, out + SPREAD, units, 1, 0, 1, TILE, 1)


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
    """What a layer multiplies with; all heads of the writes are one matrix."""

    write_proj: Tensor
    """(d, K·d)"""
    reads: Tensor
    """(R·n, d)"""
    writes: Tensor
    """(M·(n + C + 1), d)"""
    output: Tensor
    """(d, R·C), or of no columns where nobody asked for it"""


class Layout(NamedTuple):
    """The buffer: the writes' heads, write_proj, output, and the reads' head unless shared.

    Counted in rows of d values, which the matrices of other widths fill as well.
    """

    rows: int
    write_proj: int
    """Where it begins."""
    output: int
    reads: int
    copy: Bound
    """`pack_kernel`,"""
    programs: tuple[int]
    """so many of them,"""
    of_weights: tuple[int, ...]
    """with the begins and ends of six sources, and the end of all: each weight for itself,"""
    of_products: tuple[int, ...]
    """or what they receive: all heads of the writes in one, and nothing in the last two."""


@functools.lru_cache(maxsize=64)
def layout(d: int, wide: int, sizes: Sizes, reads: int, shared: bool, columns: int) -> Layout:
    """For write_proj (d, wide), a head of `reads` rows and output (d, columns)."""
    ends = tuple(itertools.accumulate((*sizes, wide, columns, 0 if shared else reads)))
    begins, rows = (0, *ends[:-1]), ends[-1]
    write_proj, output, own_reads = begins[3:]
    reads_at = 0 if shared else own_reads  # a shared head is the first of the writes'
    products_begin = (0, write_proj, output, reads_at, 0, 0)
    products_end = (write_proj, output, own_reads, reads_at + reads, 0, 0)
    return Layout(
        rows, write_proj, output, reads_at,
        copy=bound(pack_kernel, D=d, BLOCK=COPIED),
        programs=(-(-rows * d // COPIED),),
        of_weights=(*begins, *ends, rows),
        of_products=(*products_begin, *products_end, rows),
    )  # fmt: skip


def pack(heads: Heads, output: Tensor | None, dtype: torch.dtype) -> Packed:
    """Cast and lay side by side what a layer multiplies with."""
    (d, wide), reads, sizes = heads.write_proj.shape, len(heads.read_coordinate), Sizes.of(heads)
    columns = 0 if output is None else output.shape[1]
    where = layout(d, wide, sizes, reads, heads.shared, columns)
    stand_in = heads.write_proj
    sources = (
        heads.write_coordinate, heads.content, stand_in if heads.spread is None else heads.spread,
        heads.write_proj, stand_in if output is None else output, heads.read_coordinate,
    )  # fmt: skip
    flat = stand_in.new_empty(where.rows * d, dtype=dtype)
    sources = [t if t.is_contiguous() else t.contiguous() for t in sources]
    where.copy(where.programs, (*sources, flat), where.of_weights)
    return Packed(
        flat.as_strided((d, wide), (wide, 1), where.write_proj * d),
        flat.as_strided((reads, d), (d, 1), where.reads * d),
        flat.as_strided((where.write_proj, d), (d, 1), 0),
        flat.as_strided((d, columns), (columns, 1), where.output * d),
    )


class Products(NamedTuple):
    """What the packed weights receive, each in one matrix."""

    write_proj: Tensor
    reads: Tensor
    writes: Tensor
    output: Tensor


def gather(
    products: Products,
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
    write_proj, by_reads, by_writes, output = products
    (d, wide), reads, columns = write_proj.shape, by_reads.shape[0], output.shape[1]
    where = layout(d, wide, sizes, reads, shared, columns)
    start, spread, nothing = where.rows * d, sizes.spread, by_norm
    flat = by_norm.new_empty(start + 2 * d + spread + 1, dtype=dtype)
    sources = (by_writes, write_proj, output, by_reads, nothing, nothing)
    where.copy(where.programs, (*sources, flat), where.of_products)
    sums, programs = _sums(d, sizes)
    counts = (start, by_norm.shape[0], by_raw_writes.shape[0], by_gate.shape[0])
    sums(programs, (by_norm, by_raw_writes, by_gate, flat), counts)

    rows = (*sizes, wide, columns, 0 if shared else reads)
    at, content, spread_weight, write_proj, output, own_reads, norm, norm_bias, bias, gate = (
        flat.split_with_sizes([*(d * count for count in rows), d, d, spread, 1])
    )
    return (
        norm,
        norm_bias,
        gate,
        write_proj.view(d, wide),
        None if shared else own_reads.view(reads, d),
        at.view(-1, d),
        content.view(-1, d),
        spread_weight.view(-1, d) if spread else None,
        bias if spread else None,
        output.view(d, columns),
    )


@functools.lru_cache(maxsize=64)
def _sums(d: int, sizes: Sizes) -> tuple[Bound, tuple[int]]:
    """The launch of the sums, and its programs."""
    launch = bound(
        layer_sums_kernel,
        D=d, WRITES=sum(sizes), SPREAD=sizes.spread, SPREAD_PADDED=power_of_2(sizes.spread),
        TILE=SUMMED, COLUMNS=SUM_COLUMNS,
    )  # fmt: skip
    return launch, (-(-2 * d // SUM_COLUMNS) + 1,)
