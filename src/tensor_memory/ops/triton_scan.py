"""The fused scan: the door to its launches, which are next door with kernels and plan.

Letters: B batch, S steps, n axes, V voxels, C channels, Q reads and M writes per step.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from tensor_memory.ops import triton_forward
from tensor_memory.ops.request import Request
from tensor_memory.ops.triton_backward_run import run_backward
from tensor_memory.ops.triton_forward_run import run_forward
from tensor_memory.ops.triton_launch import bound
from tensor_memory.ops.triton_plan import padded_channels, sizes_of, widened

SEGMENT = 64  # steps per launch where nothing is kept


def forward(
    request: Request,
    *,
    keep: bool,
    products: torch.dtype,
    reads_in: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """Run the scan; with `keep` also return what `backward` needs, as `empty_kept` lays it out.

    Without it nothing is kept per step: long inputs go through in segments of SEGMENT steps. Reads
    come in the type `reads_in`, for who multiplies in it.
    """
    hidden, cell = request.hidden, request.cell
    C, S = hidden.shape[1], request.write_at.shape[1]
    if 0 in request.write_at.shape[:2]:
        kept = empty_kept(hidden, S, products) if keep else []
        return request.empty_reads(reads_in), hidden.clone(), cell.clone(), kept
    request = widened(request, padded_channels(C))
    if keep:
        kept = empty_kept(hidden, S, products)
        reads, hidden, cell = run_forward(request, products, reads_in, kept)
    else:
        kept, parts = [], []
        for start in range(0, S, SEGMENT):
            part = request if S <= SEGMENT else request.steps(start, start + SEGMENT)
            reads, hidden, cell = run_forward(part, products, reads_in, kept)
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


def read(read_at: Tensor, hidden: Tensor) -> Tensor:
    """Reads that no write follows, in one launch: (B, S, Q, n), (B, C, *grid) -> (B, S, Q, C)."""
    B, S, Q, _ = read_at.shape
    C, *grid = hidden.shape[1:]
    V = math.prod(grid)
    reads = hidden.new_empty(B, S, Q, C)
    if reads.numel():
        kernel = triton_forward.read_kernel
        launch = bound(kernel, VOXEL=1, CHANNEL=V, **sizes_of(C, grid), num_warps=1)
        launch((B * S * Q,), (hidden, read_at, reads), (C * V, 0, S, Q))
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
    if 0 in request.write_at.shape[:2]:
        passed_on = zip(request.floats[7:], (grad_hidden, grad_cell), strict=True)
        return (
            *(None if t is None else torch.zeros_like(t) for t in request.floats[:7]),
            *(torch.zeros_like(t) if g is None else g.clone() for t, g in passed_on),
        )
    if wide == C:
        return run_backward(grad_reads, grad_hidden, grad_cell, request, kept, products)
    volume = (*(0, 0) * (request.hidden.ndim - 2), 0, wide - C)
    grads = run_backward(
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
