"""A layer around the fused place memory as one function: norm, heads, recurrence, gated sum.

Everything a token says is one product with all weights of the heads. What is cheap to compute
again is not kept for the backward: the normed tokens, what the heads say, the readout.

Letters: B batch, N tokens, d width, H heads, C channels, n axes, R columns of the heads' product.
"""

# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportAttributeAccessIssue=false, reportIndexIssue=false
from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from tensor_memory.config import Rule
from tensor_memory.ops.autograd import Options, Recurrence, by_name, no_autocast, no_double_backward
from tensor_memory.ops.gated_sum import Drop, ReadoutLayout, add_gated, add_gated_backward
from tensor_memory.ops.inputs import prepared
from tensor_memory.ops.launch import bind, or_else
from tensor_memory.ops.layer_norm import layer_norm, layer_norm_backward
from tensor_memory.ops.places.inputs import PlaceInputs
from tensor_memory.ops.places.triton.addresses import tanh
from tensor_memory.ops.places.triton.token import PlaceWeights

TOKENS = 64
"""Per program."""


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
    said, base, rate_bias, keep_bias, write_at, read_at, rate, log_keep, content, tokens,
    H: tl.constexpr, C: tl.constexpr, CP: tl.constexpr, n: tl.constexpr, R: tl.constexpr,
    T: tl.constexpr, LEARNED: tl.constexpr, SAME: tl.constexpr,
):  # fmt: skip
    """From the heads' product (tokens, R) to the inputs of the recurrence, of one head."""
    row, head = tl.program_id(0) * T + tl.arange(0, T), tl.program_id(1)
    real = row < tokens
    token, axes = row.to(tl.int64) * H + head, tl.arange(0, 4)
    axis_real = real[:, None] & (axes < n)[None, :]
    place = token[:, None] * n + axes[None, :]
    at = tl.load(base + place, mask=axis_real, other=0.0)
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
    v, _, exist = columns(said, row, real, first + 2 * H + head * C, C, CP, R)
    channel = tl.arange(0, CP)
    tl.store(content + token[:, None] * C + channel[None, :], v, mask=exist)


@triton.jit(do_not_specialize=["tokens"])
def heads_backward_kernel(
    said, rate_bias, keep_bias, by_write_at, by_read_at, by_rate, by_log_keep, by_content, by_said,
    tokens,
    H: tl.constexpr, C: tl.constexpr, CP: tl.constexpr, n: tl.constexpr, R: tl.constexpr,
    T: tl.constexpr, LEARNED: tl.constexpr, SAME: tl.constexpr,
):  # fmt: skip
    """What the heads' product receives, all but the columns of the gate."""
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
    given = tl.load(by_rate + token, mask=real, other=0.0)
    tl.store(by_said + at, given * beta * (1.0 - beta), mask=real)
    keep = tl.load(said + at + H, mask=real, other=0.0).to(tl.float32)
    keep = sigmoid(-keep - tl.load(keep_bias + head).to(tl.float32))
    given = tl.load(by_log_keep + token, mask=real, other=0.0)
    tl.store(by_said + at + H, given * keep, mask=real)
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
    reads, said, read_norm, by_out, by_reads, by_said, by_norm, tokens, epsilon,
    H: tl.constexpr, C: tl.constexpr, CP: tl.constexpr, R: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """What reads and the gate's columns receive; by_norm (programs, C) in parts."""
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
    part = tl.program_id(0) * tl.num_programs(1) + head
    tl.store(by_norm + part * C + channel, tl.sum(given * normed, axis=0), mask=channel < C)
    given *= weight
    along = tl.sum(given * normed, axis=1)[:, None] / C
    tl.store(by_reads + at, (given - normed * along) * inverse, mask=exist)


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
    """What the backward needs, but for what the recurrence keeps."""

    x: Tensor
    base: Tensor
    state: Tensor
    resets: Tensor | None
    statistics: Tensor
    said: Tensor
    """(B·N, R) the heads' product"""
    reads: Tensor
    seeds: Tensor


def place_layer(
    recurrence: Recurrence,
    x: Tensor,
    base: Tensor,
    state: Tensor,
    resets: Tensor | None,
    weights: PlaceWeights,
    options: LayerOptions,
) -> tuple[Tensor, Tensor]:
    """x (B, N, d), base (B, N, H, n) to which places are added -> x̂ (B, N, d), the state after."""
    tensors = (x, base, state, resets, *weights)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        return _PlaceLayer.apply(recurrence, options, *tensors)  # type: ignore[return-value]
    return _run(recurrence, x, base, state, resets, weights, options, keep=False)[0]


class _PlaceLayer(torch.autograd.Function):
    """Recurrence, options, x, base, state, resets and `PlaceWeights` -> x̂, state."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        ctx.recurrence, ctx.options, *tensors = arguments
        weights = PlaceWeights._make(tensors[4:])
        results, saved, kept = _run(ctx.recurrence, *tensors[:4], weights, ctx.options, keep=True)
        ctx.save_for_backward(*saved, *weights, *kept)
        ctx.set_materialize_grads(False)
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        with no_autocast(next(g.device for g in grads if g is not None)):  # products as in forward
            return no_double_backward(_run_backward, ctx, *grads)


def _run(
    recurrence: Recurrence,
    x: Tensor,
    base: Tensor,
    state: Tensor,
    resets: Tensor | None,
    weights: PlaceWeights,
    options: LayerOptions,
    *,
    keep: bool,
) -> tuple[tuple[Tensor, Tensor], _Saved, list[Tensor]]:
    """The layer forward."""
    x, base, state = x.contiguous(), base.contiguous(), state.contiguous()
    with no_autocast(x.device):
        normed, statistics = _normed(x, weights, options)
        said = F.linear(normed.flatten(0, 1), _heads_weight(weights, options.products))
        inputs = _heads(said, base, state, resets, weights, options)
        how = Options(0, options.products, "triton")
        reads, after, kept = recurrence.run_forward(inputs, keep, how)
        m = F.linear(_readout(reads, said, weights, options), _output(weights, options))
        out, seeds = add_gated(x, m, weights.residual_gate, _layout(x), options.drop)
    saved = _Saved(x, base, state, resets, statistics, said, reads, seeds)
    return (out, after), saved, kept


def _run_backward(ctx: Any, grad_out: Tensor | None, grad_state: Tensor | None) -> tuple[Any, ...]:
    """The gradients of what `_PlaceLayer.forward` was given."""
    options = ctx.options
    saved, weights, kept = by_name(ctx.saved_tensors, _Saved, PlaceWeights)
    x, said, products = saved.x, saved.said, options.products
    grad_out = torch.zeros_like(x) if grad_out is None else grad_out.contiguous()
    # Again what was not kept.
    normed, _ = _normed(x, weights, options)
    inputs = _heads(said, saved.base, saved.state, saved.resets, weights, options)
    readout, output = _readout(saved.reads, said, weights, options), _output(weights, options)
    # Through the gated sum and the readout.
    by_m, by_gate = add_gated_backward(
        grad_out, F.linear(readout, output), weights.residual_gate, saved.seeds, _layout(x),
        options.drop,
    )  # fmt: skip
    by_output = torch.mm(by_m.t(), readout)
    by_said = torch.empty_like(said)
    by_reads, by_read_norm = _readout_backward(
        torch.mm(by_m, output), saved.reads, said, by_said, weights, options
    )
    # Through the recurrence and the heads.
    how = Options(0, products, "triton")
    found = ctx.recurrence.run_backward((by_reads, grad_state), inputs, kept, how)
    sizes = _sizes(inputs.content.shape[2:], inputs.grid, weights)
    bind(heads_backward_kernel, **sizes, T=TOKENS)(
        (triton.cdiv(said.shape[0], TOKENS), sizes["H"]),
        (
            said, weights.rate_bias, weights.keep_bias, found.write_at,
            or_else(found.read_at, found.write_at), found.rate, found.log_keep, found.content,
            by_said,
        ),
        (said.shape[0],),
    )  # fmt: skip
    by_heads = torch.mm(by_said.t(), normed.flatten(0, 1))
    by_normed = torch.mm(by_said, _heads_weight(weights, products))
    # Through the norm, where what came past it joins.
    by_x, by_norm = layer_norm_backward(
        x, weights.norm, saved.statistics, by_normed.view(x.shape), grad_out
    )
    heads = _head_weights(weights)
    by_weight = dict(zip(heads, by_heads.split([w.shape[0] for w in heads.values()]), strict=True))
    H, n = sizes["H"], sizes["n"]
    first = H * n * sum(w is not None for w in (weights.write_place, weights.read_place))
    by_rate_bias, by_keep_bias = by_said[:, first : first + 2 * H].float().sum(0).split(H)
    by_weight |= {
        "norm": by_norm[:, 0].sum(0),
        "norm_bias": by_norm[:, 1].sum(0),
        "residual_gate": by_gate.sum().view(weights.residual_gate.shape),
        "rate_bias": by_rate_bias,
        "keep_bias": by_keep_bias,
        "log_width": None if found.width is None else found.width * inputs.width,
        "read_norm": by_read_norm,
        "output": by_output,
    }
    by_base = found.write_at if found.read_at is None else found.write_at + found.read_at
    by_weights = (
        None if weight is None else prepared(by_weight[name], weight.dtype)
        for name, weight in weights._asdict().items()
    )
    return None, None, by_x, by_base, found.state, None, *by_weights


def _normed(x: Tensor, weights: PlaceWeights, options: LayerOptions) -> tuple[Tensor, Tensor]:
    return layer_norm(x, weights.norm, weights.norm_bias, options.epsilon, options.products)


def _head_weights(weights: PlaceWeights) -> dict[str, Tensor]:
    """In the order of the columns of the heads' product."""
    names = ("write_place", "read_place", "rate", "keep", "content", "gate")
    found = {name: getattr(weights, name) for name in names}
    return {name: weight for name, weight in found.items() if weight is not None}


def _heads_weight(weights: PlaceWeights, dtype: torch.dtype) -> Tensor:
    """All of them, (R, d)."""
    return torch.cat(list(_head_weights(weights).values())).to(dtype)


def _output(weights: PlaceWeights, options: LayerOptions) -> Tensor:
    return prepared(weights.output, options.products)


def _layout(x: Tensor) -> ReadoutLayout:
    """A readout for every token."""
    return ReadoutLayout(1, x.shape[1], x.shape[1])


def _sizes(channels: torch.Size, grid: tuple[int, ...], weights: PlaceWeights) -> dict[str, Any]:
    H, C = channels
    return {
        "H": H,
        "C": C,
        "CP": triton.next_power_of_2(C),
        "n": len(grid),
        "R": sum(weight.shape[0] for weight in _head_weights(weights).values()),
        "LEARNED": weights.write_place is not None,
        "SAME": weights.read_place is None,
    }


def _heads(
    said: Tensor, base: Tensor, state: Tensor, resets: Tensor | None, weights: PlaceWeights,
    options: LayerOptions,
) -> PlaceInputs:  # fmt: skip
    """What the tokens say to the recurrence."""
    (B, N, H, _), C = base.shape, state.shape[-1]
    write_at = torch.empty_like(base)
    read_at = None if weights.read_place is None else torch.empty_like(base)
    rate, log_keep, content = (base.new_empty(B, N, H, *more) for more in ((), (), (C,)))
    sizes = _sizes(content.shape[2:], tuple(state.shape[2:-1]), weights)
    bind(heads_kernel, **sizes, T=TOKENS)(
        (triton.cdiv(said.shape[0], TOKENS), H),
        (
            said, base, weights.rate_bias, weights.keep_bias, write_at,
            or_else(read_at, write_at), rate, log_keep, content,
        ),
        (said.shape[0],),
    )  # fmt: skip
    width = None if weights.log_width is None else weights.log_width.float().exp()
    return PlaceInputs(
        write_at, read_at, content, rate, log_keep, width, state, resets, options.rule,
        options.wrap,
    )  # fmt: skip


def _readout_sizes(reads: Tensor, said: Tensor) -> dict[str, int]:
    H, C = reads.shape[2:]
    return {"H": H, "C": C, "CP": triton.next_power_of_2(C), "R": said.shape[1], "T": TOKENS}


def _readout(reads: Tensor, said: Tensor, weights: PlaceWeights, options: LayerOptions) -> Tensor:
    """What W_out takes, (B·N, H·C)."""
    tokens, sizes = said.shape[0], _readout_sizes(reads, said)
    out = said.new_empty(tokens, sizes["H"] * sizes["C"])
    bind(readout_kernel, **sizes)(
        (triton.cdiv(tokens, TOKENS), sizes["H"]),
        (reads, said, weights.read_norm, out),
        (tokens, float(options.read_epsilon)),
    )
    return out


def _readout_backward(
    by_out: Tensor, reads: Tensor, said: Tensor, by_said: Tensor, weights: PlaceWeights,
    options: LayerOptions,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """What reads and the norm's weight receive; the gate's part goes to `by_said`."""
    tokens, sizes = said.shape[0], _readout_sizes(reads, said)
    programs = (triton.cdiv(tokens, TOKENS), sizes["H"])
    by_reads = torch.empty_like(reads)
    by_norm = reads.new_empty(*programs, sizes["C"])
    bind(readout_backward_kernel, **sizes)(
        programs,
        (reads, said, weights.read_norm, by_out, by_reads, by_said, by_norm),
        (tokens, float(options.read_epsilon)),
    )
    return by_reads, by_norm.sum((0, 1))
