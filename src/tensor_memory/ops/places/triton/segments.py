"""The forward of rule "linear" on small grids, without stored addresses; `dense.py` has the rest.

The sequence is cut into segments, and those into pieces. One launch finds how the tokens of every
piece change the state; the next gives each segment the state before it and goes through its chunks,
reading.

An address is the product of one factor per axis. Those are stored side by side, F numbers a place.
A product with a matrix of zeros and ones gives each voxel the factor of one of its axes; inner
products of addresses are products of those along the axes. A program is one warp. The state is held
as (C, V) and reads as (C, L), so that the result of a product is the operand of the next one in the
registers where it is: what moves between threads is what is loaded and stored.

Letters: B batch, N tokens, H heads, L tokens of a chunk, V voxels, C channels, F columns of
factors, padded K. A program is one segment or piece of a row and head. `from`, `to` and `carry` are
the decays of `dense.py`, φ and ψ the addresses to write and to read at.
"""

# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# pyright: reportPossiblyUnboundVariable=false
from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tensor_memory.ops.launch import BoundKernel, blocks, or_else
from tensor_memory.ops.places.inputs import PlaceInputs
from tensor_memory.ops.places.triton.addresses import coordinate, factor
from tensor_memory.ops.places.triton.dense import (
    decay_between,
    decays,
    of_tokens,
    product,
    rows,
    store_rows,
)
from tensor_memory.ops.places.triton.plan import LENGTH, Plan, low_dtype

MOST_VOXELS, MOST_CHANNELS, MOST_COLUMNS = 64, 32, 16
"""V, C and K that a warp holds in registers."""
TYPES = (torch.bfloat16,)
"""Of the products; in float32 three for one would need more registers than there are."""
PROGRAMS, MOST_SEGMENTS, PIECES = 512, 16, 2
"""So many warps, and PIECES times as many in the first launch, keep 132 multiprocessors busy. Each
segment reads the ends of all pieces before."""
MOST_VALUES = 2**31
"""N · H · C, or N · H · n: within a row tokens are counted in 32 bits."""


@triton.jit
def chunk_of(s, N, program, H: tl.constexpr, L: tl.constexpr, WHOLE: tl.constexpr):
    """A chunk's tokens within a row (N) and (N, H), and which of them are real."""
    t = s * L + tl.arange(0, L)
    real = tl.full([L], True, tl.int1) if WHOLE else t < N
    return t, t * H + (program % H).to(tl.int32), real


@triton.jit
def load_rows(pointer, index, real, B: tl.constexpr, WIDTH: tl.constexpr, WHOLE: tl.constexpr):
    """`rows` of all columns, padded to B; without masks where nothing is padded."""
    column = tl.arange(0, B)
    if WHOLE and B == WIDTH:
        found = tl.load(pointer + index[:, None] * WIDTH + column[None, :])
    else:
        found = rows(pointer, index, real, column, WIDTH)
    return found


@triton.jit
def store_factors(
    places, factors, t, token, real, w, n: tl.constexpr, GAUSSIAN: tl.constexpr, F: tl.constexpr,
    G0: tl.constexpr, G1: tl.constexpr, G2: tl.constexpr, G3: tl.constexpr,
    P0: tl.constexpr, P1: tl.constexpr, P2: tl.constexpr, P3: tl.constexpr,
    W0: tl.constexpr, W1: tl.constexpr, W2: tl.constexpr, W3: tl.constexpr,
):  # fmt: skip
    """The factors of some places to rows (L, F), the last axis first."""
    f3, _, _ = factor(coordinate(places, token, real, 3, n), w, G3, W3, P3, GAUSSIAN)
    store_rows(factors, t, real, tl.arange(0, P3), F, f3)
    if n > 1:
        f2, _, _ = factor(coordinate(places, token, real, 2, n), w, G2, W2, P2, GAUSSIAN)
        store_rows(factors, t, real, P3 + tl.arange(0, P2), F, f2)
    if n > 2:
        f1, _, _ = factor(coordinate(places, token, real, 1, n), w, G1, W1, P1, GAUSSIAN)
        store_rows(factors, t, real, P3 + P2 + tl.arange(0, P1), F, f1)
    if n > 3:
        f0, _, _ = factor(coordinate(places, token, real, 0, n), w, G0, W0, P0, GAUSSIAN)
        store_rows(factors, t, real, P3 + P2 + P1 + tl.arange(0, P0), F, f0)


@triton.jit
def picks(
    A: tl.constexpr, dtype: tl.constexpr, V: tl.constexpr, VB: tl.constexpr, K: tl.constexpr,
    G1: tl.constexpr, G2: tl.constexpr, G3: tl.constexpr,
    P1: tl.constexpr, P2: tl.constexpr, P3: tl.constexpr,
):  # fmt: skip
    """(V, K) with a one where a voxel takes its factor of an axis from."""
    voxel, column = tl.arange(0, VB), tl.arange(0, K)
    if A == 3:
        at = voxel % G3
    elif A == 2:
        at = voxel // G3 % G2 + P3
    elif A == 1:
        at = voxel // (G3 * G2) % G1 + (P3 + P2)
    else:
        at = voxel // (G3 * G2 * G1) + (P3 + P2 + P1)
    taken = (at[:, None] == column[None, :]) & (voxel < V)[:, None]
    return tl.where(taken, 1.0, 0.0).to(dtype)


@triton.jit
def exact(a, b, MODE: tl.constexpr):
    """a @ b of factors, in the type that they are stored in."""
    return tl.dot(a, b) if a.dtype == tl.float16 else product(a, b, MODE)


@triton.jit
def by_voxel(pick0, pick1, pick2, pick3, f, n: tl.constexpr, MODE: tl.constexpr):
    """Addresses (V, L) of factors (L, K)."""
    f = tl.trans(f)
    found = exact(pick3, f, MODE)
    if n > 1:
        found *= exact(pick2, f, MODE)
    if n > 2:
        found *= exact(pick1, f, MODE)
    if n > 3:
        found *= exact(pick0, f, MODE)
    return found


@triton.jit
def by_token(pick0, pick1, pick2, pick3, f, n: tl.constexpr, MODE: tl.constexpr):
    """Addresses (L, V) of factors (L, K)."""
    found = exact(f, tl.trans(pick3), MODE)
    if n > 1:
        found *= exact(f, tl.trans(pick2), MODE)
    if n > 2:
        found *= exact(f, tl.trans(pick1), MODE)
    if n > 3:
        found *= exact(f, tl.trans(pick0), MODE)
    return found


@triton.jit
def along(q, f, begin: tl.constexpr, P: tl.constexpr, K: tl.constexpr, MODE: tl.constexpr):
    """Inner products (L, L) of factors (L, K) along one axis."""
    column = tl.arange(0, K)
    mine = (column >= begin) & (column < begin + P)
    return exact(q * tl.where(mine, 1.0, 0.0).to(q.dtype)[None, :], tl.trans(f), MODE)


@triton.jit
def overlap(
    q, f, n: tl.constexpr, P0: tl.constexpr, P1: tl.constexpr, P2: tl.constexpr, P3: tl.constexpr,
    K: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    """Inner products (L, L) of the addresses that read and write."""
    found = along(q, f, 0, P3, K, MODE)
    if n > 1:
        found *= along(q, f, P3, P2, K, MODE)
    if n > 2:
        found *= along(q, f, P3 + P2, P1, K, MODE)
    if n > 3:
        found *= along(q, f, P3 + P2 + P1, P0, K, MODE)
    return found


@triton.jit
def load_state(pointer, VB: tl.constexpr, CB: tl.constexpr, V: tl.constexpr, C: tl.constexpr):
    """A state (V, C) as (C, V)."""
    voxel = tl.arange(0, VB)
    return tl.trans(load_rows(pointer, voxel, voxel < V, CB, C, VB == V))


@triton.jit(do_not_specialize=["N", "length"])
def end_kernel(
    write_at, read_at, width, to_write, to_read, content, rate, log_keep, resets, start, ends, left,
    N, length,
    H: tl.constexpr, V: tl.constexpr, C: tl.constexpr, VB: tl.constexpr, CB: tl.constexpr,
    F: tl.constexpr, K: tl.constexpr, L: tl.constexpr, n: tl.constexpr,
    G0: tl.constexpr, G1: tl.constexpr, G2: tl.constexpr, G3: tl.constexpr,
    P0: tl.constexpr, P1: tl.constexpr, P2: tl.constexpr, P3: tl.constexpr,
    W0: tl.constexpr, W1: tl.constexpr, W2: tl.constexpr, W3: tl.constexpr,
    GAUSSIAN: tl.constexpr, SAME: tl.constexpr, HAS_START: tl.constexpr, HAS_RESETS: tl.constexpr,
    WHOLE: tl.constexpr, PIECES: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    """What a piece's writes leave at its end (B, H, pieces, V, C), and what is `left` of before.

    The first piece begins with the state, the others with nothing. Stores all factors.
    """
    program, piece, pieces = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    # What picks an axis' factor for every voxel: (V, K) each.
    dtype: tl.constexpr = to_write.dtype.element_ty
    pick0 = picks(0, dtype, V, VB, K, G1, G2, G3, P1, P2, P3)
    pick1 = picks(1, dtype, V, VB, K, G1, G2, G3, P1, P2, P3)
    pick2 = picks(2, dtype, V, VB, K, G1, G2, G3, P1, P2, P3)
    pick3 = picks(3, dtype, V, VB, K, G1, G2, G3, P1, P2, P3)
    voxel, channel = tl.arange(0, VB), tl.arange(0, CB)
    w = 1.0
    if GAUSSIAN:
        w = tl.load(width + program % H).to(tl.float32)
    row = program // H * N  # pointers go to this row, factors to this row and head
    write_at += row * H * n
    read_at += row * H * n
    to_write += program * N * F
    to_read += program * N * F
    content += row * H * C
    rate += row * H
    log_keep += row * H
    resets += row
    first, stop = piece * length // L, tl.cdiv(min((piece + 1) * length, N), L)
    # The factors of this piece's places, to memory: (L, F) a chunk.
    for s in tl.range(first, stop, num_stages=2):
        t, token, real = chunk_of(s, N, program, H, L, WHOLE)
        store_factors(
            write_at, to_write, t, token, real, w, n, GAUSSIAN, F,
            G0, G1, G2, G3, P0, P1, P2, P3, W0, W1, W2, W3,
        )  # fmt: skip
        if not SAME:
            store_factors(
                read_at, to_read, t, token, real, w, n, GAUSSIAN, F,
                G0, G1, G2, G3, P0, P1, P2, P3, W0, W1, W2, W3,
            )  # fmt: skip
    tl.debug_barrier()  # other threads of this program load them
    if piece < pieces - PIECES:  # nobody reads what those of the last segment leave here
        # S (C, V) and what is left of it at the end, the product of all carries.
        S, carried = tl.zeros([CB, VB], tl.float32), 1.0
        if HAS_START:
            known = voxel < tl.where(piece == 0, V, 0)
            S = tl.trans(rows(start + program * V * C, voxel, known, channel, C))
        for s in range(first, stop):
            t, token, real = chunk_of(s, N, program, H, L, WHOLE)
            keep, beta = of_tokens(log_keep, token, real), of_tokens(rate, token, real)
            f = load_rows(to_write, t, real, K, F, WHOLE)
            v = load_rows(content, token, real, CB, C, WHOLE)
            _, _, _, to_state, carry = decays(keep, resets, t, real, HAS_RESETS, L)
            # S ← carry S + vᵀ (to β φ)   (C, V)
            phi = by_voxel(pick0, pick1, pick2, pick3, f, n, MODE) * (to_state * beta)[None, :]
            S = carry * S + product(tl.trans(v), tl.trans(phi), MODE)
            carried *= carry
        at = program * pieces + piece
        store_rows(ends + at * V * C, voxel, voxel < V, channel, C, tl.trans(S))
        tl.store(left + at, carried)


@triton.jit(do_not_specialize=["N", "length"])
def segment_kernel(
    to_write, to_read, content, rate, log_keep, resets, start, ends, left, before, after, reads,
    N, length,
    H: tl.constexpr, V: tl.constexpr, C: tl.constexpr, VB: tl.constexpr, CB: tl.constexpr,
    F: tl.constexpr, K: tl.constexpr, L: tl.constexpr, n: tl.constexpr,
    G1: tl.constexpr, G2: tl.constexpr, G3: tl.constexpr,
    P0: tl.constexpr, P1: tl.constexpr, P2: tl.constexpr, P3: tl.constexpr,
    KEEP: tl.constexpr, HAS_START: tl.constexpr, HAS_RESETS: tl.constexpr, WHOLE: tl.constexpr,
    PIECES: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    """What a segment's tokens read, chunk by chunk; the last segment stores the state `after`.

    KEEP stores the states `before` its chunks (B, H, S, V, C).
    """
    program, segments = tl.program_id(0).to(tl.int64), tl.num_programs(1)
    segment = segments - 1 - tl.program_id(1)  # those with most to do come first
    # What picks an axis' factor for every voxel: (V, K) each.
    dtype: tl.constexpr = to_write.dtype.element_ty
    pick0 = picks(0, dtype, V, VB, K, G1, G2, G3, P1, P2, P3)
    pick1 = picks(1, dtype, V, VB, K, G1, G2, G3, P1, P2, P3)
    pick2 = picks(2, dtype, V, VB, K, G1, G2, G3, P1, P2, P3)
    pick3 = picks(3, dtype, V, VB, K, G1, G2, G3, P1, P2, P3)
    voxel, channel = tl.arange(0, VB), tl.arange(0, CB)
    # The state before this segment: through all earlier pieces, S ← left S + end   (C, V)
    S = tl.zeros([CB, VB], tl.float32)
    if HAS_START and segment == 0:
        S = load_state(start + program * V * C, VB, CB, V, C)
    for earlier in tl.range(0, segment * PIECES, loop_unroll_factor=2):  # two loads at a time
        at = program * segments * PIECES + earlier
        S = tl.load(left + at) * S + load_state(ends + at * V * C, VB, CB, V, C)
    row = program // H * N  # pointers go to this row, factors to this row and head
    to_write += program * N * F
    to_read += program * N * F
    content += row * H * C
    rate += row * H
    log_keep += row * H
    resets += row
    reads += row * H * C
    # Chunk by chunk: read, then write.
    chunks, per_segment = tl.cdiv(N, L), PIECES * length // L
    for s in range(segment * per_segment, min((segment + 1) * per_segment, chunks)):
        t, token, real = chunk_of(s, N, program, H, L, WHOLE)
        keep, beta = of_tokens(log_keep, token, real), of_tokens(rate, token, real)
        f = load_rows(to_write, t, real, K, F, WHOLE)
        q = load_rows(to_read, t, real, K, F, WHOLE)
        v = tl.trans(load_rows(content, token, real, CB, C, WHOLE))  # (C, L)
        g, part, from_state, to_state, carry = decays(keep, resets, t, real, HAS_RESETS, L)
        if KEEP:
            at = program * chunks + s
            store_rows(before + at * V * C, voxel, voxel < V, channel, C, tl.trans(S))
        # r_t = Σ_{s ≤ t} e^{g_t − g_s} (ψ_t·φ_s) β_s v_s + e^{g_t} ψ_t S
        attention = overlap(q, f, n, P0, P1, P2, P3, K, MODE)  # (L, L)
        attention *= decay_between(g, part, L) * beta[None, :]
        psi = by_token(pick0, pick1, pick2, pick3, q, n, MODE)  # (L, V)
        psi_S = product(S, tl.trans(psi), MODE)  # (C, L)
        r = product(v, tl.trans(attention), MODE) + from_state[None, :] * psi_S
        store_rows(reads, token, real, channel, C, tl.trans(r))
        # S ← carry S + vᵀ (to β φ)   (C, V)
        phi = by_voxel(pick0, pick1, pick2, pick3, f, n, MODE) * (to_state * beta)[None, :]
        S = carry * S + product(v, tl.trans(phi), MODE)
    if segment == segments - 1:
        store_rows(after + program * V * C, voxel, voxel < V, channel, C, tl.trans(S))


def serves(inputs: PlaceInputs, plan: Plan) -> bool:
    """Whether a program holds a state of this size in registers."""
    _, N, H, C = inputs.content.shape
    if plan["DELTA"] or plan.products not in TYPES or plan["V"] > MOST_VOXELS:
        return False
    if plan["K"] > MOST_COLUMNS or C > MOST_CHANNELS:
        return False
    return N * H * max(C, plan["n"]) < MOST_VALUES


def forward(
    inputs: PlaceInputs, plan: Plan, *, keep: bool, fresh: bool = False
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Reads, the state after, and with `keep` what the backward of `dense` needs.

    `fresh`: the state before is empty, and its tensor is not read.
    """
    (B, N, H, C), do = inputs.content.shape, plan.once(_launches)
    content, rate, log_keep, state = inputs.content, inputs.rate, inputs.log_keep, inputs.state
    after, reads = torch.empty_like(state), inputs.empty_reads()
    before, same = reads, inputs.read_at is None
    if keep:
        shape = (B, H, blocks(N, LENGTH), plan["V"], C)
        before = rate.new_empty(*shape, dtype=low_dtype(plan.products))
    # Factors are at most 1, so that float16 keeps eight times as much of them as bfloat16.
    dtype = torch.float16 if plan.products == torch.bfloat16 else torch.float32
    to_write = content.new_empty(B, H, N, plan["F"], dtype=dtype)
    to_read = to_write if same else torch.empty_like(to_write)
    marks, width = or_else(inputs.resets, rate), or_else(inputs.width, rate)
    length, segments = _cut(B * H, N)
    pieces = segments * PIECES
    ends, left = rate.new_empty(B, H, pieces, plan["V"], C), rate.new_empty(B, H, pieces)
    whole = N % LENGTH == 0
    do.end[fresh, whole, same](
        (B * H, pieces),
        (
            inputs.write_at, inputs.asked_at, width, to_write, to_read, content, rate, log_keep,
            marks, state, ends, left,
        ),
        (N, length),
    )  # fmt: skip
    do.segment[fresh, whole, keep](
        (B * H, segments),
        (
            to_write, to_read, content, rate, log_keep, marks, state, ends, left, before, after,
            reads,
        ),
        (N, length),
    )  # fmt: skip
    return reads, after, [before] if keep else []


class _Launches(NamedTuple):
    """The kernels, by whether the state is fresh and all chunks are whole."""

    end: dict[tuple[bool, bool, bool], BoundKernel]
    """And by whether places to write are those to read."""
    segment: dict[tuple[bool, bool, bool], BoundKernel]
    """And by whether states are kept."""


def _launches(plan: Plan) -> _Launches:
    found = _Launches({}, {})
    for choice in itertools.product((False, True), repeat=3):
        fresh, whole, last = choice
        how = {"warps": 1, "PIECES": PIECES, "HAS_START": not fresh, "WHOLE": whole}
        found.end[choice] = plan.bound(end_kernel, stages=1, SAME=last, **how)
        found.segment[choice] = plan.bound(segment_kernel, stages=3, KEEP=last, **how)
    return found


def _cut(programs: int, N: int) -> tuple[int, int]:
    """Tokens of a piece, whole chunks, and how many segments there are."""
    wanted = min(MOST_SEGMENTS, max(1, PROGRAMS // programs))
    length = blocks(blocks(N, wanted * PIECES), LENGTH) * LENGTH
    return length, blocks(N, length * PIECES)
