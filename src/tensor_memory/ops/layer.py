"""A layer around a fused scan: the door to its parts, and all of them as one autograd function.

Python spends more on ten functions and their graph than on the launches between them, so where all
chunks of a call are complete the parts (`layer_parts`, `direct`) run one after another inside one:
norm, heads, scan, readout and gated sum.

Letters: B batch, N tokens, K tokens per chunk, S chunks, d width, C channels, n axes.
"""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tensor_memory.ops import direct, products_of, triton_plan
from tensor_memory.ops.direct import DirectScan
from tensor_memory.ops.layer_parts import (
    AddGated,
    Heads,
    NormAndThrough,
    Steer,
    add_gated,
    norm_and_through,
    plain,
    serves,
    steer,
)
from tensor_memory.ops.once import undone
from tensor_memory.ops.placing import Placing
from tensor_memory.ops.request import Request
from tensor_memory.ops.triton_token import serves as serves_token
from tensor_memory.ops.triton_token import step as token_step

__all__ = [
    "Heads", "Options", "Weights", "add_gated", "norm_and_through", "plain", "serves",
    "serves_token", "serves_whole", "steer", "token_step", "whole",
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
    return direct.serves(tensors) and triton_plan.why_not(hidden, hidden.dtype) is None


def whole(
    x: Tensor, hidden: Tensor, cell: Tensor, weights: Weights, options: Options
) -> tuple[Tensor, Tensor, Tensor]:
    """x (B, N, d) -> x̂ (B, N, d), and the state after its last chunk."""
    return _Whole.apply(x, hidden, cell, options, products_of(x), *weights)  # type: ignore


class _Part:
    """What a function that runs inside another one keeps for its backward."""

    saved_tensors: tuple[Tensor | None, ...] = ()

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        self.saved_tensors = tensors

    def set_materialize_grads(self, value: bool) -> None:
        pass


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
        x, hidden, cell, options, dtype, *rest = inputs
        weights = Weights._make(rest)
        K, frame, d = options.chunk_size, options.frame, x.shape[2]
        B, n = len(x), hidden.ndim - 2
        padded = -(-frame // K) * K
        norm, steer, scan, gated = parts = [_Part() for _ in range(4)]

        normed, x = NormAndThrough.forward(
            norm, x, weights.norm, weights.norm_bias, options.epsilon, dtype
        )
        if padded > frame:
            normed = F.pad(normed.view(B, -1, frame, d), (0, 0, 0, padded - frame))
        tokens = normed.view(B, -1, K, d)
        read_at, write_at, spread, content = Steer.forward(
            steer, tokens, options.every_token, options.sigma_scale, dtype, *weights[3:9]
        )
        request = Request(
            read_at.view(B, -1, read_at.shape[2] // n, n),
            write_at.view(B, -1, write_at.shape[2] // n, n),
            spread,
            content.view(*write_at.shape[:2], -1, hidden.shape[1]),
            weights.taps,
            weights.mix,
            weights.bias,
            hidden,
            cell,
        ).at_rest(torch.float32)
        how = (options.checkpoint_every, dtype, "triton")
        reads, last_hidden, last_cell = DirectScan.forward(scan, *request, how)
        reads, output = reads.view(-1, weights.output.shape[1]).to(dtype), weights.output.to(dtype)
        m = (reads @ output.t()).view(B, -1, d)
        repeat = 1 if options.every_token else K
        placing = Placing(repeat, frame, padded // repeat, 0)
        out = AddGated.forward(
            gated, x, m, weights.gate, placing, options.dropout, options.drop_path
        )
        ctx.lengths = [len(part.saved_tensors) for part in parts]
        ctx.save_for_backward(reads, output, *(t for part in parts for t in part.saved_tensors))
        for part in parts:
            part.saved_tensors = ()
        ctx.parts, ctx.frame = parts, (frame, padded)
        ctx.kinds = (hidden.dtype, *(t if t is None else t.dtype for t in weights))
        ctx.set_materialize_grads(False)
        return out, last_hidden, last_cell

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:  # pyright: ignore
        return undone(_Whole, ctx, grads)

    @staticmethod
    def undo(ctx: Any, *grads: Any) -> Any:
        """The gradients, without a graph of their own."""
        grad_out, grad_hidden, grad_cell = grads
        reads, output, *saved = ctx.saved_tensors
        # Copies, so that no part holds its tensors for longer than autograd does.
        norm, steer, scan, gated = parts = [copy.copy(part) for part in ctx.parts]
        for part, length in zip(parts, ctx.lengths, strict=True):
            part.saved_tensors, saved = tuple(saved[:length]), saved[length:]
        x = norm.saved_tensors[0]
        (B, _, d), (frame, padded) = x.shape, ctx.frame
        if grad_out is None:  # the state alone was made use of
            grad_out = torch.zeros_like(x)

        grad_through, grad_m, grad_gate, *_ = AddGated.undo(gated, grad_out)
        grad_m = grad_m.view(-1, d)
        grad_reads = (grad_m @ output).to(torch.float32)
        read_at, content = scan.saved_tensors[0], scan.saved_tensors[3]
        grad_reads = grad_reads.view(*read_at.shape[:3], content.shape[3])
        scanned = DirectScan.undo(scan, grad_reads, grad_hidden, grad_cell)
        by_read_at, by_write_at, by_spread, by_content, by_taps, by_mix, by_bias, *state = scanned
        by_tokens, _, _, _, *by_heads = Steer.undo(
            steer, by_read_at, by_write_at, by_spread, by_content
        )
        if padded > frame:
            by_tokens = by_tokens.view(B, -1, padded, d)[:, :, :frame]
        by_x, by_norm, by_norm_bias, *_ = NormAndThrough.undo(
            norm, by_tokens.reshape(x.shape), grad_through
        )
        by_output = grad_m.t() @ reads
        found = (by_norm, by_norm_bias, grad_gate, *by_heads, by_taps, by_mix, by_bias, by_output)
        state_kind, *kinds = ctx.kinds
        typed = (
            grad if grad is None or grad.dtype == kind else grad.to(kind)
            for grad, kind in zip(found, kinds, strict=True)
        )
        by_hidden, by_cell = (grad.to(state_kind) for grad in state[:2])
        return by_x, by_hidden, by_cell, None, None, *typed
