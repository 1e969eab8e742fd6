"""Action recognition: one video Transformer, several ways to bring frames together.

Embedding, blocks, readout and head are the same for all methods and start from the same values. A
frame is a summary token and its patches. `joint` lets all tokens of a clip attend to each other;
the others attend within a frame, and what joins frames is nothing (`frames`, `wide`), registers
handed from frame to frame, the memory (`spatial`), or the place memory, which is told where in the
picture and when in the clip a token stands (`place-given`).

Letters: B batch, T frames, P patches per frame, N = 1 + P tokens per frame, d width.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from tensor_memory import (
    MemoryConfig,
    MemoryState,
    PlaceConfig,
    PlaceMemory,
    TensorMemory,
)
from tensor_memory_lab.models import Carry
from tensor_memory_lab.models.attention import SelfAttention
from tensor_memory_lab.models.block import Block, Paths, initialise
from tensor_memory_lab.models.decoder import PLACE_METHODS
from tensor_memory_lab.models.vision import VisionConfig, VisionModel, summary_first, waves
from tensor_memory_lab.tasks import Batch
from tensor_memory_lab.tasks.images import DEVIATION, MEAN, to_patches

VideoMethod = Literal[
    "joint", "frames", "registers", "spatial", "wide", "place-given", "place-given-delta",
    "place-offset",
]  # fmt: skip


@dataclass(frozen=True)
class VideoModelConfig(VisionConfig):
    """The paper's video Transformer."""

    method: VideoMethod = "frames"
    """joint: all tokens attend. frames: frame by frame, nothing carried. registers: 8 tokens
    carried from frame to frame. spatial: the memory carried over frames. wide: `frames` with the
    weights of `spatial` in the MLP. place-given, place-given-delta: the place memory, whose places
    are a patch's column and row and its frame's time; place-offset: these and learned offsets, one
    to write at and one to read at."""
    dim: int = 256
    layers: int = 6
    heads: int = 8
    drop_path: float = 0.2
    readout: Literal["mean", "last"] = "mean"
    """What the head sees: the mean of all frames' summary tokens, or the last frame's."""
    memory: MemoryConfig = field(
        default_factory=lambda: MemoryConfig(channels=64, grid=(8, 8, 8), chunk_size=8)
    )
    place: PlaceConfig = field(
        default_factory=lambda: PlaceConfig(grid=(8, 8, 8), channels=32, heads=4)
    )
    """The place memory, by default of the memory's bytes: axes are time, rows and columns. The
    method says how its places are made and its rule."""
    scope: Literal["layer", "depth"] = "layer"
    """layer: a state per layer, all frames of a layer in one scan. depth: one state through the
    layers of a frame and on to the next frame, as published: frame by frame, layer by layer."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.has_places and (self.place.axes != 3 or self.scope == "depth"):
            raise ValueError(
                f"model.place.grid and model.scope: expected a grid of time, rows and columns, and "
                f"a state per layer for {self.method}, got {self.place.grid} and {self.scope}"
            )

    @property
    def has_places(self) -> bool:
        """Whether the method is one of the place memory's."""
        return self.method in PLACE_METHODS

    def build(self, task: Any) -> VideoModel:
        """The model for a task of clips."""
        return VideoModel(self, task.grid, task.config.patch, task.frames, task.classes)


class VideoModel(VisionModel[VideoModelConfig]):
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
    where: Tensor

    def __init__(
        self,
        config: VideoModelConfig,
        grid: tuple[int, int],
        patch: int,
        frames: int,
        classes: int,
    ) -> None:
        super().__init__(config)
        self.patch, self.frames = patch, frames
        c, P = config, grid[0] * grid[1]
        self.tokens = 1 + P
        self.embed = nn.Linear(3 * patch * patch, c.dim)
        self.summary = nn.Parameter(torch.empty(1, c.dim))
        self.place = nn.Parameter(torch.empty(P, c.dim))
        self.time = nn.Parameter(torch.empty(frames, 1, c.dim))
        self.blocks = self.make_blocks(self._attention)
        self.norm = nn.LayerNorm(c.dim)
        self.head = nn.Linear(c.dim, classes)
        self.register_buffer("mean", torch.tensor(MEAN) * 255, persistent=False)
        self.register_buffer("deviation", torch.tensor(DEVIATION) * 255, persistent=False)
        self.register_buffer("where", places(frames, *grid), persistent=False)
        # Through depth a row is dropped in all its frames or in none: by `_paths`.
        self.add_mechanism(drop_path=0.0 if c.scope == "depth" else c.drop_path)
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
        options: dict[str, Any] = {"flush": N}  # no chunk holds tokens of two frames
        if self.config.has_places:
            options = {"where": self.where.expand(B, -1, -1)}
        for block in self.blocks:
            x, _ = block(x) if block.side is None else block(x, **options)
        return self.norm(x.reshape(B, T, N, d)[:, :, 0])

    def make_memory(self) -> TensorMemory | PlaceMemory | None:
        """The memory that all layers share, where the method has one."""
        c = self.config
        if not c.has_places:
            return super().make_memory()
        changes = PLACE_METHODS[c.method] | {"share_places": c.method != "place-offset"}
        return PlaceMemory(c.dim, replace(c.place, **changes))

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
                if block.side is None:
                    y, _ = block(y, paths=path)
                else:
                    y, (_, state) = block(y, (None, state), path, flush=True)
            summaries.append(self.norm(y[:, 0]))
        return torch.stack(summaries, dim=1)

    def _paths(self, x: Tensor) -> list[Paths]:
        """Drawn once per clip, as where a layer takes all frames at once: x (B, T, N, d)."""
        return [cast(Block, block).draw_paths(x[:, 0]) for block in self.blocks]

    def labels(self) -> dict[str, Any]:
        """T and the readout; the scope and K or the grid, and the layers, of a memory."""
        c = self.config
        labels: dict[str, Any] = {"frames": self.frames, "readout": c.readout}
        if c.method == "spatial":
            layers = list(c.with_memory)
            labels |= {"scope": c.scope, "K": c.memory.chunk_size, "memory_layers": layers}
        if c.has_places:
            labels |= {"grid": list(c.place.grid), "memory_layers": list(c.with_memory)}
        return labels

    def _attention(self) -> SelfAttention:
        c = self.config
        if c.method in ("frames", "wide", "spatial") or c.has_places:
            return FrameAttention(c.dim, c.heads, self.tokens)
        return SelfAttention(c.dim, c.heads, causal=False)  # registers run one frame at a time


def places(frames: int, rows: int, columns: int) -> Tensor:
    """(T · N, 3): column, row and time of the tokens of a clip, each in [-1, 1].

    A summary token is in the middle of its frame.

    >>> places(2, 1, 2).tolist()
    [[0.0, 0.0, -1.0], [-1.0, 0.0, -1.0], [1.0, 0.0, -1.0], [0.0, 0.0, 1.0], [-1.0, 0.0, 1.0],
     [1.0, 0.0, 1.0]]
    """
    time, row, column = (
        torch.arange(size) * (2 / (size - 1)) - 1 if size > 1 else torch.zeros(1)
        for size in (frames, rows, columns)
    )
    y, x = torch.meshgrid(row, column, indexing="ij")
    frame = torch.cat([torch.zeros(1, 2), torch.stack([x, y], -1).view(-1, 2)])  # (N, 2)
    when = time.repeat_interleave(len(frame))[:, None]
    return torch.cat([frame.repeat(frames, 1), when], 1)


class FrameAttention(SelfAttention):
    """Tokens of a frame attend to each other; frames of `tokens` each lie one after the other."""

    def __init__(self, dim: int, heads: int, tokens: int) -> None:
        super().__init__(dim, heads, causal=False)
        self.tokens = tokens

    def forward(self, x: Tensor, cache: Any = None) -> tuple[Tensor, None]:
        """x (B, T · tokens, d) -> the same shape."""
        mixed, _ = super().forward(x.reshape(-1, self.tokens, x.shape[2]))
        return mixed.reshape(x.shape), None
