"""One token through a layer without gradients, in one launch: norm, write, read, gate, sum.

Letters: B batch, d width, H heads, V voxels, C channels, n axes.
"""

# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# pyright: reportPossiblyUnboundVariable=false
from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tensor_memory.ops.inputs import prepared
from tensor_memory.ops.launch import INTERPRETED, BoundKernel, bind, or_else
from tensor_memory.ops.places.triton.addresses import factor, tanh
from tensor_memory.ops.places.triton.plan import grid_constants

MOST_STATE = 16_384
"""Values of a head's grid, padded, that a program can hold."""
MOST_WIDTH = 512
"""Features of a token that are multiplied at once."""


class PlaceWeights(NamedTuple):
    """What a layer around a place memory learns; None for what its config leaves out."""

    norm: Tensor
    norm_bias: Tensor
    residual_gate: Tensor
    write_place: Tensor | None
    read_place: Tensor | None
    content: Tensor
    rate: Tensor
    rate_bias: Tensor
    keep: Tensor
    keep_bias: Tensor
    log_width: Tensor | None
    gate: Tensor
    read_norm: Tensor
    output: Tensor


@triton.jit
def normed(x, norm, norm_bias, mean, scale, c, D: tl.constexpr):
    """Some features of the token after its LayerNorm."""
    own = c < D
    value = tl.load(x + c, mask=own, other=0.0).to(tl.float32)
    weight = tl.load(norm + c, mask=own, other=0.0).to(tl.float32)
    bias = tl.load(norm_bias + c, mask=own, other=0.0).to(tl.float32)
    return tl.where(own, (value - mean) * scale * weight + bias, 0.0)


@triton.jit
def projected(weight, first, count: tl.constexpr, token, c, ROWS: tl.constexpr, D: tl.constexpr):
    """Rows of a matrix times a part of the token: (ROWS)."""
    row = tl.arange(0, ROWS)
    real = (row < count)[:, None] & (c < D)[None, :]
    part = tl.load(weight + (first + row)[:, None] * D + c[None, :], mask=real, other=0.0)
    return tl.sum(part.to(tl.float32) * token[None, :], axis=1)


@triton.jit
def component(values, index: tl.constexpr, SIZE: tl.constexpr):
    """One of some values, as (1)."""
    return tl.sum(tl.where(tl.arange(0, SIZE) == index, values, 0.0), keep_dims=True, axis=0)


@triton.jit
def address(
    place, w, G0: tl.constexpr, G1: tl.constexpr, G2: tl.constexpr,
    G3: tl.constexpr, P0: tl.constexpr, P1: tl.constexpr, P2: tl.constexpr, P3: tl.constexpr,
    W0: tl.constexpr, W1: tl.constexpr, W2: tl.constexpr, W3: tl.constexpr,
    GAUSSIAN: tl.constexpr,
):  # fmt: skip
    """φ (P0·P1·P2·P3) of one place, a vector of 4; coordinate 0 addresses the last axis."""
    f0, _, _ = factor(component(place, 3, 4), w, G0, W0, P0, GAUSSIAN)
    f1, _, _ = factor(component(place, 2, 4), w, G1, W1, P1, GAUSSIAN)
    f2, _, _ = factor(component(place, 1, 4), w, G2, W2, P2, GAUSSIAN)
    f3, _, _ = factor(component(place, 0, 4), w, G3, W3, P3, GAUSSIAN)
    phi = f0[:, :, None, None, None] * f1[:, None, :, None, None]
    phi *= f2[:, None, None, :, None] * f3[:, None, None, None, :]
    # In a row: of products along five dimensions Triton 3.6 makes code that spills everything.
    return tl.reshape(phi, [P0 * P1 * P2 * P3])


@triton.jit(do_not_specialize=["epsilon", "read_epsilon"])
def token_kernel(
    x, norm, norm_bias, residual_gate, write_place, read_place, content, rate, rate_bias, keep,
    keep_bias, log_width, gate, read_norm, output, where, origin, state, out, after, readout,
    epsilon, read_epsilon,
    D: tl.constexpr, DP: tl.constexpr, DB: tl.constexpr, H: tl.constexpr, C: tl.constexpr,
    CP: tl.constexpr, LEARNED: tl.constexpr, GIVEN: tl.constexpr, SAME: tl.constexpr,
    DELTA: tl.constexpr, GAUSSIAN: tl.constexpr, n: tl.constexpr, V: tl.constexpr,
    G0: tl.constexpr, G1: tl.constexpr, G2: tl.constexpr, G3: tl.constexpr,
    P0: tl.constexpr, P1: tl.constexpr, P2: tl.constexpr, P3: tl.constexpr,
    W0: tl.constexpr, W1: tl.constexpr, W2: tl.constexpr, W3: tl.constexpr,
):  # fmt: skip
    """One program per row. x and out (B, d), state and after (B, H, V, C), where (B, H, n)."""
    # The row's token: its mean and 1 / deviation.
    b = tl.program_id(0).to(tl.int64)
    x += b * D
    whole, axes, channel = tl.arange(0, DP), tl.arange(0, 4), tl.arange(0, CP)
    value = tl.load(x + whole, mask=whole < D, other=0.0).to(tl.float32)
    mean = tl.sum(value) / D
    centred = tl.where(whole < D, value - mean, 0.0)
    scale = 1.0 / tl.sqrt(tl.sum(centred * centred) / D + epsilon)
    # Where a head's grid lies, voxels padded axis by axis: (P0·P1·P2·P3, CP)
    voxel = tl.arange(0, P0 * P1 * P2 * P3)
    i0, i1 = voxel // (P1 * P2 * P3), voxel // (P2 * P3) % P1
    i2, i3 = voxel // P3 % P2, voxel % P3
    at = (((i0 * G1 + i1) * G2 + i2) * G3 + i3)[:, None] * C + channel[None, :]
    exist = ((i0 < G0) & (i1 < G1) & (i2 < G2) & (i3 < G3))[:, None] & (channel < C)[None, :]
    shift = tl.load(origin + b * n + axes, mask=axes < n, other=0.0).to(tl.float32)
    for head in range(H):
        # What the token says to this head, in pieces of d: p, q (4), v, gate (CP), β, α before σ.
        p, q = tl.zeros([4], tl.float32), tl.zeros([4], tl.float32)
        v, opened = tl.zeros([CP], tl.float32), tl.zeros([CP], tl.float32)
        beta = tl.load(rate_bias + head).to(tl.float32)
        kept = tl.load(keep_bias + head).to(tl.float32)
        for start in range(0, D, DB):
            c = start + tl.arange(0, DB)
            token = normed(x, norm, norm_bias, mean, scale, c, D)
            v += projected(content, head * C, C, token, c, CP, D)
            opened += projected(gate, head * C, C, token, c, CP, D)
            weight = tl.load(rate + head * D + c, mask=c < D, other=0.0).to(tl.float32)
            beta += tl.sum(weight * token)
            weight = tl.load(keep + head * D + c, mask=c < D, other=0.0).to(tl.float32)
            kept += tl.sum(weight * token)
            if LEARNED:
                p += projected(write_place, head * n, n, token, c, 4, D)
                if not SAME:
                    q += projected(read_place, head * n, n, token, c, 4, D)
        # p = tanh(W_p x) + origin + where, and q likewise.
        p, q = tanh(p) + shift, tanh(q) + shift
        if GIVEN:
            given = tl.load(where + (b * H + head) * n + axes, mask=axes < n, other=0.0)
            p += given.to(tl.float32)
            q += given.to(tl.float32)
        w = 1.0
        if GAUSSIAN:
            w = tl.exp(tl.load(log_width + head).to(tl.float32))
        # S ← αS, then S ← S + β φ (v − φᵀ S)ᵀ; without φᵀ S under rule "linear".   (V, C)
        phi = address(p, w, G0, G1, G2, G3, P0, P1, P2, P3, W0, W1, W2, W3, GAUSSIAN)
        place = (b * H + head) * V * C + at
        S = tl.load(state + place, mask=exist, other=0.0) / (1.0 + tl.exp(-kept))
        if DELTA:
            v -= tl.sum(phi[:, None] * S, axis=0)
        S += phi[:, None] * (v / (1.0 + tl.exp(-beta)))[None, :]
        tl.store(after + place, S, mask=exist)
        # r = ψᵀ S   (C)
        psi = phi
        if not SAME:
            psi = address(q, w, G0, G1, G2, G3, P0, P1, P2, P3, W0, W1, W2, W3, GAUSSIAN)
        r = tl.sum(psi[:, None] * S, axis=0)
        # norm(r) ⊙ silu(gate), in memory for the sum over heads.
        r = tl.where(channel < C, r, 0.0)
        r /= tl.sqrt(tl.sum(r * r) / C + read_epsilon)
        r *= tl.load(read_norm + channel, mask=channel < C, other=0.0).to(tl.float32)
        r *= opened / (1.0 + tl.exp(-opened))
        tl.store(readout + (b * H + head) * C + channel, r, mask=channel < C)
    tl.debug_barrier()  # every thread needs all of it
    # x̂ = x + σ(γ) W_out readout, DB features at a time.
    share = 1.0 / (1.0 + tl.exp(-tl.load(residual_gate).to(tl.float32)))
    for start in range(0, D, DB):
        c = start + tl.arange(0, DB)
        m = tl.zeros([DB], tl.float32)
        for head in range(H):
            column = head * C + channel
            real = (c < D)[:, None] & (channel < C)[None, :]
            r = tl.load(readout + b * H * C + column, mask=channel < C, other=0.0)
            part = tl.load(output + c[:, None] * (H * C) + column[None, :], mask=real, other=0.0)
            m += tl.sum(part.to(tl.float32) * r[None, :], axis=1)
        before = tl.load(x + c, mask=c < D, other=0.0).to(tl.float32)
        tl.store(out + b * D + c, before + share * m, mask=c < D)


def serves_token(state: Tensor) -> bool:
    """Whether one launch can take a token of a memory with this state (B, H, *grid, C)."""
    return state.dtype == torch.float32 and _padded(tuple(state.shape[2:])) <= MOST_STATE


@functools.lru_cache(maxsize=256)
def _padded(sizes: tuple[int, ...]) -> int:
    return math.prod(map(triton.next_power_of_2, sizes))


@functools.lru_cache(maxsize=256)
def _bound(
    d: int, H: int, C: int, grid: tuple[int, ...], wrap: tuple[bool, ...], **choices: bool
) -> BoundKernel:
    """The kernel for a memory of these sizes: finding them takes longer than a launch."""
    width = triton.next_power_of_2(d)
    return bind(
        token_kernel,
        D=d, DP=width, DB=min(MOST_WIDTH, width), H=H, C=C, CP=triton.next_power_of_2(C),
        **choices, **grid_constants(grid, wrap), **({} if INTERPRETED else {"num_warps": 8}),
    )  # fmt: skip


def token_forward(
    x: Tensor,
    weights: PlaceWeights,
    epsilon: float,
    read_epsilon: float,
    where: Tensor | None,
    origin: Tensor,
    state: Tensor,
    rule: str,
    wrap: Sequence[bool],
) -> tuple[Tensor, Tensor]:
    """One token x (B, 1, d) for every row -> x̂ (B, 1, d) and the state after; where (B, H, n)."""
    B, H, *grid, C = state.shape
    d = x.shape[-1]
    x, state, origin = x.contiguous(), state.contiguous(), origin.contiguous()
    out, after = torch.empty_like(x), torch.empty_like(state)
    readout = state.new_empty(B, H, C)
    kernel = _bound(
        d, H, C, tuple(grid), tuple(wrap),
        LEARNED=weights.write_place is not None, GIVEN=where is not None,
        SAME=weights.read_place is None, DELTA=rule == "delta",
        GAUSSIAN=weights.log_width is not None,
    )  # fmt: skip
    taken = (prepared(or_else(t, readout), or_else(t, readout).dtype) for t in weights)
    kernel(
        (B,),
        (
            x, *taken, or_else(where, readout).contiguous(), origin, state, out, after, readout
        ),
        (float(epsilon), float(read_epsilon)),
    )  # fmt: skip
    return out, after
