"""Causal linear attention (φ = ELU + 1): a state of fixed size instead of a growing cache.

out_t = φ(q_t)·S_t / φ(q_t)·z_t with S_t = Σ φ(k_s) v_sᵀ and z_t = Σ φ(k_s) over s ≤ t. Within a
chunk the sums are one masked product; between chunks they are one running state, so memory grows
with N and not with N². z is kept as one more column of S, the values' column of ones. What is
carried is {"state": (B, h, e, f + 1)}, in float32 or better.

Letters: B batch, h heads, N tokens, S chunks, c tokens per chunk, e width of a key, f of a value.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tensor_memory_lab.models.attention import check_heads, merge_heads, split_heads
from tensor_memory_lab.models.side import FLOAT_BYTES, SideMemory, State

CHUNK = 64
EPSILON = 1e-6


def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, state: Tensor | None = None, chunk: int = CHUNK
) -> tuple[Tensor, Tensor]:
    """q, k (B, h, N, e) as projected, v (B, h, N, f) -> (B, h, N, f), state (B, h, e, f + 1).

    Products run in the type of v; φ and the sums over chunks in float32 or better.
    """
    N, low = q.shape[2], v.dtype
    wide = torch.promote_types(low, torch.float32)
    q, k = ((F.elu(t.to(wide)) + 1).to(low) for t in (q, k))
    v = F.pad(v, (0, 1), value=1.0)
    c = max(min(chunk, N), 1)
    q, k, v = (F.pad(t, (0, 0, 0, -N % c)).unflatten(2, (-1, c)) for t in (q, k, v))
    added = k.transpose(-1, -2) @ v  # (B, h, S, e, f + 1); padding adds φ(k) = 0
    after = added.cumsum(2, dtype=wide)
    if state is not None:
        after = after + state[:, :, None]
    start = torch.zeros_like(after[:, :, :1]) if state is None else state[:, :, None]
    before = torch.cat([start, after[:, :, :-1]], dim=2).to(low)
    mixed = (q @ k.transpose(-1, -2)).tril() @ v + q @ before
    mixed = mixed.flatten(2, 3)[:, :, :N]
    return mixed[..., :-1] / (mixed[..., -1:] + EPSILON), after[:, :, -1]


class LinearAttention(nn.Module):
    """In place of softmax attention: same projections, same number of weights."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        check_heads(dim, heads)
        self.heads, self.width = heads, dim // heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.project = nn.Linear(dim, dim)

    def forward(self, x: Tensor, cache: State | None = None) -> tuple[Tensor, State]:
        """x (B, N, d) -> the same shape, state."""
        q, k, v = split_heads(self.qkv(x), 3, self.heads)
        mixed, state = linear_attention(q, k, v, None if cache is None else cache["state"])
        return self.project(merge_heads(mixed)), {"state": state}

    def zeros(self, rows: int, like: Tensor) -> State:
        """An empty state."""
        return {"state": _zeros(rows, self.heads, self.width, self.width, like)}

    def state_bytes(self) -> int:
        """Bytes that one row carries."""
        return FLOAT_BYTES * self.heads * self.width * (self.width + 1)


class LinearMemory(SideMemory):
    """Linear attention beside softmax attention, its state of a chosen size.

    Args:
        dim: d.
        heads, key, value: the state is (heads, key, value + 1) per row.
        gain: factor on the initial weights of values and output, `MemoryConfig.gain` of the memory.
    """

    def __init__(self, dim: int, heads: int, key: int, value: int, *, gain: float = 1.0) -> None:
        super().__init__()
        self.dim, self.heads, self.key, self.value = dim, heads, key, value
        self.query_key = nn.Linear(dim, 2 * heads * key, bias=False)
        self.values = nn.Linear(dim, heads * value, bias=False)
        self.output = nn.Linear(heads * value, dim, bias=False)
        with torch.no_grad():
            for layer in (self.values, self.output):
                layer.weight *= gain

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """x (B, N, d) -> m (B, N, d), state."""
        q, k = split_heads(self.query_key(x), 2, self.heads)
        (v,) = split_heads(self.values(x), 1, self.heads)
        mixed, after = linear_attention(q, k, v, None if state is None else state["state"])
        return self.output(merge_heads(mixed)), {"state": after}

    def zeros(self, rows: int, like: Tensor) -> State:
        """An empty state."""
        return {"state": _zeros(rows, self.heads, self.key, self.value, like)}

    def state_bytes(self) -> int:
        """Bytes that one row carries."""
        return FLOAT_BYTES * self.heads * self.key * (self.value + 1)


def sizes_for(values: int, heads: int) -> tuple[int, int]:
    """Key and value widths whose state, (heads, key, value + 1), comes nearest below `values`.

    Among equals the squarest. The language memory's layer is 32,768 values, a toy's 6,912:

    >>> sizes_for(32_768, 8), sizes_for(6_912, 4)
    ((64, 63), (36, 47))
    """
    area = values // heads
    side = math.isqrt(area)
    if side < 2:
        raise ValueError(
            f"state: expected at least {4 * heads} values for {heads} heads, got {values}"
        )
    keys = range(max(side * 3 // 4, 1), side + 1)
    key = min(reversed(keys), key=lambda key: (area - area // key * key, side - key))
    return key, area // key - 1


def _zeros(rows: int, heads: int, key: int, value: int, like: Tensor) -> Tensor:
    wide = torch.promote_types(like.dtype, torch.float32)
    return torch.zeros(rows, heads, key, value + 1, dtype=wide, device=like.device)
