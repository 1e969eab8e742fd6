"""A whole layer around a fused scan as one autograd function: x̂ = x + σ(γ)·D(memory(LayerNorm(x))).

Python spends more on a dozen functions and their graph than on the launches between them. Where all
chunks of a call are complete, norm, heads, scan, readout and gated sum therefore run one after
another inside one function: a training step launched from Python is a quarter shorter with it, a
captured one a tenth (docs/evidence/kernel-log.md).

Letters: B batch, N tokens, K tokens per chunk, S chunks, d width, C channels, U units: chunks, or
tokens where every token reads.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tensor_memory.ops.autograd import (
    Options,
    by_name,
    is_plain_eager,
    no_autocast,
    refuse_second_derivative,
)
from tensor_memory.ops.gated_sum import Drop, ReadoutLayout, add_gated, add_gated_backward
from tensor_memory.ops.inputs import prepared, products_dtype
from tensor_memory.ops.layer_norm import layer_norm, layer_norm_backward
from tensor_memory.ops.scan.inputs import ScanInputs
from tensor_memory.ops.scan.layer.heads import run_heads, run_heads_backward
from tensor_memory.ops.scan.layer.token import NextToken, serves_token, token_forward
from tensor_memory.ops.scan.layer.weights import LayerWeights, Packed, gather, pack
from tensor_memory.ops.scan.memory_scan import SCAN
from tensor_memory.ops.scan.triton.plan import why_not

__all__ = [
    "Drop", "LayerOptions", "LayerWeights", "NextToken", "fused_layer_forward", "serves",
    "serves_state", "serves_token", "token_forward",
]  # fmt: skip

MAX_WIDTH = 8192  # of a token: a program of the norm holds a whole one


class LayerOptions(NamedTuple):
    """What a layer does besides; `frame` tokens at a time, each frame padded to whole chunks."""

    epsilon: float
    chunk_size: int
    frame: int
    every_token: bool
    sigma_scale: float
    checkpoint_every: int
    drop: Drop

    @property
    def padded(self) -> int:
        """Tokens of a frame with its padding."""
        return -(-self.frame // self.chunk_size) * self.chunk_size

    @property
    def readouts(self) -> ReadoutLayout:
        """Which tokens of a frame get which readout."""
        repeat = 1 if self.every_token else self.chunk_size
        return ReadoutLayout(repeat, self.frame, self.padded // repeat)


def serves(x: Tensor) -> bool:
    """Whether the fused functions can take tokens like x, where Triton serves plain tensors."""
    known = {x.dtype, products_dtype(x)} <= {torch.float32, torch.bfloat16}
    return known and x.numel() > 0 and x.shape[-1] <= MAX_WIDTH


def serves_state(hidden: Tensor, cell: Tensor, weights: LayerWeights) -> bool:
    """Whether `fused_layer_forward` can take this state and these weights."""
    reason = why_not(hidden.shape, hidden.device, hidden.dtype)
    return reason is None and is_plain_eager((hidden, cell, *weights))


def fused_layer_forward(
    x: Tensor, hidden: Tensor, cell: Tensor, weights: LayerWeights, options: LayerOptions
) -> tuple[Tensor, Tensor, Tensor]:
    """x (B, N, d) -> x̂ (B, N, d), and the state after its last chunk."""
    tensors = (x, hidden, cell, *weights)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        return _FusedLayer.apply(options, products_dtype(x), *tensors)  # type: ignore[return-value]
    return _run(x, hidden, cell, weights, options, products_dtype(x), keep=False).results


class _Saved(NamedTuple):
    """What the backward needs, but for the scan's inputs and what that keeps."""

    x: Tensor
    norm: Tensor
    chunks: Tensor
    """(B·S, K·d) the normed tokens, padded"""
    queries: Tensor
    """(B·S, d), or (B·S·K, d) where every token reads: a part of the chunks"""
    summary: Tensor
    """(B·S, d)"""
    reads: Tensor
    """(B·U, R·C)"""
    m: Tensor
    """(B·U, d)"""
    gate: Tensor
    seeds: Tensor


class _Ran(NamedTuple):
    """What a forward has computed."""

    results: tuple[Tensor, Tensor, Tensor]
    saved: _Saved
    packed: Packed
    inputs: ScanInputs
    kept: list[Tensor]


def _run(
    x: Tensor,
    hidden: Tensor,
    cell: Tensor,
    weights: LayerWeights,
    options: LayerOptions,
    dtype: torch.dtype,
    *,
    keep: bool,
) -> _Ran:
    """The layer forward; products run in `dtype`."""
    (B, _, d), K, frame = x.shape, options.chunk_size, options.frame
    x = x.contiguous()

    # LayerNorm, then chunks of K tokens; a frame that is too short is padded with zeros.
    chunks = layer_norm(x, weights.norm, weights.norm_bias, options.epsilon, dtype)
    if options.padded > frame:
        chunks = F.pad(chunks.view(B, -1, frame, d), (0, 0, 0, options.padded - frame))
    chunks = chunks.view(-1, K * d)

    # The heads: where to read and write, how wide, what.
    queries = chunks.view(-1, d) if options.every_token else chunks[:, :d]
    packed = pack(weights, dtype)
    summary, steering = run_heads(
        chunks, queries, packed, weights.head_rows, weights.spread_bias,
        (B, chunks.shape[0] // B, hidden.ndim - 2), options.sigma_scale,
    )  # fmt: skip

    # The scan.
    fixed = (weights.taps, weights.mix, weights.bias, hidden, cell)
    inputs = ScanInputs(*steering, *(prepared(tensor, torch.float32) for tensor in fixed))
    how = Options(options.checkpoint_every, dtype, "triton")
    reads, last_hidden, last_cell, kept = SCAN.run_forward(inputs, keep, how)

    # The readout m = W_out r, and the gated sum.
    reads = reads.view(-1, weights.output.shape[1]).to(dtype)
    m = F.linear(reads, packed.output)
    out, seeds = add_gated(x, m, weights.gate, options.readouts, options.drop)
    saved = _Saved(x, weights.norm, chunks, queries, summary, reads, m, weights.gate, seeds)
    return _Ran((out, last_hidden, last_cell), saved, packed, inputs, kept)


class _FusedLayer(torch.autograd.Function):
    """Options, the type of products, x, hidden, cell and `LayerWeights` -> x̂, hidden, cell."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        options, dtype, x, hidden, cell, *rest = arguments
        weights = LayerWeights._make(rest)
        ran = _run(x, hidden, cell, weights, options, dtype, keep=True)
        ctx.save_for_backward(*ran.saved, *ran.packed, *ran.inputs, *ran.kept)
        ctx.options, ctx.dtype, ctx.rows = options, dtype, weights.head_rows
        ctx.shared, ctx.weights_dtype = weights.shared, weights.dtype
        ctx.set_materialize_grads(False)
        return ran.results

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        refuse_second_derivative()
        with no_autocast(next(g.device for g in grads if g is not None)):  # products as in forward
            return _run_backward(ctx, *grads)


def _run_backward(
    ctx: Any, grad_out: Tensor | None, grad_hidden: Tensor | None, grad_cell: Tensor | None
) -> tuple[Any, ...]:
    """The gradients of what `_FusedLayer.forward` was given."""
    options, rows = ctx.options, ctx.rows
    saved, packed, inputs, kept = by_name(ctx.saved_tensors, _Saved, Packed, ScanInputs)
    B, _, d = saved.x.shape
    # Only the state may have been used.
    grad_out = torch.zeros_like(saved.x) if grad_out is None else grad_out.contiguous()

    # Through the gated sum and the readout.
    grad_m, by_gate = add_gated_backward(
        grad_out, saved.m, saved.gate, saved.seeds, options.readouts, options.drop
    )
    grad_reads = torch.mm(grad_m, packed.output).view(*inputs.read_at.shape[:3], -1)
    grad_output = torch.mm(grad_m.t(), saved.reads)

    # Through the scan and the heads.
    how = Options(options.checkpoint_every, ctx.dtype, "triton")
    scanned = SCAN.run_backward((grad_reads, grad_hidden, grad_cell), inputs, kept, how)
    by_heads = run_heads_backward(
        saved.chunks, saved.queries, saved.summary, packed, rows, inputs, scanned,
        options.sigma_scale,
    )  # fmt: skip

    # Through the norm, where what came past it joins.
    grad_chunks = by_heads.chunks
    if options.padded > options.frame:
        grad_chunks = grad_chunks.view(B, -1, options.padded, d)[:, :, : options.frame]
    grad_x, by_norm = layer_norm_backward(
        saved.x, saved.norm, options.epsilon, grad_chunks, grad_out
    )

    products = Packed(by_heads.write_proj, by_heads.reads, by_heads.writes, grad_output)
    gathered = gather(
        products, rows, ctx.shared, by_norm, by_heads.raw_writes, by_gate, ctx.weights_dtype
    )
    by_weights = LayerWeights(**gathered, taps=scanned.taps, mix=scanned.mix, bias=scanned.bias)  # type: ignore
    return None, None, grad_x, scanned.hidden, scanned.cell, *by_weights
