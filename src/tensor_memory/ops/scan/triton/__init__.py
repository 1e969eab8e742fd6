"""The fused scan: kernels in `forward.py`, `backward.py` and `*_gradients.py`, sizes in `plan.py`.

Letters: B batch, S steps, n axes, V voxels, C channels, Q reads and M writes per step.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from tensor_memory.ops.scan.inputs import ScanInputs
from tensor_memory.ops.scan.triton.backward import run_backward
from tensor_memory.ops.scan.triton.forward import read_kernel, run_forward
from tensor_memory.ops.scan.triton.launch import bound
from tensor_memory.ops.scan.triton.plan import (
    narrowed,
    padded_channels,
    sizes_of,
    why_not,
    why_not_read,
    widened,
)

__all__ = ["backward", "empty_kept", "forward", "read", "why_not", "why_not_read"]

SEGMENT = 64  # steps per launch where nothing is kept


def forward(
    inputs: ScanInputs,
    *,
    keep: bool,
    products: torch.dtype,
    reads_in: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """Run the scan; with `keep` also return what `backward` needs, as `empty_kept` lays it out.

    Without it nothing is kept per step: long inputs go through in segments of SEGMENT steps. Reads
    come in the type `reads_in`, for who multiplies in it.
    """
    hidden, cell = inputs.hidden, inputs.cell
    C, S = hidden.shape[1], inputs.write_at.shape[1]
    if 0 in inputs.write_at.shape[:2]:
        kept = empty_kept(inputs, products) if keep else []
        return inputs.empty_reads(reads_in), hidden.clone(), cell.clone(), kept
    inputs = widened(inputs, padded_channels(C))
    if keep:
        kept = empty_kept(inputs, products)
        reads, hidden, cell = run_forward(inputs, products, reads_in, kept)
    else:
        kept, parts = [], []
        for start in range(0, S, SEGMENT):
            part = inputs if S <= SEGMENT else inputs.steps(start, start + SEGMENT)
            reads, hidden, cell = run_forward(part, products, reads_in, kept)
            inputs = inputs._replace(hidden=hidden, cell=cell)
            parts.append(reads)
        reads = torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]
    if hidden.shape[1] != C:
        reads = reads[..., :C].contiguous()
        hidden, cell = hidden[:, :C].contiguous(), cell[:, :C].contiguous()
    return reads, hidden, cell, kept


def empty_kept(inputs: ScanInputs, products: torch.dtype) -> list[Tensor]:
    """Room for hidden, cell and the filtered hidden half before every step: (S, B, V, C) each."""
    hidden, steps = inputs.hidden, inputs.length
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
        kernel = read_kernel
        launch = bound(kernel, VOXEL=1, CHANNEL=V, **sizes_of(C, grid), num_warps=1)
        launch((B * S * Q,), (hidden, read_at, reads), (C * V, 0, S, Q))
    return reads


def backward(
    grad_reads: Tensor,
    grad_hidden: Tensor | None,
    grad_cell: Tensor | None,
    inputs: ScanInputs,
    kept: list[Tensor],
    *,
    products: torch.dtype,
) -> ScanInputs:
    """The gradients in the places of the inputs."""
    if 0 in inputs.write_at.shape[:2]:
        zeros = (t if t is None else torch.zeros_like(t) for t in inputs)
        grads = ScanInputs._make(zeros)._replace(writes=None, resets=None)
        if grad_hidden is None or grad_cell is None:
            return grads
        return grads._replace(hidden=grad_hidden.clone(), cell=grad_cell.clone())
    C, wide = inputs.hidden.shape[1], padded_channels(inputs.hidden.shape[1])
    if wide == C:
        return run_backward(grad_reads, grad_hidden, grad_cell, inputs, kept, products)
    volume = (*(0, 0) * (inputs.hidden.ndim - 2), 0, wide - C)
    grads = run_backward(
        F.pad(grad_reads, (0, wide - C)),
        grad_hidden if grad_hidden is None else F.pad(grad_hidden, volume),
        grad_cell if grad_cell is None else F.pad(grad_cell, volume),
        widened(inputs, wide),
        kept,
        products,
    )
    return narrowed(grads, C)
