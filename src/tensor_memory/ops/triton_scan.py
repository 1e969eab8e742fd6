"""The fused scan: its buffers and its launches. Kernels and the plan are next door.

Letters: B batch, S steps, n axes, V voxels, C channels, Q reads and M writes per step.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from tensor_memory.ops import triton_backward, triton_forward
from tensor_memory.ops.request import Request
from tensor_memory.ops.triton_launch import INTERPRETED, launch
from tensor_memory.ops.triton_plan import (
    Plan,
    padded_channels,
    plan,
    shape_of,
    widened,
)

SLOPES_SHARE = {16: 3, 32: 3, 64: 2, 128: 3}  # programs per multiprocessor for the gates, by C
TAPS_VALUES = 1024  # voxels × channels per program for the nine sums of the taps' gradient,
TAPS_PROGRAMS = 2048  # of which there are about so many
SUM_ROWS, SUM_COLUMNS = 32, 128  # partial sums that a program adds at a time
PROGRAMS = 132  # that share a sum over all voxels of all steps: one per multiprocessor of an H200
SEGMENT = 64  # steps per launch where nothing is kept


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
            part = request.steps(start, start + SEGMENT)
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


def _segment(
    request: Request, products: torch.dtype, kept: list[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """One launch of the scan over all S > 0 steps; fills `kept` unless it is empty."""
    read_at, write_at, spread, content, taps, mix, bias, hidden, cell, writes, resets = request
    assert read_at is not None
    B, S, Q, _ = read_at.shape
    C, V = hidden.shape[1], math.prod(hidden.shape[2:])
    inline = S == 1 and not kept
    p = plan(request, products, alone=inline)
    nothing = content  # stands in for a pointer that no program follows
    some_taps = nothing if taps is None else taps
    some_spread = nothing if spread is None else spread
    written, counters = nothing, nothing
    if not inline:
        written, counters = _launch_written(request, p)
    if kept:
        kept_hidden, kept_cell, kept_filtered = kept
    else:
        kept_hidden = hidden.new_empty(2, B, V, C, dtype=p.kept)
        kept_cell = kept_filtered = nothing
    cells = hidden.new_empty(2, B, V, C) if p.tiles > 1 else nothing
    reads = request.empty_reads()
    last_hidden, last_cell = torch.empty_like(hidden), torch.empty_like(cell)
    launch(
        triton_forward.forward_kernel, (B * p.parts,),
        read_at, write_at, some_spread, content, written, some_taps, mix, bias, hidden, cell,
        nothing if writes is None else writes, nothing if resets is None else resets,
        reads, last_hidden, last_cell, kept_hidden, kept_cell, kept_filtered, cells, counters,
        S, Q, B, kept_hidden.shape[0],
        **p.write, **p.shape, BLOCK_V=p.tile, TILES=p.tiles, PARTS=p.parts, INLINE=inline,
        WRITES=writes is not None, RESETS=resets is not None,
        READ=not kept and Q > 0, KEEP=bool(kept), RESIDENT=p.resident,
        PRODUCTS=p.products, FAST=p.fast, PIN=not INTERPRETED, **p.together,
    )  # fmt: skip
    if kept and Q > 0:
        launch(
            triton_forward.read_kernel, (B * S * Q,),
            kept_hidden, read_at, reads, V * C, B * V * C, B, S, Q,
            VOXEL=C, CHANNEL=1, **p.shape, num_warps=1,
        )  # fmt: skip
    return reads, last_hidden, last_cell


def read(read_at: Tensor, hidden: Tensor) -> Tensor:
    """Reads that no write follows, in one launch: (B, S, Q, n), (B, C, *grid) -> (B, S, Q, C)."""
    B, S, Q, _ = read_at.shape
    C, V = hidden.shape[1], math.prod(hidden.shape[2:])
    reads = hidden.new_empty(B, S, Q, C)
    if reads.numel():
        launch(
            triton_forward.read_kernel, (B * S * Q,),
            hidden, read_at, reads, C * V, 0, B, S, Q,
            VOXEL=1, CHANNEL=V, **shape_of(hidden), num_warps=1,
        )  # fmt: skip
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


def _backward(
    grad_reads: Tensor,
    grad_hidden: Tensor | None,
    grad_cell: Tensor | None,
    request: Request,
    kept: list[Tensor],
    products: torch.dtype,
) -> tuple[Any, ...]:
    read_at, _, _, content, taps, mix, bias, hidden, _, writes, resets = request
    assert read_at is not None
    B, S, Q, _ = read_at.shape
    C, V = hidden.shape[1], math.prod(hidden.shape[2:])
    p = plan(request, products)
    kept_hidden, kept_cell, kept_filtered = kept
    nothing = content
    some_taps = nothing if taps is None else taps
    some_writes = nothing if writes is None else writes

    written, counters = _launch_written(request, p)
    slopes = hidden.new_empty(S, B, V, 6, C, dtype=p.kept)
    blocks = -(-S * B * V // p.block)
    programs = min(blocks, PROGRAMS * SLOPES_SHARE[C])
    launch(
        triton_backward.slopes_kernel, (programs,),
        mix, bias, some_writes, written, kept_filtered, kept_cell, slopes, S, B,
        -(-blocks // programs),
        C=C, V=V, BLOCK=p.block, WRITES=writes is not None, RESIDENT=p.resident,
        PRODUCTS=p.products, FAST=p.fast, **p.alone,
    )  # fmt: skip

    grad_filtered = hidden.new_empty(S, B, V, C, dtype=p.kept)
    rings = hidden.new_empty(2, 2, B, V, C) if p.tiles > 1 else hidden.new_empty(2, 1)
    first_hidden, first_cell = torch.empty_like(hidden), torch.empty_like(hidden)
    launch(
        triton_backward.backward_kernel, (B * p.parts,),
        read_at, some_taps, mix, some_writes, nothing if resets is None else resets,
        grad_reads, nothing if grad_hidden is None else grad_hidden,
        nothing if grad_cell is None else grad_cell, slopes, grad_filtered, rings[0], rings[1],
        first_hidden, first_cell, counters, S, Q, B,
        **p.shape, BLOCK_V=p.tile, TILES=p.tiles, PARTS=p.parts,
        FILTERED=taps is not None, WRITES=writes is not None, RESETS=resets is not None,
        LAST=grad_hidden is not None,
        RESIDENT=p.resident, PRODUCTS=p.products, PIN=not INTERPRETED, **p.together,
    )  # fmt: skip

    partial_mix = _mix_gradients(slopes, written, kept_filtered, p)
    grad_content, grad_at, grad_spread, partial_writes = _write_gradients(request, slopes, p)
    partial_hidden = content  # stands in
    if taps is not None:
        partial_hidden = _hidden_tap_gradients(grad_filtered, kept_hidden, p)
    grad_mix, grad_bias, grad_taps = _summed(taps, partial_mix, partial_writes, partial_hidden, p)
    grad_read_at = torch.empty_like(read_at)
    if Q > 0:
        launch(
            triton_backward.reads_kernel,
            (B * S * Q,),
            kept_hidden,
            read_at,
            grad_reads,
            grad_read_at,
            B,
            S,
            Q,
            **p.shape,
            num_warps=1,
        )
    return (
        grad_read_at, grad_at, grad_spread, grad_content, grad_taps, grad_mix, grad_bias,
        first_hidden, first_cell,
    )  # fmt: skip


def _launch_written(request: Request, p: Plan) -> tuple[Tensor, Tensor]:
    """Every step's filtered write (S, B, V, C), and cleared counters for the rows' meetings."""
    B, S = request.write_at.shape[:2]
    V, C = math.prod(request.hidden.shape[2:]), p.shape["C"]
    content, spread = request.content, request.spread
    written = content.new_empty(S, B, V, C, dtype=p.kept)
    counters = content.new_empty(B, dtype=torch.int32)
    launch(
        triton_forward.written_kernel, (S * B, -(-V // p.block)),
        request.write_at, content if spread is None else spread, content,
        content if request.taps is None else request.taps, written, counters, S, B,
        **p.write, **p.shape, BLOCK_V=p.block, **p.alone,
    )  # fmt: skip
    return written, counters


def _mix_gradients(slopes: Tensor, written: Tensor, kept_filtered: Tensor, p: Plan) -> Tensor:
    """Partial sums of the mix's and the bias's gradient: (chunks, 4C · 2C + 4C)."""
    rows, C = written[..., 0].numel(), p.shape["C"]
    if p.kept == torch.bfloat16:
        out, block, mode = min(4 * C, 128), 128, p.products
    else:  # tensor cores cannot transpose 32-bit operands; small products do as well without
        out, block, mode = C, 2048 // C, "ieee" if C <= 32 else p.products
    parts = 4 * C // out
    loops = max(1, -(-rows * parts // (block * PROGRAMS)))
    chunks = -(-rows // (block * loops))
    partial = slopes.new_empty(chunks, 4 * C * (2 * C + 1), dtype=torch.float32)
    launch(
        triton_backward.mix_kernel, (chunks, parts),
        slopes, written, kept_filtered, partial, rows, loops, C=C, BLOCK=block, OUT=out,
        PRODUCTS=mode, **p.streamed,
    )  # fmt: skip
    return partial


def _write_gradients(
    request: Request, slopes: Tensor, p: Plan
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    write_at, spread, content, mix = (
        request.write_at, request.spread, request.content, request.mix
    )  # fmt: skip
    S, B = slopes.shape[:2]
    M, n = write_at.shape[2:]
    C, plane = p.shape["C"], p.shape["H"] * p.shape["W"]
    grad_content, grad_at = torch.empty_like(content), torch.empty_like(write_at)
    grad_spread = None if spread is None else torch.empty_like(spread)
    filters = content.new_empty(S * B * M, n, 3, C)
    launch(
        triton_backward.writes_kernel, (S * B, M),
        write_at, content if spread is None else spread, content,
        content if request.taps is None else request.taps, mix, slopes,
        grad_content, grad_at, content if grad_spread is None else grad_spread, filters, S, B,
        **p.write, **p.shape,
        BLOCK_V=min(triton.next_power_of_2(max(16, plane)), p.block),
        RESIDENT=p.resident,
        PRODUCTS=p.products,
        SUMS={"bf16": "tf32", "bf16-emulated": "ieee"}.get(p.products, p.products), **p.alone,
    )  # fmt: skip
    return grad_content, grad_at, grad_spread, filters


def _hidden_tap_gradients(grad_filtered: Tensor, kept_hidden: Tensor, p: Plan) -> Tensor:
    """Partial sums of the hidden half's filter: (parts, 27, C); missing axes use the middle."""
    S, B, _, C = grad_filtered.shape
    block = max(4, TAPS_VALUES // C)
    tiles, rows = -(-p.shape["H"] * p.shape["W"] // block), 3 if p.shape["H"] > 1 else 1
    loops = max(1, S * B * tiles * rows // TAPS_PROGRAMS)
    chunks = -(-S * B // loops)
    partial = grad_filtered.new_empty(tiles * chunks, 27, C, dtype=torch.float32)
    launch(
        triton_backward.taps_kernel, (tiles, chunks, rows),
        grad_filtered, kept_hidden, partial, S * B, loops, **p.shape, BLOCK_V=block, **p.alone,
    )  # fmt: skip
    return partial


def _summed(
    taps: Tensor | None,
    partial_mix: Tensor,
    partial_writes: Tensor,
    partial_hidden: Tensor,
    p: Plan,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The gradients of mix, bias and taps from their partial sums."""
    C, n = p.shape["C"], p.shape["AXES"]
    both = partial_mix.new_empty(4 * C * (2 * C + 1))
    shared = partial_mix.new_empty((3 * n + 27) * C)  # the written half, then the hidden half
    written, cube = shared[: 3 * n * C], shared[3 * n * C :]
    widths = (both.numel(), *(() if taps is None else (written.numel(), cube.numel())))
    launch(
        triton_backward.sums_kernel, (sum(-(-width // SUM_COLUMNS) for width in widths),),
        partial_mix, partial_writes, partial_hidden, both, written, cube,
        len(partial_mix), len(partial_writes), len(partial_hidden),
        C=C, AXES=n, FILTERED=taps is not None, ROWS=SUM_ROWS, COLUMNS=SUM_COLUMNS, **p.alone,
    )  # fmt: skip
    grad_taps = None
    if taps is not None:
        grad_taps = torch.empty_like(taps)
        launch(
            triton_backward.share_taps_kernel, (C // 16,),
            cube, written, taps, grad_taps, C=C, AXES=n,
            ALL=3**n, ALL_PADDED=triton.next_power_of_2(3**n),
        )  # fmt: skip
    return both[: 8 * C * C].view(4 * C, 2 * C), both[8 * C * C :], grad_taps
