"""Models of the diagnostics: small causal Transformers that differ in one config value.

All of them embed a task's tokens, run the same blocks under the same mask rule and answer at the
positions asked for. Letters: B batch, N tokens, Q answers, T frames, d width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tensor_memory import MemoryConfig, PlaceConfig
from tensor_memory_lab.choices import check_unread
from tensor_memory_lab.models import Carry, Model
from tensor_memory_lab.models.block import initialise
from tensor_memory_lab.models.decoder import (
    PLACE_METHODS,
    DecoderConfig,
    Method,
    cache,
    extra_keys,
    matched_registers,
    recurrent_slots,
    registers,
    tensor_method,
    wide,
)
from tensor_memory_lab.models.peers import PEERS, PeerConfig
from tensor_memory_lab.models.relative_attention import CacheType
from tensor_memory_lab.models.side import memory_bytes
from tensor_memory_lab.models.stack import Stack, StackConfig
from tensor_memory_lab.tasks import Batch
from tensor_memory_lab.tasks.binding import WRITE
from tensor_memory_lab.tasks.map_building import FEATURES
from tensor_memory_lab.tasks.occlusion import PATCH, SIDE, TOKENS_PER_FRAME

ToyMethod = Literal[
    "base", "wide", "slots", "slots-matched", "tensor", "tensor-long", "xl", "recurrent-slots",
    "window+", "linear", "gla", "deltanet", "gated-deltanet", "kda", "mamba2", "rwkv7",
    "place", "place-delta", "place-given", "place-given-delta", "place-offset",
]  # fmt: skip

METHODS: dict[str, Method] = {
    "base": {},
    "wide": {"mlp_ratio": wide},
    "slots": {"registers": registers},
    "slots-matched": {"registers": matched_registers},
    "tensor": {"side": "tensor"},
    "tensor-long": tensor_method("tensor-long"),
    "xl": {"attention": "relative", "cache": lambda config: cache(config, config.cache_type)},
    "recurrent-slots": {"recurrent_slots": recurrent_slots},
    "window+": {"extra_keys": lambda config: extra_keys(config, config.cache_type)},
    "linear": {"side": "linear"},
    **{name: {"side": name} for name in PEERS},
    **{name: {"side": "place"} for name in PLACE_METHODS},
}
"""What a method changes; see `StackConfig`."""

CHANNELS = {2: 27, 3: 8}
"""Of each voxel of the place memory, by the axes of its grid. In the bytes of 16 channels on
6 × 6 × 6, hidden and cell, they leave 8 × 8 or 6 × 6 × 6 voxels to each of four heads."""

SEGMENTED = ("xl", "recurrent-slots")
"""Methods that take segments where the others see a window."""


@dataclass(frozen=True)
class ToyModelConfig(DecoderConfig):
    """A causal Transformer for a diagnostic task."""

    method: ToyMethod = "base"
    """base; wide: the weights of `tensor` in the MLP; slots: 8 registers; slots-matched: registers
    of the memory's bytes; tensor: the memory; tensor-long: from its start for long gaps; xl:
    relative attention with a cache of the memory's bytes; recurrent-slots: tokens of the memory's
    bytes, carried between segments; window+: a window longer by the memory's bytes in keys and
    values; linear: a linear-attention state of the memory's bytes beside attention; gla, deltanet,
    gated-deltanet, kda, mamba2, rwkv7: the field's mechanisms with a state of these bytes. The
    place memory in these bytes: place, place-delta: its places are learned; place-given,
    place-given-delta: they are those that the task tells its tokens; place-offset: these and a
    learned offset."""
    memory: MemoryConfig = field(
        default_factory=lambda: MemoryConfig(channels=16, grid=(6, 6, 6), chunk_size=1)
    )
    """The memory, whose bytes others are matched to; linear takes its `gain` too."""
    place_heads: int = 4
    """Heads of the place memory and of the field's mechanisms but mamba2, which share the memory's
    bytes."""
    window: int | None = None
    """Tokens that attention sees, itself included; None sees the whole past. xl and
    recurrent-slots take segments of so many tokens."""
    cache_type: CacheType = "float32"
    """What the cache of xl and the extra keys and values of window+ are counted in; the same bytes
    hold twice the tokens in bf16. Nothing is kept between calls, so nothing is rounded; a
    cache that is really in bf16 would be no better."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.method == "recurrent-slots" and self.window is None:
            raise ValueError(
                "model.window: expected a number of tokens, got None: recurrent-slots are carried "
                "from segment to segment, and without a window there is but one"
            )
        if self.method == "window+" and self.window is None:
            raise ValueError(
                "model.window: expected a number of tokens, got None: window+ sees more than a "
                "window, and without one attention sees all"
            )
        unread = [] if self.method in ("xl", "window+") else ["cache_type"]
        if self.method not in (*PLACE_METHODS, *PEERS) or self.method == "mamba2":
            unread.append("place_heads")
        check_unread(self, "model", self.method, unread)

    def build(self, task: Any) -> ToyModel:
        """The model for one of the drawn tasks."""
        return ToyModel(self, task)

    def stack(self, length: int, axes: int = 0) -> StackConfig:
        """The choices that `method` stands for, where places have so many coordinates."""
        name = "segment" if self.method in SEGMENTED else "window"
        options: dict[str, Any] = {name: self.window, "cache_type": self.cache_type}
        if self.method in PEERS:
            options["peer"] = PeerConfig(memory_bytes(self.memory, layers=1), self.place_heads)
        if self.method in PLACE_METHODS:
            options["place"] = self.place(axes)
        return self.make_stack(METHODS[self.method], length, **options)

    def place(self, axes: int) -> PlaceConfig:
        """The place memory that fills the memory's bytes, its grid as fine as `CHANNELS` says."""
        changes = PLACE_METHODS[self.method]
        if not axes and "places" in changes:
            raise ValueError(
                f"model.method: expected a task whose tokens have places for {self.method}, got "
                "one without; learn them with --model.method place"
            )
        axes = axes or 2
        values = self.memory.state_values // self.place_heads  # of one head
        side = max(2, int((values / CHANNELS[axes]) ** (1 / axes) + 1e-6))
        return PlaceConfig(
            grid=(side,) * axes,
            channels=values // side**axes,
            heads=self.place_heads,
            **changes,
        )


class ToyModel(Model):
    """Embedding, blocks, LayerNorm and a biased head at the positions "ask"."""

    def __init__(self, config: ToyModelConfig, task: Any) -> None:
        super().__init__()
        if task.inputs not in EMBEDDINGS:
            raise ValueError(
                f"task.inputs: expected one of {', '.join(EMBEDDINGS)}, got {task.inputs!r}"
            )
        self.config = config
        self.embed = EMBEDDINGS[task.inputs](config.dim, task)
        self.norm = nn.LayerNorm(config.dim)
        self.head = nn.Linear(config.dim, task.classes)
        self.stack = Stack(config.stack(task.length, self.embed.axes))
        initialise(self, narrow=True)

    def forward(
        self, batch: Batch, carry: Carry | None = None
    ) -> tuple[dict[str, Tensor], Carry | None]:
        """Logits (B, Q, classes) at batch["ask"]; nothing is carried."""
        x = F.dropout(self.embed(batch), self.config.dropout, self.training)  # (B, N, d)
        x, _ = self.stack(x, where=self.embed.where(batch))
        asked = x.gather(1, batch["ask"][..., None].expand(-1, -1, x.shape[2]))
        return {"logits": self.head(self.norm(asked))}, None

    def state_bytes(self) -> int:
        """Bytes one row carries past what attention sees."""
        return self.stack.state_bytes()


class Tokens(nn.Module):
    """Embeds the tokens of a task, and says where they are."""

    axes = 0
    """Coordinates of a token's place; 0 where tokens have none."""

    def where(self, batch: Batch) -> Tensor | None:
        """Places (B, N, axes) in [-1, 1]."""
        return None


class BindingTokens(Tokens):
    """Kind, place and, where one is written, value: each its own embedding, summed."""

    axes = 3

    def __init__(self, dim: int, task: Any) -> None:
        super().__init__()
        self.kind = nn.Embedding(task.kinds, dim)
        self.place = nn.Linear(3, dim)
        self.value = nn.Embedding(task.classes, dim)

    def forward(self, batch: Batch) -> Tensor:
        """kind, value (B, N), place (B, N, 3) -> (B, N, d)."""
        written = (batch["kind"] == WRITE)[..., None]
        value = self.value(batch["value"]) * written
        return self.kind(batch["kind"]) + self.place(batch["place"]) + value

    def where(self, batch: Batch) -> Tensor:
        """Where a value is written or asked for; the middle for blank tokens."""
        return batch["place"]


class MapTokens(Tokens):
    """Four cells, row, column and a query flag per token, and its position."""

    axes = 2

    def __init__(self, dim: int, task: Any) -> None:
        super().__init__()
        self.features = nn.Linear(FEATURES, dim)
        self.position = nn.Parameter(torch.empty(task.positions, dim))

    def forward(self, batch: Batch) -> Tensor:
        """features (B, N, 7) -> (B, N, d)."""
        features = batch["features"]
        return self.features(features) + self.position[: features.shape[1]]

    def where(self, batch: Batch) -> Tensor:
        """Row and column: of a patch's upper left cell, of the cell asked for."""
        return batch["features"][..., 4:6]


class FrameTokens(Tokens):
    """Patches of 4 × 4 pixels, frame after frame, with a position per patch and per frame."""

    axes = 2

    def __init__(self, dim: int, task: Any) -> None:
        super().__init__()
        self.patch = nn.Linear(PATCH * PATCH, dim)
        self.place = nn.Parameter(torch.empty(TOKENS_PER_FRAME, dim))
        self.time = nn.Parameter(torch.empty(task.positions - TOKENS_PER_FRAME, dim))

    def forward(self, batch: Batch) -> Tensor:
        """frames (B, T, 16, 16) -> (B, T · 16, d)."""
        frames = batch["frames"].unflatten(2, (-1, PATCH)).unflatten(4, (-1, PATCH))
        patches = frames.transpose(3, 4).flatten(4).flatten(2, 3)  # (B, T, 16, 16 pixels)
        time = self.time[: patches.shape[1], None]
        return (self.patch(patches) + self.place + time).flatten(1, 2)

    def where(self, batch: Batch) -> Tensor:
        """Column and row of a patch in its frame."""
        frames = batch["frames"]
        line = torch.linspace(-1, 1, SIDE // PATCH, device=frames.device, dtype=frames.dtype)
        y, x = torch.meshgrid(line, line, indexing="ij")
        return torch.stack([x, y], -1).view(1, -1, 2).repeat(*frames.shape[:2], 1)


class SymbolTokens(Tokens):
    """Symbols and positions."""

    def __init__(self, dim: int, task: Any) -> None:
        super().__init__()
        self.symbol = nn.Embedding(task.classes, dim)
        self.position = nn.Parameter(torch.empty(task.positions, dim))

    def forward(self, batch: Batch) -> Tensor:
        """symbols (B, N) -> (B, N, d)."""
        return self.symbol(batch["symbols"]) + self.position[: batch["symbols"].shape[1]]


EMBEDDINGS: dict[str, Callable[[int, Any], Tokens]] = {
    "binding": BindingTokens,
    "map": MapTokens,
    "occlusion": FrameTokens,
    "no-harm": SymbolTokens,
}
"""By a task's `inputs`."""
