"""Action recognition: one video Transformer, five ways to bring frames together.

Embedding, blocks, readout and head are the same for all methods and start from the same values. A
frame is a summary token and its patches. `joint` lets all tokens of a clip attend to each other;
the others attend within a frame, and what joins frames is nothing (`frames`, `wide`), registers
handed from frame to frame, or the memory (`spatial`).

Letters: B batch, T frames, P patches per frame, N = 1 + P tokens per frame, d width.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor, nn

from tensor_memory import MemoryConfig, MemoryState, TensorMemory
from tensor_memory_lab.models import Carry, Model
from tensor_memory_lab.models.attention import SelfAttention
from tensor_memory_lab.models.block import Block, Paths, check_memory_layers, initialise
from tensor_memory_lab.models.matched import memory_bytes
from tensor_memory_lab.models.vision import (
    GATE,
    FrameAttention,
    Scope,
    matched_ratio,
    put_memory,
    summary_first,
    waves,
)
from tensor_memory_lab.tasks import Batch
from tensor_memory_lab.tasks.images import DEVIATION, MEAN, to_patches

VideoMethod = Literal["joint", "frames", "registers", "spatial", "wide"]


@dataclass(frozen=True)
class VideoModelConfig:
    """The paper's video Transformer."""

    method: VideoMethod = "frames"
    """joint: all tokens attend. frames: frame by frame, nothing carried. registers: 8 tokens
    carried from frame to frame. spatial: the memory carried over frames. wide: `frames` with the
    weights of `spatial` in the MLP."""
    dim: int = 256
    """d, width of the tokens."""
    layers: int = 6
    """Transformer blocks."""
    heads: int = 8
    """Attention heads; a divisor of `dim`."""
    mlp_ratio: float = 4.0
    """Width of the MLP over `dim`."""
    dropout: float = 0.1
    """On what attention, MLP and memory add."""
    drop_path: float = 0.2
    """Stochastic depth: how often what a layer adds to a clip is dropped in training."""
    readout: Literal["mean", "last"] = "mean"
    """What the head sees: the mean of all frames' summary tokens, or the last frame's."""
    registers: int = 8
    """Tokens that `registers` carries from frame to frame."""
    memory: MemoryConfig = field(
        default_factory=lambda: MemoryConfig(channels=64, grid=(8, 8, 8), chunk_size=8)
    )
    memory_layers: tuple[int, ...] | None = None
    """Layers with the memory; None takes all."""
    scope: Scope = "layer"
    """layer: a state per layer, all frames of a layer in one scan. depth: one state through the
    layers of a frame and on to the next frame, as published: frame by frame, layer by layer."""
    gate_init: float = GATE
    """Initial γ of the memory layers."""

    def __post_init__(self) -> None:
        if self.method not in get_args(VideoMethod):
            raise ValueError(
                f"model.method: expected one of {', '.join(get_args(VideoMethod))}, "
                f"got {self.method!r}"
            )
        if self.readout not in ("mean", "last"):
            raise ValueError(f"model.readout: expected mean or last, got {self.readout!r}")
        if self.scope not in get_args(Scope):
            raise ValueError(f"model.scope: expected layer or depth, got {self.scope!r}")
        check_memory_layers(self.with_memory, self.layers)

    @property
    def with_memory(self) -> tuple[int, ...]:
        """Layers that hold the memory of `spatial`."""
        return tuple(range(self.layers)) if self.memory_layers is None else self.memory_layers

    def build(self, task: Any) -> VideoModel:
        """The model for a task of clips."""
        return VideoModel(self, task.grid, task.config.patch, task.frames, task.classes)


class VideoModel(Model):
    """Clips to logits.

    Args:
        config: the choices.
        grid: rows and columns of patches in a frame.
        patch: side of a patch in pixels.
        frames: T.
        classes: actions to choose from.
    """

    mean: Tensor
    deviation: Tensor

    def __init__(
        self,
        config: VideoModelConfig,
        grid: tuple[int, int],
        patch: int,
        frames: int,
        classes: int,
    ) -> None:
        super().__init__()
        self.config, self.patch, self.frames = config, patch, frames
        c, P = config, grid[0] * grid[1]
        self.tokens = 1 + P
        ratio = c.mlp_ratio
        if c.method == "wide":
            ratio = matched_ratio(c.dim, c.layers, c.mlp_ratio, c.memory, c.with_memory)
        self.embed = nn.Linear(3 * patch * patch, c.dim)
        self.summary = nn.Parameter(torch.empty(1, c.dim))
        self.place = nn.Parameter(torch.empty(P, c.dim))
        self.time = nn.Parameter(torch.empty(frames, 1, c.dim))
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
        self.head = nn.Linear(c.dim, classes)
        self.register_buffer("mean", torch.tensor(MEAN) * 255, persistent=False)
        self.register_buffer("deviation", torch.tensor(DEVIATION) * 255, persistent=False)
        if c.method == "registers":
            self.registers = nn.Parameter(torch.empty(c.registers, c.dim))
        if c.method == "spatial":
            self.memory = TensorMemory(c.dim, c.memory)
            put_memory(
                self.blocks,
                self.memory,
                c.with_memory,
                gate_init=c.gate_init,
                dropout=c.dropout,
                drop_path=0.0 if c.scope == "depth" else c.drop_path,  # there by `_paths`
            )
        initialise(self, narrow=True)
        with torch.no_grad():
            self.place.copy_(waves(*grid, c.dim))

    def forward(
        self, batch: Batch, carry: Carry | None = None
    ) -> tuple[dict[str, Tensor], Carry | None]:
        """`clip` (B, T, H, W, 3) uint8 -> `logits` (B, classes)."""
        summaries = self.summaries(self.embedded(batch["clip"]))
        read = summaries[:, -1] if self.config.readout == "last" else summaries.mean(1)
        return {"logits": self.head(read)}, None

    def embedded(self, clip: Tensor) -> Tensor:
        """(B, T, H, W, 3) uint8 -> (B, T, N, d): patches with place and time, a summary first."""
        B = clip.shape[0]
        pixels = (clip - self.mean) / self.deviation
        patches = to_patches(pixels.flatten(0, 1).permute(0, 3, 1, 2), self.patch)
        x = self.embed(patches).unflatten(0, (B, -1)) + self.place
        return summary_first(self.summary, x) + self.time

    def summaries(self, x: Tensor) -> Tensor:
        """Embedded frames (B, T, N, d) -> each frame's summary token, (B, T, d)."""
        if self.config.method == "registers":
            return self._with_registers(x)
        if self.config.method == "spatial" and self.config.scope == "depth":
            return self._through_depth(x)
        return self._all_at_once(x)

    def _all_at_once(self, x: Tensor) -> Tensor:
        """Every layer takes all frames, one scan for all of them."""
        B, T, N, d = x.shape
        x = x.flatten(1, 2)  # rows are clips for every method: dropped paths, too
        for block in self.blocks:
            assert isinstance(block, Block)
            if block.side is None:
                x, _ = block(x)
            else:
                x, _ = block(x, flush=N)  # no chunk holds tokens of two frames
        return self.norm(x.reshape(B, T, N, d)[:, :, 0])

    def _with_registers(self, x: Tensor) -> Tensor:
        """Registers leave a frame and enter the next."""
        paths = self._paths(x)
        carried = x.new_zeros(x.shape[0], self.config.registers, x.shape[3])
        summaries = []
        for frame in x.unbind(1):
            y = torch.cat([frame, self.registers + carried], dim=1)
            for block, path in zip(self.blocks, paths, strict=True):
                y, _ = block(y, paths=path)
            y = self.norm(y)
            summaries.append(y[:, 0])
            carried = y[:, self.tokens :]
        return torch.stack(summaries, dim=1)

    def _through_depth(self, x: Tensor) -> Tensor:
        """One state goes through all layers of a frame, then into the next frame."""
        state: MemoryState | None = None
        summaries, paths = [], self._paths(x)
        for frame in x.unbind(1):
            y = frame
            for block, path in zip(self.blocks, paths, strict=True):
                assert isinstance(block, Block)
                if block.side is None:
                    y, _ = block(y, paths=path)
                else:
                    y, (_, state) = block(y, (None, state), path, flush=True)
            summaries.append(self.norm(y[:, 0]))
        return torch.stack(summaries, dim=1)

    def _paths(self, x: Tensor) -> list[Paths]:
        """Drawn once per clip, as where a layer takes all frames at once: x (B, T, N, d)."""
        return [cast(Block, block).draw_paths(x[:, 0]) for block in self.blocks]

    def state_bytes(self) -> int:
        """Bytes carried from frame to frame."""
        c = self.config
        if c.method == "spatial":
            return memory_bytes(c.memory, 1 if c.scope == "depth" else len(c.with_memory))
        return 4 * c.registers * c.dim if c.method == "registers" else 0

    def labels(self) -> dict[str, Any]:
        """T and the readout; the scope, K and layers of a memory."""
        c = self.config
        labels: dict[str, Any] = {"frames": self.frames, "readout": c.readout}
        if c.method == "spatial":
            layers = list(c.with_memory)
            labels |= {"scope": c.scope, "K": c.memory.chunk_size, "memory_layers": layers}
        return labels

    def _attention(self) -> SelfAttention:
        c = self.config
        if c.method in ("frames", "wide", "spatial"):
            return FrameAttention(c.dim, c.heads, self.tokens)
        return SelfAttention(c.dim, c.heads, causal=False)  # registers run one frame at a time
