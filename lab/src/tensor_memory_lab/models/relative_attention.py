"""Attention with the relative encodings and the cache of Transformer-XL (Dai et al., 2019).

The score of query i and key j is (q_i + u)·k_j + (q_i + v)·W_R R_{i-j}, R sinusoidal; u and v are
shared by all layers. The text is read in segments: a token sees its own segment up to itself and
the `cache` tokens before the segment, whose keys and values are made anew from what was the
layer's input there. Between calls the cache carries no gradient. Within a call all segments run
side by side, since the input of a layer is known at every token; gradients then cross segments,
which the original's do not.

Letters: B batch, h heads, N tokens, b queries per block, S blocks, L keys per block, e width of a
head, d width.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tensor_memory_lab.models.attention import (
    SMALLEST_BLOCK,
    check_heads,
    merge_heads,
    split_heads,
)

CacheType = Literal["float32", "bf16"]
"""What cached tokens are kept in. Under bf16 autocast nothing is lost by bf16: the product that
takes them would round them."""

CACHE_BYTES: dict[CacheType, int] = {"float32": 4, "bf16": 2}

Cache = dict[str, Tensor]
"""{"inputs": (B, cache, d) of the layer, "seen": (B,) how many of the last of them are real}."""


class PositionBias(nn.Module):
    """u and v, which every layer adds to its queries."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.content = nn.Parameter(torch.empty(dim))
        self.place = nn.Parameter(torch.empty(dim))


class RelativeAttention(nn.Module):
    """Attention over a segment and the cache before it.

    Args:
        dim: d.
        heads: h.
        bias: u and v, registered where the layers are.
        segment: tokens read at once; None takes all of a call.
        cache: tokens before the segment that can be seen.
        carried: whether calls continue each other; a call then takes and returns a cache.
        kept_in: the type of what is cached.
    """

    bias: PositionBias
    rates: Tensor

    def __init__(
        self,
        dim: int,
        heads: int,
        bias: PositionBias,
        *,
        segment: int | None = None,
        cache: int = 0,
        carried: bool = False,
        kept_in: CacheType = "float32",
    ) -> None:
        super().__init__()
        check_heads(dim, heads)
        if dim % 2:
            raise ValueError(f"dim: expected an even width for sinusoids, got {dim}")
        if cache < 0 or (segment is not None and segment < 1):
            raise ValueError(
                f"expected cache of 0 or more and segment of 1 or more, got {cache} and {segment}"
            )
        self.heads, self.segment, self.cache, self.carried = heads, segment, cache, carried
        self.kept_in: CacheType = kept_in
        self.__dict__["bias"] = bias  # a plain reference: it is registered once, for all layers
        self.qkv = nn.Linear(dim, 3 * dim)
        self.relative = nn.Linear(dim, dim, bias=False)
        self.project = nn.Linear(dim, dim)
        rates = torch.exp(torch.arange(0, dim, 2) * (-math.log(10_000) / dim))
        self.register_buffer("rates", rates, persistent=False)

    def forward(self, x: Tensor, cache: Cache | None = None) -> tuple[Tensor, Cache | None]:
        """x (B, N, d) -> the same shape, and the cache for what follows."""
        B, N, d = x.shape
        b, S, back = self._blocks(N, cache is not None)
        source, seen = x, None
        if cache is not None:
            source, seen = torch.cat([cache["inputs"].to(x.dtype), x], dim=1), cache["seen"]

        weight, bias = self.qkv.weight, self.qkv.bias
        (q,) = split_heads(F.linear(x, weight[:d], bias[:d]), 1, self.heads)
        k, v = split_heads(F.linear(source, weight[d:], bias[d:]), 2, self.heads)
        q = F.pad(q, (0, 0, 0, S * b - N)).unflatten(2, (S, b))
        k, v = (behind(t, N, b, S, back) for t in (k, v))
        q, k, v = (t.transpose(1, 2).flatten(0, 1) for t in (q, k, v))  # (B · S, h, b or L, e)

        shared = (self.bias.content, self.bias.place)
        u, place = (p.unflatten(0, (self.heads, 1, -1)) for p in shared)
        scores = self._relative_scores(q + place.to(q.dtype), back + b)
        scores = scores.masked_fill(~self._visible(b, S, back, seen, B, x.device), -torch.inf)
        mixed = F.scaled_dot_product_attention(q + u.to(q.dtype), k, v, attn_mask=scores)
        mixed = mixed.unflatten(0, (B, S)).transpose(1, 2).flatten(2, 3)[:, :, :N]
        return self.project(merge_heads(mixed)), self._kept(source, seen, N)

    def zeros(self, rows: int, like: Tensor) -> Cache | None:
        """An empty cache; None where calls do not continue each other."""
        if not self.carried:
            return None
        return {
            "inputs": kept(like.new_zeros(rows, self.cache, self.qkv.in_features), self.kept_in),
            "seen": torch.zeros(rows, dtype=torch.long, device=like.device),
        }

    def state_bytes(self) -> int:
        """Bytes of the cached inputs of one row."""
        return CACHE_BYTES[self.kept_in] * self.cache * self.qkv.in_features

    def _blocks(self, N: int, cached: bool) -> tuple[int, int, int]:
        """b queries per block, S blocks, and how many keys before its own a block looks at."""
        segment = self.segment or max(N, 1)
        b = segment * -(-SMALLEST_BLOCK // segment)  # whole segments
        if b >= N:
            return N, 1, self.cache if cached else 0
        return b, -(-N // b), -(-self.cache // b) * b

    def _relative_scores(self, q: Tensor, keys: int) -> Tensor:
        """(q + v)·W_R R_{i-j} / √e: q (B · S, h, b, e) -> (B · S, h, b, L), garbage where j > i."""
        distance = torch.arange(keys - 1, -1, -1, device=q.device, dtype=self.rates.dtype)
        angle = distance[:, None] * self.rates
        encoding = torch.cat([angle.sin(), angle.cos()], dim=-1)  # (L, d), farthest first
        (r,) = split_heads(self.relative(encoding)[None], 1, self.heads)  # (1, h, L, e)
        # Row i must shift by b - 1 - i: a column more in front makes the flat rows step so.
        r = F.pad(r / math.sqrt(r.shape[-1]), (0, 0, 1, 0))
        scores = q @ r.transpose(-1, -2)  # (B · S, h, b, 1 + L)
        b = scores.shape[-2]
        return scores.flatten(-2)[..., b:].unflatten(-1, (b, keys))

    def _visible(
        self, b: int, S: int, back: int, seen: Tensor | None, B: int, device: torch.device
    ) -> Tensor:
        """(B · S or S, 1, b, L) bool."""
        segment = self.segment or b
        start = torch.arange(S, device=device)[:, None, None, None] * b
        query = start + torch.arange(b, device=device)[:, None]  # (S, 1, b, 1) places in the call
        key = start + torch.arange(back + b, device=device) - back  # (S, 1, 1, L)
        first = query // segment * segment - self.cache
        mask = (key <= query) & (key >= first)
        if seen is None:
            mask = (mask & (key >= 0)).expand(B, S, 1, b, back + b)
        else:
            mask = mask & (key >= -seen[:, None, None, None, None])
        return mask.flatten(0, 1)

    def _kept(self, source: Tensor, seen: Tensor | None, N: int) -> Cache | None:
        if not self.carried:
            return None
        missing = self.cache - source.shape[1]
        last = F.pad(source, (0, 0, missing, 0)) if missing > 0 else source
        last = kept(last[:, last.shape[1] - self.cache :], self.kept_in)
        before = torch.zeros_like(source[:, 0, 0], dtype=torch.long) if seen is None else seen
        return {"inputs": last, "seen": (before + N).clamp(max=self.cache)}


def behind(keys: Tensor, N: int, b: int, S: int, back: int) -> Tensor:
    """Keys (B, h, cached + N, e) -> (B, h, S, back + b, e): each block after what precedes it."""
    late = S * b - N
    early = back + N - keys.shape[2]
    blocks = F.pad(keys, (0, 0, early, late))
    if S == 1:
        return blocks[:, :, None]
    blocks = blocks.unflatten(2, (-1, b))
    shifted = [blocks[:, :, start : start + S] for start in range(back // b + 1)]
    return torch.cat(shifted, dim=3)


def kept(tokens: Tensor, kept_in: CacheType) -> Tensor:
    """Tokens as they are cached."""
    return tokens.to(torch.bfloat16) if kept_in == "bf16" else tokens
