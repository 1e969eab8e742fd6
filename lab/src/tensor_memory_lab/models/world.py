"""Models of the remembered world: what an agent will see, from its pose and what it has seen.

Two tokens per glimpse: (place, ?), at which a patch is predicted, then (pose, patch). Attention
sees the last few tokens; whatever else is known of the world must come from the side path.

Letters: B batch, T glimpses, S of them shown, N = 2T tokens, P numbers in a patch, d width.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from tensor_memory import MemoryConfig, PlaceConfig, PlaceMemory
from tensor_memory_lab.choices import check_unread
from tensor_memory_lab.models import Carry, Model
from tensor_memory_lab.models.block import Place, initialise
from tensor_memory_lab.models.decoder import (
    MEMORY_METHODS,
    PLACE_METHODS,
    DecoderConfig,
    Method,
    cache,
    extra_keys,
    tensor_method,
)
from tensor_memory_lab.models.peers import PEERS, PeerConfig
from tensor_memory_lab.models.stack import SIDES, Stack, StackConfig, extra_bytes
from tensor_memory_lab.tasks import Batch

OCTAVES = 5
"""Frequencies of the waves that tell a pose, each twice the one before; the slowest has a period
of twice the world's width."""


@dataclass(frozen=True)
class WorldModelConfig(DecoderConfig):
    """A causal Transformer over glimpses.

    Tensor methods, linear, window+ and xl keep the bytes of `memory`; xl those of `cache` where it
    is named. The place memory keeps those of `place`, the field's mechanisms those of `peer`.
    """

    method: str = "window"
    """window: attention over the last tokens alone. full: over all of them; poses tell the place of
    a token; full-rotary: turned by their number too. place, place-delta: the place memory, its
    places learned; place-given, place-given-delta: its places are the poses; place-offset: the
    poses and a learned offset. tensor: the paper's memory; tensor-open: its forget gate starts
    open; tensor-long: its start for long gaps. window+: a window longer by the memory's bytes in
    keys and values of bf16. xl: relative attention with a cache of these bytes in bf16. Any other
    side path by its name: linear, gla, gated-deltanet, …"""
    dim: int = 192
    layers: int = 4
    heads: int = 6
    dropout: float = 0.0
    memory: MemoryConfig = field(
        default_factory=lambda: MemoryConfig(channels=64, grid=(8, 8), chunk_size=1)
    )
    """The paper's memory; linear, window+ and xl are matched to its bytes."""
    memory_layers: tuple[int, ...] | None = (1, 2)
    placement: Place = "after_attention"
    share_weights: bool = False
    window: int = 16
    """Tokens that attention sees, itself included: two per glimpse."""
    place: PlaceConfig = field(default_factory=PlaceConfig)
    """The place memory; leave `places` and `rule` to a method that sets them."""
    peer: PeerConfig = field(default_factory=PeerConfig)
    """How much the field's mechanisms keep in each layer."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.method not in METHODS:
            raise ValueError(
                f"model.method: expected one of {', '.join(METHODS)}, got {self.method!r}"
            )
        unread = ("slots",) if self.method == "xl" else ("slots", "cache")
        check_unread(self, "model", self.method, unread)
        parts = {
            "place": PLACE_METHODS.get(self.method, vars(self.place)),
            "peer": PEER_UNREAD.get(self.method, vars(self.peer)),
        }
        for part, names in parts.items():
            usual: Any = self.__dataclass_fields__[part].default_factory
            check_unread(getattr(self, part), f"model.{part}", self.method, names, usual())

    def build(self, task: Any) -> WalkModel:
        """The model for walks of a task."""
        return WorldModel(self, values=task.values, glimpses=task.config.glimpses)

    def stack(self, length: int) -> StackConfig:
        """The choices that `method` stands for."""
        plain = {
            "window": self.window,
            "rotary": True,
            "cache_type": "bf16",
            "place": self.place,
            "peer": self.peer,
        }
        return self.make_stack(METHODS[self.method], length, **plain)


PEER_UNREAD = {name: ("heads",) if name == "mamba2" else () for name in PEERS}
"""The field's mechanisms, and the fields of their config that they do not read."""


def _place(changes: dict[str, Any]) -> Method:
    return {"side": "place", "place": lambda config: replace(config.place, **changes)}


METHODS: dict[str, Method] = {
    "window": {},
    "full": {"window": None, "rotary": False},
    "full-rotary": {"window": None},
    "window+": {"extra_keys": lambda config: extra_keys(config, "bf16")},
    "xl": {
        "attention": "relative",
        "segment": lambda config: config.window,
        "cache": lambda config: cache(config, "bf16"),
        "rotary": False,
    },
    **{name: {"side": name} for name in SIDES},
    **{name: tensor_method(name) for name in MEMORY_METHODS},
    **{name: _place(changes) for name, changes in PLACE_METHODS.items()},
}
"""What a method changes; see `StackConfig`."""


class WalkModel(Model):
    """What models of walks share: the tokens of a stack, grids that grow with the world."""

    config: WorldModelConfig
    stack: Stack

    @contextmanager
    def grids_scaled(self, scale: int) -> Iterator[None]:
        """Inside, the grids of place memories are those of a world so many times as wide."""
        before = {m: m.config for m in self.modules() if isinstance(m, PlaceMemory)}
        try:
            for memory, config in before.items():
                # As `resized` does it; no weight depends on the grid.
                memory.config = replace(config, grid=tuple(scale * size for size in config.grid))
            yield
        finally:
            for memory, config in before.items():
                memory.config = config

    def state_bytes(self) -> int:
        """Bytes one row carries past the window that all methods see."""
        stack = self.stack.config
        if stack.window is None:  # keys and values of a whole walk
            beyond = stack.layers * max(stack.length - self.config.window, 0)
            return extra_bytes(stack.dim, beyond, "bf16")
        return self.stack.state_bytes()

    def labels(self) -> dict[str, Any]:
        """What tables must say: the tokens that attention sees."""
        stack = self.stack.config
        if stack.window is None:
            return {"context": "all tokens"}
        more = f" and {more} before them" if (more := stack.extra_keys or stack.cache) else ""
        return {"context": f"{stack.window} tokens{more} per layer"}


class WorldModel(WalkModel):
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
        """Answers "patches" (B, T, P), each from the glimpses before it; nothing is carried.

        Where fewer glimpses are seen than there are poses, the answers stand for the others, one
        after the other. Where batch["own"] (B, T) is true the model's own answer stands for the
        glimpse, an answer made when all were seen: scheduled sampling, in parallel.
        """
        poses, seen = batch["poses"], batch["seen"]
        if seen.shape[1] < poses.shape[1]:
            return {"patches": self.roll_out(poses, seen)}, None
        if "own" in batch:
            with torch.no_grad():
                answers = self.predict(poses, seen)
            seen = torch.where(batch["own"][..., None], answers.to(seen.dtype), seen)
        return {"patches": self.predict(poses, seen, batch.get("asked"))}, None

    def roll_out(self, poses: Tensor, seen: Tensor) -> Tensor:
        """Answers (B, T, P) where only the first S glimpses are seen.

        Every pass reads the walk again and makes one more answer right: all methods can do that,
        and T - S passes over whole walks take no longer than as many steps of a token each.
        """
        T, S = poses.shape[1], seen.shape[1]
        seen = torch.cat([seen, seen.new_zeros(*seen.shape[:1], T - S, seen.shape[2])], dim=1)
        for t in range(S, T):
            seen[:, t] = self.predict(poses, seen)[:, t]
        return self.predict(poses, seen)

    def predict(self, poses: Tensor, seen: Tensor, asked: Tensor | None = None) -> Tensor:
        """Poses (B, T, 2), patches seen there (B, T, P) -> what was expected there (B, T, P).

        With `asked` (B, T, 2) what is expected at those places, each before its glimpse.
        """
        where = torch.stack([poses if asked is None else asked, poses], dim=2)  # (B, T, 2, 2)
        question, glimpse = (self.pose(self.waves(where)) + self.kind).unbind(2)  # (B, T, d)
        x = torch.stack([question, glimpse + self.patch(seen)], dim=2).flatten(1, 2)  # (B, N, d)
        x, _ = self.stack(x, where=where.flatten(1, 2))
        return self.head(self.norm(x[:, ::2]))

    def waves(self, poses: Tensor) -> Tensor:
        """Poses (B, T, 2) -> themselves, sines and cosines: (B, T, 2 + 4 · octaves)."""
        angles = (poses[..., None] * self.frequencies).flatten(-2)
        return torch.cat([poses, angles.sin(), angles.cos()], dim=-1)
