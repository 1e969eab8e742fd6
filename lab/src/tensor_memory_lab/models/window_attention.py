"""Softmax attention over a window that crosses the borders of calls.

A call sees the last keys and values of the call before it. They are kept without their rotary
positions: a product depends on the distance of query and key alone.

Letters: B batch, h heads, N tokens, b queries per block, S blocks, e width of a head.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tensor_memory_lab.models.attention import (
    SMALLEST_BLOCK,
    check_heads,
    merge_heads,
    split_heads,
    turned,
    turns_for,
)
from tensor_memory_lab.models.relative_attention import CACHE_BYTES, Cache, CacheType, behind, kept


class WindowAttention(nn.Module):
    """A token sees itself and the window - 1 tokens before it, also those of earlier calls.

    The weights are those of `SelfAttention`.

    Args:
        dim: d.
        heads: h.
        window: tokens seen, itself included.
        rotary: turn queries and keys by their place.
        kept_in: the type of the keys and values that are carried.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        window: int,
        *,
        rotary: bool = False,
        kept_in: CacheType = "float32",
    ) -> None:
        super().__init__()
        check_heads(dim, heads)
        if window < 1:
            raise ValueError(f"window: expected 1 or more tokens, got {window}")
        self.heads, self.window, self.rotary = heads, window, rotary
        self.kept_in: CacheType = kept_in
        self.qkv = nn.Linear(dim, 3 * dim)
        self.project = nn.Linear(dim, dim)

    def forward(self, x: Tensor, cache: Cache | None = None) -> tuple[Tensor, Cache]:
        """x (B, N, d) -> the same shape, and the cache for what follows."""
        B, N, _ = x.shape
        q, k, v = split_heads(self.qkv(x), 3, self.heads)
        before = self.zeros(B, q) if cache is None else cache
        k, v = (
            torch.cat([before[name].to(t.dtype), t], 2) for name, t in (("keys", k), ("values", v))
        )  # (B, h, back + N, e)
        back = self.window - 1
        after = {name: kept(t[:, :, N:], self.kept_in) for name, t in (("keys", k), ("values", v))}
        after["seen"] = (before["seen"] + N).clamp(max=back)
        if self.rotary:
            turns = turns_for(k)
            q, k = turned(q, turns[back:]), turned(k, turns)
        mixed = self._attend(q, k, v, before["seen"])
        return self.project(merge_heads(mixed)), after

    def zeros(self, rows: int, like: Tensor) -> Cache:
        """No tokens before."""
        width = self.project.in_features // self.heads
        nothing = kept(like.new_zeros(rows, self.heads, self.window - 1, width), self.kept_in)
        seen = torch.zeros(rows, dtype=torch.long, device=like.device)
        return {"keys": nothing, "values": nothing.clone(), "seen": seen}

    def state_bytes(self) -> int:
        """Bytes of the keys and values of one row."""
        return CACHE_BYTES[self.kept_in] * 2 * (self.window - 1) * self.project.in_features

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        """q (B, h, N, e), k, v (B, h, back + N, e), of the first `back` the last `seen` real."""
        B, N, back = q.shape[0], q.shape[2], self.window - 1
        b = max(self.window, SMALLEST_BLOCK)
        b, S, look = (N, 1, back) if 2 * b >= N else (b, -(-N // b), b)
        q = F.pad(q, (0, 0, 0, S * b - N)).unflatten(2, (S, b))
        k, v = (behind(t, N, b, S, look) for t in (k, v))  # (B, h, S, look + b, e)
        q, k, v = (t.transpose(1, 2).flatten(0, 1) for t in (q, k, v))
        start = torch.arange(S, device=q.device)[:, None, None, None] * b
        query = start + torch.arange(b, device=q.device)[:, None]  # (S, 1, b, 1)
        key = start + torch.arange(look + b, device=q.device) - look  # (S, 1, 1, look + b)
        mask = (key <= query) & (key > query - self.window)
        mask = (mask & (key >= -seen[:, None, None, None, None])).flatten(0, 1)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return mixed.unflatten(0, (B, S)).transpose(1, 2).flatten(2, 3)[:, :, :N]
