"""What surrounds the scan in a layer, in one pass each way: for the fused backend's layers.

Each function here has a plain twin: `nn.LayerNorm`, the heads in `module`, the sum in `residual`.

Letters: B batch, N tokens, K tokens per chunk, S chunks, d width, C channels, U units.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tensor_memory.ops import products_of, triton_layer
from tensor_memory.ops.once import undone
from tensor_memory.ops.placing import Placing
from tensor_memory.ops.triton_launch import INTERPRETED, bound
from tensor_memory.ops.triton_plan import power_of_2

NORM_VALUES = 2048  # per program of the norm
NORM_PROGRAMS = 528  # that share the sums for its weights: four per multiprocessor of an H200
STEER_BLOCK = 512
MAX_WIDTH = 8192  # of a token: a program holds a whole one


def norm_and_through(x: Tensor, norm: nn.LayerNorm) -> tuple[Tensor, Tensor]:
    """LayerNorm(x) in the type to multiply in, and x itself: their gradients meet in one pass."""
    return NormAndThrough.apply(x, norm.weight, norm.bias, norm.eps, products_of(x))  # type: ignore


class NormAndThrough(torch.autograd.Function):
    """x, weight, bias, ε and the type to multiply in -> `norm_and_through`."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        """Keeps x and its statistics."""
        x, weight, bias, epsilon, dtype = inputs
        x = x.contiguous()
        D, rows = x.shape[-1], x[..., 0].numel()
        out = torch.empty_like(x, dtype=dtype)
        centre = x.new_empty(rows, dtype=torch.float32)
        scale = torch.empty_like(centre)
        options = _norm_options(D)
        bound(triton_layer.norm_kernel, **options)(
            (-(-rows // options["ROWS"]),),
            (x, weight, bias, out, centre, scale),
            (rows, float(epsilon)),
        )
        ctx.save_for_backward(x, weight, centre, scale)
        ctx.set_materialize_grads(False)
        return out, x

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:  # pyright: ignore
        """`undo`, which nobody may differentiate."""
        return undone(NormAndThrough, ctx, grads)

    @staticmethod
    def undo(ctx: Any, *grads: Any) -> Any:
        """The gradients, without a graph of their own."""
        grad_out, grad_through = grads
        if grad_out is None:
            return grad_through, None, None, None, None
        x, weight, centre, scale = ctx.saved_tensors
        D, rows = x.shape[-1], centre.numel()
        options = _norm_options(D)
        blocks = -(-rows // options["ROWS"])
        programs = min(blocks, NORM_PROGRAMS)
        grad_x = torch.empty_like(x)
        partial = centre.new_empty(programs, 2, D)
        through = x if grad_through is None else grad_through.contiguous()
        kernel = triton_layer.norm_backward_kernel
        bound(kernel, **options, THROUGH=grad_through is not None)(
            (programs,),
            (x, weight, centre, scale, grad_out.contiguous(), through, grad_x, partial),
            (rows, -(-blocks // programs)),
        )
        grad_weight, grad_bias = partial.sum(0).to(weight.dtype)
        return grad_x, grad_weight, grad_bias, None, None


def _norm_options(D: int) -> dict[str, int]:
    width = power_of_2(D)
    return {"D": D, "WIDTH": width, "ROWS": max(1, NORM_VALUES // width)}


class Heads(NamedTuple):
    """The weights that steer a memory; with shared coordinates the two are one tensor."""

    write_proj: Tensor
    read_coordinate: Tensor
    write_coordinate: Tensor
    content: Tensor
    spread: Tensor | None
    spread_bias: Tensor | None


def steer(
    tokens: Tensor, heads: Heads, every_token: bool, sigma_scale: float
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Flat coordinates of reads and writes, spread and content, in float32.

    tokens (B, S, K, d) -> (B, S, Q·n), (B, S, M·n), (B, S, M) or None, (B, S, M·C).
    """
    dtype = products_of(tokens)
    return Steer.apply(tokens.to(dtype), every_token, sigma_scale, dtype, *heads)  # type: ignore


class Steer(torch.autograd.Function):
    """Tokens, whether each of them reads, α, the type to multiply in, `Heads` -> `steer`."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Any:
        """Keeps tokens, their summary, cast weights and the coordinates."""
        tokens, every_token, sigma_scale, dtype, *weights = inputs
        tokens = tokens.contiguous()
        heads = Heads._make(weights)
        B, S, K, d = tokens.shape
        flat = tokens.view(B * S, K * d)
        queries = flat.view(-1, d) if every_token else flat[:, :d]
        write_proj = heads.write_proj.to(dtype)
        for_reads = heads.read_coordinate.to(dtype)
        parts = (heads.write_coordinate, heads.content, heads.spread)
        for_writes = torch.cat([part for part in parts if part is not None]).to(dtype)
        summary = flat @ write_proj.t()
        raw_reads, raw_writes = queries @ for_reads.t(), summary @ for_writes.t()
        AT, CONTENT = len(heads.write_coordinate), len(heads.content)
        SPREAD = 0 if heads.spread is None else len(heads.spread)
        read_at = tokens.new_empty(B, S, raw_reads.numel() // (B * S), dtype=torch.float32)
        write_at = read_at.new_empty(B, S, AT)
        content = read_at.new_empty(B, S, CONTENT)
        spread = read_at.new_empty(B, S, SPREAD) if SPREAD else None
        stand_in = read_at
        options = {"AT": AT, "CONTENT": CONTENT, "SPREAD": SPREAD, "BLOCK": STEER_BLOCK}
        programs = -(-max(raw_reads.numel(), raw_writes.numel()) // STEER_BLOCK)
        bound(triton_layer.steer_kernel, **options)(
            (programs,),
            (
                raw_reads, raw_writes,
                stand_in if heads.spread_bias is None else heads.spread_bias,
                read_at, write_at, stand_in if spread is None else spread, content,
            ),
            (raw_reads.numel(), B * S, float(sigma_scale)),
        )  # fmt: skip
        kept = (tokens, summary, write_proj, for_reads, for_writes, read_at, write_at, spread)
        ctx.save_for_backward(*kept)
        ctx.every_token, ctx.sigma_scale, ctx.options = every_token, sigma_scale, options
        ctx.shared = heads.read_coordinate is heads.write_coordinate
        ctx.kinds = tuple(None if weight is None else weight.dtype for weight in weights)
        return read_at, write_at, spread, content

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:  # pyright: ignore
        """`undo`, which nobody may differentiate."""
        return undone(Steer, ctx, grads)

    @staticmethod
    def undo(ctx: Any, *grads: Any) -> Any:
        """The gradients, without a graph of their own."""
        kept = ctx.saved_tensors
        tokens, summary, write_proj, for_reads, for_writes, read_at, write_at, spread = kept
        grad_read_at, grad_write_at, grad_spread, grad_content = grads
        B, S, K, d = tokens.shape
        flat = tokens.view(B * S, K * d)
        queries = flat.view(-1, d) if ctx.every_token else flat[:, :d]
        grad_reads = tokens.new_empty(len(queries), len(for_reads))
        grad_writes = tokens.new_empty(B * S, len(for_writes))
        programs = -(-max(grad_reads.numel(), grad_writes.numel()) // STEER_BLOCK)
        stand_in = read_at
        bound(triton_layer.steer_backward_kernel, **ctx.options)(
            (programs,),
            (
                read_at, write_at, stand_in if spread is None else spread,
                grad_read_at.contiguous(), grad_write_at.contiguous(),
                stand_in if spread is None else grad_spread.contiguous(),
                grad_content.contiguous(), grad_reads, grad_writes,
            ),
            (grad_reads.numel(), B * S, float(ctx.sigma_scale)),
        )  # fmt: skip
        grad_summary = grad_writes @ for_writes
        grad_flat = grad_summary @ write_proj
        into = grad_flat.view(-1, d) if ctx.every_token else grad_flat[:, :d]
        into.addmm_(grad_reads, for_reads)
        grad_heads = (grad_writes.t() @ summary).to(torch.float32)
        by_reads = grad_reads.t() @ queries
        at, content, *rest = grad_heads.split([size for size in _sizes(ctx.options) if size])
        if ctx.shared:  # one tensor twice among the inputs: its gradients are added
            at = at + by_reads
        results = (
            grad_summary.t() @ flat,
            None if ctx.shared else by_reads,
            at,
            content,
            *(rest if rest else [None]),
            grad_writes[:, -ctx.options["SPREAD"] :].sum(0, dtype=torch.float32) if rest else None,
        )
        typed = (
            grad if grad is None or grad.dtype == kind else grad.to(kind)
            for grad, kind in zip(results, ctx.kinds, strict=True)
        )
        return grad_flat.view(tokens.shape), None, None, None, *typed


def _sizes(options: dict[str, int]) -> tuple[int, int, int]:
    return options["AT"], options["CONTENT"], options["SPREAD"]


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
        x, m, gate, placing, dropout, drop_path = inputs
        x, m = x.contiguous(), m.contiguous()
        seeds = gate  # stands in where nothing is drawn
        if dropout or drop_path:
            seeds = torch.randint(2**62, (2,), device=x.device)
        ctx.save_for_backward(m, gate, seeds)
        ctx.numbers = (x.shape[1], m.shape[1], placing.frame, placing.units, placing.waiting)
        ctx.rates = (float(dropout), float(drop_path))
        D = x.shape[2]
        ctx.options = {
            "D": D,
            "WIDTH": power_of_2(D),
            "REPEAT": placing.repeat,
            "DROP": dropout > 0,
            "PATH": drop_path > 0,
        }
        out = torch.empty_like(x)
        bound(triton_layer.residual_kernel, **ctx.options)(
            (m.shape[0] * m.shape[1],), (x, m, gate, seeds, out), (*ctx.numbers, *ctx.rates)
        )
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:  # pyright: ignore
        """`undo`, which nobody may differentiate."""
        return undone(AddGated, ctx, grads)

    @staticmethod
    def undo(ctx: Any, *grads: Any) -> Any:
        """The gradients, without a graph of their own."""
        (grad,) = grads
        m, gate, seeds = ctx.saved_tensors
        grad = grad.contiguous()
        grad_m = torch.empty_like(m)
        units = m.shape[0] * m.shape[1]
        partial = m.new_empty(units, dtype=torch.float32)
        bound(triton_layer.residual_backward_kernel, **ctx.options)(
            (units,), (grad, m, gate, seeds, grad_m, partial), (*ctx.numbers, *ctx.rates)
        )
        return grad, grad_m, partial.sum(0, keepdim=True).to(gate.dtype), None, None, None


def serves(x: Tensor) -> bool:
    """Whether these functions can take tokens like x."""
    floats = (torch.float32, torch.bfloat16)
    return (
        (x.is_cuda or INTERPRETED)
        and x.dtype in floats
        and products_of(x) in floats
        and x.numel() > 0
        and x.shape[-1] <= MAX_WIDTH
    )


def plain(*modules: nn.Module) -> bool:
    """Whether these are linear maps or LayerNorms as PyTorch made them, and nobody watches them."""
    return all(
        type(module) in (nn.Linear, nn.LayerNorm)
        and not (module._forward_hooks or module._forward_pre_hooks or module._backward_hooks)
        for module in modules
    )
