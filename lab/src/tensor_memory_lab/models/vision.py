"""What the image and the video models share: attention over frames and windows, the memory's place.

Letters: B batch, N tokens, d width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tensor_memory import MemoryConfig, MemoryResidual, TensorMemory
from tensor_memory_lab.models.attention import SelfAttention, merge_heads, split_heads
from tensor_memory_lab.models.block import Block
from tensor_memory_lab.models.matched import side_parameters, wide_ratio

Scope = Literal["layer", "depth"]
"""layer: every memory layer has a state of its own. depth: one state goes through the layers, as
published; a bidirectional encoder may, a causal one would see the future."""

GATE = -2.0
"""Initial γ of the paper's vision models."""


class FrameAttention(SelfAttention):
    """Tokens of a frame attend to each other; frames of `tokens` each lie one after the other."""

    def __init__(self, dim: int, heads: int, tokens: int) -> None:
        super().__init__(dim, heads, causal=False)
        self.tokens = tokens

    def forward(self, x: Tensor, cache: Any = None) -> tuple[Tensor, None]:
        """x (B, T · tokens, d) -> the same shape."""
        mixed, _ = super().forward(x.reshape(-1, self.tokens, x.shape[2]))
        return mixed.reshape(x.shape), None


class LocalAttention(SelfAttention):
    """Tokens attend where a mask lets them; the mask goes through the layers as their cache."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__(dim, heads, causal=False)

    def forward(self, x: Tensor, cache: Any = None) -> tuple[Tensor, Any]:
        """x (B, N, d), cache (B, 1, N, N) bool, true where the row may see the column."""
        q, k, v = split_heads(self.qkv(x), 3, self.heads)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=cache)
        return self.project(merge_heads(mixed)), cache


def window_mask(visible: Tensor, columns: int, window: int) -> Tensor:
    """Which patches see which in a window × window square of the picture; the first token all.

    Args:
        visible: (B, v) raster indices of the patches that are there.
        columns: patches in a row of the picture.
        window: side of the square, odd: a patch sees (window - 1) / 2 patches to every side.

    Returns:
        (B, 1, 1 + v, 1 + v) bool.

    >>> window_mask(torch.tensor([[0, 1, 5, 15]]), columns=4, window=3)[0, 0].int()
    tensor([[1, 1, 1, 1, 1],
            [1, 1, 1, 1, 0],
            [1, 1, 1, 1, 0],
            [1, 1, 1, 1, 0],
            [1, 0, 0, 0, 1]], dtype=torch.int32)
    """
    row, column = visible // columns, visible % columns
    near = window // 2
    down = (row[:, :, None] - row[:, None]).abs() <= near
    across = (column[:, :, None] - column[:, None]).abs() <= near
    return F.pad(down & across, (1, 0, 1, 0), value=True)[:, None]


def waves(rows: int, columns: int, dim: int) -> Tensor:
    """Sines and cosines of row and column, (rows · columns, d): what positions start from.

    How alike two places are then depends on how far apart they are, and is plain to attention from
    the first step. Of 64-pixel birds a small model that starts from N(0, 0.02²) throughout still
    answered the mean colour after 700 steps; from these, and `initialise(narrow=True)`, it was past
    that within 200.

    >>> table = waves(3, 4, 16)
    >>> torch.allclose(table[0] @ table[5], table[6] @ table[11])  # one down, one right
    True
    """
    row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    frequency = 10_000.0 ** -(torch.arange(dim // 4) / (dim // 4))
    angles = [place.reshape(-1, 1) * frequency for place in (row, column)]
    table = torch.cat([wave for angle in angles for wave in (angle.sin(), angle.cos())], dim=1)
    return F.pad(table, (0, dim % 4))


def put_memory(
    blocks: nn.ModuleList,
    memory: TensorMemory,
    layers: Sequence[int],
    *,
    gate_init: float,
    dropout: float,
    drop_path: float,
) -> None:
    """One shared memory on these blocks, between attention and MLP; each its own norm and gate."""
    for layer in layers:
        block = blocks[layer]
        assert isinstance(block, Block)
        block.side_place = "after_attention"
        block.side = MemoryResidual(
            memory, gate_init=gate_init, dropout=dropout, drop_path=drop_path, own_memory=False
        )


def matched_ratio(
    dim: int, layers: int, ratio: float, memory: MemoryConfig, memory_layers: Sequence[int]
) -> float:
    """MLP ratio that adds as many weights as the memory would."""
    return wide_ratio(dim, layers, ratio, side_parameters(dim, memory, len(memory_layers)))


def summary_first(summary: Tensor, tokens: Tensor) -> Tensor:
    """Put one learned token (1, d) before each row of tokens (..., N, d)."""
    first = summary.to(tokens.dtype).expand(*tokens.shape[:-2], 1, -1)
    return torch.cat([first, tokens], dim=-2)
