"""The recurrence of the peers: a decaying state that keys write into, in chunks.

    S ← e^{g_t} S,   u_t = v_t − e_tᵀ S,   S ← S + k_t u_tᵀ,   o_t = q_tᵀ S

with a log decay g_t ≤ 0 per head (Mamba-2, Gated DeltaNet) or per feature of a key (GLA, KDA,
RWKV-7) or none (DeltaNet), and an erasing key e_t (the delta rule has e = βk, v = βv) or none.

Within a chunk of L tokens c is the running sum of g and P(x)_ts = Σ_d x_td k_sd e^{c_td − c_sd} for
s ≤ t. The writes solve (I + tril₋₁ P(e)) u = v − (e ⊙ e^c) S with S the state before the chunk, the
reads are P(q) u + (q ⊙ e^c) S, and the state after the chunk is linear in S. So everything but one
product per chunk, (K × K) by (K × V), runs over all chunks at once.

Letters: B batch, N tokens, H heads, S chunks of L tokens, s blocks of b tokens in a chunk, K width
of a key, V of a value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64
"""L: products within a chunk grow with it, the steps between chunks shrink."""

BLOCK = 16
"""b: tokens whose decays per feature are taken as a product of two factors."""

LEAST_DECAY = -5.0
"""A log decay per feature is not taken below this. Over a block it adds up to e^{±80}, which
float32 holds; a token then keeps 0.7 % at least. Kimi's kernels have the same bound."""


def gated_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None,
    erase: Tensor | None,
    state: Tensor,
) -> tuple[Tensor, Tensor]:
    """-> reads (B, N, H, V), the state after the last token (B, H, K, V).

    Runs in float32 or better, also under autocast. H may be 1 where heads share queries and keys.

    Args:
        q: (B, N, H, K).
        k: (B, N, H, K).
        v: (B, N, H, V).
        decay: g, (B, N, H) or (B, N, H, K); None keeps everything.
        erase: e, (B, N, H, K); None adds and erases nothing.
        state: (B, H, K, V).
    """
    wide = torch.promote_types(v.dtype, torch.float32)
    B, N, H, V = v.shape
    with torch.autocast(v.device.type, enabled=False):
        if N == 0:
            return v.new_zeros(B, 0, H, V, dtype=wide), state
        L = min(CHUNK, max(BLOCK, 1 << (N - 1).bit_length()))  # a power of two
        q, k, v = (_by_chunk(x.to(wide), L) for x in (q, k, v))  # (B, H, S, L, K or V)
        erase = None if erase is None else _by_chunk(erase.to(wide), L)
        reads, after = _over_chunks(q, k, v, _running_sum(decay, wide, L), erase, state.to(wide))
    return reads.movedim(1, 3).flatten(1, 2)[:, :N], after


def _over_chunks(
    q: Tensor, k: Tensor, v: Tensor, c: Tensor | None, erase: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    """All by chunk, c (B, H, S, L, 1 or K) -> reads (B, H, S, L, V), state."""
    products = _products(k, c)
    since, kept, to_end = None, None, k  # e^c, e^{c_L}, k ⊙ e^{c_L − c}
    if c is not None:
        end = c[..., -1:, :]
        since, kept, to_end = c.exp(), end.exp().mT, k * (end - c).exp()
    if erase is None:
        before, after = _add(to_end.mT @ v, kept, state)
        u = v
    else:
        held = erase if since is None else erase * since
        solved = _Solve.apply(products(erase), torch.cat([v, held], -1))
        u, w = solved.split([v.shape[-1], k.shape[-1]], -1)
        eye = torch.eye(k.shape[-1], dtype=k.dtype, device=k.device)
        move = (eye if kept is None else eye * kept) - to_end.mT @ w  # (B, H, S, K, K)
        before, after = _move(to_end.mT @ u, move, state)
        u = u - w @ before
    q_since = q if since is None else q * since
    return products(q).tril() @ u + q_since @ before, after


class _Solve(torch.autograd.Function):
    """x of (I + tril₋₁ T) x = y. PyTorch's own, `solve_triangular`, is slower on a GPU."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, y: Tensor) -> Tensor:
        inverse = _inverse(t)
        x = inverse @ y
        ctx.save_for_backward(inverse, x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        inverse, x = ctx.saved_tensors
        grad = inverse.mT @ grad
        return -(grad @ x.mT).tril(-1), grad


def _inverse(t: Tensor) -> Tensor:
    """(I + tril₋₁ T)⁻¹ of T (..., L, L), from blocks on the diagonal that double.

    Where T has (A 0; B C) on its diagonal, the inverse has (A⁻¹ 0; −C⁻¹ B A⁻¹ C⁻¹).
    """
    inverse = torch.eye(2, dtype=t.dtype, device=t.device) - _diagonal(t, 2).tril(-1)
    while (size := inverse.shape[-1]) < t.shape[-1]:
        below = _diagonal(t, 2 * size)[..., size:, :size]
        first, second = inverse.unflatten(-3, (-1, 2)).unbind(-3)
        corner = -second @ below @ first
        upper = torch.cat([first, torch.zeros_like(corner)], -1)
        inverse = torch.cat([upper, torch.cat([corner, second], -1)], -2)
    return inverse.squeeze(-3)


def _diagonal(t: Tensor, size: int) -> Tensor:
    """The blocks on the diagonal of T: (..., L, L) -> (..., L / size, size, size)."""
    blocks = t.unflatten(-1, (-1, size)).unflatten(-3, (-1, size))
    return blocks.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)


def _add(added: Tensor, kept: Tensor | None, state: Tensor) -> tuple[Tensor, Tensor]:
    """The state before each chunk (B, H, S, K, V) and after the last, S ← kept S + added."""
    before = []
    for s, add in enumerate(added.unbind(2)):
        before.append(state)
        state = state + add if kept is None else torch.addcmul(add, kept[:, :, s], state)
    return torch.stack(before, 2), state


def _move(added: Tensor, move: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The state before each chunk and after the last, S ← move S + added."""
    shape, before = state.shape, []
    state = state.flatten(0, 1)
    moves = move.flatten(0, 1).unbind(1)
    for step, add in zip(moves, added.flatten(0, 1).unbind(1), strict=True):
        before.append(state)
        state = torch.baddbmm(add, step, state)
    return torch.stack(before, 1).unflatten(0, shape[:2]), state.view(shape)


def _products(k: Tensor, c: Tensor | None) -> Callable[[Tensor], Tensor]:
    """P, a function of x: Σ_d x_td k_sd e^{c_td − c_sd} where s ≤ t, else anything finite."""
    if c is None:
        return lambda x: x @ k.mT
    if c.shape[-1] == 1:
        L = c.shape[-2]
        later = torch.ones(L, L, dtype=torch.bool, device=c.device).triu(1)
        within = (c - c.mT).masked_fill(later, -torch.inf).exp()
        return lambda x: (x @ k.mT) * within
    # A factor for each side, counted from where the block of t starts: neither can overflow, and
    # what is after t is in no term of t.
    blocks = c.unflatten(-2, (-1, BLOCK))  # (B, H, S, s, b, K)
    start = F.pad(blocks[..., :-1, -1:, :], (0, 0, 0, 0, 1, 0))
    most = -LEAST_DECAY * BLOCK
    left = (blocks - start).exp()
    right = k[..., None, :, :] * (start - c[..., None, :, :]).clamp(max=most).exp()  # (.., s, L, K)
    return lambda x: ((x.unflatten(-2, (-1, BLOCK)) * left) @ right.mT).flatten(-3, -2)


def _running_sum(decay: Tensor | None, wide: torch.dtype, L: int) -> Tensor | None:
    """c (B, H, S, L, 1 or K), from zero in each chunk."""
    if decay is None:
        return None
    decay = decay.to(wide)
    decay = decay[..., None] if decay.ndim == 3 else decay.clamp(min=LEAST_DECAY)
    return _by_chunk(decay, L).cumsum(-2)


def _by_chunk(x: Tensor, L: int) -> Tensor:
    """(B, N, H, e) -> (B, H, S, L, e); zeros fill the last chunk up and change nothing."""
    short = -x.shape[1] % L
    by_chunk = F.pad(x, (0, 0, 0, 0, 0, short)).unflatten(1, (-1, L)).movedim(3, 1)
    return by_chunk.contiguous()  # one copy, where each of the products would make its own
