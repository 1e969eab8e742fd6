"""Kernels over chunks: what `chunked` does, given addresses.

Only the state goes from chunk to chunk, in kernels that do nothing else; everything within a chunk
runs for all chunks at once. Rule "delta" solves its triangular system before the state moves.

Letters: B batch, N tokens, H heads, S chunks of L tokens, V voxels, C channels. A program is one
row and head, or a chunk of them. Of a chunk φ (L, V) are the addresses that its tokens write at, ψ
those that they read at, A the attention of its reads to its writes and T the system of rule
"delta", both (L, L). `by_x` and dx are the gradient of x. `from`, `to` and `carry` are the decays
from the state before a chunk to a token, from a token to the state after, and from state to state;
0 across a reset.
"""

# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# pyright: reportPossiblyUnboundVariable=false
from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tensor_memory.ops.launch import BoundKernel, blocks, or_else
from tensor_memory.ops.places.inputs import PlaceInputs
from tensor_memory.ops.places.triton.addresses import addresses_backward, make_addresses
from tensor_memory.ops.places.triton.plan import (
    LENGTH,
    Plan,
    chunk_grid,
    low_dtype,
)

TILE = 32
"""Voxels and channels that a program of a kernel over the state holds, where they are independent.
"""


@triton.jit
def product(a, b, MODE: tl.constexpr):
    """a @ b with float32 sums; operands in bfloat16, in (three) TF32 products, or as they are."""
    if MODE == "bf16":
        found = tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16))
    elif MODE == "bf16-emulated":  # the interpreter multiplies bfloat16 wrongly
        a, b = a.to(tl.bfloat16).to(tl.float32), b.to(tl.bfloat16).to(tl.float32)
        found = tl.dot(a, b, input_precision="ieee")
    else:
        found = tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision=MODE)
    return found


@triton.jit
def rows(pointer, index, real, column, WIDTH: tl.constexpr):
    """Rows of a matrix of this width at some columns: (index, column), zeros where not real."""
    inside = real[:, None] & (column < WIDTH)[None, :]
    where = pointer + index[:, None] * WIDTH + column[None, :]
    return tl.load(where, mask=inside, other=0.0)


@triton.jit
def store_rows(pointer, index, real, column, WIDTH: tl.constexpr, values):
    """The other way."""
    inside = real[:, None] & (column < WIDTH)[None, :]
    tl.store(pointer + index[:, None] * WIDTH + column[None, :], values, mask=inside)


@triton.jit
def tokens_of(program, s, N, H: tl.constexpr, L: tl.constexpr):
    """A chunk's tokens as rows of (B, N) and of (B, N, H), and which of them are real."""
    t = s * L + tl.arange(0, L)
    row_token = program // H * N + t
    return row_token, row_token * H + program % H, (t >= 0) & (t < N)


@triton.jit
def of_tokens(pointer, token, real):
    """One number per token, (L)."""
    return tl.load(pointer + token, mask=real, other=0.0).to(tl.float32)


@triton.jit
def decays(keep, resets, row_token, real, HAS_RESETS: tl.constexpr, L: tl.constexpr):
    """log α (L) -> g (L) within the chunk, the part (L) between resets, and the three decays."""
    # e^{g_t}, e^{g_L − g_s} and e^{g_L}.
    g = tl.cumsum(keep, axis=0)
    last = tl.arange(0, L) == L - 1
    total = tl.sum(tl.where(last, g, 0.0))
    part = tl.zeros([L], tl.int32)
    from_state, to_state, carry = tl.exp(g), tl.exp(total - g), tl.exp(total)
    # Nothing goes past a reset: 0 from it on, 0 before the last one, 0 where there is any.
    if HAS_RESETS:
        part = tl.cumsum(tl.load(resets + row_token, mask=real, other=0).to(tl.int32), axis=0)
        parts = tl.sum(tl.where(last, part, 0))
        from_state = tl.where(part == 0, from_state, 0.0)
        to_state = tl.where(part == parts, to_state, 0.0)
        carry = tl.where(parts == 0, carry, 0.0)
    return g, part, from_state, to_state, carry


@triton.jit
def decay_between(g, part, L: tl.constexpr):
    """e^{g_t − g_s} where s ≤ t and no reset lies between, else 0: (L, L)."""
    i = tl.arange(0, L)
    earlier = (i[:, None] >= i[None, :]) & (part[:, None] == part[None, :])
    return tl.where(earlier, tl.exp(tl.where(earlier, g[:, None] - g[None, :], 0.0)), 0.0)


@triton.jit
def overlap(left, right, token, real, V: tl.constexpr, VB: tl.constexpr, L: tl.constexpr,
            MODE: tl.constexpr):  # fmt: skip
    """The inner products of two addresses of a chunk: (L, L)."""
    found = tl.zeros([L, L], tl.float32)
    for start in range(0, V, VB):
        voxel = start + tl.arange(0, VB)
        a, b = rows(left, token, real, voxel, V), rows(right, token, real, voxel, V)
        found += product(a, tl.trans(b), MODE)
    return found


@triton.jit(do_not_specialize=["N"])
def state_kernel(
    address, value, rate, log_keep, resets, start, between, end, N,
    H: tl.constexpr, V: tl.constexpr, C: tl.constexpr, VB: tl.constexpr, CB: tl.constexpr,
    L: tl.constexpr, BACKWARD: tl.constexpr, HAS_START: tl.constexpr, HAS_RESETS: tl.constexpr,
    MODE: tl.constexpr,
):  # fmt: skip
    """Rule "linear": the state through all chunks, S ← carry S + (to φ)ᵀ (β v); (V, C) in tiles.

    BACKWARD: its gradient from the last to the first, dS ← carry dS + (from φ(q))ᵀ dr. The states
    met on the way, before a chunk or after it, go to `between` (B, H, S, V, C).
    """
    # A tile (VB, CB) of the state of one row and head.
    program = tl.program_id(0).to(tl.int64)
    voxel = tl.program_id(1) * VB + tl.arange(0, VB)
    channel = tl.program_id(2) * CB + tl.arange(0, CB)
    S = tl.zeros([VB, CB], tl.float32)
    if HAS_START:
        S += rows(start + program * V * C, voxel, voxel < V, channel, C)
    chunks = tl.cdiv(N, L)
    s, way = 0, 1
    if BACKWARD:
        s, way = chunks - 1, -1
    # The first chunk: φ (L, VB), v (L, CB), β and log α (L).
    row_token, token, real = tokens_of(program, s, N, H, L)
    phi, v = rows(address, token, real, voxel, V), rows(value, token, real, channel, C)
    beta, keep = of_tokens(rate, token, real), of_tokens(log_keep, token, real)
    for _ in range(chunks):
        store_rows(between + (program * chunks + s) * V * C, voxel, voxel < V, channel, C, S)
        _, _, from_state, to_state, carry = decays(keep, resets, row_token, real, HAS_RESETS, L)
        # φᵀ (to β v), or φ(q)ᵀ (from dr)   (VB, CB)
        scale = from_state if BACKWARD else to_state * beta
        added = product(tl.trans(phi), scale[:, None] * v, MODE)
        # What the next chunk needs is on its way while this one is added.
        s += way
        row_token, token, real = tokens_of(program, s, N, H, L)
        phi, v = rows(address, token, real, voxel, V), rows(value, token, real, channel, C)
        beta, keep = of_tokens(rate, token, real), of_tokens(log_keep, token, real)
        S = carry * S + added
    store_rows(end + program * V * C, voxel, voxel < V, channel, C, S)


@triton.jit(do_not_specialize=["N"])
def read_kernel(
    phi, psi, written, rate, log_keep, resets, before, reads, N,
    H: tl.constexpr, V: tl.constexpr, C: tl.constexpr, VB: tl.constexpr, CB: tl.constexpr,
    L: tl.constexpr, DELTA: tl.constexpr, HAS_RESETS: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    """What a chunk's tokens read: of its own writes u, and of the state before it.

    `written` is u for rule "delta", and v otherwise.
    """
    program, s = tl.program_id(1).to(tl.int64), tl.program_id(0)
    channel = tl.arange(0, CB)
    row_token, token, real = tokens_of(program, s, N, H, L)
    g, part, from_state, _, _ = decays(
        of_tokens(log_keep, token, real), resets, row_token, real, HAS_RESETS, L
    )
    # Over the grid: ψ φᵀ (L, L), and what the state before the chunk has there, ψ S (L, C).
    S_at = before + (program * tl.num_programs(0) + s) * V * C
    psi_phi, psi_S = tl.zeros([L, L], tl.float32), tl.zeros([L, CB], tl.float32)
    for start in range(0, V, VB):
        voxel = start + tl.arange(0, VB)
        q = rows(psi, token, real, voxel, V)
        psi_phi += product(q, tl.trans(rows(phi, token, real, voxel, V)), MODE)
        psi_S += product(q, rows(S_at, voxel, voxel < V, channel, C), MODE)
    # r_t = Σ_{s ≤ t} e^{g_t − g_s} (ψ_t·φ_s) u_s + e^{g_t} ψ_t S   (L, C)
    u = rows(written, token, real, channel, C)
    if not DELTA:
        u = u * of_tokens(rate, token, real)[:, None]
    r = product(psi_phi * decay_between(g, part, L), u, MODE) + from_state[:, None] * psi_S
    store_rows(reads, token, real, channel, C, r)


@triton.jit(do_not_specialize=["N"])
def gradient_kernel(
    phi, psi, content, written, rate, log_keep, resets, before, by_after, by_reads, by_right,
    by_phi, by_psi, by_content, by_rate, by_log_keep, N,
    H: tl.constexpr, V: tl.constexpr, C: tl.constexpr, VB: tl.constexpr, CB: tl.constexpr,
    L: tl.constexpr, DELTA: tl.constexpr, SAME: tl.constexpr, HAS_RESETS: tl.constexpr,
    MODE: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """The gradients of a chunk, given the state before it and the gradient of the state after."""
    program, s = tl.program_id(1).to(tl.int64), tl.program_id(0)
    channel, i = tl.arange(0, CB), tl.arange(0, L)
    row_token, token, real = tokens_of(program, s, N, H, L)
    g, part, from_state, to_state, carry = decays(
        of_tokens(log_keep, token, real), resets, row_token, real, HAS_RESETS, L
    )
    within = decay_between(g, part, L)  # e^{g_t − g_s}
    grid_at = (program * tl.num_programs(0) + s) * V * C
    v = rows(content, token, real, channel, C).to(tl.float32)
    beta = of_tokens(rate, token, real)
    dr = rows(by_reads, token, real, channel, C).to(tl.float32)
    # Over the grid: the overlaps ψ φᵀ and φ φᵀ (L, L), φ dS and φ S (L, C), and ⟨S, dS⟩.
    psi_phi, phi_phi = tl.zeros([L, L], tl.float32), tl.zeros([L, L], tl.float32)
    phi_dS, phi_S = tl.zeros([L, CB], tl.float32), tl.zeros([L, CB], tl.float32)
    S_dS = 0.0
    for start in range(0, V, VB):
        voxel = start + tl.arange(0, VB)
        p, q = rows(phi, token, real, voxel, V), rows(psi, token, real, voxel, V)
        S = rows(before + grid_at, voxel, voxel < V, channel, C)
        dS = rows(by_after + grid_at, voxel, voxel < V, channel, C)
        psi_phi += product(q, tl.trans(p), MODE)
        phi_dS += product(p, dS, MODE)
        S_dS += tl.sum(S.to(tl.float32) * dS.to(tl.float32))
        if DELTA:
            phi_phi += product(p, tl.trans(p), EXACT)
            phi_S += product(p, S, EXACT)
    attention = psi_phi * within  # A: r = A u + from ψ S
    u = rows(written, token, real, channel, C).to(tl.float32) if DELTA else beta[:, None] * v
    # Through the state after the chunk, S' = carry S + (to φ)ᵀ u: to = e^{total − g}.
    by_to = to_state * tl.sum(u * phi_dS, axis=1)
    dtotal = tl.sum(by_to) + carry * S_dS
    # Through the reads of the chunk's own writes: dA = dr uᵀ; A_ts has e^{g_t − g_s}.
    by_attention = product(dr, tl.trans(u), MODE)
    by_gap = by_attention * attention
    dg = tl.sum(by_gap, axis=1) - tl.sum(by_gap, axis=0) - by_to
    by_psi_phi = by_attention * within
    by_phi_S = tl.zeros([L, CB], tl.float32)
    by_phi_phi = tl.zeros([L, L], tl.float32)
    if DELTA:
        # (I + T) u = β (v − from φ S): the right-hand side receives (I + T)⁻ᵀ du, `by_right`,
        # and T receives −right uᵀ below the diagonal.
        right = rows(by_right, token, real, channel, C).to(tl.float32)
        dv = beta[:, None] * right
        by_system = tl.where(
            i[:, None] > i[None, :], -product(right, tl.trans(u), EXACT) * within, 0.0
        )
        # β is in the right-hand side and in T = β (φ φᵀ) e^{g_t − g_s}.
        dbeta = tl.sum(right * (v - from_state[:, None] * phi_S), axis=1)
        dbeta += tl.sum(by_system * phi_phi, axis=1)
        by_phi_phi = by_system * beta[:, None]
        by_gap = by_phi_phi * phi_phi
        dg += tl.sum(by_gap, axis=1) - tl.sum(by_gap, axis=0)
        by_phi_S = -from_state[:, None] * dv
        dg += tl.sum(by_phi_S * phi_S, axis=1)
        by_phi_phi += tl.trans(by_phi_phi)  # φ is on both sides of φ φᵀ
    else:
        # u = β v, with du = Aᵀ dr + to φ dS.
        du = product(tl.trans(attention), dr, MODE) + to_state[:, None] * phi_dS
        dbeta = tl.sum(du * v, axis=1)
        dv = beta[:, None] * du
    store_rows(by_content, token, real, channel, C, dv)
    tl.store(by_rate + token, dbeta, mask=real)
    # The addresses, tile by tile of the grid: dψ = dN φ + from dr Sᵀ with dN = dA e^{g_t − g_s},
    # dφ = dNᵀ ψ + to u dSᵀ, and under rule "delta" what φ φᵀ and φ S receive.
    u_to, dr_from = u * to_state[:, None], dr * from_state[:, None]
    for start in range(0, V, VB):
        voxel = start + tl.arange(0, VB)
        p, q = rows(phi, token, real, voxel, V), rows(psi, token, real, voxel, V)
        S = rows(before + grid_at, voxel, voxel < V, channel, C)
        dS = rows(by_after + grid_at, voxel, voxel < V, channel, C)
        # `from` scales what is read of the state before, ψ S.
        dr_S = product(dr_from, tl.trans(S), MODE)
        dg += tl.sum(q.to(tl.float32) * dr_S, axis=1)
        dpsi = product(by_psi_phi, p, MODE) + dr_S
        dphi = product(tl.trans(by_psi_phi), q, MODE) + product(u_to, tl.trans(dS), MODE)
        if DELTA:
            dphi += product(by_phi_phi, p, EXACT) + product(by_phi_S, tl.trans(S), EXACT)
        if SAME:
            dphi += dpsi
        else:
            store_rows(by_psi, token, real, voxel, V, dpsi)
        store_rows(by_phi, token, real, voxel, V, dphi)
    # Every log α is in g from its token on, and in the chunk's total.
    later = tl.sum(dg) - tl.cumsum(dg, axis=0) + dg
    tl.store(by_log_keep + token, later + dtotal, mask=real)


@triton.jit
def inverse(system, L: tl.constexpr, STEPS: tl.constexpr, MODE: tl.constexpr):
    """(I + T)⁻¹ of a strictly lower T, block by block: two neighbours on the diagonal become one.

    With D the inverse of the diagonal's blocks and M the part of T that joins them by two,
    (D⁻¹ + M)⁻¹ = D − D M D. No power of T is taken: where a place is written again and again they
    grow to 10⁸ and cancel.
    """
    i = tl.arange(0, L)
    apart = i[:, None] ^ i[None, :]  # its highest bit: the level on which two tokens meet
    found = tl.where(apart == 0, 1.0, tl.where(apart == 1, -system, 0.0))
    for level in tl.static_range(1, STEPS):
        joins = tl.where(apart >> level == 1, system, 0.0)
        found -= product(product(found, joins, MODE), found, MODE)
    return found


@triton.jit(do_not_specialize=["N"])
def solve_kernel(
    phi, rate, log_keep, resets, solved, N,
    H: tl.constexpr, V: tl.constexpr, VB: tl.constexpr, L: tl.constexpr, STEPS: tl.constexpr,
    HAS_RESETS: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Rule "delta": (I + T)⁻¹ of a chunk, to rows (B, N, H, L)."""
    program, s = tl.program_id(1).to(tl.int64), tl.program_id(0)
    i = tl.arange(0, L)
    row_token, token, real = tokens_of(program, s, N, H, L)
    g, part, _, _, _ = decays(
        of_tokens(log_keep, token, real), resets, row_token, real, HAS_RESETS, L
    )
    # T_ts = β_t e^{g_t − g_s} φ_t·φ_s for s < t   (L, L)
    phi_phi = overlap(phi, phi, token, real, V, VB, L, EXACT) * decay_between(g, part, L)
    beta = of_tokens(rate, token, real)
    system = tl.where(i[:, None] > i[None, :], beta[:, None] * phi_phi, 0.0)
    store_rows(solved, token, real, i, L, inverse(system, L, STEPS, EXACT))


@triton.jit(do_not_specialize=["N"])
def delta_state_kernel(
    phi, content, rate, log_keep, resets, solved, start, written, between, end, N,
    H: tl.constexpr, V: tl.constexpr, C: tl.constexpr, VB: tl.constexpr, CB: tl.constexpr,
    L: tl.constexpr, HAS_RESETS: tl.constexpr, MODE: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Rule "delta": the state through all chunks; u = solved β (v − from φᵀ S) on the way."""
    program = tl.program_id(0).to(tl.int64)
    voxel, i = tl.arange(0, VB), tl.arange(0, L)
    channel = tl.program_id(1) * CB + tl.arange(0, CB)
    S = rows(start + program * V * C, voxel, voxel < V, channel, C).to(tl.float32)
    chunks = tl.cdiv(N, L)
    for s in range(chunks):
        store_rows(between + (program * chunks + s) * V * C, voxel, voxel < V, channel, C, S)
        row_token, token, real = tokens_of(program, s, N, H, L)
        _, _, from_state, to_state, carry = decays(
            of_tokens(log_keep, token, real), resets, row_token, real, HAS_RESETS, L
        )
        p = rows(phi, token, real, voxel, V)
        beta = of_tokens(rate, token, real)
        # u = (I + T)⁻¹ β (v − from φ S)   (L, CB)
        error = rows(content, token, real, channel, C) - from_state[:, None] * product(p, S, EXACT)
        u = product(rows(solved, token, real, i, L), beta[:, None] * error, EXACT)
        store_rows(written, token, real, channel, C, u)
        # S ← carry S + φᵀ (to u)   (VB, CB)
        S = carry * S + product(tl.trans(p), to_state[:, None] * u, MODE)
    store_rows(end + program * V * C, voxel, voxel < V, channel, C, S)


@triton.jit(do_not_specialize=["N"])
def delta_written_kernel(
    phi, psi, log_keep, resets, by_reads, by_written, N,
    H: tl.constexpr, V: tl.constexpr, C: tl.constexpr, VB: tl.constexpr, CB: tl.constexpr,
    L: tl.constexpr, HAS_RESETS: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    """Rule "delta": what u receives of the reads of its own chunk."""
    program, s = tl.program_id(1).to(tl.int64), tl.program_id(0)
    channel = tl.arange(0, CB)
    row_token, token, real = tokens_of(program, s, N, H, L)
    g, part, _, _, _ = decays(
        of_tokens(log_keep, token, real), resets, row_token, real, HAS_RESETS, L
    )
    # du = Aᵀ dr with A_ts = e^{g_t − g_s} ψ_t·φ_s   (L, C)
    attention = overlap(psi, phi, token, real, V, VB, L, MODE) * decay_between(g, part, L)
    du = product(tl.trans(attention), rows(by_reads, token, real, channel, C), MODE)
    store_rows(by_written, token, real, channel, C, du)


@triton.jit(do_not_specialize=["N"])
def delta_state_backward_kernel(
    phi, psi, rate, log_keep, resets, solved, by_reads, by_written, start, by_right, between,
    end, N,
    H: tl.constexpr, V: tl.constexpr, C: tl.constexpr, VB: tl.constexpr, CB: tl.constexpr,
    L: tl.constexpr, HAS_START: tl.constexpr, HAS_RESETS: tl.constexpr, MODE: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """Rule "delta": the gradient of the state from the last chunk to the first.

    On the way what the right-hand sides β (v − from φᵀ S) receive, solvedᵀ du.
    """
    program = tl.program_id(0).to(tl.int64)
    voxel, i = tl.arange(0, VB), tl.arange(0, L)
    channel = tl.program_id(1) * CB + tl.arange(0, CB)
    dS = tl.zeros([VB, CB], tl.float32)
    if HAS_START:
        dS += rows(start + program * V * C, voxel, voxel < V, channel, C)
    chunks = tl.cdiv(N, L)
    for step in range(chunks):
        s = chunks - 1 - step
        store_rows(between + (program * chunks + s) * V * C, voxel, voxel < V, channel, C, dS)
        row_token, token, real = tokens_of(program, s, N, H, L)
        _, _, from_state, to_state, carry = decays(
            of_tokens(log_keep, token, real), resets, row_token, real, HAS_RESETS, L
        )
        p, q = rows(phi, token, real, voxel, V), rows(psi, token, real, voxel, V)
        beta = of_tokens(rate, token, real)
        # All that u receives: of the chunk's own reads, and of the state after, to φ dS.
        du = rows(by_written, token, real, channel, C)
        du = du + to_state[:, None] * product(p, dS, MODE)
        # What its right-hand side receives, (I + T)⁻ᵀ du   (L, CB)
        right = product(tl.trans(rows(solved, token, real, i, L)), du, EXACT)
        store_rows(by_right, token, real, channel, C, right)
        # dS ← carry dS + ψᵀ (from dr) − φᵀ (from β right): through the reads, and through u.
        dr = from_state[:, None] * rows(by_reads, token, real, channel, C)
        by_phi_S = -(from_state * beta)[:, None] * right
        dS = carry * dS + product(tl.trans(q), dr, MODE) + product(tl.trans(p), by_phi_S, EXACT)
    store_rows(end + program * V * C, voxel, voxel < V, channel, C, dS)


class Kept(NamedTuple):
    """What a backward needs beside the inputs."""

    before: Tensor
    """(B, H, S, V, C) the state before each chunk."""
    written: Tensor | None = None
    """(B, N, H, C) u; rule "delta" alone."""
    solved: Tensor | None = None
    """(B, N, H, L) the inverse of each chunk's system; rule "delta" alone."""

    @classmethod
    def empty(cls, inputs: PlaceInputs, products: torch.dtype) -> Kept:
        """Uninitialised."""
        B, N, H, C = inputs.content.shape
        new, delta = inputs.rate.new_empty, inputs.rule == "delta"
        return cls(
            new(B, H, blocks(N, LENGTH), math.prod(inputs.grid), C, dtype=low_dtype(products)),
            new(B, N, H, C) if delta else None,
            new(B, N, H, LENGTH) if delta else None,
        )

    @property
    def tensors(self) -> list[Tensor]:
        """Those there are."""
        return [tensor for tensor in self if tensor is not None]


def forward(
    inputs: PlaceInputs, plan: Plan, *, keep: bool, fresh: bool = False
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Reads, the state after, and with `keep` what `backward` needs.

    `fresh`, of rule "linear" alone: the state before is empty, and its tensor is not read.
    """
    B, N, H, _ = inputs.content.shape
    do, kept = plan.once(_launches), Kept.empty(inputs, plan.products)
    before, written, solved = kept
    phi, psi = make_addresses(inputs, plan, before.dtype)
    after, reads = torch.empty_like(inputs.state), inputs.empty_reads()
    content, rate, log_keep = inputs.content, inputs.rate, inputs.log_keep
    marks = or_else(inputs.resets, phi)
    if written is None or solved is None:
        do.state[not fresh](
            (B * H, *do.tiles),
            (phi, content, rate, log_keep, marks, inputs.state, before, after),
            (N,),
        )
    else:
        do.solve(chunk_grid(inputs), (phi, rate, log_keep, marks, solved), (N,))
        do.state[True](
            (B * H, *do.tiles),
            (phi, content, rate, log_keep, marks, solved, inputs.state, written, before, after),
            (N,),
        )
    do.read(
        chunk_grid(inputs),
        (phi, or_else(psi, phi), or_else(written, content), rate, log_keep, marks, before, reads),
        (N,),
    )
    return reads, after, kept.tensors if keep else []


def backward(
    grad_reads: Tensor,
    grad_state: Tensor | None,
    inputs: PlaceInputs,
    kept: list[Tensor],
    plan: Plan,
) -> PlaceInputs:
    """The gradients in the places of the inputs; the width's in parts (programs, H)."""
    before, written, solved = Kept(*kept)
    (B, N, H, _), do = inputs.content.shape, plan.once(_launches)
    phi, psi = make_addresses(inputs, plan, before.dtype)  # again: keeping them takes much memory
    content, rate, log_keep = inputs.content, inputs.rate, inputs.log_keep
    marks, asked = or_else(inputs.resets, phi), or_else(psi, phi)
    by_after, by_state = torch.empty_like(before), torch.empty_like(inputs.state)
    begins, by_right = or_else(grad_state, by_state), phi
    state_backward = do.state_backward[grad_state is not None]
    if written is None or solved is None:
        state_backward(
            (B * H, *do.tiles),
            (asked, grad_reads, rate, log_keep, marks, begins, by_after, by_state),
            (N,),
        )
    else:
        by_written, by_right = torch.empty_like(written), torch.empty_like(written)
        do.written(chunk_grid(inputs), (phi, asked, log_keep, marks, grad_reads, by_written), (N,))
        state_backward(
            (B * H, *do.tiles),
            (
                phi, asked, rate, log_keep, marks, solved, grad_reads, by_written, begins,
                by_right, by_after, by_state,
            ),
            (N,),
        )  # fmt: skip
    by_phi, by_psi = torch.empty_like(phi), None if psi is None else torch.empty_like(psi)
    by_content, by_rate = torch.empty_like(content), torch.empty_like(rate)
    by_log_keep = torch.empty_like(log_keep)
    do.gradient[psi is None](
        chunk_grid(inputs),
        (
            phi, asked, content, or_else(written, content), rate, log_keep, marks, before,
            by_after, grad_reads, by_right, by_phi, or_else(by_psi, by_phi), by_content, by_rate,
            by_log_keep,
        ),
        (N,),
    )  # fmt: skip
    by_write_at, by_read_at, by_width = addresses_backward(inputs, plan, by_phi, by_psi)
    found = (by_write_at, by_read_at, by_content, by_rate, by_log_keep, by_width, by_state)
    return PlaceInputs(*found, None, None, None)


def empty_kept(inputs: PlaceInputs, products: torch.dtype) -> list[Tensor]:
    """Uninitialised tensors like those `forward` keeps."""
    return Kept.empty(inputs, products).tensors


class _Launches(NamedTuple):
    """The kernels of a rule."""

    tiles: tuple[int, ...]
    """Programs of the kernels over the state, for every row and head."""
    state: list[BoundKernel]
    """From an empty state, and from another; "delta" reads it in any case."""
    state_backward: list[BoundKernel]
    """Without a gradient of the state after, and with one."""
    read: BoundKernel
    gradient: list[BoundKernel]
    """With places to read of their own, and with one place for both."""
    solve: BoundKernel
    """This and `written`: of rule "delta" alone."""
    written: BoundKernel


def _launches(plan: Plan) -> _Launches:
    V, C = plan["V"], plan["C"]
    if plan["DELTA"]:  # the channels of its state are independent
        tile, tiles = {"VB": plan["VP"], "CB": 16}, (blocks(C, 16),)
        forward, backward = delta_state_kernel, delta_state_backward_kernel
    else:  # so are the voxels
        tile = {"VB": min(TILE, plan["VB"]), "CB": min(TILE, plan["CB"])}
        tiles = blocks(V, tile["VB"]), blocks(C, tile["CB"])
        forward = backward = state_kernel
    ways = ((forward, False), (backward, True))
    states, state_gradients = (
        [plan.bound(kernel, **tile, BACKWARD=way, HAS_START=has) for has in (False, True)]
        for kernel, way in ways
    )
    width = min(32, plan["VB"])
    gradient = [plan.bound(gradient_kernel, VB=width, SAME=same) for same in (False, True)]
    return _Launches(
        tiles,
        states,
        state_gradients,
        plan.bound(read_kernel),
        gradient,
        plan.bound(solve_kernel),
        plan.bound(delta_written_kernel),
    )
