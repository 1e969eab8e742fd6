"""Less memory for a second forward: keep the state of every so many steps, run the others again.

Works with any implementation that has `forward` and `backward` as in `torch_scan`. What a scan
keeps for its backward then grows with the number of segments and the length of one, not with S.

Letters: B batch, S steps, C channels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tensor_memory.ops.request import SHARED, STEPWISE, Floats, Request


def empty_kept(hidden: Tensor, steps: int, every: int) -> list[Tensor]:
    """Uninitialised hidden and cell before each segment: two of (segments, B, C, *grid)."""
    segments = -(-steps // every)
    return [hidden.new_empty(segments, *hidden.shape) for _ in range(2)]


def forward(
    implementation: Any, request: Request, every: int, products: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """Reads, hidden, cell, and the states that `backward` starts its segments from."""
    S, reads = request.write_at.shape[1], request.empty_reads()
    hidden, cell = request.hidden.clone(), request.cell.clone()
    kept = empty_kept(hidden, S, every)
    for segment, start in enumerate(range(0, S, every)):
        kept[0][segment], kept[1][segment] = hidden, cell
        part = request.steps(start, start + every)._replace(hidden=hidden, cell=cell)
        result = implementation.forward(part, keep=False, products=products)
        reads[:, start : start + every], hidden, cell, _ = result
    return reads, hidden, cell, kept


def backward(
    implementation: Any,
    grad_reads: Tensor,
    grad_hidden: Tensor | None,
    grad_cell: Tensor | None,
    request: Request,
    kept: list[Tensor],
    every: int,
    products: torch.dtype,
) -> Floats:
    """Gradients of everything in the request but the masks."""
    S = request.write_at.shape[1]
    if grad_hidden is None or grad_cell is None:  # nobody made use of the last state
        grad_hidden = grad_cell = torch.zeros_like(request.hidden)
    zeros = [None if value is None else torch.zeros_like(value) for value in request.floats]
    total = Request._make([*zeros, None, None])
    for segment, start in reversed(list(enumerate(range(0, S, every)))):
        stop = start + every
        state = {"hidden": kept[0][segment], "cell": kept[1][segment]}
        part = request.steps(start, stop)._replace(**state)
        *_, records = implementation.forward(part, keep=True, products=products)
        grads = implementation.backward(
            grad_reads[:, start:stop].contiguous(),
            grad_hidden,
            grad_cell,
            part,
            records,
            products=products,
        )
        *_, grad_hidden, grad_cell = grads
        for name, grad in zip(Request._fields, grads, strict=False):
            whole = getattr(total, name)
            if name in STEPWISE and whole is not None:
                whole[:, start:stop] = grad
            elif name in SHARED and whole is not None:
                whole += grad
    assert grad_hidden is not None
    assert grad_cell is not None
    return total._replace(hidden=grad_hidden.clone(), cell=grad_cell.clone()).floats
