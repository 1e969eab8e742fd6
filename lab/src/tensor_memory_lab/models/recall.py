"""The model of associative recall: zoology's two layers, a short convolution and then a mixer.

Each layer adds what it mixes and, where a Transformer has its MLP, the norm of the stream. Tokens
have no positions; input and output embeddings are one table. The mixer is the compared mechanism,
its state sized from a budget of bytes.

Letters: B batch, N tokens, Q questions, d width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tensor_memory import MemoryConfig, PlaceConfig, PlaceMemory, TensorMemory
from tensor_memory_lab.choices import check_choices, check_unread
from tensor_memory_lab.models import Carry, Model
from tensor_memory_lab.models.attention import SelfAttention
from tensor_memory_lab.models.block import initialise
from tensor_memory_lab.models.peers import PEERS, DeltaNet, GatedLinearAttention, PeerConfig
from tensor_memory_lab.models.side import FLOAT_BYTES, carried_bytes
from tensor_memory_lab.tasks import Batch

RecallMethod = Literal[
    "place", "tensor", "tensor-long", "gla", "deltanet", "gated-deltanet", "kda", "mamba2",
    "rwkv7", "window+", "attention",
]  # fmt: skip

KERNEL_SIZE = 3
"""Of the first layer's convolution: a token and the two before it."""


@dataclass(frozen=True)
class RecallModelConfig:
    """Two layers without MLP."""

    method: RecallMethod = "place"
    """The mixer. tensor: as published, a token per chunk; tensor-long: from its start for long
    gaps; window+: attention over as many tokens as the bytes hold; attention: over all."""
    dim: int = 128
    """d, width of the tokens."""
    state_bytes: int = 32_768
    """Bytes of the mixer's state in float32; what its own short convolution keeps comes on top."""
    heads: int = 2
    """Heads of attention and of the peers but for Mamba-2; the place memory has its own."""
    place_heads: int = 4
    """Heads of the place memory."""
    axes: int = 2
    """Grid axes of the place memory, 1 to 3."""
    rule: Literal["linear", "delta"] = "linear"
    """Of the place memory: add to a place, or overwrite it."""
    first: Literal["convolution", "mixer"] = "convolution"
    """The first layer; two mixers share the bytes, as zoology has it for Mamba-2."""
    dropout: float = 0.1
    """On the embeddings."""

    def __post_init__(self) -> None:
        check_choices(self, "model")
        if not 1 <= self.axes <= 3:
            raise ValueError(f"model.axes: expected 1 to 3, got {self.axes}")
        if self.state_bytes < 1024:
            raise ValueError(f"model.state_bytes: expected 1024 or more, got {self.state_bytes}")
        unread = [] if self.method == "place" else ["place_heads", "axes", "rule"]
        if self.method in ("place", "tensor", "tensor-long", "mamba2"):
            unread.append("heads")
        if self.method == "attention":
            unread.append("state_bytes")
        check_unread(self, "model", self.method, unread)

    def build(self, task: Any) -> RecallModel:
        """The model for a task of recall."""
        return RecallModel(self, task)

    def mixer(self, state_bytes: int) -> nn.Module:
        """`forward(x) -> (m, state)` with a state of so many bytes or less."""
        values = state_bytes // FLOAT_BYTES
        match self.method:
            case "place":
                config = place_of(values, self.place_heads, self.axes, self.rule)
                return PlaceMemory(self.dim, config)
            case "tensor":
                return TensorMemory(self.dim, MemoryConfig.paper(**tensor_sizes(values)))
            case "tensor-long":
                return TensorMemory(self.dim, MemoryConfig.long_gap(**tensor_sizes(values)))
            case "window+":
                return SelfAttention(self.dim, self.heads, window=1 + values // (2 * self.dim))
            case "attention":
                return SelfAttention(self.dim, self.heads)
            case peer:
                return PEERS[peer](self.dim, PeerConfig(state_bytes, self.heads))


def place_of(values: int, heads: int, axes: int, rule: Literal["linear", "delta"]) -> PlaceConfig:
    """A place memory of so many numbers: as many voxels as channels, or twice as many.

    >>> [place_of(8192, 4, axes, "linear").grid for axes in (1, 2, 3)]
    [(64,), (8, 8), (4, 4, 4)]
    >>> place_of(32_768, 4, 2, "delta").channels
    64
    """
    power = int(math.log2(values // heads))
    grid = powers((power + 1) // 2, axes)
    channels = 2 ** (power // 2)
    return PlaceConfig.recall(grid=grid, channels=channels, heads=heads, rule=rule, wrap=False)


def tensor_sizes(values: int) -> dict[str, Any]:
    """Three axes and a token per chunk; 128 KiB are the published 32 channels of 8 × 8 × 8.

    >>> tensor_sizes(32_768)
    {'channels': 32, 'grid': (8, 8, 8), 'chunk_size': 1}
    """
    power = int(math.log2(values // 2))  # hidden and cell
    voxels = max(power - 5, min(power - 1, 6))
    return {"channels": 2 ** (power - voxels), "grid": powers(voxels, 3), "chunk_size": 1}


def powers(power: int, axes: int) -> tuple[int, ...]:
    """2^power voxels over the axes, as equal as powers of two can be.

    >>> powers(7, 3), powers(5, 2)
    ((4, 4, 8), (4, 8))
    """
    return tuple(2 ** ((power + axis) // axes) for axis in range(axes))


class GatedConvolution(nn.Module):
    """Zoology's BaseConv: x + convolution(x) ⊙ projection(x)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim
        # A token's own comes last. `initialise` draws them, as every weight of the model.
        self.taps = nn.Parameter(torch.zeros(KERNEL_SIZE, dim))
        self.bias = nn.Parameter(torch.zeros(dim))
        self.project = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """x (B, N, d) -> m (B, N, d), and no state: a call is a whole row."""
        N = x.shape[1]
        tokens = F.pad(x, (0, 0, KERNEL_SIZE - 1, 0))
        mixed = self.bias + sum(tap * tokens[:, k : k + N] for k, tap in enumerate(self.taps))
        return x + mixed * self.project(x), None

    def state_bytes(self) -> int:
        """Bytes of the two tokens that one row would keep between calls."""
        return FLOAT_BYTES * (KERNEL_SIZE - 1) * self.dim


class RecallModel(Model):
    """Embedding, two layers, LayerNorm, and the embedding again as the head."""

    def __init__(self, config: RecallModelConfig, task: Any) -> None:
        super().__init__()
        self.config, self.length = config, task.length
        d = config.dim
        self.embed = nn.Embedding(task.vocabulary, d)
        first = config.first == "convolution"
        mixers = [config.state_bytes] if first else [config.state_bytes // 2] * 2
        layers = [GatedConvolution(d)] if first else []
        self.layers = nn.ModuleList([*layers, *(config.mixer(size) for size in mixers)])
        self.norms = nn.ModuleList(nn.LayerNorm(d) for _ in range(2 * len(self.layers)))
        self.last_norm = nn.LayerNorm(d)
        initialise(self)
        self._draw_linear_layers()

    def forward(
        self, batch: Batch, carry: Carry | None = None
    ) -> tuple[dict[str, Tensor], Carry | None]:
        """Logits (B, Q, vocabulary) at batch["ask"]; nothing is carried."""
        x = F.dropout(self.embed(batch["tokens"]), self.config.dropout, self.training)
        for index, mixer in enumerate(self.layers):
            m, _ = mixer(self.norms[2 * index](x))
            x = x + m
            x = x + self.norms[2 * index + 1](x)
        asked = x.gather(1, batch["ask"][..., None].expand(-1, -1, x.shape[2]))
        return {"logits": F.linear(self.last_norm(asked), self.embed.weight)}, None

    def state_bytes(self) -> int:
        """Bytes that one row keeps in all layers; attention over all keeps the longest row."""
        return sum(self._bytes_of(layer) for layer in self.layers)

    def _bytes_of(self, mixer: Any) -> int:
        if isinstance(mixer, SelfAttention):
            kept = self.length if mixer.window is None else mixer.window - 1
            return FLOAT_BYTES * 2 * kept * self.config.dim
        return carried_bytes(mixer)

    @torch.no_grad()
    def _draw_linear_layers(self) -> None:
        """Linear layers of these peers start from N(0, 0.02²), in zoology and in their own code.

        Mamba-2 and RWKV-7 have starts of their own, and so have the memories and, by `initialise`,
        the convolution.
        """
        for mixer in self.layers:
            if isinstance(mixer, GatedLinearAttention | DeltaNet):
                for module in mixer.modules():
                    if isinstance(module, nn.Linear):
                        module.weight.normal_(std=0.02)
                        if module.bias is not None:
                            module.bias.zero_()
