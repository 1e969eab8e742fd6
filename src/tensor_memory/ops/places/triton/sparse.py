"""Kernels for the linear kernel on large grids: a token touches its 2ⁿ corners, and not the grid.

The state decays lazily: a voxel keeps the value of its last write, and when that was (`last`, the
sum of log α up to then, and `page`, how many resets up to then). Within a chunk every corner gets
what the whole chunk writes there, so that tokens which meet at a voxel store the same value and no
order matters. The grid as a whole is passed over once, at the end.

Letters: B batch, N tokens, H heads, S chunks of L tokens, V voxels, C channels, E = 2ⁿ corners of
a place; rows of L·E are the corners of a chunk's tokens.
"""

# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# pyright: reportPossiblyUnboundVariable=false, reportAssignmentType=false
from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tensor_memory.ops.launch import or_else
from tensor_memory.ops.places.inputs import PlaceInputs
from tensor_memory.ops.places.triton.dense import (
    decay_between,
    decays,
    inverse,
    of_tokens,
    product,
    rows,
    store_rows,
    tokens_of,
)
from tensor_memory.ops.places.triton.plan import (
    LENGTH,
    Plan,
    chunk_grid,
    low_dtype,
    make_plan,
)


@triton.jit
def corner_axis(
    places, token, real, A: tl.constexpr, n: tl.constexpr,
    G0: tl.constexpr, G1: tl.constexpr, G2: tl.constexpr, G3: tl.constexpr,
    W0: tl.constexpr, W1: tl.constexpr, W2: tl.constexpr, W3: tl.constexpr,
):  # fmt: skip
    """An axis of some tokens' corners (T, E): voxel, weight, the weight's slope by the place."""
    SIZE: tl.constexpr = G0 if A == 0 else (G1 if A == 1 else (G2 if A == 2 else G3))
    WRAP: tl.constexpr = W0 if A == 0 else (W1 if A == 1 else (W2 if A == 2 else W3))
    place = tl.load(places + token * n + (n - 1 - A), mask=real, other=0.0).to(tl.float32)
    at = (place + 1.0) * ((SIZE - 1) / 2)
    unit = tl.full(at.shape, (SIZE - 1) / 2, tl.float32)
    if WRAP:
        at -= tl.floor(at / SIZE) * SIZE
        low = tl.minimum(tl.floor(at), SIZE - 1.0)
    else:  # a place beyond the border moves nothing
        unit = tl.where((at >= 0.0) & (at <= SIZE - 1.0), unit, 0.0)
        at = tl.minimum(tl.maximum(at, 0.0), SIZE - 1.0)
        low = tl.minimum(tl.floor(at), SIZE - 2.0)
    upper = at - low
    size = tl.sqrt((1.0 - upper) * (1.0 - upper) + upper * upper)
    grown = (2.0 * upper - 1.0) / size
    side = (tl.arange(0, 2**n) >> (n - 1 - A)) & 1
    raw = tl.where(side[None, :] == 1, upper[:, None], 1.0 - upper[:, None])
    weight = raw / size[:, None]
    slope = tl.where(side[None, :] == 1, 1.0, -1.0) - weight * grown[:, None]
    voxel = (low.to(tl.int32)[:, None] + side[None, :]) % SIZE
    return voxel, weight, slope * (unit / size)[:, None]


@triton.jit(do_not_specialize=["N"])
def corner_kernel(
    write_at, read_at, write_index, write_weight, read_index, read_weight, N,
    H: tl.constexpr, T: tl.constexpr, n: tl.constexpr,
    G0: tl.constexpr, G1: tl.constexpr, G2: tl.constexpr, G3: tl.constexpr,
    W0: tl.constexpr, W1: tl.constexpr, W2: tl.constexpr, W3: tl.constexpr,
):  # fmt: skip
    """Corners (B, N, H, E) of some tokens: their voxels and weights, of writes or of reads."""
    program = tl.program_id(0).to(tl.int64)
    t = tl.program_id(1) * T + tl.arange(0, T)
    real = t < N
    token = (program // H * N + t) * H + program % H
    places, indices, weights = write_at, write_index, write_weight
    if tl.program_id(2) == 1:
        places, indices, weights = read_at, read_index, read_weight
    E: tl.constexpr = 2**n
    index = tl.zeros([T, E], tl.int32)
    weight = tl.zeros([T, E], tl.float32) + 1.0
    for A in tl.static_range(n):
        voxel, factor, _ = corner_axis(places, token, real, A, n, G0, G1, G2, G3, W0, W1, W2, W3)
        index = index * axis_size(A, G0, G1, G2, G3) + voxel
        weight *= factor
    corner = tl.arange(0, E)
    store_rows(indices, token, real, corner, E, index)
    store_rows(weights, token, real, corner, E, weight)


@triton.jit
def axis_size(
    A: tl.constexpr, G0: tl.constexpr, G1: tl.constexpr, G2: tl.constexpr, G3: tl.constexpr
):
    """Voxels along axis A."""
    SIZE: tl.constexpr = G0 if A == 0 else (G1 if A == 1 else (G2 if A == 2 else G3))
    return tl.full([1, 1], SIZE, tl.int32)


@triton.jit(do_not_specialize=["N"])
def corner_backward_kernel(
    write_at, read_at, by_write_weight, by_read_weight, by_write_at, by_read_at, N,
    H: tl.constexpr, T: tl.constexpr, n: tl.constexpr,
    G0: tl.constexpr, G1: tl.constexpr, G2: tl.constexpr, G3: tl.constexpr,
    W0: tl.constexpr, W1: tl.constexpr, W2: tl.constexpr, W3: tl.constexpr,
):  # fmt: skip
    """What places receive of the gradient of their corners' weights."""
    program = tl.program_id(0).to(tl.int64)
    t = tl.program_id(1) * T + tl.arange(0, T)
    real = t < N
    token = (program // H * N + t) * H + program % H
    places, by_weight, by_places = write_at, by_write_weight, by_write_at
    if tl.program_id(2) == 1:
        places, by_weight, by_places = read_at, by_read_weight, by_read_at
    E: tl.constexpr = 2**n
    given = rows(by_weight, token, real, tl.arange(0, E), E)
    for A in tl.static_range(n):
        _, _, rest = corner_axis(places, token, real, A, n, G0, G1, G2, G3, W0, W1, W2, W3)
        for other in tl.static_range(n):
            if other != A:
                _, factor, _ = corner_axis(
                    places, token, real, other, n, G0, G1, G2, G3, W0, W1, W2, W3
                )
                rest *= factor
        tl.store(by_places + token * n + (n - 1 - A), tl.sum(given * rest, axis=1), mask=real)


@triton.jit
def corner_rows(program, s, N, H: tl.constexpr, L: tl.constexpr, E: tl.constexpr):
    """A chunk's corners as rows of (B, N, H, E), and which are real: (L·E) each."""
    r = tl.arange(0, L * E)
    t = s * L + r // E
    token = (program // H * N + t) * H + program % H
    return token * E + r % E, (t >= 0) & (t < N)


@triton.jit
def held_at(
    buffer, last, page, voxel, real, channel, now, pages, C: tl.constexpr, HAS_RESETS: tl.constexpr
):
    """What voxels hold now: (rows, channels) of a buffer that decays lazily."""
    then = tl.load(last + voxel, mask=real, other=0.0, cache_modifier=".cg")
    left = tl.exp(now - then)
    if HAS_RESETS:
        left = tl.where(
            tl.load(page + voxel, mask=real, other=0, cache_modifier=".cg") == pages, left, 0.0
        )
    inside = real[:, None] & (channel < C)[None, :]
    where = buffer + voxel[:, None] * C + channel[None, :]
    return left[:, None] * tl.load(where, mask=inside, other=0.0, cache_modifier=".cg")


@triton.jit
def hold(
    buffer, last, page, voxel, real, channel, values, now, pages, C: tl.constexpr,
    HAS_RESETS: tl.constexpr,
):  # fmt: skip
    """Store what voxels hold now. Rows that meet at a voxel bring the same values."""
    store_rows(buffer, voxel, real, channel, C, values)
    tl.store(last + voxel, now, mask=real)
    if HAS_RESETS:
        tl.store(page + voxel, pages, mask=real)


@triton.jit
def weights_at(voxel, index, weight, token, real, L: tl.constexpr, E: tl.constexpr):
    """The addresses of a chunk's tokens at some voxels: (rows, L)."""
    found = tl.zeros([voxel.shape[0], L], tl.float32)
    for e in range(E):
        there = tl.load(index + token * E + e, mask=real, other=-1)
        w = tl.load(weight + token * E + e, mask=real, other=0.0)
        found += tl.where(voxel[:, None] == there[None, :], w[None, :], 0.0)
    return found


@triton.jit
def reached(met, values, MODE: tl.constexpr):
    """met (rows, L) @ values (L, C). Turned round: a product with few rows takes no wide
    instructions (see LENGTH), however many corners there are."""
    return tl.trans(product(tl.trans(values), tl.trans(met), MODE))


@triton.jit
def over_corners(values, weight, L: tl.constexpr, E: tl.constexpr, WIDTH: tl.constexpr):
    """Σ over a token's corners of weight (L·E) times values (L·E, WIDTH): (L, WIDTH)."""
    return tl.sum(tl.reshape(values * weight[:, None], [L, E, WIDTH]), axis=1)


@triton.jit
def by_corner(values, factor, L: tl.constexpr, E: tl.constexpr, WIDTH: tl.constexpr):
    """Σ over columns of values (L·E, WIDTH) times a row per token (L, WIDTH): (L, E)."""
    return tl.sum(tl.reshape(values, [L, E, WIDTH]) * factor[:, None, :], axis=2)


@triton.jit(do_not_specialize=["N"])
def sparse_solve_kernel(
    write_index, write_weight, rate, log_keep, resets, solved, N,
    H: tl.constexpr, L: tl.constexpr, E: tl.constexpr, STEPS: tl.constexpr,
    HAS_RESETS: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Rule "delta": (I + T)⁻¹ of a chunk, to rows (B, N, H, L)."""
    program, s = tl.program_id(1).to(tl.int64), tl.program_id(0)
    i = tl.arange(0, L)
    row_token, token, real = tokens_of(program, s, N, H, L)
    corner, exist = corner_rows(program, s, N, H, L, E)
    g, part, _, _, _ = decays(
        of_tokens(log_keep, token, real), resets, row_token, real, HAS_RESETS, L
    )
    voxel = tl.load(write_index + corner, mask=exist, other=-2)
    w = tl.load(write_weight + corner, mask=exist, other=0.0)
    met = weights_at(voxel, write_index, write_weight, token, real, L, E)
    among = over_corners(met, w, L, E, L) * decay_between(g, part, L)
    beta = of_tokens(rate, token, real)
    system = tl.where(i[:, None] > i[None, :], beta[:, None] * among, 0.0)
    store_rows(solved, token, real, i, L, inverse(system, L, STEPS, EXACT))


@triton.jit(do_not_specialize=["N"])
def sparse_state_kernel(
    write_index, write_weight, read_index, read_weight, content, rate, log_keep, resets, solved,
    buffer, last, page, held, was, written, around_reads, around_writes, end, N,
    H: tl.constexpr, V: tl.constexpr, C: tl.constexpr, CB: tl.constexpr, L: tl.constexpr,
    E: tl.constexpr, DELTA: tl.constexpr, KEEP: tl.constexpr, HAS_RESETS: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """The state of a row and head through all chunks; what its places held before each.

    `end` (B, H, 2) gets the sum of log α and the number of resets.
    """
    program = tl.program_id(0).to(tl.int64)
    channel, i = tl.arange(0, CB), tl.arange(0, L)
    buffer, last, page = buffer + program * V * C, last + program * V, page + program * V
    now, pages = 0.0, 0
    for s in range(tl.cdiv(N, L)):
        row_token, token, real = tokens_of(program, s, N, H, L)
        corner, exist = corner_rows(program, s, N, H, L, E)
        keep = of_tokens(log_keep, token, real)
        _, part, from_state, to_state, carry = decays(keep, resets, row_token, real, HAS_RESETS, L)
        asked = tl.load(read_index + corner, mask=exist, other=0)
        old = held_at(buffer, last, page, asked, exist, channel, now, pages, C, HAS_RESETS)
        if KEEP:
            store_rows(around_reads, corner, exist, channel, C, old)
        w = tl.load(read_weight + corner, mask=exist, other=0.0)
        store_rows(held, token, real, channel, C, over_corners(old, w, L, E, CB))
        voxel = tl.load(write_index + corner, mask=exist, other=0)
        old = held_at(buffer, last, page, voxel, exist, channel, now, pages, C, HAS_RESETS)
        v, beta = rows(content, token, real, channel, C), of_tokens(rate, token, real)
        u = beta[:, None] * v
        if DELTA:
            w = tl.load(write_weight + corner, mask=exist, other=0.0)
            found = over_corners(old, w, L, E, CB)
            error = v - from_state[:, None] * found
            u = product(rows(solved, token, real, i, L), beta[:, None] * error, EXACT)
            store_rows(written, token, real, channel, C, u)
            if KEEP:
                store_rows(was, token, real, channel, C, found)
                store_rows(around_writes, corner, exist, channel, C, old)
        met = weights_at(voxel, write_index, write_weight, token, real, L, E)
        new = carry * old + reached(met, to_state[:, None] * u, EXACT)
        now += tl.sum(keep)
        if HAS_RESETS:
            pages += tl.max(part)
        tl.debug_barrier()  # everything has been read
        hold(buffer, last, page, voxel, exist, channel, new, now, pages, C, HAS_RESETS)
        tl.debug_barrier()  # and is written
    tl.store(end + program * 2, now)
    tl.store(end + program * 2 + 1, pages.to(tl.float32) if HAS_RESETS else 0.0)


@triton.jit
def settle_kernel(
    buffer, last, page, end, V: tl.constexpr, C: tl.constexpr, VB: tl.constexpr,
    CB: tl.constexpr, HAS_RESETS: tl.constexpr,
):  # fmt: skip
    """Every voxel as it is in the end."""
    program = tl.program_id(0).to(tl.int64)
    voxel, channel = tl.program_id(1) * VB + tl.arange(0, VB), tl.arange(0, CB)
    real = voxel < V
    now = tl.load(end + program * 2)
    pages = tl.load(end + program * 2 + 1).to(tl.int32)
    buffer, last, page = buffer + program * V * C, last + program * V, page + program * V
    values = held_at(buffer, last, page, voxel, real, channel, now, pages, C, HAS_RESETS)
    store_rows(buffer, voxel, real, channel, C, values)


@triton.jit(do_not_specialize=["N"])
def sparse_read_kernel(
    write_index, write_weight, read_index, read_weight, written, rate, log_keep, resets, held,
    reads, N,
    H: tl.constexpr, C: tl.constexpr, CB: tl.constexpr, L: tl.constexpr, E: tl.constexpr,
    DELTA: tl.constexpr, HAS_RESETS: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    """What a chunk's tokens read: of its own writes, and of what was held before."""
    program, s = tl.program_id(1).to(tl.int64), tl.program_id(0)
    channel = tl.arange(0, CB)
    row_token, token, real = tokens_of(program, s, N, H, L)
    corner, exist = corner_rows(program, s, N, H, L, E)
    g, part, from_state, _, _ = decays(
        of_tokens(log_keep, token, real), resets, row_token, real, HAS_RESETS, L
    )
    voxel = tl.load(read_index + corner, mask=exist, other=-2)
    w = tl.load(read_weight + corner, mask=exist, other=0.0)
    met = weights_at(voxel, write_index, write_weight, token, real, L, E)
    attention = over_corners(met, w, L, E, L) * decay_between(g, part, L)
    u = rows(written, token, real, channel, C)
    if not DELTA:
        u = u * of_tokens(rate, token, real)[:, None]
    r = product(attention, u, MODE) + from_state[:, None] * rows(held, token, real, channel, C)
    store_rows(reads, token, real, channel, C, r)


@triton.jit(do_not_specialize=["N"])
def sparse_written_kernel(
    write_index, write_weight, read_index, read_weight, log_keep, resets, by_reads, by_written, N,
    H: tl.constexpr, C: tl.constexpr, CB: tl.constexpr, L: tl.constexpr, E: tl.constexpr,
    HAS_RESETS: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    """Rule "delta": what u receives of the reads of its own chunk."""
    program, s = tl.program_id(1).to(tl.int64), tl.program_id(0)
    channel = tl.arange(0, CB)
    row_token, token, real = tokens_of(program, s, N, H, L)
    corner, exist = corner_rows(program, s, N, H, L, E)
    g, part, _, _, _ = decays(
        of_tokens(log_keep, token, real), resets, row_token, real, HAS_RESETS, L
    )
    voxel = tl.load(read_index + corner, mask=exist, other=-2)
    w = tl.load(read_weight + corner, mask=exist, other=0.0)
    met = weights_at(voxel, write_index, write_weight, token, real, L, E)
    attention = over_corners(met, w, L, E, L) * decay_between(g, part, L)
    du = product(tl.trans(attention), rows(by_reads, token, real, channel, C), MODE)
    store_rows(by_written, token, real, channel, C, du)


@triton.jit(do_not_specialize=["N"])
def sparse_state_backward_kernel(
    write_index, write_weight, read_index, read_weight, content, written, rate, log_keep, resets,
    solved, held, was, by_reads, by_written, buffer, last, page, by_write_weight, phi_dS, by_right,
    sums, end, N,
    H: tl.constexpr, V: tl.constexpr, C: tl.constexpr, CB: tl.constexpr, L: tl.constexpr,
    E: tl.constexpr, DELTA: tl.constexpr, HAS_RESETS: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """The gradient of the state from the last chunk to the first.

    `sums` (B, H, S, 3) gets what a chunk's writes and its reads have to do with the gradient of the
    state after it, and whether the state before it survives it.
    """
    program = tl.program_id(0).to(tl.int64)
    channel, i = tl.arange(0, CB), tl.arange(0, L)
    buffer, last, page = buffer + program * V * C, last + program * V, page + program * V
    now, pages = 0.0, 0
    chunks = tl.cdiv(N, L)
    for step in range(chunks):
        s = chunks - 1 - step
        row_token, token, real = tokens_of(program, s, N, H, L)
        corner, exist = corner_rows(program, s, N, H, L, E)
        keep = of_tokens(log_keep, token, real)
        _, part, from_state, to_state, carry = decays(keep, resets, row_token, real, HAS_RESETS, L)
        voxel = tl.load(write_index + corner, mask=exist, other=0)
        wrote = held_at(buffer, last, page, voxel, exist, channel, now, pages, C, HAS_RESETS)
        w = tl.load(write_weight + corner, mask=exist, other=0.0)
        arriving = over_corners(wrote, w, L, E, CB)
        store_rows(phi_dS, token, real, channel, C, arriving)
        beta = of_tokens(rate, token, real)
        if DELTA:
            u = rows(written, token, real, channel, C)
        else:
            u = beta[:, None] * rows(content, token, real, channel, C)
        u_to = to_state[:, None] * u
        corners = tl.arange(0, E)
        store_rows(by_write_weight, token, real, corners, E, by_corner(wrote, u_to, L, E, CB))
        dr = from_state[:, None] * rows(by_reads, token, real, channel, C)
        read_sum = tl.sum(dr * rows(held, token, real, channel, C))
        asked = tl.load(read_index + corner, mask=exist, other=0)
        read = held_at(buffer, last, page, asked, exist, channel, now, pages, C, HAS_RESETS)
        met = weights_at(asked, read_index, read_weight, token, real, L, E)
        read = carry * read + reached(met, dr, EXACT)
        if DELTA:
            du = rows(by_written, token, real, channel, C) + to_state[:, None] * arriving
            right = product(tl.trans(rows(solved, token, real, i, L)), du, EXACT)
            store_rows(by_right, token, real, channel, C, right)
            by_was = -(from_state * beta)[:, None] * right
            read_sum += tl.sum(by_was * rows(was, token, real, channel, C))
            met = weights_at(asked, write_index, write_weight, token, real, L, E)
            read += reached(met, by_was, EXACT)
            met = weights_at(voxel, read_index, read_weight, token, real, L, E)
            wrote = carry * wrote + reached(met, dr, EXACT)
            met = weights_at(voxel, write_index, write_weight, token, real, L, E)
            wrote += reached(met, by_was, EXACT)
        of_chunk = sums + (program * chunks + s) * 3
        tl.store(of_chunk, tl.sum(u_to * arriving))
        tl.store(of_chunk + 1, read_sum)
        tl.store(of_chunk + 2, tl.where(carry > 0.0, 1.0, 0.0))
        now += tl.sum(keep)
        if HAS_RESETS:
            pages += tl.max(part)
        tl.debug_barrier()  # everything has been read
        hold(buffer, last, page, asked, exist, channel, read, now, pages, C, HAS_RESETS)
        if DELTA:
            hold(buffer, last, page, voxel, exist, channel, wrote, now, pages, C, HAS_RESETS)
        tl.debug_barrier()  # and is written
    tl.store(end + program * 2, now)
    tl.store(end + program * 2 + 1, pages.to(tl.float32) if HAS_RESETS else 0.0)


@triton.jit
def through(sums, dot, s):
    """carry ⟨S, dS'⟩ of chunk s, what its total of log α receives from the state that survives it.

    Without passing over the grid: ⟨S, dS⟩, at the start `dot`, less what the chunk read is that
    product, and with what it wrote it is ⟨S', dS'⟩.
    """
    inner, found = tl.load(dot), 0.0
    for j in range(s + 1):
        found = tl.where(tl.load(sums + j * 3 + 2) > 0.0, inner - tl.load(sums + j * 3 + 1), 0.0)
        inner = found + tl.load(sums + j * 3)
    return found


@triton.jit(do_not_specialize=["N"])
def sparse_gradient_kernel(
    write_index, write_weight, read_index, read_weight, content, written, rate, log_keep, resets,
    held, was, around_reads, around_writes, by_reads, phi_dS, by_right, sums, dot,
    by_write_weight, by_read_weight, by_content, by_rate, by_log_keep, N,
    H: tl.constexpr, C: tl.constexpr, CB: tl.constexpr, L: tl.constexpr, E: tl.constexpr,
    DELTA: tl.constexpr, HAS_RESETS: tl.constexpr, MODE: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """The gradients of a chunk, given what its places met in the states before and after."""
    program, s = tl.program_id(1).to(tl.int64), tl.program_id(0)
    channel, i, corners = tl.arange(0, CB), tl.arange(0, L), tl.arange(0, E)
    row_token, token, real = tokens_of(program, s, N, H, L)
    corner, exist = corner_rows(program, s, N, H, L, E)
    g, part, from_state, to_state, _ = decays(
        of_tokens(log_keep, token, real), resets, row_token, real, HAS_RESETS, L
    )
    within = decay_between(g, part, L)
    v = rows(content, token, real, channel, C)
    beta = of_tokens(rate, token, real)
    dr = rows(by_reads, token, real, channel, C)
    arriving = rows(phi_dS, token, real, channel, C)
    u = rows(written, token, real, channel, C) if DELTA else beta[:, None] * v
    asked = tl.load(read_index + corner, mask=exist, other=-2)
    w = tl.load(read_weight + corner, mask=exist, other=0.0)
    met = weights_at(asked, write_index, write_weight, token, real, L, E)
    attention = over_corners(met, w, L, E, L) * within
    # Through the state after the chunk, and through the reads.
    moved = to_state * tl.sum(u * arriving, axis=1)
    dtotal = tl.sum(moved) + through(sums + program * tl.num_programs(0) * 3, dot + program, s)
    by_attention = product(dr, tl.trans(u), MODE)
    by_gap = by_attention * attention
    dg = tl.sum(by_gap, axis=1) - tl.sum(by_gap, axis=0) - moved
    dr_from = from_state[:, None] * dr
    dg += tl.sum(dr_from * rows(held, token, real, channel, C), axis=1)
    by_near = by_attention * within
    around = rows(around_reads, corner, exist, channel, C).to(tl.float32)
    by_asked = by_corner(met, by_near, L, E, L) + by_corner(around, dr_from, L, E, CB)
    store_rows(by_read_weight, token, real, corners, E, by_asked)
    voxel = tl.load(write_index + corner, mask=exist, other=-2)
    met = weights_at(voxel, read_index, read_weight, token, real, L, E)
    by_wrote = rows(by_write_weight, token, real, corners, E)
    by_wrote += by_corner(met, tl.trans(by_near), L, E, L)
    if DELTA:
        w = tl.load(write_weight + corner, mask=exist, other=0.0)
        met = weights_at(voxel, write_index, write_weight, token, real, L, E)
        among = over_corners(met, w, L, E, L)
        found = rows(was, token, real, channel, C)
        right = rows(by_right, token, real, channel, C)
        dv = beta[:, None] * right
        by_system = tl.where(
            i[:, None] > i[None, :], -product(right, tl.trans(u), EXACT) * within, 0.0
        )
        dbeta = tl.sum(right * (v - from_state[:, None] * found), axis=1)
        dbeta += tl.sum(by_system * among, axis=1)
        by_among = by_system * beta[:, None]
        by_gap = by_among * among
        dg += tl.sum(by_gap, axis=1) - tl.sum(by_gap, axis=0)
        by_was = -from_state[:, None] * dv
        dg += tl.sum(by_was * found, axis=1)
        around = rows(around_writes, corner, exist, channel, C).to(tl.float32)
        by_wrote += by_corner(met, by_among + tl.trans(by_among), L, E, L)
        by_wrote += by_corner(around, by_was, L, E, CB)
    else:
        du = product(tl.trans(attention), dr, MODE) + to_state[:, None] * arriving
        dbeta = tl.sum(du * v, axis=1)
        dv = beta[:, None] * du
    store_rows(by_write_weight, token, real, corners, E, by_wrote)
    store_rows(by_content, token, real, channel, C, dv)
    tl.store(by_rate + token, dbeta, mask=real)
    later = tl.sum(dg) - tl.cumsum(dg, axis=0) + dg
    tl.store(by_log_keep + token, later + dtotal, mask=real)


class Kept(NamedTuple):
    """What a backward needs beside the inputs."""

    write_index: Tensor
    """(B, N, H, E) voxels around the write places."""
    write_weight: Tensor
    held: Tensor
    """(B, N, H, C) what the read places held before the chunk."""
    around_reads: Tensor
    """(B, N, H, E, C) what their corners held."""
    read_index: Tensor | None = None
    """Where reads have places of their own."""
    read_weight: Tensor | None = None
    was: Tensor | None = None
    """(B, N, H, C) what the write places held before the chunk; rule "delta" alone, as the rest."""
    around_writes: Tensor | None = None
    written: Tensor | None = None
    """(B, N, H, C) u."""
    solved: Tensor | None = None
    """(B, N, H, L) the inverse of each chunk's system."""

    @classmethod
    def empty(cls, inputs: PlaceInputs, products: torch.dtype, keep: bool) -> Kept:
        """Uninitialised; without `keep` nothing is held of the corners."""
        B, N, H, C = inputs.content.shape
        E, delta, asks = 2 ** len(inputs.grid), inputs.rule == "delta", inputs.read_at is not None
        new = inputs.content.new_empty
        around = partial(new, (B, N if keep else 0, H, E, C), dtype=low_dtype(products))
        return cls(
            new(B, N, H, E, dtype=torch.int32),
            new(B, N, H, E),
            new(B, N, H, C),
            around(),
            new(B, N, H, E, dtype=torch.int32) if asks else None,
            new(B, N, H, E) if asks else None,
            new(B, N, H, C) if delta else None,
            around() if delta else None,
            new(B, N, H, C) if delta else None,
            new(B, N, H, LENGTH) if delta else None,
        )

    @classmethod
    def of(cls, tensors: list[Tensor], inputs: PlaceInputs) -> Kept:
        """The other way of `tensors`."""
        first, rest = tensors[:4], tensors[4:]
        asks = [None, None] if inputs.read_at is None else [rest.pop(0), rest.pop(0)]
        return cls(*first, *asks, *rest)

    @property
    def tensors(self) -> list[Tensor]:
        """Those there are."""
        return [tensor for tensor in self if tensor is not None]

    @property
    def corners(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Voxels and weights around the write places and the read places."""
        return (
            self.write_index, self.write_weight, or_else(self.read_index, self.write_index),
            or_else(self.read_weight, self.write_weight),
        )  # fmt: skip


class Lazy(NamedTuple):
    """A grid that decays lazily: (B, H, *grid, C) and what `held_at` needs."""

    buffer: Tensor
    last: Tensor
    page: Tensor
    end: Tensor

    @classmethod
    def of(cls, values: Tensor) -> Lazy:
        """Of values that it may change."""
        last = values.new_zeros(values.shape[:-1])
        return cls(
            values,
            last,
            torch.zeros_like(last, dtype=torch.int32),
            last.new_empty(*values.shape[:2], 2),
        )

    def settled(self, plan: Plan) -> Tensor:
        """The grid as it is after the last chunk."""
        B, H = self.buffer.shape[:2]
        plan.bound(settle_kernel, VB=64)(
            (B * H, triton.cdiv(plan["V"], 64)), (self.buffer, self.last, self.page, self.end)
        )
        return self.buffer


def forward(
    inputs: PlaceInputs, *, keep: bool, products: torch.dtype
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Reads, the state after, and with `keep` what `backward` needs."""
    (B, N, H, _), plan = inputs.content.shape, make_plan(inputs, products)
    kept, reads = Kept.empty(inputs, products, keep), inputs.empty_reads()
    content, rate, log_keep = inputs.content, inputs.rate, inputs.log_keep
    marks, nothing = or_else(inputs.resets, reads), kept.held
    corners, written = kept.corners, or_else(kept.written, content)
    plan.bound(corner_kernel, warps=4, T=LENGTH)(
        (B * H, triton.cdiv(N, LENGTH), 1 if inputs.read_at is None else 2),
        (inputs.write_at, inputs.asked_at, *corners),
        (N,),
    )
    if kept.solved is not None:
        plan.bound(sparse_solve_kernel, warps=plan["E"])(
            chunk_grid(inputs), (*corners[:2], rate, log_keep, marks, kept.solved), (N,)
        )
    lazy = Lazy.of(inputs.state.clone())
    plan.bound(sparse_state_kernel, warps=plan["E"], KEEP=keep)(
        (B * H,),
        (
            *corners, content, rate, log_keep, marks, or_else(kept.solved, nothing), *lazy[:3],
            kept.held, or_else(kept.was, nothing), or_else(kept.written, nothing),
            kept.around_reads, or_else(kept.around_writes, nothing), lazy.end,
        ),
        (N,),
    )  # fmt: skip
    plan.bound(sparse_read_kernel, warps=plan["E"])(
        chunk_grid(inputs), (*corners, written, rate, log_keep, marks, kept.held, reads), (N,)
    )
    return reads, lazy.settled(plan), kept.tensors if keep else []


def backward(
    grad_reads: Tensor,
    grad_state: Tensor | None,
    inputs: PlaceInputs,
    kept: list[Tensor],
    *,
    products: torch.dtype,
) -> PlaceInputs:
    """The gradients in the places of the inputs."""
    (B, N, H, _), plan = inputs.content.shape, make_plan(inputs, products)
    found = Kept.of(kept, inputs)
    content, rate, log_keep = inputs.content, inputs.rate, inputs.log_keep
    corners, held = found.corners, found.held
    marks, written = or_else(inputs.resets, held), or_else(found.written, content)
    solved, was = or_else(found.solved, held), or_else(found.was, held)
    by_written, by_right = held, held
    if found.solved is not None:
        by_written, by_right = torch.empty_like(held), torch.empty_like(held)
        plan.bound(sparse_written_kernel, warps=plan["E"])(
            chunk_grid(inputs), (*corners, log_keep, marks, grad_reads, by_written), (N,)
        )
    begins = torch.zeros_like(inputs.state) if grad_state is None else grad_state.clone()
    lazy, phi_dS = Lazy.of(begins), torch.empty_like(held)
    by_write_weight, by_read_weight = (torch.empty_like(corners[1]) for _ in range(2))
    sums = held.new_empty(B, H, triton.cdiv(N, LENGTH), 3)
    plan.bound(sparse_state_backward_kernel, warps=plan["E"])(
        (B * H,),
        (
            *corners, content, written, rate, log_keep, marks, solved, held, was, grad_reads,
            by_written, *lazy[:3], by_write_weight, phi_dS, by_right, sums, lazy.end,
        ),
        (N,),
    )  # fmt: skip
    by_state = lazy.settled(plan)
    dot = (inputs.state * by_state).flatten(2).sum(-1)  # (B, H)
    by_content, by_rate, by_log_keep = (torch.empty_like(t) for t in (content, rate, log_keep))
    plan.bound(sparse_gradient_kernel, warps=plan["E"])(
        chunk_grid(inputs),
        (
            *corners, content, written, rate, log_keep, marks, held, was, found.around_reads,
            or_else(found.around_writes, held), grad_reads, phi_dS, by_right, sums, dot,
            by_write_weight, by_read_weight, by_content, by_rate, by_log_keep,
        ),
        (N,),
    )  # fmt: skip
    by_write_at, by_read_at = torch.empty_like(inputs.write_at), None
    if inputs.read_at is None:
        by_write_weight += by_read_weight
    else:
        by_read_at = torch.empty_like(inputs.read_at)
    plan.bound(corner_backward_kernel, warps=4, T=LENGTH)(
        (B * H, triton.cdiv(N, LENGTH), 1 if by_read_at is None else 2),
        (
            inputs.write_at, inputs.asked_at, by_write_weight, by_read_weight, by_write_at,
            or_else(by_read_at, by_write_at),
        ),
        (N,),
    )  # fmt: skip
    gradients = (by_write_at, by_read_at, by_content, by_rate, by_log_keep, None, by_state)
    return PlaceInputs._make((*gradients, None, None, None))


def empty_kept(inputs: PlaceInputs, products: torch.dtype) -> list[Tensor]:
    """Uninitialised tensors like those `forward` keeps."""
    return Kept.empty(inputs, products, keep=True).tensors
