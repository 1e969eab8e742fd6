"""One decoder for text, the mechanism a config value.

Positions count within a call, also where calls continue each other: learned ones, as the paper has
them, or rotary ones; xl has its own. The head is tied to the embedding.

Letters: B batch, N tokens, d width.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tensor_memory import MemoryConfig
from tensor_memory_lab.models import Carry, Model
from tensor_memory_lab.models.block import Place, check_memory_layers, initialise
from tensor_memory_lab.models.cross_entropy import linear_cross_entropy
from tensor_memory_lab.models.matched import (
    FLOAT_BYTES,
    memory_bytes,
    side_parameters,
    wide_ratio,
)
from tensor_memory_lab.models.slots import check_slots
from tensor_memory_lab.models.stack import Stack, StackConfig
from tensor_memory_lab.tasks import Batch, Task

LanguageMethod = Literal[
    "base",
    "base-sln",
    "wide",
    "local",
    "wide-local",
    "linear",
    "linear-local",
    "conv-local",
    "xl",
    "recurrent-slots",
    "tensor",
    "tensor-local",
    "tensor-xl",
    "tensor-depth",
]

Positions = Literal["learned", "rotary"]

NARROW = 128
"""Width below which weights start from the larger values that narrow models need."""

RIVALS = {"linear-local": "linear", "conv-local": "convolution"}
"""What stands in the memory's place, by method."""

NOT_TURNED = ("linear", "recurrent-slots")
"""Methods without rotary positions, beside those with relative ones."""


@dataclass(frozen=True)
class LanguageModelConfig:
    """A decoder. The defaults are the paper's sizes."""

    method: LanguageMethod = "base"
    """base; base-sln: a LayerNorm on what attention adds; wide: the weights of `tensor` in the MLP;
    local, wide-local: attention within `window`; linear: ELU + 1 attention; linear-local: local and
    a linear-attention state of the memory's bytes; conv-local: local and a convolution over four
    tokens; xl: relative attention with a cache; recurrent-slots: tokens carried from segment to
    segment; tensor, tensor-local: the memory beside full or local attention; tensor-xl: beside xl's
    attention, in place of its cache; tensor-depth: the published form, which sees the future."""
    dim: int = 384
    """d, width of the tokens."""
    layers: int = 8
    """Transformer blocks."""
    heads: int = 8
    """Attention heads; a divisor of `dim`."""
    mlp_ratio: float = 4.0
    """Width of the MLP over `dim`."""
    dropout: float = 0.2
    """On embeddings, and on what attention, MLP and side path add."""
    window: int = 64
    """Tokens that local attention sees, itself included."""
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    memory_layers: tuple[int, ...] | None = None
    """Layers with a side path (tensor, linear-local, conv-local); None takes all."""
    positions: Positions = "learned"
    """learned: a table that is added to the words, as in the paper; rotary: queries and keys are
    turned by their place, so that attention knows distances. xl and tensor-xl have relative ones of
    their own."""
    gate_init: float = 0.0
    """Initial γ of the side paths."""
    placement: Place = "after_mlp"
    """Where the side path stands in its block."""
    share_weights: bool = True
    """One set of side-path weights for all layers."""
    segment: int | None = None
    """Tokens that xl, tensor-xl and recurrent-slots take at once. None: all of a call for the first
    two, `window` for recurrent-slots, which learn to write from the segments that follow within a
    call."""
    cache: int | None = None
    """Tokens in the cache of xl; None takes as many as fill the memory's bytes, 0 for tensor-xl."""
    slots: int | None = None
    """Recurrent slots; None takes as many as fill the memory's bytes."""
    non_causal: bool = False
    """Must be true for tensor-depth, whose scores are no perplexities."""

    def __post_init__(self) -> None:
        if self.method not in get_args(LanguageMethod):
            raise ValueError(
                f"model.method: expected one of {', '.join(get_args(LanguageMethod))}, "
                f"got {self.method!r}"
            )
        depth = self.method == "tensor-depth"
        if depth and not self.non_causal:
            raise ValueError(
                "model.method: tensor-depth hands the state left at the end of the text to the "
                "layer above, so its first token sees the last; expected non_causal=True, got "
                "False; set it to build the model all the same, or take method tensor"
            )
        if self.non_causal and not depth:
            raise ValueError(
                f"model.non_causal: expected False for {self.method}, which is causal, got True"
            )
        if self.positions not in get_args(Positions):
            raise ValueError(
                f"model.positions: expected one of {', '.join(get_args(Positions))}, "
                f"got {self.positions!r}"
            )
        if self.positions == "rotary" and (self.relative or self.method in NOT_TURNED):
            raise ValueError(
                f"model.positions: expected learned for {self.method}, got rotary, which only "
                "softmax attention over tokens alone can have; leave it out or take another method"
            )
        check_memory_layers(self.with_memory, self.layers)

    @property
    def relative(self) -> bool:
        """Whether attention is that of xl."""
        return self.method.endswith("xl")

    @property
    def with_memory(self) -> tuple[int, ...]:
        """Layers that hold the side path, or whose memory others are matched to."""
        return tuple(range(self.layers)) if self.memory_layers is None else self.memory_layers

    def build(self, task: Task) -> LanguageModel:
        """The model for a task of text: its vocabulary, its window, whether it carries."""
        if self.non_causal and task.metric == "perplexity":
            raise ValueError(
                f"model.method: {self.method} sees the tokens it is scored on, so it has no "
                "perplexity; expected a task with leak=True, which calls it a score; take the "
                "recipe language-leak or add --task.leak"
            )
        facts = task.facts()
        return LanguageModel(
            self, words=facts["vocabulary"], length=facts["window"], carried=task.carries
        )

    def stack(self, length: int, carried: bool) -> StackConfig:
        """The choices that `method` stands for."""
        method, layers = self.method, self.with_memory
        plain = StackConfig(
            dim=self.dim,
            layers=self.layers,
            heads=self.heads,
            length=length,
            mlp_ratio=self.mlp_ratio,
            dropout=self.dropout,
            window=self.window if method.endswith("local") else None,
            rotary=self.positions == "rotary",
            attention_out_norm=method == "base-sln",
            carried=carried and method != "tensor-depth",
        )
        budget = memory_bytes(self.memory, len(layers))
        changes: dict[str, Any] = {}
        if method in ("wide", "wide-local"):
            extra = side_parameters(self.dim, self.memory, len(layers))
            changes["mlp_ratio"] = wide_ratio(self.dim, self.layers, self.mlp_ratio, extra)
        elif method == "linear":
            changes["attention"] = "linear"
        elif self.relative:
            matched = budget // (FLOAT_BYTES * self.dim * self.layers) if method == "xl" else 0
            cache = matched if self.cache is None else self.cache
            changes |= {"attention": "relative", "segment": self.segment, "cache": cache}
        elif method == "recurrent-slots":
            matched = budget // (FLOAT_BYTES * self.dim)
            slots = check_slots(matched if self.slots is None else self.slots, method)
            segment = self.window if self.segment is None else self.segment
            changes |= {"segment": segment, "recurrent_slots": slots}
        if method.startswith("tensor") or method in RIVALS:
            changes |= {
                "side": RIVALS.get(method, "tensor"),
                "memory": self.memory,
                "side_layers": layers,
                "side_place": self.placement,
                "gate_init": self.gate_init,
                "share_weights": self.share_weights,
                "thread_depth": method == "tensor-depth",
            }
        return replace(plain, **changes)


class LanguageModel(Model):
    """Words to next words.

    >>> config = LanguageModelConfig(dim=16, layers=2, heads=2, method="local", window=4)
    >>> model = LanguageModel(config, words=50, length=12)
    >>> ids = torch.randint(50, (3, 12))
    >>> outputs, carry = model({"ids": ids, "targets": ids})
    >>> outputs["nll"].shape, carry
    (torch.Size([3, 12]), None)
    """

    def __init__(
        self, config: LanguageModelConfig, words: int, length: int, carried: bool = False
    ) -> None:
        super().__init__()
        self.config, self.length = config, length
        self.word = nn.Embedding(words, config.dim)
        learned = config.positions == "learned" and not config.relative
        self.position = nn.Parameter(torch.empty(length, config.dim)) if learned else None
        self.norm = nn.LayerNorm(config.dim)
        self.stack = Stack(config.stack(length, carried))
        initialise(self, narrow=config.dim < NARROW)
        if config.dim < NARROW:  # the table is the head too: logits must not start large
            with torch.no_grad():
                self.word.weight.mul_(config.dim**-0.5 / self.word.weight.std())

    def forward(
        self, batch: Batch, carry: Carry | None = None, *, need_logits: bool = False
    ) -> tuple[dict[str, Tensor], Carry | None]:
        """Losses "nll" (B, N) of batch["targets"] after batch["ids"], or "logits" (B, N, words).

        Rows of batch["fresh"] (B,) forget what is carried.
        """
        x, carry = self.hidden(batch["ids"], carry, batch.get("fresh"))
        if need_logits:
            return {"logits": self.logits(x)}, carry
        losses = linear_cross_entropy(self.norm(x), self.word.weight, batch["targets"])
        return {"nll": losses}, carry

    def hidden(
        self, ids: Tensor, carry: Carry | None = None, fresh: Tensor | None = None
    ) -> tuple[Tensor, Carry | None]:
        """Ids (B, N) -> what the last block leaves (B, N, d), and the carry."""
        x = F.dropout(self.embed(ids), self.config.dropout, self.training)
        return self.stack(x, carry, fresh)

    def embed(self, ids: Tensor, first: int = 0) -> Tensor:
        """Ids (B, N), the first of them at place `first` of its window -> (B, N, d)."""
        x, end = self.word(ids), first + ids.shape[1]
        if self.position is None:
            return x
        if end > self.length:
            raise ValueError(
                f"ids: expected at most {self.length} tokens, for which there are positions, "
                f"got {end}; cut them into windows and carry the state"
            )
        return x + self.position[first:end]

    def logits(self, x: Tensor) -> Tensor:
        """Blocks' outputs (..., d) -> (..., words)."""
        return F.linear(self.norm(x), self.word.weight)

    def empty_carry(self, rows: int) -> Carry:
        """Zeros to start from where every row of the first batch is fresh."""
        return self.stack.empty_carry(rows, self.word.weight)

    def state_bytes(self) -> int:
        """Bytes one row carries past what attention sees."""
        return self.stack.state_bytes()

    def labels(self) -> dict[str, Any]:
        """What tables must say: the context a prediction has, and that a model sees the future."""
        stack, method = self.stack.config, self.config.method
        if self.config.non_causal:
            return {"non_causal": True, "context": f"all of {self.length}, later tokens too"}
        context = f"window {self.length}"
        if stack.window is not None:
            context = f"{stack.window} per layer within {context}"  # no token before the window
        segment = stack.segment or self.length
        if self.config.relative and (stack.carried or segment < self.length):
            context = f"segment {segment}, {stack.cache} before it per layer"
        if method == "recurrent-slots":
            context = f"segment {stack.segment}, {stack.recurrent_slots} slots before it"
        if stack.carried and self.state_bytes():
            context += ", carried"
        return {"context": context}
