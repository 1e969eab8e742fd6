"""Linear layers and norms that a step calls many times, with one gradient for all the calls.

A loop over segments calls the same layers for every segment. Autograd makes a gradient of every
weight for every call and adds them up: half of all kernels of recurrent slots, each too small for a
GPU. Inside `repeated` the backward of a call makes the gradient of its input alone and keeps what
the weights need; the last one done, one product over the rows of all calls makes theirs. The sums
are the same, in another order.

Letters: B rows of all calls, i inputs, o outputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

Kept = list[tuple[Tensor, ...]]
"""What each call's backward leaves for the gradient of the weights."""

Shared = tuple[Tensor, Tensor, Kept]
"""Weight and bias as the calls see them, and what the backwards leave."""


PLAIN = ("cpu",)
"""Kinds of device on which layers stay ordinary: launches cost nothing there, and bringing the rows
of all calls together makes a step of recurrent slots 1.5 times as long."""


class Linear(nn.Linear):
    """`nn.Linear`; inside `repeated`, with one gradient for all its calls."""

    shared: Shared | None = None

    def forward(self, input: Tensor) -> Tensor:
        """(..., i) -> (..., o)."""
        if self.shared is None:
            return super().forward(input)
        return _LinearCall.apply(input, *self.shared)  # type: ignore

    def share(self) -> None:
        """Let the calls that follow leave their gradient to one product."""
        kept: Kept = []
        self.shared = (*_LinearWeights.apply(self.weight, self.bias, kept), kept)  # type: ignore


class LayerNorm(nn.LayerNorm):
    """`nn.LayerNorm`; inside `repeated`, with one gradient for all its calls."""

    shared: Shared | None = None

    def forward(self, input: Tensor) -> Tensor:
        """(..., d) -> (..., d)."""
        if self.shared is None:
            return super().forward(input)
        return _NormCall.apply(input, *self.shared, self.eps)  # type: ignore

    def share(self) -> None:
        """Let the calls that follow leave their gradient to one sum."""
        kept: Kept = []
        self.shared = (*_NormWeights.apply(self.weight, self.bias, kept), kept)  # type: ignore


@contextmanager
def repeated(module: nn.Module, x: Tensor) -> Iterator[None]:
    """Inside, the linear layers and norms of a module expect to be called many times.

    Nothing changes on a CPU, where there is no gradient to make, where a compiler reads the calls,
    or where autocast chooses the types of x and the weights.
    """
    kind = x.device.type
    plain = kind in PLAIN or torch.is_autocast_enabled(kind) or torch.compiler.is_compiling()
    if plain or not torch.is_grad_enabled():
        yield
        return
    layers = [layer for layer in module.modules() if isinstance(layer, Linear | LayerNorm)]
    try:
        for layer in layers:
            layer.share()
        yield
    finally:
        for layer in layers:
            layer.shared = None


class _LinearWeights(Function):
    """Weight and bias, whose gradient is made when the backwards of all calls are done."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, bias: Tensor, kept: Kept) -> tuple[Tensor, Tensor]:
        ctx.kept = kept
        ctx.set_materialize_grads(False)
        return weight.view_as(weight), bias.view_as(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *_: None) -> Any:  # pyright: ignore
        x, gradient = _joined(ctx.kept)  # (B, i), (B, o)
        return gradient.mT @ x, gradient.sum(0), None


class _LinearCall(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, kept: Kept) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.kept = kept
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:  # pyright: ignore
        x, weight = ctx.saved_tensors
        ctx.kept.append((x.detach().flatten(0, -2), gradient.flatten(0, -2)))
        return gradient @ weight, None, None, None


class _NormWeights(Function):
    """Weight and bias of a norm, as `_LinearWeights`."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, bias: Tensor, kept: Kept) -> tuple[Tensor, Tensor]:
        ctx.kept = kept
        ctx.save_for_backward(weight, bias)
        ctx.set_materialize_grads(False)
        return weight.view_as(weight), bias.view_as(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *_: None) -> Any:  # pyright: ignore
        weight, bias = ctx.saved_tensors
        x, gradient, mean, scale = _joined(ctx.kept)  # (B, d) twice, (B, 1) twice
        _, of_weight, of_bias = torch.ops.aten.native_layer_norm_backward(
            gradient, x, weight.shape, mean, scale, weight, bias, [False, True, True]
        )
        return of_weight, of_bias, None


class _NormCall(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, kept: Kept, eps: float
    ) -> Tensor:
        y, mean, scale = torch.native_layer_norm(x, weight.shape, weight, bias, eps)
        ctx.save_for_backward(x, mean, scale, weight, bias)
        ctx.kept = kept
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:  # pyright: ignore
        x, mean, scale, weight, bias = ctx.saved_tensors
        of_x, _, _ = torch.ops.aten.native_layer_norm_backward(
            gradient, x, weight.shape, mean, scale, weight, bias, [True, False, False]
        )
        parts = (x.detach(), gradient, mean, scale)
        ctx.kept.append(tuple(part.flatten(0, -2) for part in parts))
        return of_x, None, None, None, None


def _joined(kept: Kept) -> tuple[Tensor, ...]:
    """The rows of all calls; what was kept is let go."""
    joined = tuple(torch.cat(parts) for parts in zip(*kept, strict=True))
    kept.clear()
    return joined
