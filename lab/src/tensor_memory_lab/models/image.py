"""Masked reconstruction: an encoder over the visible patches, a light decoder over all of them.

One model; a method changes the attention, adds registers, or puts a memory between attention and
MLP of some encoder layers. Letters: B batch, P patches, v visible patches, d width.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tensor_memory import MemoryConfig
from tensor_memory_lab.models import Carry
from tensor_memory_lab.models.attention import SelfAttention, merge_heads, split_heads
from tensor_memory_lab.models.block import Block, initialise
from tensor_memory_lab.models.vision import VisionConfig, VisionModel, summary_first, waves
from tensor_memory_lab.tasks import Batch

ImageMethod = Literal["base", "local", "registers", "spatial", "wide"]


@dataclass(frozen=True)
class ImageModelConfig(VisionConfig):
    """Encoder and decoder of the paper's masked reconstruction."""

    method: ImageMethod = "base"
    """base; local: a 2-D window; registers: learned tokens beside the patches; spatial: the
    memory; wide: the weights of `spatial` in the MLP."""
    dim: int = 192
    layers: int = 4
    heads: int = 3
    decoder_dim: int = 96
    """Width of the decoder's tokens."""
    decoder_layers: int = 2
    """Blocks of the decoder."""
    decoder_heads: int = 3
    """Its attention heads; a divisor of `decoder_dim`."""
    dropout: float = 0.0
    window: int = 7
    """Side of the square of patches that `local` sees, odd."""
    memory: MemoryConfig = field(
        default_factory=lambda: MemoryConfig(channels=16, grid=(4, 4, 4), chunk_size=16)
    )
    memory_layers: tuple[int, ...] | None = (0, 2)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window < 1 or self.window % 2 == 0:
            raise ValueError(f"model.window: expected an odd number of patches, got {self.window}")

    def build(self, task: Any) -> ImageModel:
        """The model for a task of masked images."""
        return ImageModel(self, task.grid, task.values)


class ImageModel(VisionModel[ImageModelConfig]):
    """Predicts every patch; the task scores the hidden ones.

    Args:
        config: the choices.
        grid: rows and columns of patches in an image.
        values: numbers in a patch.
    """

    def __init__(self, config: ImageModelConfig, grid: tuple[int, int], values: int) -> None:
        super().__init__(config)
        self.columns = grid[1]
        c, P = config, grid[0] * grid[1]
        self.embed = nn.Linear(values, c.dim)
        self.summary = nn.Parameter(torch.empty(1, c.dim))
        self.position = nn.Parameter(torch.empty(1 + P, c.dim))
        attention = LocalAttention if c.method == "local" else SelfAttention
        self.blocks = self.make_blocks(lambda: attention(c.dim, c.heads, causal=False))
        self.norm = nn.LayerNorm(c.dim)
        self.narrow = nn.Linear(c.dim, c.decoder_dim)
        self.blank = nn.Parameter(torch.empty(1, c.decoder_dim))
        self.decoder_position = nn.Parameter(torch.empty(1 + P, c.decoder_dim))
        self.decoder = nn.ModuleList(
            Block(
                c.decoder_dim, attention=SelfAttention(c.decoder_dim, c.decoder_heads, causal=False)
            )
            for _ in range(c.decoder_layers)
        )
        self.decoder_norm = nn.LayerNorm(c.decoder_dim)
        self.head = nn.Linear(c.decoder_dim, values)
        self.add_mechanism(drop_path=c.drop_path)
        initialise(self, narrow=True)
        with torch.no_grad():
            self.position[1:] = waves(*grid, c.dim)
            self.decoder_position[1:] = waves(*grid, c.decoder_dim)

    def forward(
        self, batch: Batch, carry: Carry | None = None
    ) -> tuple[dict[str, Tensor], Carry | None]:
        """`patches` (B, P, values), `visible` (B, v) -> `patches` predicted, (B, P, values)."""
        patches, visible = batch["patches"], batch["visible"]
        places = visible[..., None].expand(-1, -1, patches.shape[2])
        x = self.encode(patches.gather(1, places), visible)
        return {"patches": self.decode(x, visible, patches.shape[1])}, None

    def encode(self, patches: Tensor, visible: Tensor) -> Tensor:
        """Visible patches (B, v, values) -> (B, 1 + v, d), the summary token first."""
        x = self.embed(patches) + self.position[1:][visible]
        x = summary_first(self.summary + self.position[:1], x)
        if self.config.method == "registers":
            registers = self.registers.to(x.dtype).expand(x.shape[0], -1, -1)
            x = torch.cat([x, registers], dim=1)
        seen = None
        if self.config.method == "local":
            seen = window_mask(visible, self.columns, self.config.window)
        threaded = self.config.scope == "depth"
        state = None
        for block in self.blocks:
            if block.side is None:
                x, _ = block(x, (seen, None))
            else:  # the last chunk of a layer is written before the next layer reads
                x, (_, after) = block(x, (seen, state), flush=threaded)
                state = after if threaded else None
        return self.norm(x)[:, : 1 + visible.shape[1]]

    def decode(self, x: Tensor, visible: Tensor, patches: int) -> Tensor:
        """(B, 1 + v, d) -> (B, P, values)."""
        x = self.narrow(x)
        B, _, width = x.shape
        places = visible[..., None].expand(-1, -1, width)
        whole = self.blank.to(x.dtype).expand(B, patches, -1).scatter(1, places, x[:, 1:])
        x = torch.cat([x[:, :1], whole], dim=1) + self.decoder_position
        for block in self.decoder:
            x, _ = block(x)
        return self.head(self.decoder_norm(x[:, 1:]))

    def labels(self) -> dict[str, Any]:
        """The scope and K of a memory, the window of `local`."""
        c = self.config
        if c.method == "spatial":
            return {"scope": c.scope, "K": c.memory.chunk_size}
        return {"window": c.window} if c.method == "local" else {}


class LocalAttention(SelfAttention):
    """Tokens attend where a mask lets them; the mask goes through the layers as their cache."""

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
