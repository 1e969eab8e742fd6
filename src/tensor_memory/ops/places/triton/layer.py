"""A layer around the fused place memory as one function: norm, heads, recurrence, gated sum.

Everything a token says is one product with all weights of the heads. The normed tokens are
computed again in the backward: kept, they would take most of the memory.

Letters: B batch, N tokens, d width, H heads, C channels, n axes, R columns of the heads' product:
H·n for each place that is learned, H rates, H keeps, H·C contents, H·C gates. `by_x` is the
gradient of x.
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
from tensor_memory.ops.autograd import no_autocast, refuse_second_derivative
from tensor_memory.ops.gated_sum import Drop, add_each, each_backward
from tensor_memory.ops.inputs import prepared
from tensor_memory.ops.launch import Alike, BoundKernel, bind, blocks, or_else
from tensor_memory.ops.layer_norm import layer_norm, layer_norm_backward
from tensor_memory.ops.places import triton as backend
from tensor_memory.ops.places.inputs import PlaceInputs
from tensor_memory.ops.places.triton.addresses import tanh
from tensor_memory.ops.places.triton.plan import MOST_PROGRAMS
from tensor_memory.ops.places.triton.token import PlaceWeights
from tensor_memory.ops.prepared import prepared_once

TOKENS = 64
"""Per program."""
SUM_ROWS, SUM_COLUMNS, COPIED = 128, 32, 2048
"""That a program of `gather_kernel` takes at once."""


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
    said, base, small, write_at, read_at, rate, log_keep, content, width, tokens,
    H: tl.constexpr, C: tl.constexpr, CP: tl.constexpr, n: tl.constexpr, R: tl.constexpr,
    T: tl.constexpr, LEARNED: tl.constexpr, SAME: tl.constexpr, HAS_BASE: tl.constexpr,
    GAUSSIAN: tl.constexpr,
):  # fmt: skip
    """From the heads' product (tokens, R) to the inputs of the recurrence, of one head.

    small: the memory's small weights, as `Packed` has them.
    """
    # T tokens of one head, and where their places lie, (T, 4) of which n are real.
    row, head = tl.program_id(0) * T + tl.arange(0, T), tl.program_id(1)
    real = row < tokens
    token, axes = row.to(tl.int64) * H + head, tl.arange(0, 4)
    axis_real = real[:, None] & (axes < n)[None, :]
    place = token[:, None] * n + axes[None, :]
    at = tl.zeros([T, 4], tl.float32)
    if HAS_BASE:
        at += tl.load(base + place, mask=axis_real, other=0.0)
    # p = base + tanh(W_p x), and q likewise or p   (T, n)
    first = 0  # column behind those of the places
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
    # β = σ(W_β x + b)   (T)
    beta = tl.load(said + row.to(tl.int64) * R + first + head, mask=real, other=0.0).to(tl.float32)
    beta += tl.load(small + head).to(tl.float32)
    tl.store(rate + token, sigmoid(beta), mask=real)
    # log α = log σ(W_α x + b)   (T)
    keep = tl.load(said + row.to(tl.int64) * R + first + H + head, mask=real, other=0.0)
    keep = keep.to(tl.float32) + tl.load(small + H + head).to(tl.float32)
    keep = tl.minimum(keep, 0.0) - tl.log(1.0 + tl.exp(-tl.abs(keep)))
    tl.store(log_keep + token, keep, mask=real)
    # The width of the kernel, once per head.
    if GAUSSIAN:
        wide = tl.exp(tl.load(small + 2 * H + head).to(tl.float32))
        tl.store(width + head, wide, mask=tl.program_id(0) == 0)
    # v = W_v x   (T, C)
    v, _, exist = columns(said, row, real, first + 2 * H + head * C, C, CP, R)
    channel = tl.arange(0, CP)
    tl.store(content + token[:, None] * C + channel[None, :], v, mask=exist)


@triton.jit(do_not_specialize=["tokens"])
def heads_backward_kernel(
    said, small, by_write_at, by_read_at, by_rate, by_log_keep, by_content, by_said, by_bias,
    tokens,
    H: tl.constexpr, C: tl.constexpr, CP: tl.constexpr, n: tl.constexpr, R: tl.constexpr,
    T: tl.constexpr, LEARNED: tl.constexpr, SAME: tl.constexpr,
):  # fmt: skip
    """What the heads' product receives, all but the gate's columns; by_bias (programs, 2, H)."""
    # T tokens of one head, and where their places lie, (T, 4) of which n are real.
    row, head = tl.program_id(0) * T + tl.arange(0, T), tl.program_id(1)
    real = row < tokens
    token, axes = row.to(tl.int64) * H + head, tl.arange(0, 4)
    axis_real = real[:, None] & (axes < n)[None, :]
    place = token[:, None] * n + axes[None, :]
    # Through tanh: 1 − tanh²   (T, n)
    first = 0  # column behind those of the places
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
    # Through β = σ(…): β (1 − β), and summed for its bias.
    at = row.to(tl.int64) * R + first + head
    beta = tl.load(said + at, mask=real, other=0.0).to(tl.float32)
    beta = sigmoid(beta + tl.load(small + head).to(tl.float32))
    given = tl.load(by_rate + token, mask=real, other=0.0) * beta * (1.0 - beta)
    tl.store(by_said + at, given, mask=real)
    bias = by_bias + tl.program_id(0) * 2 * H + head
    tl.store(bias, tl.sum(given))
    # Through log σ(…): 1 − σ(…) = σ(−…), and summed for its bias.
    keep = tl.load(said + at + H, mask=real, other=0.0).to(tl.float32)
    keep = sigmoid(-keep - tl.load(small + H + head).to(tl.float32))
    given = tl.load(by_log_keep + token, mask=real, other=0.0) * keep
    tl.store(by_said + at + H, given, mask=real)
    tl.store(bias + H, tl.sum(given))
    # Contents are columns as they are.   (T, C)
    _, where, exist = columns(said, row, real, first + 2 * H + head * C, C, CP, R)
    channel = tl.arange(0, CP)
    given = tl.load(by_content + token[:, None] * C + channel[None, :], mask=exist, other=0.0)
    tl.store(by_said + where, given, mask=exist)


@triton.jit(do_not_specialize=["tokens", "epsilon"])
def readout_kernel(
    reads, said, small, out, tokens, epsilon,
    H: tl.constexpr, C: tl.constexpr, CP: tl.constexpr, R: tl.constexpr, T: tl.constexpr,
    NORM_AT: tl.constexpr,
):  # fmt: skip
    """norm(r) ⊙ silu(gate) of one head; the gate's columns are the last."""
    # T tokens of one head: gate and r   (T, C)
    row, head = tl.program_id(0) * T + tl.arange(0, T), tl.program_id(1)
    real, channel = row < tokens, tl.arange(0, CP)
    gate, _, exist = columns(said, row, real, R - H * C + head * C, C, CP, R)
    at = (row.to(tl.int64) * H + head)[:, None] * C + channel[None, :]
    r = tl.load(reads + at, mask=exist, other=0.0)
    # r / rms(r) · weight · gate · σ(gate)
    inverse = 1.0 / tl.sqrt(tl.sum(r * r, axis=1) / C + epsilon)
    weight = tl.load(small + NORM_AT + channel, mask=channel < C, other=0.0).to(tl.float32)
    tl.store(out + at, r * inverse[:, None] * weight[None, :] * gate * sigmoid(gate), mask=exist)


@triton.jit(do_not_specialize=["tokens", "epsilon"])
def readout_backward_kernel(
    reads, said, small, residual_gate, by_out, by_reads, by_said, parts, tokens, epsilon,
    H: tl.constexpr, C: tl.constexpr, CP: tl.constexpr, R: tl.constexpr, T: tl.constexpr,
    NORM_AT: tl.constexpr,
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
    # r̂ = r / rms(r) and σ(gate), as in forward.
    inverse = 1.0 / tl.sqrt(tl.sum(r * r, axis=1) / C + epsilon)[:, None]
    weight = tl.load(small + NORM_AT + channel, mask=channel < C, other=0.0)
    weight = weight.to(tl.float32)[None, :]
    normed, opened = r * inverse, sigmoid(gate)
    # The gate: silu′ = σ (1 + gate (1 − σ)).
    slope = opened * (1.0 + gate * (1.0 - opened))
    tl.store(by_said + where, given * normed * weight * slope, mask=exist)
    # The norm's weight: Σ over the tokens of what arrives before it times r̂, a part per program.
    given *= gate * opened
    part = parts + (tl.program_id(0) * tl.num_programs(1) + head) * (C + 1)
    tl.store(part + channel, tl.sum(given * normed, axis=0), mask=channel < C)
    given *= weight
    # γ: given · r̂, all of it summed.
    shut = 1.0 - sigmoid(tl.load(residual_gate).to(tl.float32))
    tl.store(part + C, tl.sum(given * normed) * shut)
    # r: (dr̂ − r̂ mean(dr̂ r̂)) / rms(r)
    along = tl.sum(given * normed, axis=1)[:, None] / C
    tl.store(by_reads + at, (given - normed * along) * inverse, mask=exist)


@triton.jit(do_not_specialize=["norm_rows", "bias_rows", "readout_rows", "width_rows"])
def gather_kernel(
    by_norm, by_bias, by_readout, by_width, width, by_heads, by_output, by_layer, by_memory,
    norm_rows, bias_rows, readout_rows, width_rows,
    D: tl.constexpr, H: tl.constexpr, C: tl.constexpr, R: tl.constexpr, NORM_AT: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, COPIED: tl.constexpr,
):  # fmt: skip
    """What all weights receive: the layer's own (2D + 1), and the memory's as `Packed` has them.

    The rows of four matrices are summed, some columns of one of them by a program. Gradients of
    the heads and of W_out are copied. by_width is multiplied by the width: it is for its logarithm.
    """
    matrix, column = tl.program_id(1), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    small = by_memory + (R * D + D * H * C)
    # Which matrix this program sums: of the norm, of the biases, of the readout, of the width.
    if matrix < 4:
        parts, rows, count = by_norm, norm_rows, 2 * D
        if matrix == 1:
            parts, rows, count = by_bias, bias_rows, 2 * H
        if matrix == 2:
            parts, rows, count = by_readout, readout_rows, C + 1
        if matrix == 3:
            parts, rows, count = by_width, width_rows, NORM_AT - 2 * H
        # Its rows, ROWS at a time; then those ROWS.
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
        for start in range(0, rows, ROWS):
            row = start + tl.arange(0, ROWS)
            own = (row < rows)[:, None] & (column < count)[None, :]
            total += tl.load(parts + row[:, None] * count + column[None, :], mask=own, other=0.0)
        found = tl.sum(total, axis=0)
        # To where its weights are.
        if matrix == 0:
            tl.store(by_layer + column, found, mask=column < count)
        if matrix == 1:
            tl.store(small + column, found, mask=column < count)
        if matrix == 2:  # its last column is for γ
            tl.store(small + NORM_AT + column, found, mask=column < C)
            tl.store(by_layer + 2 * D - C + column, found, mask=column == C)
        if matrix == 3:
            found *= tl.load(width + column, mask=column < count, other=0.0)
            tl.store(small + 2 * H + column, found, mask=column < count)
    else:
        # The others copy: 4 the heads' matrices, 5 W_out.
        at = tl.program_id(0) * COPIED + tl.arange(0, COPIED)
        if matrix == 4:
            given = tl.load(by_heads + at, mask=at < R * D, other=0.0)
            tl.store(by_memory + at, given.to(tl.float32), mask=at < R * D)
        else:
            given = tl.load(by_output + at, mask=at < D * H * C, other=0.0)
            tl.store(by_memory + R * D + at, given.to(tl.float32), mask=at < D * H * C)


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
    fresh: bool
    """Whether the state before is empty; its tensor holds anything then."""


class Packed(NamedTuple):
    """The weights of a memory in a row, and what products and kernels take of them."""

    flat: Tensor
    """All of them: those of the heads, W_out, the small ones. Gradients go here."""
    heads: Tensor
    """(R, d) in the type of products, as W_out; and both transposed"""
    output: Tensor
    to_heads: Tensor
    to_output: Tensor
    small: Tensor
    """(H) each the biases of rate and keep and, where there is one, log_width; (C) norm of reads"""


class _Saved(NamedTuple):
    """What the backward needs, but for inputs and results of the recurrence."""

    x: Tensor
    said: Tensor
    """(B·N, R) the heads' product"""
    reads: Tensor
    readout: Tensor
    """(B·N, H·C) what W_out takes"""
    seeds: Tensor
    norm: Tensor
    norm_bias: Tensor
    residual_gate: Tensor


INPUTS = len(PlaceInputs._fields) - len(PlaceInputs.CHOICES)
SAVED = len(_Saved._fields)
KEPT = SAVED + INPUTS
"""Where inputs of the recurrence begin among saved tensors, and what it kept."""


def serves(rows: int, tokens: int, heads: int) -> bool:
    """Whether a call of this size can be launched; each memory alone may serve a longer one."""
    return max(rows * heads, tokens) <= MOST_PROGRAMS


def place_layer(
    x: Tensor,
    base: Tensor | None,
    state: Tensor,
    resets: Tensor | None,
    weights: PlaceWeights,
    options: LayerOptions,
) -> tuple[Tensor, Tensor]:
    """x (B, N, d), base (B, N, H, n) to which places are added -> x̂ (B, N, d), the state after."""
    packed: Packed = prepared_once(_packed, _memory_weights(weights), options.products)
    own = weights.norm, weights.norm_bias, weights.residual_gate
    tensors = (x, base, state, resets, *own, packed.flat)
    keep = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    given = [tensor for tensor in (base, resets) if tensor is not None]
    known = Alike((x, state, *own, packed.small, *given), options.products, keep)
    if keep:
        return _apply(options, packed, known, *tensors)
    with known:
        return _run(options, packed, *tensors[:7], keep=False)[0]


def _memory_weights(weights: PlaceWeights) -> tuple[Tensor, ...]:
    """Those of the memory: the heads in the order of their product's columns, W_out, the small."""
    order = (
        weights.write_place, weights.read_place, weights.rate, weights.keep, weights.content,
        weights.gate, weights.output, weights.rate_bias, weights.keep_bias, weights.log_width,
        weights.read_norm,
    )  # fmt: skip
    return tuple([weight for weight in order if weight is not None])


def _packed(weights: tuple[Tensor, ...], products: torch.dtype) -> Packed:
    """What `_memory_weights` returned, for products in a type."""
    *heads, output = (weight for weight in weights if weight.ndim == 2)
    rows, (d, columns) = sum(len(weight) for weight in heads), output.shape
    flat: Any = _Pack.apply(*weights)
    low, small = prepared(flat.detach(), products), flat.detach()[(rows + columns) * d :]
    to_heads = low.as_strided((d, rows), (1, d))
    to_output = low.as_strided((columns, d), (1, columns), rows * d)
    return Packed(flat, to_heads.t(), to_output.t(), to_heads, to_output, small)


class _Pack(torch.autograd.Function):
    """Weights -> all of them in one row."""

    @staticmethod
    def forward(ctx: Any, *weights: Tensor) -> Tensor:
        ctx.shapes = [weight.shape for weight in weights]
        return torch.cat([weight.flatten() for weight in weights])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        parts = grads[0].split_with_sizes([shape.numel() for shape in ctx.shapes])
        return tuple(part.view(shape) for part, shape in zip(parts, ctx.shapes, strict=True))


class _PlaceLayer(torch.autograd.Function):
    """x, base, state, resets, norm, its bias, γ, all weights in one row -> x̂, state."""

    @staticmethod
    def forward(
        ctx: Any, options: LayerOptions, packed: Packed, known: Alike, *tensors: Any
    ) -> Any:
        with known:
            results, ctx.launches, saved, inputs, kept = _run(
                options, packed, *tensors[:7], keep=True
            )
        ctx.save_for_backward(*saved, *inputs[:INPUTS], *kept)
        ctx.set_materialize_grads(False)
        # Nobody else can change what is packed.
        ctx.options, ctx.kind, ctx.packed = options, known.kind, packed
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        refuse_second_derivative()
        given = [grad for grad in grads if grad is not None]
        saved = ctx.saved_tensors  # which may run a forward again: not inside `Alike`
        with no_autocast(given[0].device), Alike(given, ctx.kind):  # products as in forward
            return _run_backward(ctx, saved, *grads)


# Without PyTorch's search of all arguments for transforms: where this layer runs, none is on.
_apply: Any = super(torch.autograd.Function, _PlaceLayer).apply


def _run(
    options: LayerOptions,
    packed: Packed,
    x: Tensor,
    base: Tensor | None,
    state: Tensor,
    resets: Tensor | None,
    norm: Tensor,
    norm_bias: Tensor,
    residual_gate: Tensor,
    *,
    keep: bool,
) -> tuple[tuple[Tensor, Tensor], _Launches, _Saved, PlaceInputs, list[Tensor]]:
    """The layer forward: the results, and what the backward needs."""
    # Autocast is left on: it takes time to leave, and every product here has its type.
    x, state = x.contiguous(), state.contiguous()
    small = packed.small
    normed = layer_norm(x, norm, norm_bias, options.epsilon, options.products)
    said = torch.mm(normed, packed.to_heads)
    do = _launches_of(packed, state, base is not None)
    inputs = _heads(do, said, x.shape[:2], base, state, resets, small, options)
    reads, after, kept = backend.forward(
        inputs, keep=keep, products=options.products, fresh=options.fresh
    )
    readout = _readout(do, reads, said, small, options)
    m = torch.mm(readout, packed.to_output)
    out, seeds = add_each(x, m, residual_gate, options.drop)
    saved = _Saved(x, said, reads, readout, seeds, norm, norm_bias, residual_gate)
    return (out, after), do, saved, inputs, kept


def _run_backward(
    ctx: Any, tensors: Sequence[Tensor], grad_out: Tensor | None, grad_state: Tensor | None
) -> tuple[Any, ...]:
    """The gradients of what `_PlaceLayer.forward` was given."""
    options, do, packed = ctx.options, ctx.launches, ctx.packed
    saved = _Saved(*tensors[:SAVED])
    inputs = PlaceInputs(*tensors[SAVED:KEPT], options.rule, options.wrap)
    x, said, products = saved.x, saved.said, options.products
    grad_out = torch.zeros_like(x) if grad_out is None else grad_out.contiguous()
    grad_state = None if grad_state is None else grad_state.contiguous()
    # Through the gated sum and the readout.
    by_m = each_backward(grad_out, saved.residual_gate, saved.seeds, options.drop, products)
    by_output = torch.mm(by_m.t(), saved.readout)
    by_said = torch.empty_like(said)
    by_out = torch.mm(by_m, packed.output)
    by_reads, by_readout = _readout_backward(do, by_out, saved, packed.small, by_said, options)
    # Through the recurrence and the heads.
    kept = list(tensors[KEPT:])
    found = backend.backward(by_reads, grad_state, inputs, kept, products=products, in_parts=True)
    by_bias = _heads_backward(do, said, packed.small, found, by_said)
    # Through the norm, where what came past it joins; the normed tokens once more on the way.
    by_normed = torch.mm(by_said, packed.heads)
    normed = by_m  # as large, and of no use any more
    by_x, by_norm = layer_norm_backward(
        x, saved.norm, options.epsilon, by_normed, grad_out, saved.norm_bias, normed
    )
    by_heads = torch.mm(by_said.t(), normed)
    by_base = None
    if ctx.needs_input_grad[4]:
        by_base = found.write_at if found.read_at is None else found.write_at + found.read_at
    parts = by_norm, by_bias, by_readout, or_else(found.width, by_norm)
    own, by_memory = _gathered(do, parts, inputs.width, by_heads, by_output, packed.small.dtype)
    # Autograd brings a gradient to the type of its weight, where that is another.
    return None, None, None, by_x, by_base, found.state, None, *own, by_memory


class _Launches(NamedTuple):
    places: int
    """That a token learns: none, one to write and read, or two."""
    gaussian: bool
    heads: BoundKernel
    heads_backward: BoundKernel
    readout: BoundKernel
    readout_backward: BoundKernel
    gather: BoundKernel
    gather_grid: tuple[int, int]
    own_sizes: tuple[int, ...]
    """Of the layer's norm, its bias, and γ; and their sum."""
    own_size: int
    memory_size: int
    """Of all weights of the memory."""


@functools.lru_cache(maxsize=64)
def _launches(d: int, H: int, C: int, n: int, R: int, small: int, based: bool) -> _Launches:
    """The kernels around a memory of these sizes."""
    places, norm_at = (R - 2 * H - 2 * H * C) // (H * n), small - C
    gaussian = norm_at > 2 * H
    sizes = {"H": H, "C": C, "CP": triton.next_power_of_2(C), "R": R, "T": TOKENS}
    said = sizes | {"n": n, "LEARNED": places > 0, "SAME": places < 2}
    read = sizes | {"NORM_AT": norm_at}
    gathered = {"D": d, "H": H, "C": C, "R": R, "NORM_AT": norm_at}
    columns = blocks(max(2 * d, 2 * H, C + 1), SUM_COLUMNS)
    return _Launches(
        places,
        gaussian,
        bind(heads_kernel, **said, GAUSSIAN=gaussian, HAS_BASE=based),
        bind(heads_backward_kernel, **said),
        bind(readout_kernel, **read),
        bind(readout_backward_kernel, **read),
        bind(gather_kernel, **gathered, ROWS=SUM_ROWS, COLUMNS=SUM_COLUMNS, COPIED=COPIED),
        (max(columns, blocks(max(R, H * C) * d, COPIED)), 6),
        (d, d, 1),
        2 * d + 1,
        (R + H * C) * d + small,
    )


def _launches_of(packed: Packed, state: Tensor, based: bool) -> _Launches:
    (R, d), (H, *grid, C) = packed.heads.shape, state.shape[1:]
    return _launches(d, H, C, len(grid), R, packed.small.shape[0], based)


def _heads(
    do: _Launches, said: Tensor, tokens: Sequence[int], base: Tensor | None, state: Tensor,
    resets: Tensor | None, small: Tensor, options: LayerOptions,
) -> PlaceInputs:  # fmt: skip
    """What the tokens say to the recurrence; their content in the type of products."""
    H, *grid, C = state.shape[1:]
    write_at = state.new_empty(*tokens, H, len(grid))
    read_at = torch.empty_like(write_at) if do.places == 2 else None
    rate, log_keep = state.new_empty(*tokens, H), state.new_empty(*tokens, H)
    content = said.new_empty(*tokens, H, C)
    width = state.new_empty(H) if do.gaussian else None
    base = None if base is None else base.contiguous()
    do.heads(
        (blocks(said.shape[0], TOKENS), H),
        (
            said, or_else(base, write_at), small, write_at, or_else(read_at, write_at), rate,
            log_keep, content, or_else(width, write_at),
        ),
        (said.shape[0],),
    )  # fmt: skip
    return PlaceInputs(
        write_at, read_at, content, rate, log_keep, width, state, resets, options.rule,
        options.wrap,
    )  # fmt: skip


def _heads_backward(
    do: _Launches, said: Tensor, small: Tensor, found: PlaceInputs, by_said: Tensor
) -> Tensor:
    """Fills `by_said` but for the gate's columns; parts (programs, 2, H) for rate and keep."""
    H = found.rate.shape[2]
    programs = blocks(said.shape[0], TOKENS)
    by_bias = found.rate.new_empty(programs, 2, H)
    do.heads_backward(
        (programs, H),
        (
            said, small, found.write_at, or_else(found.read_at, found.write_at), found.rate,
            found.log_keep, found.content, by_said, by_bias,
        ),
        (said.shape[0],),
    )  # fmt: skip
    return by_bias


def _readout(
    do: _Launches, reads: Tensor, said: Tensor, small: Tensor, options: LayerOptions
) -> Tensor:
    """What W_out takes, (B·N, H·C)."""
    tokens, (H, C) = said.shape[0], reads.shape[2:]
    out = said.new_empty(tokens, H * C)
    do.readout(
        (blocks(tokens, TOKENS), H),
        (reads, said, small, out),
        (tokens, float(options.read_epsilon)),
    )
    return out


def _readout_backward(
    do: _Launches, by_out: Tensor, saved: _Saved, small: Tensor, by_said: Tensor,
    options: LayerOptions,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """What reads receive, and parts for the norm's weight and γ; fills the gate's columns."""
    reads, tokens = saved.reads, saved.said.shape[0]
    H, C = reads.shape[2:]
    programs, by_reads = blocks(tokens, TOKENS), torch.empty_like(reads)
    parts = reads.new_empty(programs * H, C + 1)
    do.readout_backward(
        (programs, H),
        (reads, saved.said, small, saved.residual_gate, by_out, by_reads, by_said, parts),
        (tokens, float(options.read_epsilon)),
    )
    return by_reads, parts


def _gathered(
    do: _Launches, parts: tuple[Tensor, ...], width: Tensor | None, by_heads: Tensor,
    by_output: Tensor, dtype: torch.dtype,
) -> tuple[Sequence[Tensor], Tensor]:  # fmt: skip
    """What the layer's own weights receive, and all of the memory's as `Packed` has them."""
    by_norm = parts[0]
    by_layer = by_norm.new_empty(do.own_size)
    by_memory = by_norm.new_empty(do.memory_size, dtype=dtype)
    do.gather(
        do.gather_grid,
        (*parts, or_else(width, by_norm), by_heads, by_output, by_layer, by_memory),
        tuple([part.size(0) for part in parts]),
    )
    return by_layer.split_with_sizes(do.own_sizes), by_memory
