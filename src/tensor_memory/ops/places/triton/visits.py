"""Rule "linear" with the linear kernel on large grids: by voxel, not by chunk.

A token visits the E = 2ⁿ corners of its place. Sorted by voxel, and by token within a voxel, all
visits of a row and head are one list, in which the state of a voxel goes from visit to visit: a
scan along the list finds what every visit meets. The grid as a whole is passed over once, for the
voxels that nobody visited. The gradient is the same scan from the end of the list.

Later tokens shift the list, and must not change how earlier visits are summed up. So the visits of
a voxel that a tile holds are all of them, or begin with the tile; and the sums within a tile go
from visit to visit, in float32.

Letters: B batch, N tokens, H heads, V voxels, C channels, n axes; K visits of a token, E or 2 E:
first those of its write, then those of its read where that has a place of its own. `documents`
counts the resets up to a token: across them nothing is kept. `by_x` and dx are the gradient of x.
"""

# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# pyright: reportPossiblyUnboundVariable=false
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tensor_memory.ops.launch import blocks, or_else
from tensor_memory.ops.places.inputs import PlaceInputs
from tensor_memory.ops.places.triton.dense import (
    of_tokens,
    product,
    rows,
    store_rows,
    tokens_of,
)
from tensor_memory.ops.places.triton.plan import Plan
from tensor_memory.ops.places.triton.sparse import (
    SUMMED,
    corner_rows,
    corner_weights,
    keep_gradient,
)

TOKENS = 16
"""Of a program that goes through tokens."""
PIECE, CHANNELS = 256, 32
"""Visits of the list, and channels, that a program has."""
VOXELS = 64
"""Of a program that goes through the grid."""


@triton.jit(do_not_specialize=["N"])
def visit_kernel(
    write_at, read_at, voxels, weights, visited, N,
    H: tl.constexpr, V: tl.constexpr, T: tl.constexpr, E: tl.constexpr, K: tl.constexpr,
    n: tl.constexpr,
    G0: tl.constexpr, G1: tl.constexpr, G2: tl.constexpr, G3: tl.constexpr,
    W0: tl.constexpr, W1: tl.constexpr, W2: tl.constexpr, W3: tl.constexpr,
):  # fmt: skip
    """Visits (B, H, N, K) of some tokens, of writes or of reads; 1 in `visited` (B, H, V)."""
    program, s, kind = tl.program_id(1).to(tl.int64), tl.program_id(0), tl.program_id(2)
    _, token, real = tokens_of(program, s, N, H, T)
    places = write_at
    if kind == 1:
        places = read_at
    index, weight = corner_weights(places, token, real, -1, n, G0, G1, G2, G3, W0, W1, W2, W3)
    # To columns of rows (B, H, N) of K visits.
    t, column = program * N + s * T + tl.arange(0, T), kind * E + tl.arange(0, E)
    store_rows(voxels, t, real, column, K, index)
    store_rows(weights, t, real, column, K, weight)
    tl.store(visited + program * V + index, 1, mask=real[:, None])


@triton.jit(do_not_specialize=["N"])
def total_kernel(
    log_keep, resets, total, documents, N,
    H: tl.constexpr, T: tl.constexpr, HAS_RESETS: tl.constexpr,
):  # fmt: skip
    """The sums of log α and of resets up to each token of a row and head.

    In float64: a few tokens that forget everything would leave no digits for the others.
    """
    program = tl.program_id(0).to(tl.int64)
    decayed, document = tl.full([], 0.0, tl.float64), 0
    for begin in range(0, N, T):
        row_token, token, real = tokens_of(program, begin // T, N, H, T)
        keep = of_tokens(log_keep, token, real).to(tl.float64)
        tl.store(total + token, decayed + tl.cumsum(keep, axis=0), mask=real)
        decayed += tl.sum(keep)
        if HAS_RESETS:
            reset = tl.load(resets + row_token, mask=real, other=0).to(tl.int32)
            tl.store(documents + row_token, document + tl.cumsum(reset, axis=0), mask=real)
            document += tl.sum(reset)


@triton.jit
def decay(change):
    """What is left after a change of the sum of log α, which is at most 0 where it matters."""
    return tl.exp(tl.minimum(change.to(tl.float32), 0.0))


@triton.jit
def voxel_at(voxels, i, visits, BACKWARD: tl.constexpr):
    """The voxels of some visits of the list in the order of the scan, -1 where there is none."""
    at = visits - 1 - i if BACKWARD else i
    return tl.load(voxels + at, mask=(i >= 0) & (i < visits), other=-1).to(tl.int32)


@triton.jit
def after_voxel(voxels, i, visits, L: tl.constexpr, BACKWARD: tl.constexpr):
    """The first visit from i on that is not to the voxel of the visit before i."""
    # L visits at a time: the list is sorted, so that those to this voxel come first.
    voxel, same = voxel_at(voxels, i - 1, visits, BACKWARD), L
    while same == L:
        ahead = i + tl.arange(0, L)
        known = (voxel_at(voxels, ahead, visits, BACKWARD) == voxel) & (ahead < visits)
        same = tl.sum(known.to(tl.int32))
        i += same
    return tl.minimum(i, visits)


@triton.jit
def visits_at(
    order, voxels, total, documents, row, head, i, visits,
    H: tl.constexpr, K: tl.constexpr, BACKWARD: tl.constexpr, HAS_RESETS: tl.constexpr,
):  # fmt: skip
    """Some visits of the list in the order of the scan: which, where, whose, decays and resets."""
    real = (i >= 0) & (i < visits)
    at = visits - 1 - i if BACKWARD else i
    visit = tl.load(order + at, mask=real, other=0).to(tl.int32)
    voxel = voxel_at(voxels, i, visits, BACKWARD)
    row_token = row + visit // K
    token = row_token * H + head
    document = tl.zeros(i.shape, tl.int32)
    if HAS_RESETS:
        document = tl.load(documents + row_token, mask=real, other=0)
    decayed = tl.load(total + token, mask=real, other=0.0)
    return real, visit, voxel, token, decayed, document


@triton.jit
def given(
    value, rate, weights, visit, token, gives, channel, C: tl.constexpr, WITH_RATE: tl.constexpr
):
    """What some visits add to their voxels, (visits, channels)."""
    scale = tl.load(weights + visit, mask=gives, other=0.0)
    if WITH_RATE:
        scale *= of_tokens(rate, token, gives)
    return scale[:, None] * rows(value, token, gives, channel, C)


@triton.jit(do_not_specialize=["N"])
def scan_kernel(
    order, voxels, weights, value, rate, total, documents, start, around, end, N,
    H: tl.constexpr, V: tl.constexpr, C: tl.constexpr, CB: tl.constexpr, L: tl.constexpr,
    E: tl.constexpr, K: tl.constexpr, BACKWARD: tl.constexpr, HAS_START: tl.constexpr,
    HAS_RESETS: tl.constexpr,
):  # fmt: skip
    """A piece of the list: S ← decay S + w β v at a write's visits; `around` gets S at a read's.

    BACKWARD, from the end: dS ← decay dS + w dr at a read's; `around` gets dS at a write's. `start`
    is what the voxels hold before, and the last visit of a voxel leaves what goes to `end`.
    """
    # The list of one row and head, and the state's channels that this program has.
    program = tl.program_id(0).to(tl.int64)
    channel, lane = tl.program_id(2) * CB + tl.arange(0, CB), tl.arange(0, L)
    visits, row, head = N * K, program // H * N, program % H
    order, voxels = order + program * visits, voxels + program * visits
    weights += program * visits
    start, end = start + program * V * C, end + program * V * C
    # The sums of log α, and of resets, where the scan begins and where it ends.
    first_total, last_total = 0.0, tl.load(total + (row + N - 1) * H + head)
    first_document, last_document = 0, 0
    if HAS_RESETS:
        last_document = tl.load(documents + row + N - 1)
    # Which visits of a token add to the state, from `gives` on, and which need it, from `takes` on;
    # `sign` makes a difference of sums of log α that of the later token and the earlier.
    gives, takes, sign = 0, K - E, 1.0
    if BACKWARD:
        gives, takes, sign = K - E, 0, -1.0
        first_total, last_total = last_total, first_total
        first_document, last_document = last_document, first_document
    # A voxel belongs to the piece that its visits begin in.
    length = tl.cdiv(visits, tl.num_programs(1))
    at = after_voxel(voxels, tl.program_id(1) * length, visits, L, BACKWARD)
    stop = after_voxel(voxels, (tl.program_id(1) + 1) * length, visits, L, BACKWARD)
    # The state (CB) after the last visit so far, without `start`, and which visit that was.
    carried_voxel, carried_document = tl.full([], -1, tl.int32), tl.zeros([], tl.int32)
    carried_decayed, carried = tl.zeros([], tl.float64), tl.zeros([CB], tl.float32)
    while at < stop:
        # A tile of L visits, and the voxel of the visit after each.
        i = at + lane
        real, visit, voxel, token, decayed, document = visits_at(
            order, voxels, total, documents, row, head, i, visits, H, K, BACKWARD, HAS_RESETS
        )
        following = voxel_at(voxels, i + 1, visits, BACKWARD)
        # A voxel that neither begins with the tile nor ends in it waits for the next one.
        last = tl.sum(tl.where(lane == L - 1, voxel, 0))
        ends = tl.sum(tl.where(lane == L - 1, following, 0)) != last
        begins = tl.sum(tl.where(lane == 0, voxel, 0)) == last
        taken = real & (voxel != tl.where(ends | begins, -2, last))
        count = tl.sum(taken.to(tl.int32))
        # What the visits add, w β v or w dr: (L, CB)
        kind = visit % K // E * E
        gave = real & (kind == gives)
        added = given(value, rate, weights, visit, token, gave, channel, C, not BACKWARD)
        # S at each visit: from the tile's visits to its voxel up to then, Σ e^{g_i − g_j} added_j,
        # and from the visits before the tile.   (L, CB)
        same_voxel, carries = voxel[:, None] == voxel[None, :], voxel == carried_voxel
        if HAS_RESETS:
            same_voxel &= document[:, None] == document[None, :]
            carries &= document == carried_document
        same_voxel &= i[:, None] >= i[None, :]
        between = tl.where(same_voxel, decay(sign * (decayed[:, None] - decayed[None, :])), 0.0)
        left = tl.where(carries, decay(sign * (decayed - carried_decayed)), 0.0)
        state = product(between, added, "ieee") + left[:, None] * carried[None, :]
        # The last visit taken hands on to the next tile.
        final = lane == count - 1
        carried = tl.sum(tl.where(final[:, None], state, 0.0), axis=0)
        carried_voxel = tl.sum(tl.where(final, voxel, 0))
        carried_decayed = tl.sum(tl.where(final, decayed, 0.0))
        carried_document = tl.sum(tl.where(final, document, 0))
        # What the voxel held at first joins here: every visit gets it from `start` itself.
        if HAS_START:
            left = tl.where(document == first_document, decay(sign * (decayed - first_total)), 0.0)
            state += left[:, None] * rows(start, voxel, real, channel, C)
        # Visits of this piece store S; the last one of a voxel what is left at the scan's end.
        mine = taken & (i < stop)
        store_rows(around, token * E + visit % E, mine & (kind == takes), channel, C, state)
        rest = tl.where(document == last_document, decay(sign * (last_total - decayed)), 0.0)
        store_rows(end, voxel, mine & (following != voxel), channel, C, rest[:, None] * state)
        at += count


@triton.jit(do_not_specialize=["N"])
def read_kernel(
    read_at, around, reads, N,
    H: tl.constexpr, C: tl.constexpr, CB: tl.constexpr, T: tl.constexpr, E: tl.constexpr,
    n: tl.constexpr,
    G0: tl.constexpr, G1: tl.constexpr, G2: tl.constexpr, G3: tl.constexpr,
    W0: tl.constexpr, W1: tl.constexpr, W2: tl.constexpr, W3: tl.constexpr,
):  # fmt: skip
    """What tokens read of the voxels around their places."""
    program, s = tl.program_id(1).to(tl.int64), tl.program_id(0)
    channel = tl.arange(0, CB)
    _, token, real = tokens_of(program, s, N, H, T)
    corner, exist = corner_rows(program, s, N, H, T, E)
    # r = Σ over the E corners of w S
    _, weight = corner_weights(read_at, token, real, -1, n, G0, G1, G2, G3, W0, W1, W2, W3)
    S = tl.reshape(rows(around, corner, exist, channel, C), [T, E, CB])
    store_rows(reads, token, real, channel, C, tl.sum(weight[:, :, None] * S, axis=1))


@triton.jit(do_not_specialize=["N"])
def settle_kernel(
    start, end, visited, total, documents, other, dots, N,
    H: tl.constexpr, V: tl.constexpr, C: tl.constexpr, CB: tl.constexpr, VB: tl.constexpr,
    HAS_START: tl.constexpr, HAS_RESETS: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """The voxels that nobody visited; with DOT the inner product with another grid, in parts."""
    program = tl.program_id(0).to(tl.int64)
    voxel, channel = tl.program_id(1) * VB + tl.arange(0, VB), tl.arange(0, CB)
    row, at = program // H * N + N - 1, program * V * C
    was_visited = tl.load(visited + program * V + voxel, mask=voxel < V, other=1) != 0
    # What is left of the start after all tokens, in voxels that no token touched: (VB, CB)
    left = decay(tl.load(total + row * H + program % H))
    if HAS_RESETS:
        left = tl.where(tl.load(documents + row) == 0, left, 0.0)
    values = tl.zeros([VB, CB], tl.float32)
    if HAS_START:
        values += left * rows(start + at, voxel, was_visited == 0, channel, C)
    store_rows(end + at, voxel, was_visited == 0, channel, C, values)
    # The visited ones, which the scan has stored, join for the inner product.
    if DOT:
        values += rows(end + at, voxel, was_visited & (voxel < V), channel, C)
        dot = tl.sum(values * rows(other + at, voxel, voxel < V, channel, C))
        tl.store(dots + program * tl.num_programs(1) + tl.program_id(1), dot)


@triton.jit(do_not_specialize=["N"])
def token_gradient_kernel(
    write_at, read_at, content, rate, around, by_around, by_reads,
    by_write_at, by_read_at, by_content, by_rate, lost, N,
    H: tl.constexpr, C: tl.constexpr, CB: tl.constexpr, T: tl.constexpr, E: tl.constexpr,
    SAME: tl.constexpr, n: tl.constexpr,
    G0: tl.constexpr, G1: tl.constexpr, G2: tl.constexpr, G3: tl.constexpr,
    W0: tl.constexpr, W1: tl.constexpr, W2: tl.constexpr, W3: tl.constexpr,
):  # fmt: skip
    """What tokens receive, given S where they read and dS where they wrote.

    `lost` (B, N, H) gets ⟨r, dr⟩ − ⟨v, dv⟩, for `keep_gradient_kernel`.
    """
    program, s = tl.program_id(1).to(tl.int64), tl.program_id(0)
    channel = tl.arange(0, CB)
    _, token, real = tokens_of(program, s, N, H, T)
    corner, exist = corner_rows(program, s, N, H, T, E)
    v, beta = rows(content, token, real, channel, C), of_tokens(rate, token, real)
    dr = rows(by_reads, token, real, channel, C)
    S = tl.reshape(rows(around, corner, exist, channel, C), [T, E, CB])
    dS = tl.reshape(rows(by_around, corner, exist, channel, C), [T, E, CB])
    # u = β v, with du = Σ over the corners of w dS
    _, weight = corner_weights(write_at, token, real, -1, n, G0, G1, G2, G3, W0, W1, W2, W3)
    du = tl.sum(weight[:, :, None] * dS, axis=1)
    dbeta = tl.sum(v * du, axis=1)
    # What the weights of the corners receive, (T, E), and the places through them.
    by_write = tl.sum(dS * (beta[:, None] * v)[:, None, :], axis=2)
    by_read = tl.sum(S * dr[:, None, :], axis=2)
    if not SAME:
        _, weight = corner_weights(read_at, token, real, -1, n, G0, G1, G2, G3, W0, W1, W2, W3)
    # ⟨r, dr⟩ − ⟨v, dv⟩
    loses = tl.sum(weight * by_read, axis=1) - beta * dbeta
    if SAME:
        by_write += by_read
    # Coordinate by coordinate: the slopes of the weights along its axis.
    for A in tl.static_range(4 - n, 4):
        _, slope = corner_weights(write_at, token, real, A, n, G0, G1, G2, G3, W0, W1, W2, W3)
        tl.store(by_write_at + token * n + (3 - A), tl.sum(slope * by_write, axis=1), mask=real)
        if not SAME:
            _, slope = corner_weights(read_at, token, real, A, n, G0, G1, G2, G3, W0, W1, W2, W3)
            tl.store(by_read_at + token * n + (3 - A), tl.sum(slope * by_read, axis=1), mask=real)
    store_rows(by_content, token, real, channel, C, beta[:, None] * du)
    tl.store(by_rate + token, dbeta, mask=real)
    tl.store(lost + token, loses, mask=real)


class Kept(NamedTuple):
    """What a backward needs beside the inputs."""

    order: Tensor
    """(B, H, N·K) visits by voxel, then by token."""
    voxels: Tensor
    """(B, H, N·K) in that order."""
    weights: Tensor
    """(B, H, N·K) by token."""
    visited: Tensor
    """(B, H, V)"""
    total: Tensor
    """(B, N, H) the sum of log α up to each token."""
    around: Tensor
    """(B, N, H, E, C) the state at the corners of the read places, after the write.

    In float32, for `keep_gradient`: of a token that reads where it writes, ⟨r, dr⟩ and ⟨v, dv⟩
    hardly differ, and what rounding leaves adds up along the row.
    """
    documents: Tensor | None = None
    """(B, N) the number of resets up to each token, where there are any."""

    @property
    def tensors(self) -> list[Tensor]:
        """Those there are."""
        return [tensor for tensor in self if tensor is not None]


def visits_per_token(inputs: PlaceInputs) -> int:
    """K: the corners of its write, and those of its read where that has a place of its own."""
    return 2 ** len(inputs.grid) * (1 if inputs.read_at is None else 2)


def empty_kept(inputs: PlaceInputs, products: torch.dtype) -> list[Tensor]:
    """Uninitialised tensors like those `forward` keeps."""
    (B, N, H, C), E = inputs.content.shape, 2 ** len(inputs.grid)
    new, V = inputs.rate.new_empty, inputs.state[0, 0, ..., 0].numel()
    visits = (B, H, N * visits_per_token(inputs))
    kept = Kept(
        new(visits, dtype=torch.int64),
        new(visits, dtype=torch.int16 if V < 2**15 else torch.int32),  # the shorter sorts faster
        new(visits),
        new(B, H, V, dtype=torch.int8),
        new(B, N, H, dtype=torch.float64),
        new(B, N, H, E, C),
        None if inputs.resets is None else new(B, N, dtype=torch.int32),
    )
    return kept.tensors


def forward(inputs: PlaceInputs, plan: Plan, *, keep: bool) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Reads, the state after, and with `keep` what `backward` needs."""
    B, N, H, _ = inputs.content.shape
    kept = Kept(*empty_kept(inputs, plan.products))
    reads, after = inputs.empty_reads(), torch.empty_like(inputs.state)
    voxels, K = torch.empty_like(kept.voxels), kept.voxels.shape[-1] // N
    plan.bound(visit_kernel, T=TOKENS, K=K)(
        (blocks(N, TOKENS), B * H, K // plan["E"]),
        (inputs.write_at, inputs.asked_at, voxels, kept.weights, kept.visited.zero_()),
        (N,),
    )
    torch.sort(voxels, stable=True, out=(kept.voxels, kept.order))
    documents = or_else(kept.documents, kept.total)
    plan.bound(total_kernel, warps=4, T=SUMMED)(
        (B * H,), (inputs.log_keep, or_else(inputs.resets, documents), kept.total, documents), (N,)
    )
    _scan(plan, inputs, kept, inputs.content, inputs.state, kept.around, after)
    plan.bound(read_kernel, T=TOKENS)(
        (blocks(N, TOKENS), B * H), (inputs.asked_at, kept.around, reads), (N,)
    )
    _settle(plan, inputs, kept, inputs.state, after)
    return reads, after, kept.tensors if keep else []


def _scan(
    plan: Plan,
    inputs: PlaceInputs,
    kept: Kept,
    value: Tensor,
    start: Tensor | None,
    around: Tensor,
    end: Tensor,
    BACKWARD: bool = False,
) -> None:
    (B, N, H, C), visits = inputs.content.shape, kept.weights.shape[-1]
    plan.bound(
        scan_kernel, warps=1, CB=min(CHANNELS, plan["CB"]), K=visits // N,
        BACKWARD=BACKWARD, HAS_START=start is not None,
    )(
        (B * H, blocks(visits, PIECE), blocks(C, CHANNELS)),
        (
            kept.order, kept.voxels, kept.weights, value, inputs.rate, kept.total,
            or_else(kept.documents, kept.total), or_else(start, end), around, end,
        ),
        (N,),
    )  # fmt: skip


def _settle(
    plan: Plan,
    inputs: PlaceInputs,
    kept: Kept,
    start: Tensor | None,
    end: Tensor,
    other: Tensor | None = None,
) -> Tensor | None:
    """Fill the rest of `end`; return parts of its inner product with another grid."""
    B, N, H, _ = inputs.content.shape
    dots = end.new_empty(B * H, blocks(plan["V"], VOXELS))
    plan.bound(settle_kernel, VB=VOXELS, HAS_START=start is not None, DOT=other is not None)(
        tuple(dots.shape),
        (
            or_else(start, end), end, kept.visited, kept.total, or_else(kept.documents, kept.total),
            or_else(other, end), dots,
        ),
        (N,),
    )  # fmt: skip
    return None if other is None else dots


def backward(
    grad_reads: Tensor,
    grad_state: Tensor | None,
    inputs: PlaceInputs,
    kept: list[Tensor],
    plan: Plan,
) -> PlaceInputs:
    """The gradients in the places of the inputs."""
    B, N, H, _ = inputs.content.shape
    found, same = Kept(*kept), inputs.read_at is None
    by_state, by_around = torch.empty_like(inputs.state), torch.empty_like(found.around)
    _scan(plan, inputs, found, grad_reads, grad_state, by_around, by_state, BACKWARD=True)
    by_write_at, by_content, by_rate, lost = (
        torch.empty_like(t) for t in (inputs.write_at, inputs.content, inputs.rate, inputs.log_keep)
    )
    by_read_at = None if same else torch.empty_like(inputs.asked_at)
    plan.bound(token_gradient_kernel, warps=4, T=TOKENS, SAME=same)(
        (blocks(N, TOKENS), B * H),
        (
            inputs.write_at, inputs.asked_at, inputs.content, inputs.rate, found.around, by_around,
            grad_reads, by_write_at, or_else(by_read_at, by_write_at), by_content, by_rate, lost,
        ),
        (N,),
    )  # fmt: skip
    other = None if grad_state is None else inputs.state
    dots = _settle(plan, inputs, found, grad_state, by_state, other)
    by_log_keep = keep_gradient(plan, inputs, lost, dots)
    gradients = (by_write_at, by_read_at, by_content, by_rate, by_log_keep, None, by_state)
    return PlaceInputs._make((*gradients, None, None, None))
