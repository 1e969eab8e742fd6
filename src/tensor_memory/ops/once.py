"""Functions with a hand-written backward.

It has no derivative of its own, which is said in words, and multiplies as its forward did: whatever
autocast says by then, it is off.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

NO_SECOND_DERIVATIVE = (
    "memory_scan: this backend has no second derivative; "
    'use backend="reference", which is differentiable any number of times'
)


def undone(function: Any, ctx: Any, grads: tuple[Any, ...]) -> Any:
    """`function.undo(ctx, *grads)` without autocast; its results cannot be differentiated."""
    device = next((grad.device.type for grad in grads if grad is not None), "cpu")
    if torch.is_autocast_enabled(device):  # the forward has chosen the type of all products
        with torch.autocast(device, enabled=False):
            return undone(function, ctx, grads)
    if not torch.is_grad_enabled():
        return function.undo(ctx, *grads)
    with torch.no_grad():  # somebody keeps the graph of the backward: create_graph=True
        results = function.undo(ctx, *grads)
    places = [i for i, result in enumerate(results) if isinstance(result, Tensor)]
    anchor = torch.zeros((), requires_grad=True)
    refusing = _Refuse.apply(anchor, *(results[i] for i in places))
    marked = dict(zip(places, refusing, strict=True))
    return tuple(marked.get(i, result) for i, result in enumerate(results))


class _Refuse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Any:
        return tuple(tensor.view_as(tensor) for tensor in inputs[1:])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError(NO_SECOND_DERIVATIVE)
