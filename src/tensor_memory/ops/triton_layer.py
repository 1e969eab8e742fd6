"""Kernels for what surrounds the scan in a layer: LayerNorm, the heads' activations, the residual.

Plain PyTorch runs each of these as a handful of passes over all tokens; here each is one pass, and
its backward another. `layer_parts.py` and `layer_heads.py` call them.

Letters: B batch, N tokens, d width, U units: chunks, or tokens where every token reads.
"""

# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportAttributeAccessIssue=false, reportIndexIssue=false
from __future__ import annotations

import triton
import triton.language as tl

from tensor_memory.ops.scan.triton.step import tanh

SIGMA_FLOOR = tl.constexpr(1e-4)


@triton.jit(do_not_specialize=["rows", "epsilon"])
def norm_kernel(
    x,
    weight,
    bias,
    out,
    statistics,
    rows,
    epsilon,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):
    """LayerNorm of ROWS rows of D values in the type of `out`; keeps centre and scale (2, rows)."""
    row, c = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    own = (row < rows)[:, None] & (c < D)[None, :]
    at = row[:, None].to(tl.int64) * D + c[None, :]
    value = tl.load(x + at, mask=own, other=0.0).to(tl.float32)
    mean = tl.sum(value, axis=1) / D
    value = tl.where(own, value - mean[:, None], 0.0)
    inverse = 1.0 / tl.sqrt(tl.sum(value * value, axis=1) / D + epsilon)
    factor = tl.load(weight + c, mask=c < D, other=0.0).to(tl.float32)
    offset = tl.load(bias + c, mask=c < D, other=0.0).to(tl.float32)
    value = value * inverse[:, None] * factor[None, :] + offset[None, :]
    tl.store(out + at, value.to(out.dtype.element_ty), mask=own)
    tl.store(statistics + row, mean, mask=row < rows)
    tl.store(statistics + rows + row, inverse, mask=row < rows)


@triton.jit(do_not_specialize=["rows", "loops"])
def norm_backward_kernel(
    x,
    weight,
    statistics,
    grad_out,
    grad_through,
    grad_x,
    partial,
    rows,
    loops,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    THROUGH: tl.constexpr,
):
    """What reaches x through its norm, plus what reached it past the norm.

    partial (programs, 2, D): sums for weight and bias over ROWS · loops rows.
    """
    c = tl.arange(0, WIDTH)
    factor = tl.load(weight + c, mask=c < D, other=0.0).to(tl.float32)[None, :]
    to_weight = tl.zeros([ROWS, WIDTH], dtype=tl.float32)
    to_bias = tl.zeros([ROWS, WIDTH], dtype=tl.float32)
    for loop in range(loops):
        row = (tl.program_id(0) + loop * tl.num_programs(0)) * ROWS + tl.arange(0, ROWS)
        own = (row < rows)[:, None] & (c < D)[None, :]
        at = row[:, None].to(tl.int64) * D + c[None, :]
        mean = tl.load(statistics + row, mask=row < rows, other=0.0)[:, None]
        inverse = tl.load(statistics + rows + row, mask=row < rows, other=0.0)[:, None]
        value = tl.load(x + at, mask=own, other=0.0).to(tl.float32)
        value = tl.where(own, (value - mean) * inverse, 0.0)
        grad = tl.load(grad_out + at, mask=own, other=0.0).to(tl.float32)
        to_weight += grad * value
        to_bias += grad
        grad *= factor
        along = tl.sum(grad * value, axis=1)[:, None] / D
        mean_grad = tl.sum(grad, axis=1)[:, None] / D
        total = (grad - value * along - mean_grad) * inverse
        if THROUGH:
            total += tl.load(grad_through + at, mask=own, other=0.0).to(tl.float32)
        tl.store(grad_x + at, total.to(grad_x.dtype.element_ty), mask=own)
    out = partial + tl.program_id(0) * (2 * D) + c
    tl.store(out, tl.sum(to_weight, axis=0), mask=c < D)
    tl.store(out + D, tl.sum(to_bias, axis=0), mask=c < D)


@triton.jit(do_not_specialize=["reads", "writes"])
def steer_kernel(
    raw_reads,
    raw_writes,
    bias,
    read_at,
    write_at,
    spread,
    content,
    reads,
    writes,
    sigma_scale,
    AT: tl.constexpr,
    CONTENT: tl.constexpr,
    SPREAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The heads' activations: μ = tanh, σ = α (softplus + 1e-4), content as it is; in float32.

    raw_reads holds `reads` numbers; raw_writes `writes` rows of AT + CONTENT + SPREAD.
    """
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    WIDTH: tl.constexpr = AT + CONTENT + SPREAD
    asked = tl.load(raw_reads + i, mask=i < reads, other=0.0).to(tl.float32)
    tl.store(read_at + i, tanh(asked, False), mask=i < reads)
    own = i < writes * WIDTH
    row, column = i // WIDTH, i % WIDTH
    raw = tl.load(raw_writes + i, mask=own, other=0.0).to(tl.float32)
    tl.store(write_at + row * AT + column, tanh(raw, False), mask=own & (column < AT))
    after = column - AT
    tl.store(content + row * CONTENT + after, raw, mask=own & (after >= 0) & (after < CONTENT))
    if SPREAD > 0:
        head = after - CONTENT
        own = own & (head >= 0)
        raw += tl.load(bias + head, mask=own, other=0.0).to(tl.float32)
        e = tl.exp(-tl.abs(raw))
        soft = tl.maximum(raw, 0.0) + tl.where(e < 1e-4, e - 0.5 * e * e, tl.log(1.0 + e))
        tl.store(spread + row * SPREAD + head, sigma_scale * (soft + SIGMA_FLOOR), mask=own)


@triton.jit(do_not_specialize=["reads", "writes"])
def steer_backward_kernel(
    read_at,
    write_at,
    spread,
    grad_read_at,
    grad_write_at,
    grad_spread,
    grad_content,
    grad_reads,
    grad_writes,
    reads,
    writes,
    sigma_scale,
    AT: tl.constexpr,
    CONTENT: tl.constexpr,
    SPREAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Back through the activations, from their results: tanh′ = 1 − μ², softplus′ = 1 − e^−s."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    WIDTH: tl.constexpr = AT + CONTENT + SPREAD
    kind = grad_writes.dtype.element_ty
    at = tl.load(read_at + i, mask=i < reads, other=0.0)
    grad = tl.load(grad_read_at + i, mask=i < reads, other=0.0) * (1.0 - at * at)
    tl.store(grad_reads + i, grad.to(kind), mask=i < reads)
    own = i < writes * WIDTH
    row, column = i // WIDTH, i % WIDTH
    placed = own & (column < AT)
    at = tl.load(write_at + row * AT + column, mask=placed, other=0.0)
    grad = tl.load(grad_write_at + row * AT + column, mask=placed, other=0.0) * (1.0 - at * at)
    after = column - AT
    filled = own & (after >= 0) & (after < CONTENT)
    grad += tl.load(grad_content + row * CONTENT + after, mask=filled, other=0.0)
    if SPREAD > 0:
        head = after - CONTENT
        wide = own & (head >= 0)
        soft = tl.load(spread + row * SPREAD + head, mask=wide, other=0.0) / sigma_scale
        slope = sigma_scale * (1.0 - tl.exp(-(soft - SIGMA_FLOOR)))
        grad += slope * tl.load(grad_spread + row * SPREAD + head, mask=wide, other=0.0)
    tl.store(grad_writes + i, grad.to(kind), mask=own)


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
    mask = c < tl.where((place >= 0) & (place < ends), D, 0)
    value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + at, (value + m).to(out.dtype.element_ty), mask=mask)


@triton.jit
def token_grad(grad_out, token, place, ends, c, D: tl.constexpr):
    mask = c < tl.where((place >= 0) & (place < ends), D, 0)
    return tl.load(grad_out + token.to(tl.int64) * D + c, mask=mask, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["tokens", "count", "frame", "units", "waiting"])
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
    waiting,
    dropout,
    drop_path,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    REPEAT: tl.constexpr,
    DROP: tl.constexpr,
    PATH: tl.constexpr,
):
    """x̂ = x + σ(γ)·D(m), m (B, count, D) once for the REPEAT tokens of each unit.

    A frame of `frame` tokens holds `units` units, its first token in place `waiting` of the first.
    """
    b, unit = tl.program_id(0) // count, tl.program_id(0) % count
    c = tl.arange(0, WIDTH)
    weight = 1.0 / (1.0 + tl.exp(-tl.load(gate).to(tl.float32)))
    m = tl.load(readouts + tl.program_id(0).to(tl.int64) * D + c, mask=c < D, other=0.0)
    m = m.to(tl.float32) * weight
    begins = unit % units * REPEAT - waiting  # the place in its frame of the unit's first token
    ends = tl.minimum(frame, begins + REPEAT)
    first_token = b * tokens + unit // units * frame + begins
    for group in range((REPEAT + 3) // 4):
        first, second, third, fourth = drop_factors(
            seeds, b, tl.program_id(0), group, c, dropout, drop_path, DROP, PATH
        )
        place, token = begins + group * 4, first_token + group * 4
        add_token(x, out, m * first, token, place, ends, c, D)
        add_token(x, out, m * second, token + 1, place + 1, ends, c, D)
        add_token(x, out, m * third, token + 2, place + 2, ends, c, D)
        add_token(x, out, m * fourth, token + 3, place + 3, ends, c, D)


@triton.jit(do_not_specialize=["tokens", "count", "frame", "units", "waiting"])
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
    waiting,
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
    begins = unit % units * REPEAT - waiting  # the place in its frame of the unit's first token
    ends = tl.minimum(frame, begins + REPEAT)
    first_token = b * tokens + unit // units * frame + begins
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
    weight = 1.0 / (1.0 + tl.exp(-tl.load(gate).to(tl.float32)))
    at = tl.program_id(0).to(tl.int64) * D + c
    m = tl.load(readouts + at, mask=c < D, other=0.0).to(tl.float32)
    tl.store(grad_readouts + at, (total * weight).to(grad_readouts.dtype.element_ty), mask=c < D)
    tl.store(partial + tl.program_id(0), tl.sum(total * m) * weight * (1.0 - weight))
