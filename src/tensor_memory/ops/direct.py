"""The fast scans for plain eager code, past PyTorch's dispatcher.

An operator registered from Python takes longer to dispatch than a short scan takes to run, and the
first call of one imports PyTorch's compiler. Where nobody needs the operator by name (no compiler,
no tracer, no transform) the same functions run under a plain autograd function.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import TransformType, get_interpreter_stack
from torch.autograd import forward_ad

from tensor_memory.ops import operator
from tensor_memory.ops.once import undone
from tensor_memory.ops.request import Request

PLAIN = (Tensor, torch.nn.Parameter)


def serves(tensors: Iterable[Tensor | None]) -> bool:
    """Whether these are plain tensors and nothing but autograd looks on."""
    return not (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._are_functorch_transforms_active()
        or transformed()
        or any(value is not None and type(value) not in PLAIN for value in tensors)
    )


def transformed() -> bool:
    """Whether torch.func (grad, vmap, jvp) or forward-mode differentiation looks on.

    What neither autograd nor an operator tells them they take for a constant.
    """
    if torch.compiler.is_compiling():
        return False
    if forward_ad._current_level >= 0:
        return True
    if not torch._C._are_functorch_transforms_active():
        return False
    levels = get_interpreter_stack() or []
    return any(level.key() != TransformType.Functionalize for level in levels)


def scan(
    request: Request, keep: bool, checkpoint_every: int, products: torch.dtype, name: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Reads, hidden and cell; differentiable where `keep` is true."""
    options = (checkpoint_every, products, name)
    if keep:
        return DirectScan.apply(*request, options)  # type: ignore[return-value]
    return operator.run_forward(request, False, *options)[:3]


class DirectScan(torch.autograd.Function):
    """`operator.scan` without what compilers need to know of it."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
        """The eleven tensors of a request, then the options of `operator.scan`."""
        *tensors, options = inputs
        *results, kept = operator.run_forward(Request._make(tensors), True, *options)
        ctx.save_for_backward(*tensors, *kept)
        ctx.set_materialize_grads(False)
        ctx.options = options
        return tuple(results)  # type: ignore[return-value]

    @staticmethod
    def backward(ctx: Any, *wanted: Any) -> Any:
        """Nine gradients."""
        return undone(DirectScan, ctx, wanted)

    @staticmethod
    def undo(ctx: Any, *wanted: Any) -> Any:
        """The gradients, without a graph of their own."""
        saved = ctx.saved_tensors
        request, kept = Request._make(saved[:11]), list(saved[11:])
        grads = operator.run_backward(wanted, request, kept, *ctx.options)
        return *grads, None, None, None
