"""What steers a memory, in one pass each way: for the fused backend's layers.

The products are PyTorch's, the activations behind them one kernel. The plain twin is in `module`.

Letters: B batch, K tokens per chunk, S chunks, d width, C channels, n axes, Q reads and M writes
per chunk.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tensor_memory.ops import triton_layer
from tensor_memory.ops.autograd import no_double_backward
from tensor_memory.ops.inputs import prepared, products_dtype
from tensor_memory.ops.packing import Heads, Packed, Sizes, pack
from tensor_memory.ops.scan.triton.launch import Bound, bound

STEER_BLOCK = 512  # values per program


def steer(
    tokens: Tensor, heads: Heads, axes: int, every_token: bool, sigma_scale: float
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Where to read and write, how wide and what, in float32.

    tokens (B, S, K, d) -> (B, S, Q, n), (B, S, M, n), (B, S, M) or None, (B, S, M, C).
    """
    dtype = products_dtype(tokens)
    options = (axes, every_token, sigma_scale, dtype)
    return Steer.apply(tokens.to(dtype), options, *heads)  # type: ignore


class Steer(torch.autograd.Function):
    """Tokens, n, whether each of them reads, α and the type to multiply in, `Heads` -> `steer`."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Any:
        """Keeps tokens, their summary, the weights in the type to multiply in, coordinates."""
        tokens, (axes, every_token, sigma_scale, dtype), *weights = inputs
        heads = Heads._make(weights)
        B, S, K, d = tokens.shape
        flat, packed = tokens.contiguous().view(B * S, K * d), pack(heads, None, dtype)
        queries = flat.view(-1, d) if every_token else flat[:, :d]
        ctx.sizes, ctx.sigma_scale = Sizes.of(heads), float(sigma_scale)
        summary, steered = steered_by(
            flat, queries, packed, ctx.sizes, heads.spread_bias, (B, S, axes), ctx.sigma_scale
        )
        ctx.save_for_backward(flat, queries, summary, *packed, *steered[:3])
        ctx.shared, ctx.shape = heads.shared, tokens.shape
        return steered

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:  # pyright: ignore
        """`undo`, which nobody may differentiate."""
        return no_double_backward(Steer.undo, ctx, *grads)

    @staticmethod
    def undo(ctx: Any, *grads: Any) -> Any:
        """The gradients, without a graph of their own."""
        flat, queries, summary, *saved = ctx.saved_tensors
        packed, at = Packed._make(saved[:4]), saved[4:]
        found = steered_back(flat, queries, summary, packed, at, grads, ctx.sizes, ctx.sigma_scale)
        grad_heads = found.by_writes.to(torch.float32)
        at, content, *rest = grad_heads.split([size for size in ctx.sizes if size])
        if ctx.shared:  # one tensor twice among the inputs: its gradients are added
            at = at + found.by_reads
        return (  # autograd casts each to the type of its weight
            found.flat.view(ctx.shape),
            None,
            found.by_write_proj,
            None if ctx.shared else found.by_reads,
            at,
            content,
            *(rest if rest else [None]),
            found.raw_writes[:, -ctx.sizes.spread :].sum(0, dtype=torch.float32) if rest else None,
        )


@functools.lru_cache(maxsize=64)
def _steer(sizes: Sizes) -> tuple[Bound, Bound]:
    """The launches forward and back."""
    AT, CONTENT, SPREAD = sizes
    constants = {"AT": AT, "CONTENT": CONTENT, "SPREAD": SPREAD, "BLOCK": STEER_BLOCK}
    kernels = (triton_layer.steer_kernel, triton_layer.steer_backward_kernel)
    forward, backward = (bound(kernel, **constants) for kernel in kernels)
    return forward, backward


def steered_by(
    flat: Tensor,
    queries: Tensor,
    packed: Packed,
    sizes: Sizes,
    spread_bias: Tensor | None,
    shape: tuple[int, int, int],
    sigma_scale: float,
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor | None, Tensor]]:
    """The summary (B·S, d) of chunks, and what `steer` gives.

    Chunks (B·S, K·d), queries (B·S, d) or (B·S·K, d) where every token reads, shape (B, S, n).
    """
    B, S, n = shape
    M = sizes.at // n
    if spread_bias is not None:
        spread_bias = prepared(spread_bias, spread_bias.dtype)
    summary = F.linear(flat, packed.write_proj)
    raw_reads, raw_writes = F.linear(queries, packed.reads), F.linear(summary, packed.writes)
    asked = raw_reads.numel()
    read_at = flat.new_empty(B, S, asked // (B * S * n), n, dtype=torch.float32)
    write_at = read_at.new_empty(B, S, M, n)
    content = read_at.new_empty(B, S, M, sizes.content // M)
    spread = read_at.new_empty(B, S, M) if sizes.spread else None
    stand_in = read_at
    _steer(sizes)[0](
        (-(-max(asked, raw_writes.numel()) // STEER_BLOCK),),
        (
            raw_reads, raw_writes, stand_in if spread_bias is None else spread_bias,
            read_at, write_at, stand_in if spread is None else spread, content,
        ),
        (asked, B * S, sigma_scale),
    )  # fmt: skip
    return summary, (read_at, write_at, spread, content)


class SteeredBack(NamedTuple):
    """What reaches the chunks, the heads before their activations, and the packed weights."""

    flat: Tensor
    raw_writes: Tensor
    by_write_proj: Tensor
    by_reads: Tensor
    by_writes: Tensor


def steered_back(
    flat: Tensor,
    queries: Tensor,
    summary: Tensor,
    packed: Packed,
    at: Sequence[Tensor | None],
    grads: Sequence[Any],
    sizes: Sizes,
    sigma_scale: float,
) -> SteeredBack:
    """Back from the gradients of what `steered_by` gave; `at` is that but for the content."""
    (asked, d), chunks, stand_in = queries.shape, flat.shape[0], flat
    reads = flat.new_empty(asked, packed.reads.shape[0])
    writes = flat.new_empty(chunks, sum(sizes))
    placed = (stand_in if tensor is None else tensor.contiguous() for tensor in (*at, *grads))
    _steer(sizes)[1](
        (-(-max(reads.numel(), writes.numel()) // STEER_BLOCK),),
        (*placed, reads, writes),
        (reads.numel(), chunks, sigma_scale),
    )
    by_summary = torch.mm(writes, packed.writes)
    by_flat = torch.mm(by_summary, packed.write_proj)
    into = by_flat.view(-1, d) if asked > chunks else by_flat[:, :d]
    into.addmm_(reads, packed.reads)
    return SteeredBack(
        by_flat,
        writes,
        torch.mm(by_summary.t(), flat),
        torch.mm(reads.t(), queries),
        torch.mm(writes.t(), summary),
    )
