"""A small random host of every kind a memory must attach to; `families.py` has one per family."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from tensor_memory import MemoryConfig

SMALL = MemoryConfig(channels=4, grid=(3, 3), chunk_size=3)
WIDTH, VOCABULARY, TOKENS = 16, 30, 11

_SIZES: dict[str, Any] = dict(
    hidden_size=WIDTH,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=24,
)
_TEXT: dict[str, Any] = dict(
    vocab_size=VOCABULARY, bos_token_id=None, eos_token_id=None, pad_token_id=None
)
_DECODER = _SIZES | _TEXT | dict(num_key_value_heads=1, max_position_embeddings=4096)
_ENCODER = _SIZES | _TEXT | dict(pad_token_id=0, max_position_embeddings=64)
BOTH: dict[str, Any] = dict(vocab_size=VOCABULARY, d_model=WIDTH) | {
    f"{half}_{name}": size
    for half in ("encoder", "decoder")
    for name, size in (("layers", 2), ("attention_heads", 2), ("ffn_dim", 24))
}
"""Sizes of an encoder and decoder as BART names them."""
_IMAGE: dict[str, Any] = dict(image_size=8, patch_size=4)


@dataclass(frozen=True)
class Host:
    """How to build a host, feed it and read it, and what must be found in it."""

    build: Callable[[], nn.Module]
    example: Callable[[], Tensor]
    blocks: tuple[str, ...]
    causal: bool
    bidirectional_is_known: bool = True

    def __call__(self) -> nn.Module:
        return self.build().double().eval()


def ids() -> Tensor:
    return torch.randint(1, VOCABULARY, (2, TOKENS))


def read(output: Any) -> Tensor:
    """The tensor a host is judged by."""
    for name in ("logits", "last_hidden_state"):
        if hasattr(output, name):
            return getattr(output, name)
    return output[0] if isinstance(output, tuple) else output


def gpt2(**options: Any) -> nn.Module:
    config = dict(n_embd=WIDTH, n_layer=2, n_head=2, n_positions=4096) | _TEXT | options
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**config))


def llama(**options: Any) -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**_DECODER | options))


def mistral(window: int | None = 8, **options: Any) -> nn.Module:
    config = transformers.MistralConfig(**_DECODER | dict(sliding_window=window) | options)
    return transformers.MistralForCausalLM(config)


def bert(**options: Any) -> nn.Module:
    config = transformers.BertConfig(**_ENCODER | options)
    return transformers.BertModel(config, add_pooling_layer=False)


def _vit() -> nn.Module:
    return transformers.ViTModel(transformers.ViTConfig(**_SIZES | _IMAGE), add_pooling_layer=False)


def encoder(*, batch_first: bool = True) -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 24, batch_first=batch_first)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=batch_first)


class TimmBlock(nn.Module):
    """The parts and names of a block of timm's VisionTransformer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn = nn.ModuleDict(
            {"qkv": nn.Linear(WIDTH, 3 * WIDTH), "proj": nn.Linear(WIDTH, WIDTH)}
        )
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 24), nn.GELU(), nn.Linear(24, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.attn["qkv"](self.norm1(x)).chunk(3, dim=-1)
        attended = nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + self.attn["proj"](attended)
        return x + self.mlp(self.norm2(x))


class TimmViT(nn.Module):
    """Stands in for timm's VisionTransformer, which cannot be installed everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, WIDTH, 4, 4)
        self.blocks = nn.Sequential(TimmBlock(), TimmBlock())
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.patch_embed(x).flatten(2).transpose(1, 2))
        return self.head(self.norm(x).mean(1))


class Unnamed(nn.Module):
    """A causal block none of whose names says what it is, and which returns a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.n = nn.RMSNorm(WIDTH)
        self.look = nn.ModuleDict({f"to_{x}": nn.Linear(WIDTH, WIDTH) for x in "qkv"})
        self.up, self.down = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        y = self.n(x)
        q, k, v = (self.look[f"to_{name}"](y) for name in "qkv")
        x = x + nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.down(self.up(self.n(x)).relu()), None


class Custom(nn.Module):
    """A hand-written causal language model."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.steps = nn.ModuleList(Unnamed() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = self.embedding(tokens)
        for step in self.steps:
            x, _ = step(x)
        return self.head(x)


def embeddings() -> Tensor:
    return torch.randn(2, TOKENS, WIDTH, dtype=torch.float64)


def _images() -> Tensor:
    return torch.randn(2, 3, 8, 8, dtype=torch.float64)


def _row(path: str) -> tuple[str, ...]:
    return (f"{path}.0", f"{path}.1")


HOSTS = {
    "gpt2": Host(gpt2, ids, _row("transformer.h"), causal=True),
    "llama": Host(llama, ids, _row("model.layers"), causal=True),
    "mistral": Host(mistral, ids, _row("model.layers"), causal=True),
    "bert": Host(bert, ids, _row("encoder.layer"), causal=False),
    "vit": Host(_vit, _images, _row("layers"), causal=False),
    "timm": Host(TimmViT, _images, _row("blocks"), causal=False, bidirectional_is_known=False),
    "encoder": Host(
        encoder, embeddings, _row("layers"), causal=False, bidirectional_is_known=False
    ),
    "custom": Host(Custom, ids, _row("steps"), causal=True),
}

SAMPLE = ("llama", "bert", "vit", "encoder", "custom")
"""A decoder and an encoder of text, one of images, one of torch, one written by hand."""


def for_hosts(hosts: dict[str, Host], sample: tuple[str, ...] = SAMPLE) -> pytest.MarkDecorator:
    """Run a test on a sample of hosts, and on all of them where everything is run."""
    return pytest.mark.parametrize(
        "host",
        [
            pytest.param(host, id=name, marks=() if name in sample else pytest.mark.exhaustive)
            for name, host in hosts.items()
        ],
    )
