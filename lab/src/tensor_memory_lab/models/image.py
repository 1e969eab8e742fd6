"""Masked reconstruction: an encoder over the visible patches, a light decoder over all of them.

One model; a method changes the attention, adds registers, or puts a memory between attention and
MLP of some encoder layers. Letters: B batch, P patches, v visible patches, d width.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from tensor_memory import MemoryConfig, TensorMemory
from tensor_memory_lab.models import Carry, Model
from tensor_memory_lab.models.attention import SelfAttention
from tensor_memory_lab.models.block import Block, check_memory_layers, initialise
from tensor_memory_lab.models.matched import memory_bytes
from tensor_memory_lab.models.vision import (
    GATE,
    LocalAttention,
    Scope,
    matched_ratio,
    put_memory,
    summary_first,
    waves,
    window_mask,
)
from tensor_memory_lab.tasks import Batch

ImageMethod = Literal["base", "local", "registers", "spatial", "wide"]


@dataclass(frozen=True)
class ImageModelConfig:
    """Encoder and decoder of the paper's masked reconstruction."""

    method: ImageMethod = "base"
    """base; local: a 2-D window; registers: learned tokens beside the patches; spatial: the
    memory; wide: the weights of `spatial` in the MLP."""
    dim: int = 192
    """d, width of the encoder's tokens."""
    layers: int = 4
    """Blocks of the encoder."""
    heads: int = 3
    """Its attention heads; a divisor of `dim`."""
    decoder_dim: int = 96
    """Width of the decoder's tokens."""
    decoder_layers: int = 2
    """Blocks of the decoder."""
    decoder_heads: int = 3
    """Its attention heads; a divisor of `decoder_dim`."""
    mlp_ratio: float = 4.0
    """Width of the encoder's MLP over `dim`."""
    dropout: float = 0.0
    """In the encoder, on what attention, MLP and memory add."""
    drop_path: float = 0.1
    """Stochastic depth in the encoder."""
    window: int = 7
    """Side of the square of patches that `local` sees, odd."""
    registers: int = 8
    """Learned tokens of `registers`."""
    memory: MemoryConfig = field(
        default_factory=lambda: MemoryConfig(channels=16, grid=(4, 4, 4), chunk_size=16)
    )
    memory_layers: tuple[int, ...] = (0, 2)
    """Layers of the encoder with the memory, counted from 0."""
    scope: Scope = "layer"
    """layer: a state per memory layer. depth: one state through the layers, as published."""
    gate_init: float = GATE
    """Initial γ of the memory layers."""

    def __post_init__(self) -> None:
        if self.method not in get_args(ImageMethod):
            raise ValueError(
                f"model.method: expected one of {', '.join(get_args(ImageMethod))}, "
                f"got {self.method!r}"
            )
        if self.scope not in get_args(Scope):
            raise ValueError(f"model.scope: expected layer or depth, got {self.scope!r}")
        if self.window < 1 or self.window % 2 == 0:
            raise ValueError(f"model.window: expected an odd number of patches, got {self.window}")
        check_memory_layers(self.memory_layers, self.layers)

    def build(self, task: Any) -> ImageModel:
        """The model for a task of masked images."""
        return ImageModel(self, task.grid, task.values)


class ImageModel(Model):
    """Predicts every patch; the task scores the hidden ones.

    Args:
        config: the choices.
        grid: rows and columns of patches in an image.
        values: numbers in a patch.
    """

    def __init__(self, config: ImageModelConfig, grid: tuple[int, int], values: int) -> None:
        super().__init__()
        self.config, self.columns = config, grid[1]
        c, P = config, grid[0] * grid[1]
        ratio = c.mlp_ratio
        if c.method == "wide":
            ratio = matched_ratio(c.dim, c.layers, c.mlp_ratio, c.memory, c.memory_layers)
        self.embed = nn.Linear(values, c.dim)
        self.summary = nn.Parameter(torch.empty(1, c.dim))
        self.position = nn.Parameter(torch.empty(1 + P, c.dim))
        self.blocks = nn.ModuleList(
            Block(
                c.dim,
                attention=self._attention(),
                mlp_ratio=ratio,
                dropout=c.dropout,
                drop_path=c.drop_path,
            )
            for _ in range(c.layers)
        )
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
        if c.method == "registers":
            self.registers = nn.Parameter(torch.empty(c.registers, c.dim))
        if c.method == "spatial":
            self.memory = TensorMemory(c.dim, c.memory)
            put_memory(
                self.blocks,
                self.memory,
                c.memory_layers,
                gate_init=c.gate_init,
                dropout=c.dropout,
                drop_path=c.drop_path,
            )
        initialise(self, narrow=True)
        with torch.no_grad():
            self.position[1:] = waves(*grid, c.dim)
            self.decoder_position[1:] = waves(*grid, c.decoder_dim)

    def forward(
        self, batch: Batch, carry: Carry | None = None
    ) -> tuple[dict[str, Tensor], Carry | None]:
        """`patches` (B, P, values), `visible` (B, v) -> `patches` predicted, (B, P, values)."""
        patches, visible = batch["patches"], batch["visible"]
        x = self.encode(_take(patches, visible), visible)
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
            assert isinstance(block, Block)
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

    def state_bytes(self) -> int:
        """Bytes of the memory, or of the registers, of one image."""
        c = self.config
        if c.method == "spatial":
            return memory_bytes(c.memory, 1 if c.scope == "depth" else len(c.memory_layers))
        return 4 * c.registers * c.dim if c.method == "registers" else 0

    def labels(self) -> dict[str, Any]:
        """The scope and K of a memory, the window of `local`."""
        c = self.config
        if c.method == "spatial":
            return {"scope": c.scope, "K": c.memory.chunk_size}
        return {"window": c.window} if c.method == "local" else {}

    def _attention(self) -> SelfAttention:
        c = self.config
        if c.method == "local":
            return LocalAttention(c.dim, c.heads)
        return SelfAttention(c.dim, c.heads, causal=False)


def _take(patches: Tensor, which: Tensor) -> Tensor:
    """(B, P, values) and (B, v) -> (B, v, values)."""
    return patches.gather(1, which[..., None].expand(-1, -1, patches.shape[2]))
