"""What surrounds the scan in a layer, in one pass each way: for the fused backend's layers.

Here are the norm and the gated sum, next door (`layer_heads`) the heads. Each has a plain twin:
`nn.LayerNorm`, the sum in `residual`, the heads in `module`; each is a function and its way back,
for `layer.whole` to call, and an autograd function around the two where parts run one by one.

Letters: B batch, N tokens, d width, U units: chunks, or tokens where every token reads.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from tensor_memory.ops import triton_layer
from tensor_memory.ops.autograd import no_double_backward
from tensor_memory.ops.inputs import prepared, products_dtype
from tensor_memory.ops.placing import Placing
from tensor_memory.ops.scan.triton.launch import INTERPRETED, Bound, bound
from tensor_memory.ops.scan.triton.plan import power_of_2

NORM_VALUES = 2048  # per program of the norm
NORM_PROGRAMS = 528  # that share the sums for its weights: four per multiprocessor of an H200
MAX_WIDTH = 8192  # of a token: a program holds a whole one


def norm_and_through(x: Tensor, norm: nn.LayerNorm) -> tuple[Tensor, Tensor]:
    """LayerNorm(x) in the type to multiply in, and x itself: their gradients meet in one pass."""
    return NormAndThrough.apply(x, norm.weight, norm.bias, norm.eps, products_dtype(x))  # type: ignore


class NormAndThrough(torch.autograd.Function):
    """x, weight, bias, ε and the type to multiply in -> `norm_and_through`."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        """Keeps x and its statistics."""
        x, weight, bias, epsilon, dtype = inputs
        x = x.contiguous()
        out, statistics = normed(x, weight, bias, epsilon, dtype)
        ctx.save_for_backward(x, weight, statistics)
        ctx.set_materialize_grads(False)
        return out, x

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:  # pyright: ignore
        """`undo`, which nobody may differentiate."""
        return no_double_backward(NormAndThrough.undo, ctx, *grads)

    @staticmethod
    def undo(ctx: Any, *grads: Any) -> Any:
        """The gradients, without a graph of their own."""
        grad_out, grad_through = grads
        if grad_out is None:
            return grad_through, None, None, None, None
        x, weight, statistics = ctx.saved_tensors
        grad_x, shares = normed_back(x, weight, statistics, grad_out, grad_through)
        grad_weight, grad_bias = shares.sum(0).to(weight.dtype)
        return grad_x, grad_weight, grad_bias, None, None


class _Norm(NamedTuple):
    rows: int
    """Per program."""
    forward: Bound
    backward: tuple[Bound, Bound]
    """Without and with a gradient that comes past the norm."""


@functools.lru_cache(maxsize=64)
def _norm(D: int) -> _Norm:
    width = power_of_2(D)
    sizes = {"D": D, "WIDTH": width, "ROWS": max(1, NORM_VALUES // width)}
    kernel = triton_layer.norm_backward_kernel
    alone, meeting = (bound(kernel, **sizes, THROUGH=through) for through in (False, True))
    return _Norm(sizes["ROWS"], bound(triton_layer.norm_kernel, **sizes), (alone, meeting))


def normed(
    x: Tensor, weight: Tensor, bias: Tensor, epsilon: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """LayerNorm of x (..., d), contiguous, and centre and scale of every token, (2, tokens)."""
    launch, rows = _norm(x.shape[-1]), x.numel() // x.shape[-1]
    weight, bias = prepared(weight, weight.dtype), prepared(bias, bias.dtype)
    out = torch.empty_like(x, dtype=dtype)
    statistics = x.new_empty(2, rows, dtype=torch.float32)
    launch.forward(
        (-(-rows // launch.rows),), (x, weight, bias, out, statistics), (rows, float(epsilon))
    )
    return out, statistics


def normed_back(
    x: Tensor, weight: Tensor, statistics: Tensor, grad_out: Tensor, grad_through: Tensor | None
) -> tuple[Tensor, Tensor]:
    """What x receives, and shares (programs, 2, d) of what weight and bias do."""
    D, rows = x.shape[-1], statistics.shape[1]
    launch, weight = _norm(D), prepared(weight, weight.dtype)
    blocks = -(-rows // launch.rows)
    programs = min(blocks, NORM_PROGRAMS)
    grad_x = torch.empty_like(x)
    shares = statistics.new_empty(programs, 2, D)
    through = x if grad_through is None else grad_through.contiguous()
    launch.backward[grad_through is not None](
        (programs,),
        (x, weight, statistics, grad_out.contiguous(), through, grad_x, shares),
        (rows, -(-blocks // programs)),
    )
    return grad_x, shares


def add_gated(
    x: Tensor, m: Tensor, gate: Tensor, placing: Placing, dropout: float, drop_path: float
) -> Tensor:
    """x̂ = x + σ(γ)·D(m): x (B, N, d), m (B, U, d), once for all tokens of a unit."""
    return AddGated.apply(x, m, gate, placing, dropout, drop_path)  # type: ignore


class AddGated(torch.autograd.Function):
    """The arguments of `add_gated`."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        """Keeps m, the gate and the seeds of what is dropped."""
        x, m, gate, *how = inputs
        m, ctx.how = m.contiguous(), how
        out, seeds = gated(x.contiguous(), m, gate, *how)
        ctx.save_for_backward(m, gate, seeds)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:  # pyright: ignore
        """`undo`, which nobody may differentiate."""
        return no_double_backward(AddGated.undo, ctx, *grads)

    @staticmethod
    def undo(ctx: Any, *grads: Any) -> Any:
        """The gradients, without a graph of their own."""
        m, gate, seeds = ctx.saved_tensors
        grad = grads[0].contiguous()
        grad_m, shares = gated_back(grad, m, gate, seeds, *ctx.how)
        return grad, grad_m, shares.sum(0, keepdim=True).to(gate.dtype), None, None, None


@functools.lru_cache(maxsize=64)
def _gated(D: int, repeat: int, drop: bool, path: bool) -> tuple[Bound, Bound]:
    """The launches forward and back."""
    constants = {"D": D, "WIDTH": power_of_2(D), "REPEAT": repeat, "DROP": drop, "PATH": path}
    kernels = (triton_layer.residual_kernel, triton_layer.residual_backward_kernel)
    forward, backward = (bound(kernel, **constants) for kernel in kernels)
    return forward, backward


def _places(
    tokens: int, units: int, placing: Placing, dropout: float, drop_path: float
) -> tuple[float, ...]:
    """The numbers both launches take."""
    frame = (placing.frame, placing.units, placing.waiting)
    return tokens, units, *frame, float(dropout), float(drop_path)


def gated(
    x: Tensor, m: Tensor, gate: Tensor, placing: Placing, dropout: float, drop_path: float
) -> tuple[Tensor, Tensor]:
    """`add_gated` of contiguous tensors, and the seeds of what was dropped; m also as (B·U, d)."""
    (B, N, D), units = x.shape, m.numel() // x.shape[2]
    seeds = gate  # stands in where nothing is drawn
    if dropout or drop_path:
        seeds = torch.randint(2**62, (2,), device=x.device)
    out = torch.empty_like(x)
    _gated(D, placing.repeat, dropout > 0, drop_path > 0)[0](
        (units,),
        (x, m, gate, seeds, out),
        _places(N, units // B, placing, dropout, drop_path),
    )
    return out, seeds


def gated_back(
    grad: Tensor,
    m: Tensor,
    gate: Tensor,
    seeds: Tensor,
    placing: Placing,
    dropout: float,
    drop_path: float,
) -> tuple[Tensor, Tensor]:
    """What m receives, and every unit's share (B·U) of what the gate does."""
    (B, N, D), units = grad.shape, m.numel() // grad.shape[2]
    grad_m = torch.empty_like(m)
    shares = m.new_empty(units, dtype=torch.float32)
    _gated(D, placing.repeat, dropout > 0, drop_path > 0)[1](
        (units,),
        (grad, m, gate, seeds, grad_m, shares),
        _places(N, units // B, placing, dropout, drop_path),
    )
    return grad_m, shares


def serves(x: Tensor) -> bool:
    """Whether these functions can take tokens like x."""
    floats = (torch.float32, torch.bfloat16)
    return (
        (x.is_cuda or INTERPRETED)
        and x.dtype in floats
        and products_dtype(x) in floats
        and x.numel() > 0
        and x.shape[-1] <= MAX_WIDTH
    )


def plain_norm(norm: nn.Module, width: int) -> bool:
    """Whether this is PyTorch's LayerNorm of single tokens with weight and bias, not watched."""
    return (
        type(norm) is nn.LayerNorm
        and norm.normalized_shape == (width,)
        and norm._parameters.get("weight") is not None
        and norm._parameters.get("bias") is not None
        and not watched(norm)
    )


def plain_heads(heads: Sequence[nn.Module], spread: nn.Module | None = None) -> bool:
    """Whether these are PyTorch's linear maps, the spread's alone with a bias; none watched."""
    for head in heads if spread is None else (*heads, spread):
        # Asked for as an attribute, a parameter is searched for, which takes longer than all else.
        biased = head._parameters.get("bias") is not None
        if type(head) is not nn.Linear or biased != (head is spread) or watched(head):
            return False
    return True


def watched(module: nn.Module) -> bool:
    """Whether somebody waits for this module to be called: a hook, or a forward of its own."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in module.__dict__
        or _has_any_global_hook()
    )
