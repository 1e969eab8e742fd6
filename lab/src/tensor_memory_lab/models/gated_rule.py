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
        L = min(CHUNK, -(-N // BLOCK) * BLOCK)
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
        solved = torch.linalg.solve_triangular(  # looks at what is below the diagonal alone
            products(erase), torch.cat([v, held], -1), upper=False, unitriangular=True
        )
        u, w = solved.split([v.shape[-1], k.shape[-1]], -1)
        eye = torch.eye(k.shape[-1], dtype=k.dtype, device=k.device)
        move = (eye if kept is None else eye * kept) - to_end.mT @ w  # (B, H, S, K, K)
        before, after = _move(to_end.mT @ u, move, state)
        u = u - w @ before
    q_since = q if since is None else q * since
    return products(q).tril() @ u + q_since @ before, after


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
