"""One decoder for text, the mechanism a config value.

Positions count within a call, also where calls continue each other: learned ones, as the paper has
them, or rotary ones; xl has its own. The head is tied to the embedding.

Letters: B batch, N tokens, d width.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tensor_memory import PlaceConfig
from tensor_memory_lab.choices import check_unread
from tensor_memory_lab.models import Carry, Model
from tensor_memory_lab.models.block import initialise
from tensor_memory_lab.models.cross_entropy import linear_cross_entropy
from tensor_memory_lab.models.decoder import (
    DecoderConfig,
    Method,
    cache,
    extra_keys,
    recurrent_slots,
    wide,
)
from tensor_memory_lab.models.relative_attention import CacheType
from tensor_memory_lab.models.stack import Stack, StackConfig
from tensor_memory_lab.tasks import Batch, Task

LanguageMethod = Literal[
    "base", "base-sln", "wide", "local", "wide-local", "linear", "linear-local", "conv-local",
    "window+", "xl", "recurrent-slots", "tensor", "tensor-local", "tensor-xl", "tensor-depth",
    "place", "place-local",
]  # fmt: skip

NARROW = 128
"""Width below which weights start from the larger values that narrow models need."""


@dataclass(frozen=True)
class LanguageModelConfig(DecoderConfig):
    """A decoder. The defaults are the paper's sizes."""

    method: LanguageMethod = "base"
    """base; base-sln: a LayerNorm on what attention adds; wide: the weights of `tensor` in the MLP;
    local, wide-local: attention within `window`; linear: ELU + 1 attention; linear-local: local and
    a linear-attention state of the memory's bytes; conv-local: local and a convolution over four
    tokens; window+: local, with as many keys and values before the window as fill the memory's
    bytes, also of earlier calls; xl: relative attention with a cache; recurrent-slots: tokens
    carried from segment to segment; tensor, tensor-local: the memory beside full or local
    attention; tensor-xl: beside xl's attention, in place of its cache; tensor-depth: the published
    form, which sees the future; place, place-local: the place memory beside full or local
    attention."""
    dim: int = 384
    layers: int = 8
    heads: int = 8
    dropout: float = 0.2
    window: int = 64
    """Tokens that local attention sees, itself included."""
    positions: Literal["learned", "rotary"] = "learned"
    """learned: a table that is added to the words, as in the paper; rotary: queries and keys are
    turned by their place, so that attention knows distances. xl and tensor-xl have relative ones of
    their own."""
    segment: int | None = None
    """Tokens that xl, tensor-xl and recurrent-slots take at once. None: all of a call for the first
    two, `window` for recurrent-slots, which learn to write from the segments that follow within a
    call."""
    cache_type: CacheType = "float32"
    """What the cache of xl and tensor-xl and the keys and values of window+ are carried in. With
    --precision bf16 nothing is lost by bf16, and the same bytes hold twice the tokens."""
    place: PlaceConfig = field(default_factory=PlaceConfig)
    """The place memory of place and place-local: 4 heads of 8 × 8 × 32."""
    non_causal: bool = False
    """Must be true for tensor-depth, whose scores are no perplexities."""

    def __post_init__(self) -> None:
        super().__post_init__()
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
        if not self.relative and self.method != "window+":
            check_unread(self, "model", self.method, ["cache_type"])
        if self.place.places != "learned":
            raise ValueError(
                "model.place.places: expected learned, since nobody tells a token of text where it "
                f"stands, got {self.place.places!r}; leave it out"
            )
        if self.positions == "learned" and self.method == "window+":
            raise ValueError(
                "model.positions: expected rotary for window+, since later calls see its keys and "
                "learned positions begin anew in them, got learned; add --model.positions rotary"
            )
        if self.positions == "rotary" and self.method in NOT_ROTARY:
            raise ValueError(
                f"model.positions: expected learned for {self.method}, got rotary, which only "
                "softmax attention over tokens alone can have; leave it out or take another method"
            )

    @property
    def relative(self) -> bool:
        """Whether attention is that of xl."""
        return METHODS[self.method].get("attention") == "relative"

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
        return self.make_stack(
            METHODS[self.method],
            length,
            place=self.place,
            rotary=self.positions == "rotary",
            cache_type=self.cache_type,
            carried=carried and not self.non_causal,
        )


_window, _segment = attrgetter("window"), attrgetter("segment")

METHODS: dict[str, Method] = {
    "base": {},
    "base-sln": {"attention_out_norm": True},
    "wide": {"mlp_ratio": wide},
    "local": {"window": _window},
    "wide-local": {"window": _window, "mlp_ratio": wide},
    "linear": {"attention": "linear"},
    "linear-local": {"window": _window, "side": "linear"},
    "conv-local": {"window": _window, "side": "convolution"},
    "window+": {
        "window": _window,
        "extra_keys": lambda config: extra_keys(config, config.cache_type),
    },
    "xl": {
        "attention": "relative",
        "segment": _segment,
        "cache": lambda config: cache(config, config.cache_type),
    },
    "recurrent-slots": {
        "segment": lambda config: config.window if config.segment is None else config.segment,
        "recurrent_slots": recurrent_slots,
    },
    "tensor": {"side": "tensor"},
    "tensor-local": {"window": _window, "side": "tensor"},
    "tensor-xl": {
        "attention": "relative",
        "segment": _segment,
        "cache": lambda config: config.cache or 0,
        "side": "tensor",
    },
    "tensor-depth": {"side": "tensor", "thread_depth": True},
    "place": {"side": "place"},
    "place-local": {"window": _window, "side": "place"},
}
"""What a method changes; see `StackConfig`."""

NOT_ROTARY = ("linear", "recurrent-slots", "xl", "tensor-xl")
"""Methods whose attention is not softmax over tokens alone."""


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
        if stack.extra_keys:
            context = f"{stack.window} and {stack.extra_keys} before them per layer"
        segment = stack.segment or self.length
        if self.config.relative and (stack.carried or segment < self.length):
            context = f"segment {segment}, {stack.cache} before it per layer"
        if method == "recurrent-slots":
            context = f"segment {stack.segment}, {stack.recurrent_slots} slots before it"
        if stack.carried and self.state_bytes():
            context += ", carried"
        return {"context": context}
