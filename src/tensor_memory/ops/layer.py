"""A layer around a fused scan: the door to its parts, and all of them as one autograd function.

Python spends more on ten functions and their graph than on the launches between them, so where all
chunks of a call are complete the parts (`layer_parts`, `layer_heads`, `triton_scan`) run one after
another inside one: norm, heads, scan, readout and gated sum.

Letters: B batch, N tokens, K tokens per chunk, S chunks, d width, C channels, n axes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tensor_memory.ops.autograd import Options as ScanOptions
from tensor_memory.ops.autograd import is_plain_eager, no_double_backward
from tensor_memory.ops.inputs import prepared, products_dtype
from tensor_memory.ops.layer_heads import steer, steered_back, steered_by
from tensor_memory.ops.layer_parts import (
    add_gated,
    gated,
    gated_back,
    norm_and_through,
    normed,
    normed_back,
    plain_heads,
    plain_norm,
    serves,
    watched,
)
from tensor_memory.ops.packing import Heads, Packed, Sizes, gather, pack
from tensor_memory.ops.placing import Placing
from tensor_memory.ops.scan import triton as triton_scan
from tensor_memory.ops.scan.inputs import ScanInputs
from tensor_memory.ops.scan.memory_scan import SCAN
from tensor_memory.ops.scan.triton import plan
from tensor_memory.ops.triton_token import serves as serves_token
from tensor_memory.ops.triton_token import step as token_step

__all__ = [
    "Heads", "Options", "Weights", "add_gated", "norm_and_through", "plain_heads", "plain_norm",
    "serves", "serves_token", "serves_whole", "steer", "token_step", "watched", "whole",
]  # fmt: skip


class Weights(NamedTuple):
    """Everything a layer learns; with shared coordinates the two are one tensor."""

    norm: Tensor
    norm_bias: Tensor
    gate: Tensor
    write_proj: Tensor
    read_coordinate: Tensor
    write_coordinate: Tensor
    content: Tensor
    spread: Tensor | None
    spread_bias: Tensor | None
    taps: Tensor | None
    mix: Tensor
    bias: Tensor
    output: Tensor


class Options(NamedTuple):
    """What a layer does besides; `frame` tokens at a time, each frame padded to whole chunks."""

    epsilon: float
    chunk_size: int
    frame: int
    every_token: bool
    sigma_scale: float
    checkpoint_every: int
    dropout: float
    drop_path: float


def serves_whole(hidden: Tensor, cell: Tensor, weights: Weights) -> bool:
    """Whether `whole` can take this state and these weights."""
    tensors = (hidden, cell, *weights)
    return (
        is_plain_eager(tensors) and plan.why_not(hidden.shape, hidden.device, hidden.dtype) is None
    )


def whole(
    x: Tensor, hidden: Tensor, cell: Tensor, weights: Weights, options: Options
) -> tuple[Tensor, Tensor, Tensor]:
    """x (B, N, d) -> x̂ (B, N, d), and the state after its last chunk."""
    return _Whole.apply(x, hidden, cell, options, products_dtype(x), *weights)  # type: ignore


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
        x, hidden, cell, options, dtype, *rest = inputs
        weights = Weights._make(rest)
        heads = Heads._make(weights[3:9])
        (B, _, d), K, frame = x.shape, options.chunk_size, options.frame
        padded = -(-frame // K) * K
        x = x.contiguous()

        chunks, statistics = normed(x, weights.norm, weights.norm_bias, options.epsilon, dtype)
        if padded > frame:
            chunks = F.pad(chunks.view(B, -1, frame, d), (0, 0, 0, padded - frame))
        chunks = chunks.view(-1, K * d)
        queries = chunks.view(-1, d) if options.every_token else chunks[:, :d]
        packed, sizes = pack(heads, weights.output, dtype), Sizes.of(heads)
        summary, steered = steered_by(
            chunks, queries, packed, sizes, weights.spread_bias,
            (B, chunks.shape[0] // B, hidden.ndim - 2), options.sigma_scale,
        )  # fmt: skip
        fixed = (weights.taps, weights.mix, weights.bias, hidden, cell)
        request = ScanInputs(*steered, *(prepared(tensor, torch.float32) for tensor in fixed))
        reads, last_hidden, last_cell, kept = _scan(request, options.checkpoint_every, dtype)
        reads = reads.view(-1, weights.output.shape[1])
        m = F.linear(reads, packed.output)  # (B·U, d)
        repeat = 1 if options.every_token else K
        placing = Placing(repeat, frame, padded // repeat, 0)
        adding = (placing, options.dropout, options.drop_path)
        out, seeds = gated(x, m, weights.gate, *adding)

        ctx.save_for_backward(
            x, weights.norm, statistics, chunks, queries, summary, *packed,
            reads, m, weights.gate, seeds, *request[:9], *kept,
        )  # fmt: skip
        ctx.scanning = ScanOptions(options.checkpoint_every, dtype, "triton")
        ctx.sizes, ctx.sigma_scale, ctx.adding = sizes, options.sigma_scale, adding
        ctx.shared, ctx.frame = heads.shared, (frame, padded)
        kinds = {t.dtype for t in weights if t is not None}
        ctx.kind = kinds.pop() if len(kinds) == 1 else torch.float32  # autograd casts to each own
        ctx.set_materialize_grads(False)
        return out, last_hidden, last_cell

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:  # pyright: ignore
        return no_double_backward(_Whole.undo, ctx, *grads)

    @staticmethod
    def undo(ctx: Any, *grads: Any) -> Any:
        """The gradients, without a graph of their own."""
        grad_out, grad_hidden, grad_cell = grads
        saved = ctx.saved_tensors
        x, norm, statistics, chunks, queries, summary, *rest, reads, m, gate, seeds = saved[:14]
        packed, request, kept = Packed._make(rest), ScanInputs(*saved[14:23]), list(saved[23:])
        (B, _, d), (frame, padded) = x.shape, ctx.frame
        # Nobody may have made use of anything but the state.
        grad_out = torch.zeros_like(x) if grad_out is None else grad_out.contiguous()

        grad_m, by_gate = gated_back(grad_out, m, gate, seeds, *ctx.adding)
        steps = request.write_at.shape[:2]
        grad_reads = torch.mm(grad_m, packed.output).view(*steps, -1, request.content.shape[3])
        wanted = (grad_reads, grad_hidden, grad_cell)
        *steered, by_taps, by_mix, by_bias, by_hidden, by_cell, _, _ = SCAN.run_backward(
            wanted, request, kept, ctx.scanning
        )
        back = steered_back(
            chunks, queries, summary, packed, request[:3], steered, ctx.sizes, ctx.sigma_scale
        )
        by_chunks = back.flat
        if padded > frame:
            by_chunks = by_chunks.view(B, -1, padded, d)[:, :, :frame]
        by_x, by_norm = normed_back(x, norm, statistics, by_chunks, grad_out)
        products = Packed(
            back.by_write_proj, back.by_reads, back.by_writes, torch.mm(grad_m.t(), reads)
        )
        *found, by_output = gather(
            products, ctx.sizes, ctx.shared, by_norm, back.raw_writes, by_gate, ctx.kind
        )
        by_weights = (*found, by_taps, by_mix, by_bias, by_output)
        return by_x, by_hidden, by_cell, None, None, *by_weights


def _scan(
    request: ScanInputs, checkpoint_every: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """The scan with its reads in the type that they are multiplied in."""
    if not checkpoint_every:
        return triton_scan.forward(request, keep=True, products=dtype, reads_in=dtype)
    results = SCAN.run_forward(request, True, ScanOptions(checkpoint_every, dtype, "triton"))
    return results[0].to(dtype), *results[1:]  # type: ignore
