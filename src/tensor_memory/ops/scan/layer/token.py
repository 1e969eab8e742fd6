"""One token through a layer without gradients, in one launch: norm, read, readout, gate, sum.

The first token of a chunk reads; the others use what it read. The token joins the unfinished chunk.
The caller writes a chunk that is complete. A token decoded with a memory in every layer takes a
third less time with this (docs/evidence/kernel-log.md).

Letters: B batch, K tokens per chunk, d width, C channels, n axes, R reads per query.
"""

# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportAttributeAccessIssue=false, reportIndexIssue=false
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tensor_memory.ops.inputs import prepared
from tensor_memory.ops.launch import bind
from tensor_memory.ops.scan.layer.weights import LayerWeights
from tensor_memory.ops.scan.triton.addressing import read_place
from tensor_memory.ops.scan.triton.plan import power_of_2, sizes_of, why_not_read
from tensor_memory.ops.scan.triton.step import tanh

MAX_READS = 4  # heads, which one program goes through one by one


@triton.jit
def coordinate(weight, normed, row, c, D: tl.constexpr):
    """μ = tanh(w · x) of one row of the coordinate head."""
    factor = tl.load(weight + row * D + c, mask=c < D, other=0.0).to(tl.float32)
    return tanh(tl.sum(factor * normed), False)


@triton.jit(do_not_specialize=["waiting", "epsilon"])
def token_kernel(
    x,
    weight,
    bias,
    coordinates,
    output,
    gate,
    hidden,
    tokens,
    readout,
    out,
    chunk,
    next_tokens,
    next_readout,
    next_fill,
    waiting,
    epsilon,
    K: tl.constexpr,
    WIDTH_D: tl.constexpr,
    WIDTH: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
    D: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    AXES: tl.constexpr,
    READ: tl.constexpr,
    COMPLETE: tl.constexpr,
    KEPT: tl.constexpr,
):
    """One program per row. x and out (B, d), tokens, chunk and next_tokens (B, K, d).

    READ: this token reads, into `readout` (B, R·C). COMPLETE: the chunk goes to `chunk`, and the
    state begins anew; otherwise it goes to next_tokens. KEPT: the state keeps a readout.
    """
    b = tl.program_id(0)
    c, voxel = tl.arange(0, WIDTH), tl.arange(0, C)
    own = c < WIDTH_D
    # LayerNorm of the token.
    value = tl.load(x + b * WIDTH_D + c, mask=own, other=0.0).to(tl.float32)
    centred = tl.where(own, value - tl.sum(value) / WIDTH_D, 0.0)
    normed = centred / tl.sqrt(tl.sum(centred * centred) / WIDTH_D + epsilon)
    normed *= tl.load(weight + c, mask=own, other=0.0).to(tl.float32)
    normed += tl.load(bias + c, mask=own, other=0.0).to(tl.float32)
    normed = normed.to(x.dtype.element_ty).to(tl.float32)  # as it waits in the state

    # The chunk's tokens are copied, this one in its place: inputs are never changed.
    kept = tokens + b * (K * WIDTH_D)
    into = (chunk if COMPLETE else next_tokens) + b * (K * WIDTH_D)
    nothing = tl.zeros([WIDTH], dtype=x.dtype.element_ty)
    for k in range(K):
        before = tl.load(kept + k * WIDTH_D + c, mask=own, other=0.0).to(tl.float32)
        token = tl.where(c * 0 + k == waiting, normed, before).to(x.dtype.element_ty)
        tl.store(into + k * WIDTH_D + c, token, mask=own)
        if COMPLETE:
            tl.store(next_tokens + b * (K * WIDTH_D) + k * WIDTH_D + c, nothing, mask=own)

    # μ and the read of every head.
    V: tl.constexpr = D * H * W
    readout += b * (R * C)
    if READ:
        for head in tl.static_range(R):
            at_x = coordinate(coordinates, normed, head * AXES, c, WIDTH_D)
            at_y, at_z = 0.0, 0.0
            if H > 1:
                at_y = coordinate(coordinates, normed, head * AXES + 1, c, WIDTH_D)
            if D > 1:
                at_z = coordinate(coordinates, normed, head * AXES + 2, c, WIDTH_D)
            r = read_place(hidden + b * (C * V), at_x, at_y, at_z, 1, V, C, D, H, W)
            tl.store(readout + head * C + voxel, r)
        tl.debug_barrier()  # every thread needs all of it
    # m = W_out r, sixteen columns at a time.
    m = tl.zeros([WIDTH], dtype=tl.float32)
    for start in range(0, R * C, 16):
        piece = start + tl.arange(0, 16)
        values = tl.load(readout + piece)
        columns = tl.load(
            output + c[:, None] * (R * C) + piece[None, :], mask=own[:, None], other=0.0
        )
        m += tl.sum(columns.to(tl.float32) * values[None, :], axis=1)
    if KEPT and COMPLETE:
        for head in tl.static_range(R):
            tl.store(next_readout + b * (R * C) + head * C + voxel, voxel * 0.0)
    # x̂ = x + σ(γ)·m.
    opened = 1.0 / (1.0 + tl.exp(-tl.load(gate).to(tl.float32)))
    tl.store(out + b * WIDTH_D + c, (value + opened * m).to(out.dtype.element_ty), mask=own)
    tl.store(next_fill + b, 0 if COMPLETE else waiting + 1)


class NextToken(NamedTuple):
    """x̂ (B, 1, d), the chunk (B, K, d) where it is complete, and what waits in the state next."""

    out: Tensor
    chunk: Tensor | None
    tokens: Tensor
    fill: Tensor
    readout: Tensor


def token_forward(
    x: Tensor,
    weights: LayerWeights,
    epsilon: float,
    hidden: Tensor,
    tokens: Tensor,
    fill: Tensor,
    readout: Tensor,
    waiting: int,
    every_token: bool,
) -> NextToken:
    """One token x (B, 1, d) for every row, after `waiting` tokens of its chunk."""
    B, K, d = tokens.shape
    C = hidden.shape[1]
    R = weights.output.shape[1] // C
    x, tokens, hidden, readout = (t.contiguous() for t in (x, tokens, hidden, readout))
    used = (weights.norm, weights.norm_bias, weights.read_coordinate, weights.output, weights.gate)
    complete, reads = waiting + 1 == K, every_token or waiting == 0
    out, next_tokens, next_fill = torch.empty_like(x), torch.empty_like(tokens), fill.new_empty(B)
    chunk = torch.empty_like(tokens) if complete else None
    into = hidden.new_empty(B, R * C) if reads else readout
    next_readout = readout if every_token else into
    if complete and not every_token:
        next_readout = torch.empty_like(readout)
    kernel = bind(
        token_kernel,
        K=K, WIDTH_D=d, WIDTH=power_of_2(d), R=R, **sizes_of(C, hidden.shape[2:]),
        READ=reads, COMPLETE=complete, KEPT=not every_token,
    )  # fmt: skip
    kernel(
        (B,),
        (
            x, *(prepared(t, t.dtype) for t in used), hidden, tokens, into,
            out, tokens if chunk is None else chunk, next_tokens,
            into if every_token else next_readout, next_fill,
        ),
        (waiting, float(epsilon)),
    )  # fmt: skip
    return NextToken(out, chunk, next_tokens, next_fill, next_readout)


def serves_token(hidden: Tensor, output: Tensor) -> bool:
    """Whether one launch can take a token of a layer with this state and readout (d, R·C)."""
    return why_not_read(hidden) is None and output.shape[1] <= MAX_READS * hidden.shape[1]
