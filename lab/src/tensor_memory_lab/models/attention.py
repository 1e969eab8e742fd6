"""Softmax attention: over everything, over the past, or over a window of it, with slots or not.

A window that is short against the sequence runs in blocks: each block of queries sees its own and
the previous block of keys, so its cost grows with N·w and not with N².

Letters: B batch, h heads, N tokens, b tokens per block, S blocks, e width of a head.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

SMALLEST_BLOCK = 64
"""Queries per block at least: smaller products leave a GPU idle."""
SMALL = 512
"""Up to so many tokens one masked product costs less than the cutting into blocks: 0.33 ms against
0.52 for a layer of 32 × 512 tokens and a window of 64, forward and backward, on one H200."""
NARROWEST = 16
"""Width of a head from which on the compiler writes a kernel for a window."""
SLOWEST = 10_000.0
"""The pair of features that rotary positions turn slowest takes about so many tokens a radian."""

Cache = dict[str, Tensor]
"""{"keys": (B, h, L, e), "values": (B, h, L, e)} of the tokens before, where one is kept."""


class SelfAttention(nn.Module):
    """Queries, keys and values from the same tokens; one product makes all three.

    Args:
        dim: d.
        heads: h.
        causal: a token sees itself and what is before it; else everything.
        window: a token sees itself and the window - 1 tokens before it.
        length: tokens to prepare a mask for, or several; other lengths make theirs on the device.
        read_slots, write_slots: how many of the first and last positions are slots, which see and
            are seen as `visible` says.
        rotary: turn queries and keys by their place; else the tokens must tell it themselves.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        causal: bool = True,
        window: int | None = None,
        length: int | tuple[int, ...] = (),
        read_slots: int = 0,
        write_slots: int = 0,
        rotary: bool = False,
    ) -> None:
        super().__init__()
        check_heads(dim, heads)
        if window is not None and (window < 1 or not causal):
            raise ValueError(
                f"window: expected 1 or more tokens of a causal model, got {window} and "
                f"causal={causal}; None sees everything"
            )
        width = dim // heads
        if rotary and width % 2:
            raise ValueError(
                f"heads: expected an even width of a head for rotary positions, got {width}; "
                "change the number of heads or the width"
            )
        self.heads, self.causal, self.window, self.rotary = heads, causal, window, rotary
        self.read_slots, self.write_slots = read_slots, write_slots
        self.qkv = nn.Linear(dim, 3 * dim)
        self.project = nn.Linear(dim, dim)
        for N in {length} if isinstance(length, int) else set(length):
            if self._needs_mask(N):
                self.register_buffer(f"mask_{N}", _addend(self._make_mask(N)), persistent=False)

    def forward(self, x: Tensor, cache: Cache | None = None) -> tuple[Tensor, Cache | None]:
        """x (B, N, d), slots included -> the same shape; nothing is carried.

        With a cache (`empty_cache` at first) x goes on where the tokens it holds ended.
        """
        q, k, v = split_heads(self.qkv(x), 3, self.heads)
        if cache is not None:
            mixed, cache = self._attend_further(q, k, v, cache)
            return self.project(merge_heads(mixed)), cache
        q, k = self._placed(q, k)
        N = x.shape[1] - self.read_slots - self.write_slots
        if not self._needs_mask(N):
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        elif self.window is not None and self._in_one_kernel(q):
            mixed = _attend_near(q, k, v, self.window)
        else:
            mask = getattr(self, f"mask_{N}", None)
            mask = self._make_mask(N, x.device) if mask is None else mask
            attend = self._attend_in_blocks if self._in_blocks(N) else _attend_masked
            mixed = attend(q, k, v, mask)
        return self.project(merge_heads(mixed)), None

    def zeros(self, rows: int, like: Tensor) -> None:
        """Nothing is carried."""

    def state_bytes(self) -> int:
        """Nothing is carried."""
        return 0

    def empty_cache(self, rows: int, like: Tensor) -> Cache:
        """No tokens before: what reading a window in parts starts with."""
        if self.read_slots or self.write_slots or not self.causal:
            raise ValueError("expected causal attention without slots to read a window in parts")
        nothing = like.new_zeros(rows, self.heads, 0, self.project.in_features // self.heads)
        return {"keys": nothing, "values": nothing}

    def _attend_further(
        self, q: Tensor, k: Tensor, v: Tensor, cache: Cache
    ) -> tuple[Tensor, Cache]:
        """q, k, v (B, h, N, e) after the cached tokens; keeps what the next token can see."""
        k = torch.cat([cache["keys"].to(k.dtype), k], dim=2)
        v = torch.cat([cache["values"].to(v.dtype), v], dim=2)
        seen = visible(k.shape[2], self.causal, self.window, device=q.device)[-q.shape[2] :]
        # Keys are kept as they are: from which of them places are counted makes no difference.
        mixed = F.scaled_dot_product_attention(*self._placed(q, k), v, attn_mask=seen)
        first = 0 if self.window is None else max(k.shape[2] - self.window + 1, 0)
        return mixed, {"keys": k[:, :, first:], "values": v[:, :, first:]}

    def _placed(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys that know their places; the last of each are the same tokens."""
        if not self.rotary:
            return q, k
        turns = turns_for(k)
        return turned(q, turns[k.shape[2] - q.shape[2] :]), turned(k, turns)

    def _needs_mask(self, N: int) -> bool:
        slots = self.read_slots + self.write_slots
        return bool(slots) or (self.window is not None and self.window < N)

    def _in_blocks(self, N: int) -> bool:
        """Whether blocks look at less than a dense mask would, and there is something to save."""
        if self.window is None or self.read_slots or self.write_slots:
            return False
        return max(2 * max(self.window, SMALLEST_BLOCK), SMALL) < N

    def _in_one_kernel(self, q: Tensor) -> bool:
        """Whether a GPU will run this compiled: one kernel does a window then; q (B, h, N, e)."""
        if self.read_slots or self.write_slots or q.shape[-1] < NARROWEST:
            return False
        return q.is_cuda and torch.compiler.is_compiling()

    def _make_mask(self, N: int, device: torch.device | None = None) -> Tensor:
        """(N, N) with the slots, or per head and block (h · S, b, 2b)."""
        if not self._in_blocks(N):
            return visible(
                N, self.causal, self.window, self.read_slots, self.write_slots, device=device
            )
        assert self.window is not None
        b = max(self.window, SMALLEST_BLOCK)
        S = -(-N // b)
        query = torch.arange(b, device=device)[:, None]
        key = torch.arange(2 * b, device=device) - b
        near = (key <= query) & (key > query - self.window)  # (b, 2b)
        first = torch.arange(S, device=device)[:, None, None] == 0
        mask = near & ~(first & (key < 0))  # before the first block there is nothing
        return mask.expand(self.heads, S, b, 2 * b).flatten(0, 1).contiguous()

    def _attend_in_blocks(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        """q, k, v (B, h, N, e); mask (h · S, b, 2b)."""
        N, b = q.shape[2], mask.shape[1]
        q, k, v = (F.pad(t, (0, 0, 0, -N % b)).unflatten(2, (-1, b)) for t in (q, k, v))
        k, v = (torch.cat([F.pad(t, (0, 0, 0, 0, 1, -1)), t], dim=3) for t in (k, v))
        q, k, v = q.flatten(1, 2), k.flatten(1, 2), v.flatten(1, 2)  # (B, h · S, b or 2b, e)
        mixed = _attend_masked(q, k, v, mask)
        return mixed.unflatten(1, (self.heads, -1)).flatten(2, 3)[:, :, :N]


def _attend_near(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """Causal attention over a window; q, k, v (B, h, N, e).

    Compiled for a GPU it skips what no query sees: 0.19 ms a layer of 64 × 512 tokens and a window
    of 16, forward and backward, where a masked product takes 0.42, on one H200.
    """

    def near(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (key > query - window)

    N = q.shape[2]
    blocks = create_block_mask(near, None, None, N, N, device=q.device)
    return cast(Tensor, flex_attention(q, k, v, block_mask=blocks))


def _attend_masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask[..., : k.shape[2]])


def _addend(mask: Tensor) -> Tensor:
    """A mask as fused attention takes it, made once: what is added to the scores.

    Of true and false it would make these numbers at every call, and copy them to rows of a multiple
    of 8 where they are not: five kernels.
    """
    mask = F.pad(mask, (0, -mask.shape[-1] % 8))
    return torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)


def visible(
    length: int,
    causal: bool = True,
    window: int | None = None,
    read_slots: int = 0,
    write_slots: int = 0,
    *,
    device: torch.device | None = None,
) -> Tensor:
    """The one mask rule: (positions, positions) bool, true where the row may see the column.

    Positions are read slots, tokens, write slots. Tokens see themselves, what is before them
    within the window, and every read slot. Read slots see each other alone, so nothing later can
    reach a token through them; write slots see everything.

    >>> visible(3, window=2).int()
    tensor([[1, 0, 0],
            [1, 1, 0],
            [0, 1, 1]], dtype=torch.int32)
    >>> visible(2, read_slots=1, write_slots=1).int()
    tensor([[1, 0, 0, 0],
            [1, 1, 0, 0],
            [1, 1, 1, 0],
            [1, 1, 1, 1]], dtype=torch.int32)
    """
    end = read_slots + length
    place = torch.arange(end + write_slots, device=device)
    query, key = place[:, None], place[None]
    seen = (key >= read_slots) & (key < end) & (query >= read_slots)
    if causal:
        seen = seen & (key <= query)
    if window is not None:
        seen = seen & (key > query - window)
    return seen | (key < read_slots) | (query >= end)


def turns_for(x: Tensor) -> Tensor:
    """Rotary positions (Su et al., 2021) of x (..., N, e): (N, e / 2, 2), cosine and sine per pair.

    What is at place p is turned by angles that grow with p, so the product of a query and a key
    depends on their distance alone.
    """
    N, e = x.shape[-2:]
    exact = {"dtype": torch.promote_types(x.dtype, torch.float32), "device": x.device}
    rates = SLOWEST ** (-torch.arange(0, e, 2, **exact) / e)
    angle = torch.arange(N, **exact)[:, None] * rates
    return torch.stack([angle.cos(), angle.sin()], dim=-1)


def turned(x: Tensor, turns: Tensor) -> Tensor:
    """x (..., N, e), its neighbouring features taken as pairs, turned by (N, e / 2, 2)."""
    pairs = x.to(turns.dtype).unflatten(-1, (-1, 2))
    if torch.compiler.is_compiling():
        # The compiler writes no code for complex numbers, and fuses real ones into one kernel.
        # Without it they would take four kernels in place of one.
        cos, sin = turns.split(1, -1)
        made = pairs * cos + pairs.flip(-1) * torch.cat([-sin, sin], -1)
    else:
        made = torch.view_as_real(torch.view_as_complex(pairs) * torch.view_as_complex(turns))
    return made.flatten(-2).to(x.dtype)


def split_heads(x: Tensor, parts: int, heads: int) -> tuple[Tensor, ...]:
    """(B, N, parts · d) -> as many of (B, h, N, e)."""
    # Apart before they are turned, so that their gradients come together in one copy.
    return tuple(part.transpose(1, 2) for part in x.unflatten(-1, (parts, heads, -1)).unbind(-3))


def merge_heads(x: Tensor) -> Tensor:
    """(B, h, N, e) -> (B, N, d)."""
    return x.transpose(1, 2).flatten(2)


def check_heads(dim: int, heads: int) -> None:
    """Raise unless the width can be shared among the heads."""
    if heads < 1 or dim % heads:
        raise ValueError(
            f"heads: expected a divisor of the width {dim}, got {heads}; change one of them"
        )
