"""A layer's weights by name, cast into one buffer; and their gradients gathered in another.

A cast of a small weight takes the host longer than the device, and so does the sum of a few rows.
A layer has up to six matrices to cast and three sums. Here they are one launch each way.

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

from tensor_memory.ops.launch import BoundKernel, bind, or_else
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
    # Each place of the buffer comes from one of the sources; the others give zero.
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
    if program < COPIES:  # matrices, cast
        i = program.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        value = part_of(by_writes, i, 0, PROJ_AT)
        value += part_of(by_write_proj, i, PROJ_AT, OUTPUT_AT)
        value += part_of(by_output, i, OUTPUT_AT, OUTPUT_END)
        value += part_of(by_reads, i, READS_AT, READS_AT + READS * D)
        tl.store(out + i, value.to(out.dtype.element_ty), mask=i < END)
    elif program < COPIES + NORMS:  # sums for the norm
        first = (program - COPIES) * TILE_COLUMNS
        sum_columns(by_norm, out + END, shares, 2 * D, first, 2 * D, TILE_ROWS, TILE_COLUMNS)
    else:  # sums for the spread's bias and the gate
        sums = out + END + 2 * D
        if SPREAD > 0:
            last = by_raw_writes + (WRITES - SPREAD)
            sum_columns(last, sums, writes, WRITES, 0, SPREAD, TILE // SPREAD_PADDED, SPREAD_PADDED)
        sum_columns(by_gate, sums + SPREAD, units, 1, 0, 1, TILE, 1)


class LayerWeights(NamedTuple):
    """Everything a layer learns, or its gradients; with shared coordinates the two are one."""

    norm: Tensor
    norm_bias: Tensor
    gate: Tensor
    write_proj: Tensor
    read_coordinate: Tensor
    write_coordinate: Tensor
    content: Tensor
    spread: Tensor | None
    spread_bias: Tensor | None
    taps: Tensor | None
    mix: Tensor
    bias: Tensor
    output: Tensor

    @property
    def shared(self) -> bool:
        """Whether reads and writes have one head for their coordinates."""
        return self.read_coordinate is self.write_coordinate

    @property
    def head_rows(self) -> HeadRows:
        """The rows of the writes' heads."""
        spread = 0 if self.spread is None else self.spread.shape[0]
        return HeadRows(self.write_coordinate.shape[0], self.content.shape[0], spread)

    @property
    def dtype(self) -> torch.dtype:
        """The type of the weights, float32 where they differ."""
        types = {t.dtype for t in self if t is not None}
        return types.pop() if len(types) == 1 else torch.float32


class HeadRows(NamedTuple):
    """Rows of the writes' heads: M·n for coordinates, M·C for content, M for the spread or none."""

    at: int
    content: int
    spread: int


class Packed(NamedTuple):
    """The matrices that a layer multiplies with, or their gradients."""

    write_proj: Tensor
    """(d, K·d)"""
    reads: Tensor
    """(R·n, d)"""
    writes: Tensor
    """(M·(n + C + 1), d): the writes' heads in one matrix"""
    output: Tensor
    """(d, R·C)"""


class _Packing(NamedTuple):
    """Where the buffer begins what follows the writes' heads, and the launch that fills it."""

    write_proj: int
    output: int
    reads: int
    total: int
    kernel: BoundKernel
    grid: tuple[int]


@functools.lru_cache(maxsize=64)
def _packing(d: int, rows: HeadRows, wide: int, columns: int, reads: int) -> _Packing:
    """For write_proj (d, wide), output (d, columns), a head of `reads` rows; 0: not copied."""
    starts = itertools.accumulate((*rows, wide, columns, reads), initial=0)
    *_, write_proj, output, own_reads, total = starts
    kernel = bind(
        pack_kernel,
        D=d, AT=rows.at, CONTENT=rows.content, SPREAD=rows.spread, WIDE=wide, COLUMNS=columns,
        READS=reads, BLOCK=COPIED,
    )  # fmt: skip
    grid = (-(-total * d // COPIED),)
    return _Packing(write_proj * d, output * d, own_reads * d, total * d, kernel, grid)


def pack(weights: LayerWeights, dtype: torch.dtype) -> Packed:
    """What a layer multiplies with: the writes' heads in one matrix, all of it in one type.

    A matrix that is in this type already and contiguous is used as it is. A copy of it would be
    kept until the backward, by every call.
    """
    (d, wide), columns = weights.write_proj.shape, weights.output.shape[1]
    own_reads, shared, rows = len(weights.read_coordinate), weights.shared, weights.head_rows
    write_proj = _unless_copied(weights.write_proj, dtype)
    output = _unless_copied(weights.output, dtype)
    reads = None if shared else _unless_copied(weights.read_coordinate, dtype)
    do = _packing(
        d,
        rows,
        wide if write_proj is None else 0,
        columns if output is None else 0,
        own_reads if reads is None and not shared else 0,
    )
    sources = (
        weights.write_coordinate, weights.content, or_else(weights.spread, weights.content),
        weights.write_proj, weights.output, weights.read_coordinate,
    )  # fmt: skip
    flat = weights.output.new_empty(do.total, dtype=dtype)
    do.kernel(do.grid, (*(t.contiguous() for t in sources), flat))
    if write_proj is None:
        write_proj = flat.as_strided((d, wide), (wide, 1), do.write_proj)
    if reads is None:  # a shared head is the first of the writes'
        reads = flat.as_strided((own_reads, d), (d, 1), 0 if shared else do.reads)
    if output is None:
        output = flat.as_strided((d, columns), (columns, 1), do.output)
    return Packed(write_proj, reads, flat.as_strided((sum(rows), d), (d, 1), 0), output)


def _unless_copied(matrix: Tensor, dtype: torch.dtype) -> Tensor | None:
    """A matrix that needs no copy, or None."""
    return matrix if matrix.dtype == dtype and matrix.is_contiguous() else None


class _Gathering(NamedTuple):
    """How many values each gradient has in their buffer, and the launch that fills it."""

    sizes: list[int]
    """The writes' heads, write_proj, output, the reads' head unless shared, then the sums."""
    kernel: BoundKernel
    grid: tuple[int]


@functools.lru_cache(maxsize=64)
def _gathering(
    d: int, rows: HeadRows, wide: int, columns: int, reads: int, shared: bool
) -> _Gathering:
    """For write_proj (d, wide), output (d, columns) and a head of `reads` rows."""
    sizes = [d * size for size in (*rows, wide, columns, 0 if shared else reads)]
    copies, norms = -(-sum(sizes) // COPIED), -(-2 * d // SUM_COLUMNS)
    kernel = bind(
        gather_kernel,
        D=d, WRITES=sum(rows), SPREAD=rows.spread, SPREAD_PADDED=power_of_2(rows.spread),
        WIDE=wide, COLUMNS=columns, READS=reads, SHARED=shared, BLOCK=COPIED, TILE=SUMMED,
        TILE_COLUMNS=SUM_COLUMNS,
    )  # fmt: skip
    return _Gathering([*sizes, d, d, rows.spread, 1], kernel, (copies + norms + 1,))


def gather(
    products: Packed,
    rows: HeadRows,
    shared: bool,
    by_norm: Tensor,
    by_raw_writes: Tensor,
    by_gate: Tensor,
    dtype: torch.dtype,
) -> dict[str, Tensor | None]:
    """The gradients of `LayerWeights` by name, in one type; all but those of the scan's weights.

    by_norm (shares, 2, d), by_raw_writes (B·S, M·(n + C + 1)), by_gate (units): to be summed.
    The results are parts of one buffer, which lives as long as any of them. A shared head has its
    gradient as the writes'.
    """
    (d, wide), reads = products.write_proj.shape, len(products.reads)
    do = _gathering(d, rows, wide, products.output.shape[1], reads, shared)
    flat = by_norm.new_empty(sum(do.sizes), dtype=dtype)
    do.kernel(
        do.grid,
        (
            products.writes, products.write_proj, products.output, products.reads,
            by_norm, by_raw_writes, by_gate, flat,
        ),
        (by_norm.shape[0], by_raw_writes.shape[0], by_gate.shape[0]),
    )  # fmt: skip
    at, content, spread, write_proj, output, own_reads, norm, norm_bias, spread_bias, gate = (
        flat.split_with_sizes(do.sizes)
    )
    return {
        "norm": norm,
        "norm_bias": norm_bias,
        "gate": gate,
        "write_proj": write_proj.view(d, wide),
        "read_coordinate": None if shared else own_reads.view(reads, d),
        "write_coordinate": at.view(-1, d),
        "content": content.view(-1, d),
        "spread": spread.view(-1, d) if rows.spread else None,
        "spread_bias": spread_bias if rows.spread else None,
        "output": output.view(d, -1),
    }
