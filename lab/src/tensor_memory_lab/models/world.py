"""Models of the remembered world: what an agent will see, from its pose and what it has seen.

Two tokens per glimpse: (pose, ?), at which the patch is predicted, then (pose, patch). Attention
sees the last few tokens; whatever else is known of the world must come from the side path.

Letters: B batch, T glimpses, S of them shown, N = 2T tokens, P numbers in a patch, d width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from tensor_memory import MemoryConfig, PlaceConfig, PlaceMemory
from tensor_memory_lab.models import Carry, Model
from tensor_memory_lab.models.block import Place, initialise
from tensor_memory_lab.models.decoder import DecoderConfig, Method, cache
from tensor_memory_lab.models.stack import SIDES, Stack, StackConfig
from tensor_memory_lab.tasks import Batch

OCTAVES = 5
"""Frequencies of the waves that tell a pose, each twice the one before; the slowest has a period
of twice the world's width."""


@dataclass(frozen=True)
class WorldModelConfig(DecoderConfig):
    """A causal Transformer over glimpses. The bytes of `memory` are what other methods get."""

    method: str = "window"
    """window: attention over the last tokens alone. full: over all of them; poses tell the place of
    a token; full-rotary: turned by their number too. place, place-delta: the place memory, its
    places learned; place-given, place-given-delta: its places are the poses; place-offset: the
    poses and a learned offset. tensor: the paper's memory; tensor-open: its forget gate starts
    open; tensor-long: its start for long gaps. xl: relative attention with a cache. Any other side
    path by its name, such as linear."""
    dim: int = 192
    layers: int = 4
    heads: int = 6
    dropout: float = 0.0
    memory: MemoryConfig = field(
        default_factory=lambda: MemoryConfig(channels=64, grid=(8, 8), chunk_size=1)
    )
    """The paper's memory, whose bytes other methods are matched to."""
    memory_layers: tuple[int, ...] | None = (1, 2)
    placement: Place = "after_attention"
    share_weights: bool = False
    window: int = 16
    """Tokens that attention sees, itself included: two per glimpse."""
    place: PlaceConfig = field(default_factory=PlaceConfig)
    """The place memory; the method says how its places are made and its rule."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.method not in METHODS:
            raise ValueError(
                f"model.method: expected one of {', '.join(METHODS)}, got {self.method!r}"
            )

    def build(self, task: Any) -> WorldModel:
        """The model for walks of a task."""
        return WorldModel(self, values=task.values, glimpses=task.config.glimpses)

    def stack(self, length: int) -> StackConfig:
        """The choices that `method` stands for."""
        plain = {"window": self.window, "rotary": True, "place": self.place}
        return self.make_stack(METHODS[self.method], length, **plain)


def _place(**changes: Any) -> Method:
    return {"side": "place", "place": lambda config: replace(config.place, **changes)}


def _tensor(start: Callable[..., MemoryConfig]) -> Method:
    """The paper's memory from another start, its sizes those of the config."""
    return {
        "side": "tensor",
        "memory": lambda config: start(
            channels=config.memory.channels,
            grid=config.memory.grid,
            chunk_size=config.memory.chunk_size,
        ),
    }


METHODS: dict[str, Method] = {
    "window": {},
    "full": {"window": None, "rotary": False},
    "full-rotary": {"window": None},
    "xl": {
        "attention": "relative",
        "segment": lambda config: config.window,
        "cache": cache,
        "rotary": False,
    },
    **{name: {"side": name} for name in SIDES},
    "tensor-open": {
        "side": "tensor",
        "memory": lambda config: replace(config.memory, forget_bias=5.0),
    },
    "tensor-long": _tensor(MemoryConfig.long_gap),
    "place": _place(),
    "place-delta": _place(rule="delta"),
    "place-given": _place(places="given"),
    "place-given-delta": _place(places="given", rule="delta"),
    "place-offset": _place(places="offset"),
}
"""What a method changes; see `StackConfig`."""


class WorldModel(Model):
    """Poses and patches to the patches that come next.

    >>> config = WorldModelConfig(dim=16, heads=2, layers=2, memory_layers=(1,), method="place")
    >>> model = WorldModel(config, values=12, glimpses=5)
    >>> batch = {"poses": torch.zeros(3, 5, 2), "seen": torch.zeros(3, 5, 12)}
    >>> model(batch)[0]["patches"].shape
    torch.Size([3, 5, 12])
    """

    frequencies: Tensor

    def __init__(self, config: WorldModelConfig, values: int, glimpses: int) -> None:
        super().__init__()
        self.config = config
        waves = math.pi / 2 * 2.0 ** torch.arange(OCTAVES)
        self.register_buffer("frequencies", waves, persistent=False)
        self.pose = nn.Linear(2 + 4 * OCTAVES, config.dim)
        self.patch = nn.Linear(values, config.dim)
        self.kind = nn.Parameter(torch.empty(2, config.dim))  # asked, seen
        self.norm = nn.LayerNorm(config.dim)
        self.head = nn.Linear(config.dim, values)
        self.stack = Stack(config.stack(2 * glimpses))
        initialise(self, narrow=True)

    def forward(
        self, batch: Batch, carry: Carry | None = None
    ) -> tuple[dict[str, Tensor], Carry | None]:
        """ "patches" (B, T, P), each from the glimpses before it; nothing is carried."""
        return {"patches": self.predict(batch["poses"], batch["seen"])}, None

    def predict(self, poses: Tensor, seen: Tensor) -> Tensor:
        """Poses (B, T, 2), patches seen there (B, T, P) -> what was expected there (B, T, P)."""
        at = self.pose(self.waves(poses))  # (B, T, d)
        asked, shown = at + self.kind[0], at + self.kind[1] + self.patch(seen)
        x = torch.stack([asked, shown], dim=2).flatten(1, 2)  # (B, N, d)
        where = poses.repeat_interleave(2, dim=1, output_size=2 * poses.shape[1])
        x, _ = self.stack(x, where=where)
        return self.head(self.norm(x[:, ::2]))

    def waves(self, poses: Tensor) -> Tensor:
        """Poses (B, T, 2) -> themselves, sines and cosines: (B, T, 2 + 4 · octaves)."""
        angles = (poses[..., None] * self.frequencies).flatten(-2)
        return torch.cat([poses, angles.sin(), angles.cos()], dim=-1)

    @contextmanager
    def grids_scaled(self, scale: int) -> Iterator[None]:
        """Inside, place memories have so many times as many voxels along each axis."""
        memories = [m for m in self.modules() if isinstance(m, PlaceMemory)]
        before = [memory.config for memory in memories]
        try:
            for memory, config in zip(memories, before, strict=True):
                # As `resized` does it; no weight depends on the grid.
                memory.config = replace(config, grid=tuple(scale * size for size in config.grid))
            yield
        finally:
            for memory, config in zip(memories, before, strict=True):
                memory.config = config

    def state_bytes(self) -> int:
        """Bytes one row carries past what attention sees."""
        return self.stack.state_bytes()

    def labels(self) -> dict[str, Any]:
        """What tables must say: the tokens that attention sees."""
        window = self.stack.config.window
        return {"context": "all tokens" if window is None else f"{window} tokens per layer"}
