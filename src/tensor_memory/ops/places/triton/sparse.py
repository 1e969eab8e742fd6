"""Rule "delta" with the linear kernel on large grids: a token touches its 2ⁿ corners alone.

The state decays lazily: a voxel keeps the value of its last write, and when that was: `last`, the
sum of log α up to then, and `document`, the number of resets up to then. That sum is in float64: a
few chunks that forget everything would leave no digits for the others. Within a chunk every corner
gets what the whole chunk writes there, so that tokens which meet at a voxel store the same value
and no order matters. The grid as a whole is passed over once, at the end. The overlap of two places
is the product of their overlaps along the axes, so that within a chunk no corner is compared with
another.

Letters: B batch, N tokens, H heads, S chunks of L tokens, V voxels, C channels, E = 2ⁿ corners of
a place; rows of L·E are the corners of a chunk's tokens. φ and ψ, A and T, `from`, `to`, `carry`,
`by_x` and dx are as in `dense.py`.
"""

# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# pyright: reportPossiblyUnboundVariable=false, reportAssignmentType=false
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tensor_memory.ops.launch import blocks, or_else
from tensor_memory.ops.places.inputs import PlaceInputs
from tensor_memory.ops.places.triton.addresses import below, clamped
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
)


@triton.jit
def axis_of(
    places, token, real, A: tl.constexpr, n: tl.constexpr,
    G0: tl.constexpr, G1: tl.constexpr, G2: tl.constexpr, G3: tl.constexpr,
    W0: tl.constexpr, W1: tl.constexpr, W2: tl.constexpr, W3: tl.constexpr,
):  # fmt: skip
    """The two voxels of places along axis A, their weights, and the weights' slopes: (T) each."""
    SIZE: tl.constexpr = G0 if A == 0 else (G1 if A == 1 else (G2 if A == 2 else G3))
    WRAP: tl.constexpr = W0 if A == 0 else (W1 if A == 1 else (W2 if A == 2 else W3))
    place = tl.load(places + token * n + (3 - A), mask=real, other=0.0).to(tl.float32)
    # The place in voxels, on the axis: brought round or moved to the border.
    at = (place + 1.0) * ((SIZE - 1) / 2)
    unit = tl.full(at.shape, (SIZE - 1) / 2, tl.float32)
    if WRAP:
        at -= tl.floor(at / SIZE) * SIZE
        at = clamped(at, SIZE * 1.0)  # a huge place has no digits left, and its turn may be missed
        low = below(at, SIZE - 1.0)
    else:  # a place beyond the border moves nothing
        unit = tl.where((at >= 0.0) & (at <= SIZE - 1.0), unit, 0.0)
        at = clamped(at, SIZE - 1.0)
        low = below(at, SIZE - 2.0)
    # (1 − u, u) / |(1 − u, u)| with u the way from the lower voxel to the upper, and its slope.
    upper = at - low.to(tl.float32)
    size = tl.sqrt((1.0 - upper) * (1.0 - upper) + upper * upper)
    lower, upper, unit = (1.0 - upper) / size, upper / size, unit / size
    grown = upper - lower
    by_lower, by_upper = unit * (-1.0 - lower * grown), unit * (1.0 - upper * grown)
    return low, (low + 1) % SIZE, lower, upper, by_lower, by_upper


@triton.jit
def axis_size(
    A: tl.constexpr, G0: tl.constexpr, G1: tl.constexpr, G2: tl.constexpr, G3: tl.constexpr
):
    """Voxels along axis A: a loop cannot name a constant twice."""
    SIZE: tl.constexpr = G0 if A == 0 else (G1 if A == 1 else (G2 if A == 2 else G3))
    return SIZE


@triton.jit
def corner_weights(
    places, token, real, A: tl.constexpr, n: tl.constexpr,
    G0: tl.constexpr, G1: tl.constexpr, G2: tl.constexpr, G3: tl.constexpr,
    W0: tl.constexpr, W1: tl.constexpr, W2: tl.constexpr, W3: tl.constexpr,
):  # fmt: skip
    """Voxels and weights of places' corners, (T, E); with A the weights' slopes along that axis."""
    corner = tl.arange(0, 2**n)[None, :]
    index = tl.zeros([token.shape[0], 2**n], tl.int32)
    weight = tl.full([token.shape[0], 2**n], 1.0, tl.float32)
    # Axis by axis, which corner being told by one bit each: index ← index · G + voxel, w ← w · e.
    for axis in tl.static_range(4 - n, 4):
        low, high, lower, upper, by_lower, by_upper = axis_of(
            places, token, real, axis, n, G0, G1, G2, G3, W0, W1, W2, W3
        )
        if axis == A:
            lower, upper = by_lower, by_upper
        is_high = ((corner >> (3 - axis)) & 1) == 1
        index *= axis_size(axis, G0, G1, G2, G3)
        index += tl.where(is_high, high[:, None], low[:, None])
        weight *= tl.where(is_high, upper[:, None], lower[:, None])
    return index, weight


@triton.jit
def at_voxel(voxel, low, high, lower, upper):
    """The weights of some places (L) along an axis at the voxels of others: (L, L)."""
    found = tl.where(voxel[:, None] == low[None, :], lower[None, :], 0.0)
    return found + tl.where(voxel[:, None] == high[None, :], upper[None, :], 0.0)


@triton.jit
def overlap(
    left, right, token, real, BY_LEFT: tl.constexpr, BY_RIGHT: tl.constexpr, L: tl.constexpr,
    n: tl.constexpr,
    G0: tl.constexpr, G1: tl.constexpr, G2: tl.constexpr, G3: tl.constexpr,
    W0: tl.constexpr, W1: tl.constexpr, W2: tl.constexpr, W3: tl.constexpr,
):  # fmt: skip
    """The inner products of a chunk's addresses, (L, L); or their slopes by one side's axis."""
    # φ·φ' = Π_a e_a·e_a', each of two voxels: those of the left at the voxels of the right.
    found = tl.full([L, L], 1.0, tl.float32)
    for axis in tl.static_range(4 - n, 4):
        low, high, lower, upper, by_lower, by_upper = axis_of(
            left, token, real, axis, n, G0, G1, G2, G3, W0, W1, W2, W3
        )
        if axis == BY_LEFT:
            lower, upper = by_lower, by_upper
        other_low, other_high, other_lower, other_upper, by_lower, by_upper = axis_of(
            right, token, real, axis, n, G0, G1, G2, G3, W0, W1, W2, W3
        )
        if axis == BY_RIGHT:
            other_lower, other_upper = by_lower, by_upper
        at_low = at_voxel(low, other_low, other_high, other_lower, other_upper)
        at_high = at_voxel(high, other_low, other_high, other_lower, other_upper)
        found *= lower[:, None] * at_low + upper[:, None] * at_high
    return found


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
    index, weight = corner_weights(places, token, real, -1, n, G0, G1, G2, G3, W0, W1, W2, W3)
    corner = tl.arange(0, 2**n)
    store_rows(indices, token, real, corner, 2**n, index)
    store_rows(weights, token, real, corner, 2**n, weight)


@triton.jit
def corner_rows(program, s, N, H: tl.constexpr, L: tl.constexpr, E: tl.constexpr):
    """A chunk's corners as rows of (B, N, H, E), and which are real: (L·E) each."""
    r = tl.arange(0, L * E)
    t = s * L + r // E
    token = (program // H * N + t) * H + program % H
    return token * E + r % E, (t >= 0) & (t < N)


@triton.jit
def held_at(
    start, buffer, last, document, voxel, real, channel, now, documents, C: tl.constexpr,
    HAS_START: tl.constexpr, HAS_RESETS: tl.constexpr, BOTH: tl.constexpr = True,
):  # fmt: skip
    """What voxels hold now, (rows, channels): of a buffer, or what they started with."""
    then = tl.load(last + voxel, mask=real, other=0.0, cache_modifier=".cg")
    is_written = then == then  # NaN: not yet written
    # What is left since then: e^{now − then}, 0 across a reset.
    left = tl.exp((now - tl.where(is_written, then, 0.0)).to(tl.float32))
    if HAS_RESETS:
        then_document = tl.load(document + voxel, mask=real, other=0, cache_modifier=".cg")
        left = tl.where(then_document == documents, left, 0.0)
    inside, at = real[:, None] & (channel < C)[None, :], voxel[:, None] * C + channel[None, :]
    # Where time counts, both are loaded: to load the one that is needed would wait for `last`.
    written, begun = inside, inside
    if not BOTH:
        written, begun = inside & is_written[:, None], inside & (then != then)[:, None]
    held = tl.load(buffer + at, mask=written, other=0.0, cache_modifier=".cg")
    first = tl.zeros(held.shape, tl.float32)
    if HAS_START:
        first += tl.load(start + at, mask=begun, other=0.0)
    return left[:, None] * tl.where(is_written[:, None], held, first)


@triton.jit
def hold(
    buffer, last, document, voxel, real, channel, values, now, documents, C: tl.constexpr,
    HAS_RESETS: tl.constexpr,
):  # fmt: skip
    """Store what voxels hold now. Rows that meet at a voxel bring the same values."""
    store_rows(buffer, voxel, real, channel, C, values)
    tl.store(last + voxel, now, mask=real)
    if HAS_RESETS:
        tl.store(document + voxel, documents, mask=real)


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
def reached(address, values, MODE: tl.constexpr):
    """address (rows, L) @ values (L, C). Turned round: a product with few rows takes no wide
    instructions (see LENGTH), however many corners there are."""
    return tl.trans(product(tl.trans(values), tl.trans(address), MODE))


@triton.jit
def over_corners(values, weight, L: tl.constexpr, E: tl.constexpr, WIDTH: tl.constexpr):
    """Σ over a token's corners of weight (L·E) times values (L·E, WIDTH): (L, WIDTH)."""
    return tl.sum(tl.reshape(values * weight[:, None], [L, E, WIDTH]), axis=1)


@triton.jit(do_not_specialize=["N"])
def sparse_solve_kernel(
    write_at, rate, log_keep, resets, solved, N,
    H: tl.constexpr, L: tl.constexpr, STEPS: tl.constexpr, HAS_RESETS: tl.constexpr,
    EXACT: tl.constexpr, n: tl.constexpr,
    G0: tl.constexpr, G1: tl.constexpr, G2: tl.constexpr, G3: tl.constexpr,
    W0: tl.constexpr, W1: tl.constexpr, W2: tl.constexpr, W3: tl.constexpr,
):  # fmt: skip
    """(I + T)⁻¹ of a chunk, to rows (B, N, H, L)."""
    program, s = tl.program_id(1).to(tl.int64), tl.program_id(0)
    i = tl.arange(0, L)
    row_token, token, real = tokens_of(program, s, N, H, L)
    g, part, _, _, _ = decays(
        of_tokens(log_keep, token, real), resets, row_token, real, HAS_RESETS, L
    )
    # T_ts = β_t e^{g_t − g_s} φ_t·φ_s for s < t   (L, L)
    phi_phi = overlap(
        write_at, write_at, token, real, -1, -1, L, n, G0, G1, G2, G3, W0, W1, W2, W3
    ) * decay_between(g, part, L)
    beta = of_tokens(rate, token, real)
    system = tl.where(i[:, None] > i[None, :], beta[:, None] * phi_phi, 0.0)
    store_rows(solved, token, real, i, L, inverse(system, L, STEPS, EXACT))


@triton.jit(do_not_specialize=["N"])
def delta_kernel(
    write_index, write_weight, read_index, content, rate, log_keep, resets, solved, start,
    buffer, last, document, written, around_reads, around_writes, end, N,
    H: tl.constexpr, V: tl.constexpr, C: tl.constexpr, CB: tl.constexpr, L: tl.constexpr,
    E: tl.constexpr, SAME: tl.constexpr, HAS_RESETS: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """The state of a row and head through all chunks; u = solved β (v − from φᵀ S) on the way.

    `around_reads` and `around_writes` get what the corners held before. Channels are independent: a
    program has some of them, and its own `last` and `document` (B, H, programs, V). `end` (B, H, 2)
    gets the sum of log α and the number of resets.
    """
    program = tl.program_id(0).to(tl.int64)
    channel, i = tl.program_id(1) * CB + tl.arange(0, CB), tl.arange(0, L)
    start, buffer = start + program * V * C, buffer + program * V * C
    own = (program * tl.num_programs(1) + tl.program_id(1)) * V
    last, document = last + own, document + own
    now, documents = tl.full([], 0.0, tl.float64), 0
    for s in range(tl.cdiv(N, L)):
        row_token, token, real = tokens_of(program, s, N, H, L)
        corner, exist = corner_rows(program, s, N, H, L, E)
        keep = of_tokens(log_keep, token, real)
        _, part, from_state, to_state, carry = decays(keep, resets, row_token, real, HAS_RESETS, L)
        # What the corners hold before this chunk, (L·E, CB): of the write places and of the reads.
        voxel = tl.load(write_index + corner, mask=exist, other=0)
        S_old = held_at(
            start, buffer, last, document, voxel, exist, channel, now, documents, C, True,
            HAS_RESETS,
        )  # fmt: skip
        if SAME:
            store_rows(around_reads, corner, exist, channel, C, S_old)
        else:
            asked = tl.load(read_index + corner, mask=exist, other=0)
            S_asked = held_at(
                start, buffer, last, document, asked, exist, channel, now, documents, C, True,
                HAS_RESETS,
            )  # fmt: skip
            store_rows(around_reads, corner, exist, channel, C, S_asked)
        # u = (I + T)⁻¹ β (v − from φ S)   (L, CB)
        v, beta = rows(content, token, real, channel, C), of_tokens(rate, token, real)
        store_rows(around_writes, corner, exist, channel, C, S_old)
        w = tl.load(write_weight + corner, mask=exist, other=0.0)
        error = v - from_state[:, None] * over_corners(S_old, w, L, E, CB)
        u = product(rows(solved, token, real, i, L), beta[:, None] * error, EXACT)
        store_rows(written, token, real, channel, C, u)
        # S ← carry S + Σ_s (to u)_s φ_s at every corner, (L·E, CB)
        address = weights_at(voxel, write_index, write_weight, token, real, L, E)
        S_new = carry * S_old + reached(address, to_state[:, None] * u, EXACT)
        now += tl.sum(keep)
        if HAS_RESETS:
            documents += tl.max(part)
        tl.debug_barrier()  # everything has been read
        hold(buffer, last, document, voxel, exist, channel, S_new, now, documents, C, HAS_RESETS)
        tl.debug_barrier()  # and is written
    tl.store(end + program * 2, now)
    tl.store(end + program * 2 + 1, documents.to(tl.float64) if HAS_RESETS else 0.0)


@triton.jit(do_not_specialize=["parts"])
def settle_kernel(
    start, buffer, last, document, end, other, dots, parts,
    V: tl.constexpr, C: tl.constexpr, CB: tl.constexpr, VB: tl.constexpr,
    HAS_START: tl.constexpr, HAS_RESETS: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Every voxel as it is in the end; with DOT the inner product with another grid, in parts."""
    program = tl.program_id(0).to(tl.int64)
    voxel, channel = tl.program_id(1) * VB + tl.arange(0, VB), tl.arange(0, CB)
    real = voxel < V
    now = tl.load(end + program * 2)
    documents = tl.load(end + program * 2 + 1).to(tl.int32)
    start, buffer, other = (
        start + program * V * C,
        buffer + program * V * C,
        other + program * V * C,
    )
    last, document = last + program * parts * V, document + program * parts * V
    values = held_at(
        start, buffer, last, document, voxel, real, channel, now, documents, C, HAS_START,
        HAS_RESETS, False,
    )  # fmt: skip
    store_rows(buffer, voxel, real, channel, C, values)
    if DOT:
        dot = tl.sum(values * rows(other, voxel, real, channel, C))
        tl.store(dots + program * tl.num_programs(1) + tl.program_id(1), dot)


@triton.jit(do_not_specialize=["N"])
def sparse_read_kernel(
    write_at, read_at, read_weight, written, log_keep, resets, around_reads, reads, N,
    H: tl.constexpr, C: tl.constexpr, CB: tl.constexpr, L: tl.constexpr, E: tl.constexpr,
    HAS_RESETS: tl.constexpr, MODE: tl.constexpr, n: tl.constexpr,
    G0: tl.constexpr, G1: tl.constexpr, G2: tl.constexpr, G3: tl.constexpr,
    W0: tl.constexpr, W1: tl.constexpr, W2: tl.constexpr, W3: tl.constexpr,
):  # fmt: skip
    """What a chunk's tokens read: of its own writes, and of what was held before."""
    program, s = tl.program_id(1).to(tl.int64), tl.program_id(0)
    channel = tl.arange(0, CB)
    row_token, token, real = tokens_of(program, s, N, H, L)
    g, part, from_state, _, _ = decays(
        of_tokens(log_keep, token, real), resets, row_token, real, HAS_RESETS, L
    )
    psi_phi = overlap(read_at, write_at, token, real, -1, -1, L, n, G0, G1, G2, G3, W0, W1, W2, W3)
    u = rows(written, token, real, channel, C)
    # ψ S of the state before the chunk, corner by corner: (L, C)
    psi_S = tl.zeros([L, CB], tl.float32)
    for e in range(E):
        w = of_tokens(read_weight, token * E + e, real)
        psi_S += w[:, None] * rows(around_reads, token * E + e, real, channel, C).to(tl.float32)
    # r_t = Σ_{s ≤ t} e^{g_t − g_s} (ψ_t·φ_s) u_s + e^{g_t} ψ_t S   (L, C)
    r = product(psi_phi * decay_between(g, part, L), u, MODE) + from_state[:, None] * psi_S
    store_rows(reads, token, real, channel, C, r)


@triton.jit(do_not_specialize=["N"])
def sparse_written_kernel(
    write_at, read_at, log_keep, resets, by_reads, by_written, N,
    H: tl.constexpr, C: tl.constexpr, CB: tl.constexpr, L: tl.constexpr,
    HAS_RESETS: tl.constexpr, MODE: tl.constexpr, n: tl.constexpr,
    G0: tl.constexpr, G1: tl.constexpr, G2: tl.constexpr, G3: tl.constexpr,
    W0: tl.constexpr, W1: tl.constexpr, W2: tl.constexpr, W3: tl.constexpr,
):  # fmt: skip
    """What u receives of the reads of its own chunk."""
    program, s = tl.program_id(1).to(tl.int64), tl.program_id(0)
    channel = tl.arange(0, CB)
    row_token, token, real = tokens_of(program, s, N, H, L)
    g, part, _, _, _ = decays(
        of_tokens(log_keep, token, real), resets, row_token, real, HAS_RESETS, L
    )
    # du = Aᵀ dr with A_ts = e^{g_t − g_s} ψ_t·φ_s   (L, C)
    psi_phi = overlap(read_at, write_at, token, real, -1, -1, L, n, G0, G1, G2, G3, W0, W1, W2, W3)
    attention = psi_phi * decay_between(g, part, L)
    du = product(tl.trans(attention), rows(by_reads, token, real, channel, C), MODE)
    store_rows(by_written, token, real, channel, C, du)


@triton.jit(do_not_specialize=["N"])
def delta_backward_kernel(
    write_index, write_weight, read_index, read_weight, rate, log_keep, resets, solved, by_reads,
    by_written, start, buffer, last, document, around_after, by_right, end, N,
    H: tl.constexpr, V: tl.constexpr, C: tl.constexpr, CB: tl.constexpr, L: tl.constexpr,
    E: tl.constexpr, SAME: tl.constexpr, HAS_START: tl.constexpr, HAS_RESETS: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """The gradient of the state, from the last chunk to the first.

    `around_after` gets that of the corners of the write places after each chunk.
    """
    program = tl.program_id(0).to(tl.int64)
    channel, i = tl.program_id(1) * CB + tl.arange(0, CB), tl.arange(0, L)
    start, buffer = start + program * V * C, buffer + program * V * C
    own = (program * tl.num_programs(1) + tl.program_id(1)) * V
    last, document = last + own, document + own
    now, documents = tl.full([], 0.0, tl.float64), 0
    chunks = tl.cdiv(N, L)
    for step in range(chunks):
        s = chunks - 1 - step
        row_token, token, real = tokens_of(program, s, N, H, L)
        corner, exist = corner_rows(program, s, N, H, L, E)
        keep = of_tokens(log_keep, token, real)
        _, part, from_state, to_state, carry = decays(keep, resets, row_token, real, HAS_RESETS, L)
        # dS after this chunk at the corners, (L·E, CB): of the write places and of the reads.
        voxel = tl.load(write_index + corner, mask=exist, other=0)
        dS_wrote = held_at(
            start, buffer, last, document, voxel, exist, channel, now, documents, C, HAS_START,
            HAS_RESETS,
        )  # fmt: skip
        store_rows(around_after, corner, exist, channel, C, dS_wrote)
        asked, dS_asked = voxel, dS_wrote
        if not SAME:
            asked = tl.load(read_index + corner, mask=exist, other=0)
            dS_asked = held_at(
                start, buffer, last, document, asked, exist, channel, now, documents, C, HAS_START,
                HAS_RESETS,
            )  # fmt: skip
        # dS ← carry dS + ψᵀ (from dr) − φᵀ (from β right): here its first two terms.
        dr = from_state[:, None] * rows(by_reads, token, real, channel, C)
        address = weights_at(asked, read_index, read_weight, token, real, L, E)
        dS_asked = carry * dS_asked + reached(address, dr, EXACT)
        # What u receives, Aᵀ dr + to φ dS, and its right-hand side, (I + T)⁻ᵀ du   (L, CB)
        w = tl.load(write_weight + corner, mask=exist, other=0.0)
        du = rows(by_written, token, real, channel, C)
        du += to_state[:, None] * over_corners(dS_wrote, w, L, E, CB)
        right = product(tl.trans(rows(solved, token, real, i, L)), du, EXACT)
        store_rows(by_right, token, real, channel, C, right)
        # The third term of dS.
        by_phi_S = -(from_state * of_tokens(rate, token, real))[:, None] * right
        address = weights_at(asked, write_index, write_weight, token, real, L, E)
        dS_asked += reached(address, by_phi_S, EXACT)
        if not SAME:  # all three at the corners of the write places
            address = weights_at(voxel, read_index, read_weight, token, real, L, E)
            dS_wrote = carry * dS_wrote + reached(address, dr, EXACT)
            address = weights_at(voxel, write_index, write_weight, token, real, L, E)
            dS_wrote += reached(address, by_phi_S, EXACT)
        now += tl.sum(keep)
        if HAS_RESETS:
            documents += tl.max(part)
        tl.debug_barrier()  # everything has been read
        hold(buffer, last, document, asked, exist, channel, dS_asked, now, documents, C, HAS_RESETS)
        if not SAME:
            hold(
                buffer, last, document, voxel, exist, channel, dS_wrote, now, documents, C,
                HAS_RESETS,
            )  # fmt: skip
        tl.debug_barrier()  # and is written
    tl.store(end + program * 2, now)
    tl.store(end + program * 2 + 1, documents.to(tl.float64) if HAS_RESETS else 0.0)


@triton.jit(do_not_specialize=["N"])
def sparse_gradient_kernel(
    write_at, read_at, write_weight, read_weight, content, written, rate, log_keep, resets,
    around_reads, around_writes, around_after, by_reads, by_right,
    by_psi_phi, by_phi_phi, by_asked, by_wrote, by_content, by_rate, lost, N,
    H: tl.constexpr, C: tl.constexpr, CB: tl.constexpr, L: tl.constexpr, E: tl.constexpr,
    HAS_RESETS: tl.constexpr, MODE: tl.constexpr, EXACT: tl.constexpr, n: tl.constexpr,
    G0: tl.constexpr, G1: tl.constexpr, G2: tl.constexpr, G3: tl.constexpr,
    W0: tl.constexpr, W1: tl.constexpr, W2: tl.constexpr, W3: tl.constexpr,
):  # fmt: skip
    """The gradients of a chunk, given what its places met in the states before and after.

    Overlaps receive `by_psi_phi` and `by_phi_phi` (B, N, H, L), weights of corners `by_asked` and
    `by_wrote` (B, N, H, E). `place_gradient_kernel` goes on from there, and `keep_gradient_kernel`
    from `lost`, ⟨r, dr⟩ − ⟨v, dv⟩.
    """
    program, s = tl.program_id(1).to(tl.int64), tl.program_id(0)
    channel, i = tl.arange(0, CB), tl.arange(0, L)
    row_token, token, real = tokens_of(program, s, N, H, L)
    g, part, from_state, to_state, _ = decays(
        of_tokens(log_keep, token, real), resets, row_token, real, HAS_RESETS, L
    )
    within = decay_between(g, part, L)
    v, u = rows(content, token, real, channel, C), rows(written, token, real, channel, C)
    beta = of_tokens(rate, token, real)
    dr, right = rows(by_reads, token, real, channel, C), rows(by_right, token, real, channel, C)
    # (I + T) u = β (v − from φ S): `right` is what the right-hand side receives.
    dv = beta[:, None] * right
    store_rows(by_content, token, real, channel, C, dv)
    by_phi_S = -from_state[:, None] * dv
    u_to, dr_from = to_state[:, None] * u, from_state[:, None] * dr
    # Corner by corner, through the states before and after: φ S (L, C), what the corners' weights
    # receive, and ⟨r, dr⟩ of what was read of the state before.
    phi_S, r_dr = tl.zeros([L, CB], tl.float32), tl.zeros([L], tl.float32)
    for e in range(E):
        at = token * E + e
        around = rows(around_reads, at, real, channel, C).to(tl.float32)
        by_weight = tl.sum(around * dr_from, axis=1)
        r_dr += of_tokens(read_weight, at, real) * by_weight
        tl.store(by_asked + at, by_weight, mask=real)
        around = rows(around_after, at, real, channel, C).to(tl.float32)
        by_weight = tl.sum(around * u_to, axis=1)
        around = rows(around_writes, at, real, channel, C).to(tl.float32)
        phi_S += of_tokens(write_weight, at, real)[:, None] * around
        tl.store(by_wrote + at, by_weight + tl.sum(around * by_phi_S, axis=1), mask=real)
    # Through the reads of the chunk's own writes, dA = dr uᵀ.
    psi_phi = overlap(read_at, write_at, token, real, -1, -1, L, n, G0, G1, G2, G3, W0, W1, W2, W3)
    by_attention = product(dr, tl.trans(u), MODE) * within
    store_rows(by_psi_phi, token, real, i, L, by_attention)
    r_dr += tl.sum(by_attention * psi_phi, axis=1)
    tl.store(lost + token, r_dr - tl.sum(v * dv, axis=1), mask=real)
    # Through the system: dT = −right uᵀ below the diagonal; T and the right-hand side have β.
    phi_phi = overlap(write_at, write_at, token, real, -1, -1, L, n, G0, G1, G2, G3, W0, W1, W2, W3)
    by_system = tl.where(i[:, None] > i[None, :], -product(right, tl.trans(u), EXACT) * within, 0.0)
    dbeta = tl.sum(right * (v - from_state[:, None] * phi_S), axis=1)
    tl.store(by_rate + token, dbeta + tl.sum(by_system * phi_phi, axis=1), mask=real)
    by_system *= beta[:, None]
    # φ is on both sides of φ φᵀ.
    store_rows(by_phi_phi, token, real, i, L, by_system + tl.trans(by_system))


@triton.jit(do_not_specialize=["N"])
def place_gradient_kernel(
    write_at, read_at, by_psi_phi, by_phi_phi, by_asked, by_wrote, by_write_at, by_read_at, N,
    H: tl.constexpr, L: tl.constexpr, E: tl.constexpr, SAME: tl.constexpr, n: tl.constexpr,
    G0: tl.constexpr, G1: tl.constexpr, G2: tl.constexpr, G3: tl.constexpr,
    W0: tl.constexpr, W1: tl.constexpr, W2: tl.constexpr, W3: tl.constexpr,
):  # fmt: skip
    """What the places of a chunk receive of the gradients of their overlaps and weights."""
    program, s = tl.program_id(1).to(tl.int64), tl.program_id(0)
    i, corner = tl.arange(0, L), tl.arange(0, E)
    _, token, real = tokens_of(program, s, N, H, L)
    d_psi_phi = rows(by_psi_phi, token, real, i, L)
    for A in tl.static_range(4 - n, 4):
        # p: through the weights of its corners, ψ φᵀ and φ φᵀ.
        _, slope = corner_weights(write_at, token, real, A, n, G0, G1, G2, G3, W0, W1, W2, W3)
        dp = tl.sum(rows(by_wrote, token, real, corner, E) * slope, axis=1)
        slopes = overlap(
            read_at, write_at, token, real, -1, A, L, n, G0, G1, G2, G3, W0, W1, W2, W3
        )
        dp += tl.sum(d_psi_phi * slopes, axis=0)
        slopes = overlap(
            write_at, write_at, token, real, A, -1, L, n, G0, G1, G2, G3, W0, W1, W2, W3
        )
        dp += tl.sum(rows(by_phi_phi, token, real, i, L) * slopes, axis=1)
        # q: through the weights of its corners and ψ φᵀ.
        _, slope = corner_weights(read_at, token, real, A, n, G0, G1, G2, G3, W0, W1, W2, W3)
        dq = tl.sum(rows(by_asked, token, real, corner, E) * slope, axis=1)
        slopes = overlap(
            read_at, write_at, token, real, A, -1, L, n, G0, G1, G2, G3, W0, W1, W2, W3
        )
        dq += tl.sum(d_psi_phi * slopes, axis=1)
        if SAME:
            dp += dq
        else:
            tl.store(by_read_at + token * n + (3 - A), dq, mask=real)
        tl.store(by_write_at + token * n + (3 - A), dp, mask=real)


@triton.jit
def since_reset(reset, summed, next_reset, next_summed):
    """Two stretches of tokens as one: whether it has a reset, and the sum since the last."""
    return reset | next_reset, tl.where(next_reset != 0, next_summed, summed + next_summed)


@triton.jit(do_not_specialize=["N", "parts"])
def keep_gradient_kernel(
    lost, dots, resets, by_log_keep, N, parts,
    H: tl.constexpr, T: tl.constexpr, DOT: tl.constexpr, HAS_RESETS: tl.constexpr,
):  # fmt: skip
    """What log α receives, under either rule: ⟨S, dS⟩ over the grid, of the state that it decays.

    From a token to the next ⟨S, dS⟩ loses ⟨r, dr⟩ and gains ⟨v, dv⟩, and `lost` is the difference;
    a reset makes it 0. So the grid is needed once, before the first token: `dots` are the parts of
    that. Where no gradient of the state after came, ⟨S, dS⟩ ends as 0, and no grid is needed.
    """
    program, i = tl.program_id(0).to(tl.int64), tl.arange(0, T)
    # ⟨S, dS⟩ before the first token: given in parts, or what is lost up to the first reset.
    inner, documents = 0.0, 0
    if DOT:
        for begin in range(0, parts, T):
            at = begin + i
            inner += tl.sum(tl.load(dots + program * parts + at, mask=at < parts, other=0.0))
    else:
        for begin in range(0, N, T):
            row_token, token, real = tokens_of(program, begin // T, N, H, T)
            change = of_tokens(lost, token, real)
            if HAS_RESETS:
                reset = tl.load(resets + row_token, mask=real, other=0).to(tl.int32)
                part = documents + tl.cumsum(reset, axis=0)
                change, documents = tl.where(part == 0, change, 0.0), tl.max(part)
            inner += tl.sum(change)
    # From there on token by token: its log α receives ⟨S, dS⟩ as it was before the token.
    for begin in range(0, N, T):
        row_token, token, real = tokens_of(program, begin // T, N, H, T)
        change, reset = of_tokens(lost, token, real), tl.zeros([T], tl.int32)
        if HAS_RESETS:
            reset += tl.load(resets + row_token, mask=real, other=0).to(tl.int32)
        reset, summed = tl.associative_scan((reset, change), 0, since_reset)
        after = tl.where(reset != 0, 0.0, inner) - summed
        tl.store(by_log_keep + token, after + change, mask=real)
        inner = tl.sum(tl.where(i == T - 1, after, 0.0))


CHANNELS = 16
"""That a program of a kernel over the state has: they are independent, and its steps are short."""
SETTLED = 64
"""Voxels that a program settles."""
SUMMED = 512
"""Tokens whose numbers are summed at once."""


class Kept(NamedTuple):
    """What a backward needs beside the inputs."""

    write_index: Tensor
    """(B, N, H, E) voxels around the write places."""
    write_weight: Tensor
    around_reads: Tensor
    """(B, N, H, E, C) what the corners of the read places held before the chunk."""
    around_writes: Tensor
    """As `around_reads`."""
    written: Tensor
    """(B, N, H, C) u."""
    solved: Tensor
    """(B, N, H, L) the inverse of each chunk's system."""
    read_index: Tensor | None = None
    """Where reads have places of their own."""
    read_weight: Tensor | None = None

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


def empty_kept(inputs: PlaceInputs, products: torch.dtype) -> list[Tensor]:
    """Uninitialised tensors like those `forward` keeps."""
    (B, N, H, C), E = inputs.content.shape, 2 ** len(inputs.grid)
    new, low, asks = inputs.rate.new_empty, low_dtype(products), inputs.read_at is not None
    kept = Kept(
        new(B, N, H, E, dtype=torch.int32),
        new(B, N, H, E),
        new(B, N, H, E, C, dtype=low),
        new(B, N, H, E, C, dtype=low),
        new(B, N, H, C),
        new(B, N, H, LENGTH),
        new(B, N, H, E, dtype=torch.int32) if asks else None,
        new(B, N, H, E) if asks else None,
    )
    return kept.tensors


class Lazy(NamedTuple):
    """A grid that decays lazily, (B, H, *grid, C), and what `held_at` needs."""

    start: Tensor | None
    """None starts from zero."""
    buffer: Tensor
    last: Tensor
    """(B, H, programs, V)"""
    document: Tensor
    end: Tensor

    @classmethod
    def of(cls, start: Tensor | None, state: Tensor, has_resets: bool) -> Lazy:
        """A grid like a state."""
        (B, H, *_, C), V = state.shape, state[0, 0, ..., 0].numel()
        parts = B, H, blocks(C, CHANNELS), V
        last = state.new_full(parts, torch.nan, dtype=torch.float64)
        document = state.new_zeros(parts, dtype=torch.int32) if has_resets else last
        return cls(start, torch.empty_like(state), last, document, last.new_empty(B, H, 2))

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Those that a kernel over chunks works on."""
        return or_else(self.start, self.buffer), self.buffer, self.last, self.document

    @property
    def programs(self) -> tuple[int, int]:
        """Of such a kernel."""
        B, H, parts, _ = self.last.shape
        return B * H, parts

    def settled(self, plan: Plan, other: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """The grid as it is in the end, and parts of its inner product with another."""
        programs, parts = self.programs
        dots = self.buffer.new_empty(programs, blocks(plan["V"], SETTLED))
        plan.bound(
            settle_kernel, VB=SETTLED, HAS_START=self.start is not None, DOT=other is not None
        )(
            (programs, dots.shape[1]),
            (*self.tensors, self.end, or_else(other, self.buffer), dots),
            (parts,),
        )
        return self.buffer, None if other is None else dots


def forward(inputs: PlaceInputs, plan: Plan, *, keep: bool) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Reads, the state after, and with `keep` what `backward` needs."""
    B, N, H, _ = inputs.content.shape
    kept, reads = Kept(*empty_kept(inputs, plan.products)), inputs.empty_reads()
    content, rate, log_keep = inputs.content, inputs.rate, inputs.log_keep
    marks, same, corners = or_else(inputs.resets, reads), inputs.read_at is None, kept.corners
    plan.bound(corner_kernel, warps=4, T=LENGTH)(
        (B * H, blocks(N, LENGTH), 1 if same else 2),
        (inputs.write_at, inputs.asked_at, *corners),
        (N,),
    )
    lazy = Lazy.of(inputs.state, inputs.state, inputs.resets is not None)
    plan.bound(sparse_solve_kernel)(
        chunk_grid(inputs), (inputs.write_at, rate, log_keep, marks, kept.solved), (N,)
    )
    plan.bound(delta_kernel, warps=plan["E"], CB=CHANNELS, SAME=same)(
        lazy.programs,
        (
            *corners[:3], content, rate, log_keep, marks, kept.solved, *lazy.tensors,
            kept.written, kept.around_reads, kept.around_writes, lazy.end,
        ),
        (N,),
    )  # fmt: skip
    plan.bound(sparse_read_kernel)(
        chunk_grid(inputs),
        (
            inputs.write_at, inputs.asked_at, corners[3], kept.written, log_keep, marks,
            kept.around_reads, reads,
        ),
        (N,),
    )  # fmt: skip
    after, _ = lazy.settled(plan)
    return reads, after, kept.tensors if keep else []


def backward(
    grad_reads: Tensor,
    grad_state: Tensor | None,
    inputs: PlaceInputs,
    kept: list[Tensor],
    plan: Plan,
) -> PlaceInputs:
    """The gradients in the places of the inputs."""
    N, found, same = inputs.content.shape[1], Kept(*kept), inputs.read_at is None
    content, rate, log_keep = inputs.content, inputs.rate, inputs.log_keep
    places, corners = (inputs.write_at, inputs.asked_at), found.corners
    marks, ends = or_else(inputs.resets, grad_reads), grad_state is not None
    lazy = Lazy.of(grad_state, inputs.state, inputs.resets is not None)
    around_after = torch.empty_like(found.around_reads)
    by_written, by_right = torch.empty_like(grad_reads), torch.empty_like(grad_reads)
    plan.bound(sparse_written_kernel)(
        chunk_grid(inputs), (*places, log_keep, marks, grad_reads, by_written), (N,)
    )
    plan.bound(delta_backward_kernel, warps=plan["E"], CB=CHANNELS, SAME=same, HAS_START=ends)(
        lazy.programs,
        (
            *corners, rate, log_keep, marks, found.solved, grad_reads, by_written,
            *lazy.tensors, around_after, by_right, lazy.end,
        ),
        (N,),
    )  # fmt: skip
    by_write_at, by_content, by_rate, lost = (
        torch.empty_like(t) for t in (inputs.write_at, content, rate, log_keep)
    )
    by_read_at = None if same else torch.empty_like(inputs.asked_at)
    by_psi_phi, by_phi_phi = (rate.new_empty(*rate.shape, LENGTH) for _ in range(2))
    by_asked, by_wrote = (rate.new_empty(*rate.shape, plan["E"]) for _ in range(2))
    plan.bound(sparse_gradient_kernel, warps=4)(
        chunk_grid(inputs),
        (
            *places, corners[1], corners[3], content, found.written, rate, log_keep, marks,
            found.around_reads, found.around_writes, around_after, grad_reads, by_right,
            by_psi_phi, by_phi_phi, by_asked, by_wrote, by_content, by_rate, lost,
        ),
        (N,),
    )  # fmt: skip
    plan.bound(place_gradient_kernel, SAME=same)(
        chunk_grid(inputs),
        (
            *places, by_psi_phi, by_phi_phi, by_asked, by_wrote, by_write_at,
            or_else(by_read_at, by_write_at),
        ),
        (N,),
    )  # fmt: skip
    by_state, dots = lazy.settled(plan, inputs.state if ends else None)
    by_log_keep = keep_gradient(plan, inputs, lost, dots)
    gradients = (by_write_at, by_read_at, by_content, by_rate, by_log_keep, None, by_state)
    return PlaceInputs._make((*gradients, None, None, None))


def keep_gradient(plan: Plan, inputs: PlaceInputs, lost: Tensor, dots: Tensor | None) -> Tensor:
    """What log α receives; `dots` are None where no gradient of the state came."""
    (B, N, H), found = lost.shape, torch.empty_like(lost)
    plan.bound(keep_gradient_kernel, warps=4, T=SUMMED, DOT=dots is not None)(
        (B * H,),
        (lost, or_else(dots, lost), or_else(inputs.resets, lost), found),
        (N, 0 if dots is None else dots.shape[1]),
    )
    return found
