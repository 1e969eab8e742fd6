"""x̂ = x + σ(γ)·D(m) in one pass, and its backward in another.

Letters: B batch, N tokens, d width, U units: chunks, or tokens where every token reads.
"""

# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportAttributeAccessIssue=false, reportIndexIssue=false
from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tensor_memory.ops.launch import BoundKernel, bind, blocks


@triton.jit
def drop_factors(seeds, b, unit, group, c, dropout, drop_path, DROP: tl.constexpr,
                 PATH: tl.constexpr):  # fmt: skip
    """Factors 0 or 1 / (1 − p) for four tokens of a unit, each (WIDTH,), from one draw."""
    zero = c * 0
    first = zero.to(tl.float32) + 1.0
    if PATH:
        drawn, _, _, _ = tl.philox(tl.load(seeds + 1), zero, zero + b, zero, zero)
        drawn = tl.random.uint_to_uniform_float(drawn)
        first = tl.where(drawn >= drop_path, 1.0 / (1.0 - drop_path), 0.0)
    second, third, fourth = first, first, first
    if DROP:
        r0, r1, r2, r3 = tl.philox(tl.load(seeds), c, zero + unit, zero + group, zero)
        keep = 1.0 / (1.0 - dropout)
        first *= tl.where(tl.random.uint_to_uniform_float(r0) >= dropout, keep, 0.0)
        second *= tl.where(tl.random.uint_to_uniform_float(r1) >= dropout, keep, 0.0)
        third *= tl.where(tl.random.uint_to_uniform_float(r2) >= dropout, keep, 0.0)
        fourth *= tl.where(tl.random.uint_to_uniform_float(r3) >= dropout, keep, 0.0)
    return first, second, third, fourth


@triton.jit
def add_token(x, out, m, token, place, ends, c, D: tl.constexpr):
    """x + m for one token, where its place lies inside the frame and the unit."""
    at = token.to(tl.int64) * D + c
    mask = c < tl.where(place < ends, D, 0)
    value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + at, (value + m).to(out.dtype.element_ty), mask=mask)


@triton.jit
def token_grad(grad_out, token, place, ends, c, D: tl.constexpr):
    """What arrives for one token, zero where its place lies outside the frame or the unit."""
    mask = c < tl.where(place < ends, D, 0)
    return tl.load(grad_out + token.to(tl.int64) * D + c, mask=mask, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["tokens", "count", "frame", "units"])
def residual_kernel(
    x,
    readouts,
    gate,
    seeds,
    out,
    tokens,
    count,
    frame,
    units,
    dropout,
    drop_path,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    REPEAT: tl.constexpr,
    DROP: tl.constexpr,
    PATH: tl.constexpr,
):
    """x̂ = x + σ(γ)·D(m), m (B, count, D) once for the REPEAT tokens of each unit.

    A frame of `frame` tokens holds `units` units; its last unit may hold fewer than REPEAT.
    """
    b, unit = tl.program_id(0) // count, tl.program_id(0) % count
    c = tl.arange(0, WIDTH)
    # σ(γ)·m, once for the tokens of this unit.
    weight = 1.0 / (1.0 + tl.exp(-tl.load(gate).to(tl.float32)))
    m = tl.load(readouts + tl.program_id(0).to(tl.int64) * D + c, mask=c < D, other=0.0)
    m = m.to(tl.float32) * weight
    begins = unit % units * REPEAT  # the place in its frame of the unit's first token
    ends = tl.minimum(frame, begins + REPEAT)
    first_token = b * tokens + unit // units * frame + begins
    # Four tokens at a time: one draw of random numbers serves four.
    for group in range((REPEAT + 3) // 4):
        first, second, third, fourth = drop_factors(
            seeds, b, tl.program_id(0), group, c, dropout, drop_path, DROP, PATH
        )
        place, token = begins + group * 4, first_token + group * 4
        add_token(x, out, m * first, token, place, ends, c, D)
        add_token(x, out, m * second, token + 1, place + 1, ends, c, D)
        add_token(x, out, m * third, token + 2, place + 2, ends, c, D)
        add_token(x, out, m * fourth, token + 3, place + 3, ends, c, D)


@triton.jit(do_not_specialize=["tokens", "count", "frame", "units"])
def residual_backward_kernel(
    grad_out,
    readouts,
    gate,
    seeds,
    grad_readouts,
    partial,
    tokens,
    count,
    frame,
    units,
    dropout,
    drop_path,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    REPEAT: tl.constexpr,
    DROP: tl.constexpr,
    PATH: tl.constexpr,
):
    """What reaches m, summed over the tokens of each unit, and each unit's share for γ."""
    b, unit = tl.program_id(0) // count, tl.program_id(0) % count
    c = tl.arange(0, WIDTH)
    begins = unit % units * REPEAT  # the place in its frame of the unit's first token
    ends = tl.minimum(frame, begins + REPEAT)
    first_token = b * tokens + unit // units * frame + begins
    # What arrives for the tokens of this unit, where it was not dropped.
    total = tl.zeros([WIDTH], dtype=tl.float32)
    for group in range((REPEAT + 3) // 4):
        first, second, third, fourth = drop_factors(
            seeds, b, tl.program_id(0), group, c, dropout, drop_path, DROP, PATH
        )
        place, token = begins + group * 4, first_token + group * 4
        total += first * token_grad(grad_out, token, place, ends, c, D)
        total += second * token_grad(grad_out, token + 1, place + 1, ends, c, D)
        total += third * token_grad(grad_out, token + 2, place + 2, ends, c, D)
        total += fourth * token_grad(grad_out, token + 3, place + 3, ends, c, D)
    # m gets it times σ(γ); γ gets its product with m times σ′(γ).
    weight = 1.0 / (1.0 + tl.exp(-tl.load(gate).to(tl.float32)))
    at = tl.program_id(0).to(tl.int64) * D + c
    m = tl.load(readouts + at, mask=c < D, other=0.0).to(tl.float32)
    tl.store(grad_readouts + at, (total * weight).to(grad_readouts.dtype.element_ty), mask=c < D)
    tl.store(partial + tl.program_id(0), tl.sum(total * m) * weight * (1.0 - weight))


@triton.jit
def scaled_token(
    x, m, out, factor, token, place, ends, c, D: tl.constexpr, ADD: tl.constexpr
):  # fmt: skip
    """x + factor·m for one token, or the second part alone, where it lies inside its row."""
    at = token.to(tl.int64) * D + c
    mask = c < tl.where(place < ends, D, 0)
    value = tl.load(m + at, mask=mask, other=0.0).to(tl.float32) * factor
    if ADD:
        value += tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["tokens"])
def each_token_kernel(
    x, m, gate, seeds, out, tokens, dropout, drop_path,
    D: tl.constexpr, WIDTH: tl.constexpr, DROP: tl.constexpr, PATH: tl.constexpr,
    ADD: tl.constexpr,
):  # fmt: skip
    """x + σ(γ)·D(m), or σ(γ)·D(m), of four tokens of a row: every token has its own m."""
    groups = tl.cdiv(tokens, 4)
    b, place = tl.program_id(0) // groups, tl.program_id(0) % groups * 4
    c, token = tl.arange(0, WIDTH), b * tokens + place
    weight = 1.0 / (1.0 + tl.exp(-tl.load(gate).to(tl.float32)))
    first, second, third, fourth = drop_factors(
        seeds, b, tl.program_id(0), 0, c, dropout, drop_path, DROP, PATH
    )
    scaled_token(x, m, out, weight * first, token, place, tokens, c, D, ADD)
    scaled_token(x, m, out, weight * second, token + 1, place + 1, tokens, c, D, ADD)
    scaled_token(x, m, out, weight * third, token + 2, place + 2, tokens, c, D, ADD)
    scaled_token(x, m, out, weight * fourth, token + 3, place + 3, tokens, c, D, ADD)


class ReadoutLayout(NamedTuple):
    """Which tokens get which readout: a frame of `frame` tokens has `units` readouts.

    Each readout is for `repeat` tokens in a row; the last of a frame may be for fewer.
    """

    repeat: int
    frame: int
    units: int


class Drop(NamedTuple):
    """Probabilities of dropping single features, and whole rows."""

    dropout: float
    drop_path: float


@functools.lru_cache(maxsize=64)
def _launches(D: int, repeat: int, dropout: bool, path: bool) -> tuple[BoundKernel, BoundKernel]:
    """Forward and backward."""
    constants = {
        "D": D,
        "WIDTH": triton.next_power_of_2(D),
        "REPEAT": repeat,
        "DROP": dropout,
        "PATH": path,
    }
    return bind(residual_kernel, **constants), bind(residual_backward_kernel, **constants)


def _numbers(tokens: int, units: int, layout: ReadoutLayout, drop: Drop) -> tuple[float, ...]:
    """What both kernels take behind their tensors."""
    return tokens, units, layout.frame, layout.units, float(drop.dropout), float(drop.drop_path)


def add_each(x: Tensor, m: Tensor, gate: Tensor, drop: Drop) -> tuple[Tensor, Tensor]:
    """x̂ (B, N, d) of contiguous x (B, N, d) and m (B·N, d), and the seeds of what was dropped."""
    seeds, out = _seeds(gate, drop), torch.empty_like(x)
    _each(x, m, gate, seeds, out, drop, ADD=True)
    return out, seeds


def each_backward(
    grad: Tensor, gate: Tensor, seeds: Tensor, drop: Drop, dtype: torch.dtype
) -> Tensor:
    """What m of `add_each` receives, (B·N, d) in a type."""
    B, N, D = grad.shape
    by_m = grad.new_empty(B * N, D, dtype=dtype)
    _each(grad, grad, gate, seeds, by_m, drop, ADD=False)
    return by_m


def _each(
    x: Tensor, m: Tensor, gate: Tensor, seeds: Tensor, out: Tensor, drop: Drop, ADD: bool
) -> None:
    (B, N, D), (dropout, drop_path) = x.shape, drop
    kernel = _each_launch(D, dropout > 0, drop_path > 0, ADD)
    numbers = (N, float(dropout), float(drop_path))
    kernel((B * blocks(N, 4),), (x, m, gate, seeds, out), numbers)


@functools.lru_cache(maxsize=64)
def _each_launch(D: int, dropout: bool, path: bool, ADD: bool) -> BoundKernel:
    width = triton.next_power_of_2(D)
    return bind(each_token_kernel, D=D, WIDTH=width, DROP=dropout, PATH=path, ADD=ADD)


def _seeds(gate: Tensor, drop: Drop) -> Tensor:
    """Of what is dropped; the gate stands in where nothing is drawn."""
    return torch.randint(2**62, (2,), device=gate.device) if any(drop) else gate


def add_gated(
    x: Tensor, m: Tensor, gate: Tensor, layout: ReadoutLayout, drop: Drop
) -> tuple[Tensor, Tensor]:
    """x̂ (B, N, d) of contiguous x (B, N, d) and m (B·U, d), and the seeds of what was dropped."""
    (B, N, D), units = x.shape, m.shape[0]
    seeds, out = _seeds(gate, drop), torch.empty_like(x)
    kernel, _ = _launches(D, layout.repeat, drop.dropout > 0, drop.drop_path > 0)
    kernel((units,), (x, m, gate, seeds, out), _numbers(N, units // B, layout, drop))
    return out, seeds


def add_gated_backward(
    grad: Tensor, m: Tensor, gate: Tensor, seeds: Tensor, layout: ReadoutLayout, drop: Drop
) -> tuple[Tensor, Tensor]:
    """What m receives, and every unit's share (B·U) of what the gate does."""
    (B, N, D), units = grad.shape, m.shape[0]
    grad_m, shares = torch.empty_like(m), m.new_empty(units, dtype=torch.float32)
    _, kernel = _launches(D, layout.repeat, drop.dropout > 0, drop.drop_path > 0)
    kernel((units,), (grad, m, gate, seeds, grad_m, shares), _numbers(N, units // B, layout, drop))
    return grad_m, shares
