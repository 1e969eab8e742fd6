"""Models of the remembered maze: what stands in a cell, from all that was seen on a walk.

Two tokens per step: (pose, view), then (place asked for), at which the answer is given. Attention
sees the last few tokens; whatever else is known of the maze must come from the side path.

Letters: B batch, T steps, N = 2T tokens, V cells of a view, d width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tensor_memory import PlaceConfig, PlaceMemory
from tensor_memory_lab.models import Carry
from tensor_memory_lab.models.block import initialise
from tensor_memory_lab.models.stack import Stack
from tensor_memory_lab.models.world import WalkModel, WorldModelConfig
from tensor_memory_lab.tasks import Batch
from tensor_memory_lab.tasks.maze import PERIOD, RIGHT, STEPS, VIEW

OCTAVES = 5
"""Waves that tell a position, each half as long as the one before; the longest has `PERIOD`."""


@dataclass(frozen=True)
class MazeModelConfig(WorldModelConfig):
    """A causal Transformer over views; its fields and methods are those of the world."""

    place: PlaceConfig = field(default_factory=lambda: PlaceConfig(wrap=True))
    """The place memory, on a torus: a pose may be counted from any cell of a maze."""

    def build(self, task: Any) -> MazeModel:
        """The model for walks of a task."""
        return MazeModel(self, classes=task.classes, steps=task.config.steps)


class MazeModel(WalkModel):
    """Views, poses and questions to what stands where.

    >>> config = MazeModelConfig(dim=16, heads=2, layers=2, memory_layers=(1,), method="place")
    >>> model = MazeModel(config, classes=8, steps=5)
    >>> batch = {name: torch.zeros(3, 5, dtype=torch.long) for name in ("heading", "action")}
    >>> batch["view"] = torch.zeros(3, 5, 25, dtype=torch.uint8)
    >>> batch |= {name: torch.zeros(3, 5, 2) for name in ("at", "asked")}
    >>> batch["where"] = torch.zeros(3, 10, 2)
    >>> model(batch)[0]["logits"].shape
    torch.Size([3, 5, 8])
    """

    frequencies: Tensor

    def __init__(self, config: MazeModelConfig, classes: int, steps: int) -> None:
        super().__init__()
        self.config, self.classes = config, classes
        waves = 2 * math.pi / PERIOD * 2.0 ** torch.arange(OCTAVES)
        self.register_buffer("frequencies", waves, persistent=False)
        self.position = nn.Linear(2 + 4 * OCTAVES, config.dim)
        # A weight for every heading, so that turning a view is no work of later layers.
        self.view = nn.Linear(len(STEPS) * VIEW * classes, config.dim, bias=False)
        self.action = nn.Embedding(RIGHT + 1, config.dim)
        self.kind = nn.Parameter(torch.empty(2, config.dim))  # seen, asked
        self.norm = nn.LayerNorm(config.dim)
        self.head = nn.Linear(config.dim, classes)
        self.stack = Stack(config.stack(2 * steps))
        initialise(self, narrow=True)
        with torch.no_grad():  # of what is seen one in so many is 1, the others are 0
            self.view.weight *= (len(STEPS) * classes) ** 0.5

    def forward(
        self, batch: Batch, carry: Carry | None = None
    ) -> tuple[dict[str, Tensor], Carry | None]:
        """Logits (B, T, classes) of what is asked at every step; nothing is carried."""
        seen = self.kind[0] + self.action(batch["action"]) + self._viewed(batch)
        seen = seen + self.position(self.told(batch["at"], batch["where"][:, ::2]))
        asked = self.position(self.told(batch["asked"], batch["where"][:, 1::2])) + self.kind[1]
        x = torch.stack([seen, asked], dim=2).flatten(1, 2)  # (B, N, d)
        x, _ = self.stack(x, where=self._once_around(batch["where"]))
        return {"logits": self.head(self.norm(x[:, 1::2]))}, None

    def _once_around(self, where: Tensor) -> Tensor:
        """Places (B, N, 2) as the memory counts them: the grid goes once around the torus.

        To the memory the places from -1 to 1 are those from the first voxel to the last, and on an
        axis that wraps the way from the last to the first comes on top.
        """
        memory = next((m for m in self.modules() if isinstance(m, PlaceMemory)), None)
        if memory is None:
            return where
        grid, wrap = memory.config.grid, memory.config.wrap
        assert isinstance(wrap, tuple)
        turns = [G / (G - 1) if wraps else 1.0 for G, wraps in zip(grid, wrap, strict=True)]
        # Coordinate 0 addresses the last axis.
        parts = zip(where.unbind(-1), reversed(turns), strict=True)
        return torch.stack([(part + 1) * turn - 1 for part, turn in parts], -1)

    def _viewed(self, batch: Batch) -> Tensor:
        """What is seen, by heading: (B, T, d)."""
        view, heading = batch["view"], batch["heading"]
        what = view[..., None] == torch.arange(self.classes, device=view.device)  # (B, T, V, c)
        turn = heading[..., None] == torch.arange(len(STEPS), device=view.device)  # (B, T, 4)
        both = turn[..., None] & what.flatten(2)[:, :, None]
        return self.view(both.flatten(2).to(self.view.weight.dtype))

    def told(self, cells: Tensor, where: Tensor) -> Tensor:
        """What is told of positions (B, T, 2) in cells and in the maze: (B, T, 2 + 4 · octaves).

        Sines and cosines are told alike in mazes of all sizes; `where` is the same around a maze.
        """
        angles = (cells[..., None] * self.frequencies).flatten(-2)
        return torch.cat([where, angles.sin(), angles.cos()], dim=-1)
