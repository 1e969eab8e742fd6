"""What the two kinds of decoder share, of diagnostics and of text: methods made into a stack.

A method is a few changes to a plain stack, `{"side": "tensor"}`. A change may be a function of the
config, such as the cache that fills the memory's bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tensor_memory import MemoryConfig
from tensor_memory_lab.choices import check_unread
from tensor_memory_lab.models.block import Place
from tensor_memory_lab.models.config import TransformerConfig
from tensor_memory_lab.models.relative_attention import CACHE_BYTES, CacheType
from tensor_memory_lab.models.side import FLOAT_BYTES
from tensor_memory_lab.models.stack import StackConfig, extra_bytes

Method = Mapping[str, Any]
"""Fields of `StackConfig` with their values, or functions of the config that give them."""


@dataclass(frozen=True)
class DecoderConfig(TransformerConfig):
    """A causal Transformer."""

    placement: Place = "after_mlp"
    """Where the side path stands in its block."""
    share_weights: bool = True
    """One set of side-path weights for all layers."""
    slots: int | None = None
    """Registers or recurrent slots; None takes what the method says."""
    cache: int | None = None
    """Tokens in the cache of xl; None takes as many as fill the memory's bytes."""

    def __post_init__(self) -> None:
        super().__post_init__()
        changed = MEMORY_METHODS.get(self.method, ())
        check_unread(self.memory, "model.memory", self.method, changed)

    def make_stack(self, method: Method, length: int, **options: Any) -> StackConfig:
        """The stack that a method stands for, for windows of `length` tokens."""
        changes: dict[str, Any] = {
            name: value(self) if callable(value) else value for name, value in method.items()
        }
        plain: dict[str, Any] = {
            "dim": self.dim,
            "layers": self.layers,
            "heads": self.heads,
            "length": length,
            "mlp_ratio": self.mlp_ratio,
            "dropout": self.dropout,
            "memory": self.memory,
            "side_layers": self.with_memory if "side" in method else (),
            "side_place": self.placement,
            "gate_init": self.gate_init,
            "share_weights": self.share_weights,
        }
        return StackConfig(**plain | options | changes)


MEMORY_METHODS: dict[str, dict[str, Any]] = {
    "tensor-open": {"forget_bias": 5.0},
    "tensor-long": {
        name: getattr(MemoryConfig.long_gap(), name)
        for name in ("spread_bias", "forget_bias", "feedback", "gain")
    },
}
"""Methods with the paper's memory, and the fields of its config that they change."""

PLACE_METHODS: dict[str, dict[str, Any]] = {
    "place": {},
    "place-delta": {"rule": "delta"},
    "place-given": {"places": "given"},
    "place-given-delta": {"places": "given", "rule": "delta"},
    "place-offset": {"places": "offset"},
}
"""Methods with the place memory, and the fields of its config that they change."""


def tensor_method(name: str) -> Method:
    """One of `MEMORY_METHODS`: the paper's memory with its changes, all else as in the config."""
    changes = MEMORY_METHODS[name]
    return {"side": "tensor", "memory": lambda config: replace(config.memory, **changes)}


def wide(config: DecoderConfig) -> float:
    """The MLP ratio that has the memory's weights."""
    return config.wide_ratio


def cache(config: DecoderConfig, kept_in: CacheType = "float32") -> int:
    """The cache of xl: as many tokens in every layer as fill the memory's bytes, if not named."""
    return _per_layer(config, kept_in) if config.cache is None else config.cache


def extra_keys(config: DecoderConfig, kept_in: CacheType = "float32") -> int:
    """Tokens before the window whose keys and values, in every layer, fill the memory's bytes."""
    of_a_token = extra_bytes(config.dim, config.layers, kept_in)
    if config.memory_bytes < of_a_token:  # the method would be a plain window under another name
        raise ValueError(
            f"model.memory: expected {of_a_token} bytes or more for {config.method}, those of one "
            f"token's keys and values, got {config.memory_bytes}; take a larger memory"
        )
    return config.memory_bytes // of_a_token


def registers(config: DecoderConfig) -> int:
    """Learned tokens before the sequence: 8, if not named."""
    return _some(config, 8 if config.slots is None else config.slots)


def matched_registers(config: DecoderConfig) -> int:
    """Learned tokens that fill the memory's bytes; each layer holds its own view of them."""
    return _some(config, _per_layer(config))


def recurrent_slots(config: DecoderConfig) -> int:
    """Tokens carried between segments: as many as fill the memory's bytes, if not named."""
    matched = config.memory_bytes // (FLOAT_BYTES * config.dim)
    return _some(config, matched if config.slots is None else config.slots)


def _per_layer(config: DecoderConfig, kept_in: CacheType = "float32") -> int:
    return config.memory_bytes // (CACHE_BYTES[kept_in] * config.dim * config.layers)


def _some(config: DecoderConfig, slots: int) -> int:
    if slots < 1:  # without any, the method would be `base` under another name
        raise ValueError(
            f"model.slots: expected 1 or more for {config.method}, got {slots}; name a number, or "
            "a memory whose bytes hold one"
        )
    return slots
