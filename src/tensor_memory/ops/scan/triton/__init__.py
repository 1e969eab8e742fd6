"""The fused scan, `backend="triton"`: what it serves, and its two directions for `ops.autograd`.

Kernels and their launches are in `forward_scan.py`, `backward_scan.py`, `weight_gradients.py` and
`write_gradients.py`; what kernels are made of in `step.py`, `filter.py` and `addressing.py`; how a
scan is laid out on the device in `plan.py`.

Letters: B batch, S steps, C channels.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tensor_memory.ops.scan.inputs import ScanInputs
from tensor_memory.ops.scan.triton.backward_scan import run_backward
from tensor_memory.ops.scan.triton.forward_scan import Kept, read, run_forward
from tensor_memory.ops.scan.triton.plan import (
    narrowed,
    padded_channels,
    why_not,
    why_not_read,
    widened,
)

__all__ = ["backward", "empty_kept", "forward", "read", "why_not", "why_not_read"]

SEGMENT = 64  # steps per launch where nothing is kept


def forward(
    inputs: ScanInputs, *, keep: bool, products: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """Reads, hidden, cell, and with `keep` what `backward` needs.

    Without it nothing is kept per step: long inputs go through in segments of SEGMENT steps.
    """
    hidden, cell = inputs.hidden, inputs.cell
    C, S = hidden.shape[1], inputs.length
    kept = Kept.empty(inputs, products) if keep else None
    if 0 in inputs.write_at.shape[:2]:
        return inputs.empty_reads(), hidden.clone(), cell.clone(), list(kept or ())
    inputs = widened(inputs, padded_channels(C))
    if kept is not None:
        reads, hidden, cell = run_forward(inputs, products, kept)
    else:
        parts = []
        for start in range(0, S, SEGMENT):
            part = inputs if S <= SEGMENT else inputs.steps(start, start + SEGMENT)
            reads, hidden, cell = run_forward(part, products, None)
            inputs = inputs._replace(hidden=hidden, cell=cell)
            parts.append(reads)
        reads = torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]
    if hidden.shape[1] != C:
        reads = reads[..., :C].contiguous()
        hidden, cell = hidden[:, :C].contiguous(), cell[:, :C].contiguous()
    return reads, hidden, cell, list(kept or ())


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
    if 0 in inputs.write_at.shape[:2]:  # no step ran: the state's gradient passes through
        zeros = (t if t is None else torch.zeros_like(t) for t in inputs)
        grads = ScanInputs._make(zeros)._replace(writes=None, resets=None)
        if grad_hidden is None or grad_cell is None:
            return grads
        return grads._replace(hidden=grad_hidden.clone(), cell=grad_cell.clone())
    C = inputs.hidden.shape[1]
    more = padded_channels(C) - C
    if more:
        volume = (*(0, 0) * (inputs.hidden.ndim - 2), 0, more)
        inputs, grad_reads = widened(inputs, C + more), F.pad(grad_reads, (0, more))
        grad_hidden = grad_hidden if grad_hidden is None else F.pad(grad_hidden, volume)
        grad_cell = grad_cell if grad_cell is None else F.pad(grad_cell, volume)
    grads = run_backward(grad_reads, grad_hidden, grad_cell, inputs, Kept._make(kept), products)
    return narrowed(grads, C) if more else grads


def empty_kept(inputs: ScanInputs, products: torch.dtype) -> list[Tensor]:
    """Uninitialised tensors like those `forward` keeps."""
    return list(Kept.empty(inputs, products))
