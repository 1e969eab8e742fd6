"""A layer around the fused place memory as one function: norm, heads, recurrence, gated sum.

Everything a token says is one product with all weights of the heads. The normed tokens are
computed again in the backward: kept, they would take most of the memory.

Letters: B batch, N tokens, d width, H heads, C channels, n axes, R columns of the heads' product.
"""

# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportAttributeAccessIssue=false, reportIndexIssue=false
from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tensor_memory.config import Rule
from tensor_memory.ops.autograd import by_name, no_autocast, refuse_second_derivative
from tensor_memory.ops.gated_sum import Drop, add_each, each_backward
from tensor_memory.ops.inputs import prepared
from tensor_memory.ops.launch import BoundKernel, bind, blocks, or_else
from tensor_memory.ops.layer_norm import layer_norm, layer_norm_backward
from tensor_memory.ops.places import triton as backend
from tensor_memory.ops.places.inputs import PlaceInputs
from tensor_memory.ops.places.triton.addresses import tanh
from tensor_memory.ops.places.triton.token import PlaceWeights

TOKENS = 64
"""Per program."""
SUM_ROWS, SUM_COLUMNS = 128, 32
"""That a program of `sums_kernel` takes at once."""


@triton.jit
def sigmoid(x):
    """σ."""
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def columns(said, row, real, first, count: tl.constexpr, P: tl.constexpr, R: tl.constexpr):
    """Some columns of what the tokens say: values (T, P), where they are, and which exist."""
    c = tl.arange(0, P)
    where = row[:, None].to(tl.int64) * R + first + c[None, :]
    exist = real[:, None] & (c < count)[None, :]
    return tl.load(said + where, mask=exist, other=0.0).to(tl.float32), where, exist


@triton.jit(do_not_specialize=["tokens"])
def heads_kernel(
    said, base, rate_bias, keep_bias, log_width, write_at, read_at, rate, log_keep, content,
    width, tokens,
    H: tl.constexpr, C: tl.constexpr, CP: tl.constexpr, n: tl.constexpr, R: tl.constexpr,
    T: tl.constexpr, LEARNED: tl.constexpr, SAME: tl.constexpr, HAS_BASE: tl.constexpr,
    GAUSSIAN: tl.constexpr,
):  # fmt: skip
    """From the heads' product (tokens, R) to the inputs of the recurrence, of one head."""
    row, head = tl.program_id(0) * T + tl.arange(0, T), tl.program_id(1)
    real = row < tokens
    token, axes = row.to(tl.int64) * H + head, tl.arange(0, 4)
    axis_real = real[:, None] & (axes < n)[None, :]
    place = token[:, None] * n + axes[None, :]
    at = tl.zeros([T, 4], tl.float32)
    if HAS_BASE:
        at += tl.load(base + place, mask=axis_real, other=0.0)
    first = 0
    if LEARNED:
        p, _, _ = columns(said, row, real, head * n, n, 4, R)
        tl.store(write_at + place, at + tanh(p), mask=axis_real)
        first = H * n
        if not SAME:
            q, _, _ = columns(said, row, real, H * n + head * n, n, 4, R)
            tl.store(read_at + place, at + tanh(q), mask=axis_real)
            first = 2 * H * n
    else:
        tl.store(write_at + place, at, mask=axis_real)
    beta = tl.load(said + row.to(tl.int64) * R + first + head, mask=real, other=0.0).to(tl.float32)
    beta += tl.load(rate_bias + head).to(tl.float32)
    tl.store(rate + token, sigmoid(beta), mask=real)
    keep = tl.load(said + row.to(tl.int64) * R + first + H + head, mask=real, other=0.0)
    keep = keep.to(tl.float32) + tl.load(keep_bias + head).to(tl.float32)
    keep = tl.minimum(keep, 0.0) - tl.log(1.0 + tl.exp(-tl.abs(keep)))
    tl.store(log_keep + token, keep, mask=real)
    if GAUSSIAN:
        wide = tl.exp(tl.load(log_width + head).to(tl.float32))
        tl.store(width + head, wide, mask=tl.program_id(0) == 0)
    v, _, exist = columns(said, row, real, first + 2 * H + head * C, C, CP, R)
    channel = tl.arange(0, CP)
    tl.store(content + token[:, None] * C + channel[None, :], v, mask=exist)


@triton.jit(do_not_specialize=["tokens"])
def heads_backward_kernel(
    said, rate_bias, keep_bias, by_write_at, by_read_at, by_rate, by_log_keep, by_content, by_said,
    by_bias, tokens,
    H: tl.constexpr, C: tl.constexpr, CP: tl.constexpr, n: tl.constexpr, R: tl.constexpr,
    T: tl.constexpr, LEARNED: tl.constexpr, SAME: tl.constexpr,
):  # fmt: skip
    """What the heads' product receives, all but the gate's columns; by_bias (programs, 2, H)."""
    row, head = tl.program_id(0) * T + tl.arange(0, T), tl.program_id(1)
    real = row < tokens
    token, axes = row.to(tl.int64) * H + head, tl.arange(0, 4)
    axis_real = real[:, None] & (axes < n)[None, :]
    place = token[:, None] * n + axes[None, :]
    first = 0
    if LEARNED:
        p, where, exist = columns(said, row, real, head * n, n, 4, R)
        given = tl.load(by_write_at + place, mask=axis_real, other=0.0)
        tl.store(by_said + where, given * (1.0 - tanh(p) * tanh(p)), mask=exist)
        first = H * n
        if not SAME:
            q, where, exist = columns(said, row, real, H * n + head * n, n, 4, R)
            given = tl.load(by_read_at + place, mask=axis_real, other=0.0)
            tl.store(by_said + where, given * (1.0 - tanh(q) * tanh(q)), mask=exist)
            first = 2 * H * n
    at = row.to(tl.int64) * R + first + head
    beta = tl.load(said + at, mask=real, other=0.0).to(tl.float32)
    beta = sigmoid(beta + tl.load(rate_bias + head).to(tl.float32))
    given = tl.load(by_rate + token, mask=real, other=0.0) * beta * (1.0 - beta)
    tl.store(by_said + at, given, mask=real)
    bias = by_bias + tl.program_id(0) * 2 * H + head
    tl.store(bias, tl.sum(given))
    keep = tl.load(said + at + H, mask=real, other=0.0).to(tl.float32)
    keep = sigmoid(-keep - tl.load(keep_bias + head).to(tl.float32))
    given = tl.load(by_log_keep + token, mask=real, other=0.0) * keep
    tl.store(by_said + at + H, given, mask=real)
    tl.store(bias + H, tl.sum(given))
    _, where, exist = columns(said, row, real, first + 2 * H + head * C, C, CP, R)
    channel = tl.arange(0, CP)
    given = tl.load(by_content + token[:, None] * C + channel[None, :], mask=exist, other=0.0)
    tl.store(by_said + where, given, mask=exist)


@triton.jit(do_not_specialize=["tokens", "epsilon"])
def readout_kernel(
    reads, said, read_norm, out, tokens, epsilon,
    H: tl.constexpr, C: tl.constexpr, CP: tl.constexpr, R: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """norm(r) ⊙ silu(gate) of one head; the gate's columns are the last."""
    row, head = tl.program_id(0) * T + tl.arange(0, T), tl.program_id(1)
    real, channel = row < tokens, tl.arange(0, CP)
    gate, _, exist = columns(said, row, real, R - H * C + head * C, C, CP, R)
    at = (row.to(tl.int64) * H + head)[:, None] * C + channel[None, :]
    r = tl.load(reads + at, mask=exist, other=0.0)
    inverse = 1.0 / tl.sqrt(tl.sum(r * r, axis=1) / C + epsilon)
    weight = tl.load(read_norm + channel, mask=channel < C, other=0.0).to(tl.float32)
    tl.store(out + at, r * inverse[:, None] * weight[None, :] * gate * sigmoid(gate), mask=exist)


@triton.jit(do_not_specialize=["tokens", "epsilon"])
def readout_backward_kernel(
    reads, said, read_norm, residual_gate, by_out, by_reads, by_said, parts, tokens, epsilon,
    H: tl.constexpr, C: tl.constexpr, CP: tl.constexpr, R: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """What reads and the gate's columns receive; parts (programs, C + 1) for the norm and γ.

    γ receives (1 − σ(γ)) Σ m · dm, and m · dm summed over a token is readout · its gradient.
    """
    row, head = tl.program_id(0) * T + tl.arange(0, T), tl.program_id(1)
    real, channel = row < tokens, tl.arange(0, CP)
    gate, where, exist = columns(said, row, real, R - H * C + head * C, C, CP, R)
    at = (row.to(tl.int64) * H + head)[:, None] * C + channel[None, :]
    r = tl.load(reads + at, mask=exist, other=0.0)
    given = tl.load(by_out + at, mask=exist, other=0.0).to(tl.float32)
    inverse = 1.0 / tl.sqrt(tl.sum(r * r, axis=1) / C + epsilon)[:, None]
    weight = tl.load(read_norm + channel, mask=channel < C, other=0.0).to(tl.float32)[None, :]
    normed, opened = r * inverse, sigmoid(gate)
    slope = opened * (1.0 + gate * (1.0 - opened))
    tl.store(by_said + where, given * normed * weight * slope, mask=exist)
    given *= gate * opened
    part = parts + (tl.program_id(0) * tl.num_programs(1) + head) * (C + 1)
    tl.store(part + channel, tl.sum(given * normed, axis=0), mask=channel < C)
    given *= weight
    shut = 1.0 - sigmoid(tl.load(residual_gate).to(tl.float32))
    tl.store(part + C, tl.sum(given * normed) * shut)
    along = tl.sum(given * normed, axis=1)[:, None] / C
    tl.store(by_reads + at, (given - normed * along) * inverse, mask=exist)


@triton.jit(do_not_specialize=["norm_rows", "bias_rows", "readout_rows", "width_rows"])
def sums_kernel(
    by_norm, by_bias, by_readout, by_width, width, sums,
    norm_rows, bias_rows, readout_rows, width_rows,
    NORM: tl.constexpr, BIAS: tl.constexpr, READOUT: tl.constexpr, H: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The rows of four matrices summed, some columns of one of them, to one vector of all sums.

    That of by_width is multiplied by the width: it is for its logarithm.
    """
    matrix, column = tl.program_id(1), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    parts, rows, count, first = by_norm, norm_rows, NORM, 0
    if matrix == 1:
        parts, rows, count, first = by_bias, bias_rows, BIAS, NORM
    if matrix == 2:
        parts, rows, count, first = by_readout, readout_rows, READOUT, NORM + BIAS
    if matrix == 3:
        parts, rows, count, first = by_width, width_rows, H, NORM + BIAS + READOUT
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, rows, ROWS):
        row = start + tl.arange(0, ROWS)
        own = (row < rows)[:, None] & (column < count)[None, :]
        total += tl.load(parts + row[:, None] * count + column[None, :], mask=own, other=0.0)
    found = tl.sum(total, axis=0)
    if matrix == 3:
        found *= tl.load(width + column, mask=column < count, other=0.0)
    tl.store(sums + first + column, found, mask=column < count)


class LayerOptions(NamedTuple):
    """What a layer does, beside what it learns."""

    epsilon: float
    """Of the layer's norm."""
    read_epsilon: float
    """Of the norm of what is read."""
    rule: Rule
    wrap: tuple[bool, ...]
    drop: Drop
    products: torch.dtype


class _Saved(NamedTuple):
    """What the backward needs, but for inputs and results of the recurrence."""

    x: Tensor
    statistics: Tensor
    said: Tensor
    """(B·N, R) the heads' product"""
    reads: Tensor
    readout: Tensor
    """(B·N, H·C) what W_out takes"""
    heads: Tensor
    """(R, d) all weights of the heads, in the type of products; W_out too"""
    output: Tensor
    seeds: Tensor
    norm: Tensor
    norm_bias: Tensor
    residual_gate: Tensor
    rate_bias: Tensor
    keep_bias: Tensor
    read_norm: Tensor


INPUTS = len(PlaceInputs._fields) - len(PlaceInputs.CHOICES)


def place_layer(
    x: Tensor,
    base: Tensor | None,
    state: Tensor,
    resets: Tensor | None,
    weights: PlaceWeights,
    options: LayerOptions,
) -> tuple[Tensor, Tensor]:
    """x (B, N, d), base (B, N, H, n) to which places are added -> x̂ (B, N, d), the state after."""
    tensors = (x, base, state, resets, *weights)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        return _PlaceLayer.apply(options, *tensors)  # type: ignore[return-value]
    return _run(x, base, state, resets, weights, options, keep=False)[0]


class _PlaceLayer(torch.autograd.Function):
    """Options, x, base, state, resets and `PlaceWeights` -> x̂, state."""

    @staticmethod
    def forward(ctx: Any, options: LayerOptions, *tensors: Any) -> tuple[Tensor, Tensor]:
        weights = PlaceWeights._make(tensors[4:])
        results, ctx.launches, saved, inputs, kept = _run(*tensors[:4], weights, options, keep=True)
        ctx.save_for_backward(*saved, *inputs[:INPUTS], *kept)
        ctx.set_materialize_grads(False)
        ctx.options, ctx.dtype = options, weights.content.dtype
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        refuse_second_derivative()
        with no_autocast(next(g.device for g in grads if g is not None)):  # products as in forward
            return _run_backward(ctx, *grads)


def _run(
    x: Tensor,
    base: Tensor | None,
    state: Tensor,
    resets: Tensor | None,
    weights: PlaceWeights,
    options: LayerOptions,
    *,
    keep: bool,
) -> tuple[tuple[Tensor, Tensor], _Launches, _Saved, PlaceInputs, list[Tensor]]:
    """The layer forward: the results, and what the backward needs."""
    x, state = x.contiguous(), state.contiguous()
    # Autocast is left on: it takes time to leave, and every product here has its type.
    heads = torch.cat(_head_weights(weights)).to(options.products)
    output = prepared(weights.output, options.products)
    normed, statistics = _normed(x, weights.norm, weights.norm_bias, options)
    said = torch.mm(normed, heads.t())
    do = _launches_of(weights, said, state, base is not None)
    inputs = _heads(do, said, x.shape[:2], base, state, resets, weights, options)
    reads, after, kept = backend.forward(inputs, keep=keep, products=options.products)
    readout = _readout(do, reads, said, weights, options)
    m = torch.mm(readout, output.t())
    out, seeds = add_each(x, m, weights.residual_gate, options.drop)
    saved = _Saved(
        x, statistics, said, reads, readout, heads, output, seeds, weights.norm, weights.norm_bias,
        weights.residual_gate, weights.rate_bias, weights.keep_bias, weights.read_norm,
    )  # fmt: skip
    return (out, after), do, saved, inputs, kept


def _run_backward(ctx: Any, grad_out: Tensor | None, grad_state: Tensor | None) -> tuple[Any, ...]:
    """The gradients of what `_PlaceLayer.forward` was given."""
    options, do = ctx.options, ctx.launches
    saved, rest = by_name(ctx.saved_tensors, _Saved)
    inputs, kept = PlaceInputs(*rest[:INPUTS], options.rule, options.wrap), rest[INPUTS:]
    x, said, products = saved.x, saved.said, options.products
    grad_out = torch.zeros_like(x) if grad_out is None else grad_out.contiguous()
    grad_state = None if grad_state is None else grad_state.contiguous()
    # Through the gated sum and the readout.
    by_m = each_backward(grad_out, saved.residual_gate, saved.seeds, options.drop, products)
    by_output = torch.mm(by_m.t(), saved.readout)
    by_said = torch.empty_like(said)
    by_reads, by_readout = _readout_backward(
        do, torch.mm(by_m, saved.output), saved, by_said, options
    )
    # Through the recurrence and the heads.
    found = backend.backward(by_reads, grad_state, inputs, kept, products=products, in_parts=True)
    by_bias = _heads_backward(do, saved, found, by_said)
    # Through the norm, where what came past it joins.
    normed, _ = _normed(x, saved.norm, saved.norm_bias, options)
    by_heads = torch.mm(by_said.t(), normed).to(ctx.dtype)
    by_x, by_norm = layer_norm_backward(
        x, saved.norm, saved.statistics, torch.mm(by_said, saved.heads), grad_out
    )
    by_base = None
    if ctx.needs_input_grad[2]:
        by_base = found.write_at if found.read_at is None else found.write_at + found.read_at
    *places, rate, keep, content, gate = by_heads.split_with_sizes(do.head_sizes)
    write_place, read_place = (*places, None, None)[:2]
    norm, norm_bias, rate_bias, keep_bias, read_norm, residual_gate, log_width = _sums(
        do, by_norm, by_bias, by_readout, found.width, inputs.width
    )
    # Autograd brings a gradient to the type of its weight, where that is another.
    by_weights = PlaceWeights(
        norm, norm_bias, residual_gate, write_place, read_place, content, rate, rate_bias, keep,
        keep_bias, log_width, gate, read_norm, by_output,
    )  # fmt: skip
    return None, by_x, by_base, found.state, None, *by_weights


def _normed(
    x: Tensor, norm: Tensor, norm_bias: Tensor, options: LayerOptions
) -> tuple[Tensor, Tensor]:
    """(B·N, d), and what the norm's backward needs."""
    tokens = x.view(-1, x.shape[-1])
    return layer_norm(tokens, norm, norm_bias, options.epsilon, options.products)


def _head_weights(weights: PlaceWeights) -> list[Tensor]:
    """In the order of the columns of the heads' product."""
    places = [w for w in (weights.write_place, weights.read_place) if w is not None]
    return [*places, weights.rate, weights.keep, weights.content, weights.gate]


class _Launches(NamedTuple):
    heads: BoundKernel
    heads_backward: BoundKernel
    readout: BoundKernel
    readout_backward: BoundKernel
    head_sizes: tuple[int, ...]
    """Rows of the heads' weights, in the order of `_head_weights`."""
    sums: BoundKernel
    sum_programs: int
    sum_sizes: tuple[int, ...]
    """Of norm, its bias, the biases of rate and keep, the norm of reads, γ and the width."""


@functools.lru_cache(maxsize=64)
def _launches(
    d: int, H: int, C: int, n: int, R: int, learned: bool, same: bool, gaussian: bool, based: bool
) -> _Launches:
    """The kernels around a memory of these sizes."""
    sizes = {"H": H, "C": C, "CP": triton.next_power_of_2(C), "R": R, "T": TOKENS}
    said = sizes | {"n": n, "LEARNED": learned, "SAME": same}
    places = [H * n] * ((1 if same else 2) if learned else 0)
    summed = {"NORM": 2 * d, "BIAS": 2 * H, "READOUT": C + 1, "H": H}
    return _Launches(
        bind(heads_kernel, **said, GAUSSIAN=gaussian, HAS_BASE=based),
        bind(heads_backward_kernel, **said),
        bind(readout_kernel, **sizes),
        bind(readout_backward_kernel, **sizes),
        (*places, H, H, H * C, H * C),
        bind(sums_kernel, **summed, ROWS=SUM_ROWS, COLUMNS=SUM_COLUMNS),
        blocks(max(summed.values()), SUM_COLUMNS),
        (d, d, H, H, C, 1, H if gaussian else 0),
    )


def _launches_of(weights: PlaceWeights, said: Tensor, state: Tensor, based: bool) -> _Launches:
    gaussian = weights.log_width is not None
    learned, same = weights.write_place is not None, weights.read_place is None
    sizes = len(weights.norm), state.shape[1], state.shape[-1], state.ndim - 3, said.shape[1]
    return _launches(*sizes, learned, same, gaussian, based)


def _heads(
    do: _Launches, said: Tensor, tokens: Sequence[int], base: Tensor | None, state: Tensor,
    resets: Tensor | None, weights: PlaceWeights, options: LayerOptions,
) -> PlaceInputs:  # fmt: skip
    """What the tokens say to the recurrence; their content in the type of products."""
    H, *grid, C = state.shape[1:]
    write_at = state.new_empty(*tokens, H, len(grid))
    read_at = None if weights.read_place is None else torch.empty_like(write_at)
    rate, log_keep = state.new_empty(*tokens, H), state.new_empty(*tokens, H)
    content = said.new_empty(*tokens, H, C)
    width = None if weights.log_width is None else state.new_empty(H)
    base = None if base is None else base.contiguous()
    do.heads(
        (blocks(said.shape[0], TOKENS), H),
        (
            said, or_else(base, write_at), weights.rate_bias, weights.keep_bias,
            or_else(weights.log_width, write_at), write_at, or_else(read_at, write_at), rate,
            log_keep, content, or_else(width, write_at),
        ),
        (said.shape[0],),
    )  # fmt: skip
    return PlaceInputs(
        write_at, read_at, content, rate, log_keep, width, state, resets, options.rule,
        options.wrap,
    )  # fmt: skip


def _heads_backward(do: _Launches, saved: _Saved, found: PlaceInputs, by_said: Tensor) -> Tensor:
    """Fills `by_said` but for the gate's columns; parts (programs, 2, H) for rate and keep."""
    said, H = saved.said, found.rate.shape[2]
    programs = blocks(said.shape[0], TOKENS)
    by_bias = found.rate.new_empty(programs, 2, H)
    do.heads_backward(
        (programs, H),
        (
            said, saved.rate_bias, saved.keep_bias, found.write_at,
            or_else(found.read_at, found.write_at), found.rate, found.log_keep, found.content,
            by_said, by_bias,
        ),
        (said.shape[0],),
    )  # fmt: skip
    return by_bias


def _readout(
    do: _Launches, reads: Tensor, said: Tensor, weights: PlaceWeights, options: LayerOptions
) -> Tensor:
    """What W_out takes, (B·N, H·C)."""
    tokens, (H, C) = said.shape[0], reads.shape[2:]
    out = said.new_empty(tokens, H * C)
    do.readout(
        (blocks(tokens, TOKENS), H),
        (reads, said, weights.read_norm, out),
        (tokens, float(options.read_epsilon)),
    )
    return out


def _readout_backward(
    do: _Launches, by_out: Tensor, saved: _Saved, by_said: Tensor, options: LayerOptions
) -> tuple[Tensor, Tensor]:
    """What reads receive, and parts for the norm's weight and γ; fills the gate's columns."""
    reads, tokens = saved.reads, saved.said.shape[0]
    H, C = reads.shape[2:]
    programs, by_reads = blocks(tokens, TOKENS), torch.empty_like(reads)
    parts = reads.new_empty(programs * H, C + 1)
    do.readout_backward(
        (programs, H),
        (
            reads, saved.said, saved.read_norm, saved.residual_gate, by_out, by_reads, by_said,
            parts,
        ),
        (tokens, float(options.read_epsilon)),
    )  # fmt: skip
    return by_reads, parts


def _sums(
    do: _Launches, by_norm: Tensor, by_bias: Tensor, by_readout: Tensor, by_width: Tensor | None,
    width: Tensor | None,
) -> list[Tensor | None]:  # fmt: skip
    """What the small weights receive, of parts by program, in the order of `sum_sizes`."""
    sums = by_norm.new_empty(sum(do.sum_sizes))
    matrices = [by_norm, by_bias, by_readout, or_else(by_width, by_norm)]
    do.sums(
        (do.sum_programs, 3 if by_width is None else 4),
        (*matrices, or_else(width, by_norm), sums),
        tuple(len(matrix) for matrix in matrices),
    )
    *found, log_width = sums.split_with_sizes(do.sum_sizes)
    return [*found, None if by_width is None else log_width]
