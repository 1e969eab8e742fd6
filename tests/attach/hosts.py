"""A small random host of every kind a memory must attach to; `families.py` has one per family."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from tensor_memory import MemoryConfig

SMALL = MemoryConfig(channels=4, grid=(3, 3), chunk_size=3)
WIDTH, VOCABULARY, TOKENS = 16, 30, 11
SIZES: dict[str, Any] = dict(
    vocab_size=VOCABULARY,
    max_position_embeddings=128,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=None,
    hidden_size=WIDTH,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    intermediate_size=24,
    sliding_window=6,
    # GPT-2 and its kin
    n_embd=WIDTH,
    n_layer=2,
    n_head=2,
    n_positions=128,
    n_inner=24,
    # experts
    num_experts=4,
    num_local_experts=4,
    n_routed_experts=4,
    num_experts_per_tok=2,
    n_shared_experts=1,
    moe_intermediate_size=24,
    shared_expert_intermediate_size=24,
    shared_intermediate_size=24,
    first_k_dense_replace=1,
    n_group=1,
    topk_group=1,
    # attention of low rank
    q_lora_rank=8,
    kv_lora_rank=8,
    qk_nope_head_dim=8,
    qk_rope_head_dim=8,
    v_head_dim=8,
    # linear attention, Mamba
    linear_num_key_heads=2,
    linear_num_value_heads=2,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
    state_size=4,
    ssm_state_size=4,
    mamba_d_state=4,
    mamba_d_head=16,
    mamba_n_heads=2,
    mamba_n_groups=1,
    mamba_num_heads=2,
    mamba_head_dim=16,
    n_groups=1,
    chunk_size=4,
    mamba_chunk_size=4,
    # encoders and decoders
    d_model=WIDTH,
    encoder_layers=2,
    decoder_layers=2,
    encoder_attention_heads=2,
    decoder_attention_heads=2,
    encoder_ffn_dim=24,
    decoder_ffn_dim=24,
    decoder_start_token_id=0,
    # images
    image_size=8,
    patch_size=4,
)
"""Sizes by the names that configs have for them; each host takes those it knows."""


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


def ids(rows: int = 2, length: int = TOKENS) -> Tensor:
    return torch.randint(1, VOCABULARY, (rows, length))


def prompts() -> tuple[Tensor, Tensor]:
    """Two rows of 7 ids and their mask; the second row is padded on its left."""
    tokens = ids(2, 7)
    mask = torch.ones_like(tokens)
    mask[1, :3] = 0
    return tokens, mask


def read(output: Any) -> Tensor:
    """The tensor a host is judged by."""
    for name in ("logits", "last_hidden_state"):
        if hasattr(output, name):
            return getattr(output, name)
    return output[0] if isinstance(output, tuple) else output


def host_of(model: str, **config: Any) -> Any:
    """A new random host of a class of transformers, of the small sizes that its config knows."""
    with _without_kernels():
        kind: Any = getattr(transformers, model)
    known = {f.name for f in fields(kind.config_class)}
    sizes = {name: size for name, size in SIZES.items() if name in known}
    return kind(kind.config_class(**sizes | config))


def new_host(model: str, **config: Any) -> Any:
    """The same in float64, in evaluation mode."""
    return host_of(model, **config).double().eval()


@contextmanager
def _without_kernels() -> Iterator[None]:
    """Let transformers import a host without fla, whose kernels need a GPU and no float64."""
    found = sys.modules.get("fla")
    sys.modules["fla"] = None  # type: ignore[assignment]
    yield
    if found is None:
        del sys.modules["fla"]
    else:
        sys.modules["fla"] = found


def gpt2(**options: Any) -> nn.Module:
    return host_of("GPT2LMHeadModel", **dict(n_positions=4096) | options)


def llama(**options: Any) -> nn.Module:
    return host_of("LlamaForCausalLM", **dict(max_position_embeddings=4096) | options)


def mistral(window: int | None = 8, **options: Any) -> nn.Module:
    sizes = dict(sliding_window=window, max_position_embeddings=4096)
    return host_of("MistralForCausalLM", **sizes | options)


def bert(**options: Any) -> nn.Module:
    model = host_of("BertModel", **dict(pad_token_id=0) | options)
    model.pooler = None  # whose weights no test would train
    return model


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


class Repeats(torch.utils.data.Dataset):
    """Rows of ids to learn, for the Trainer of transformers."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = (torch.arange(6) + index) % VOCABULARY
        return {"input_ids": tokens, "labels": tokens}


def trainer(model: nn.Module, folder: Path) -> transformers.Trainer:
    """Four steps on these rows, with a checkpoint after two."""
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=4,
        save_steps=2,
        per_device_train_batch_size=4,
        report_to=[],
        use_cpu=True,
        learning_rate=1e-2,
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    return transformers.Trainer(model=model, args=arguments, train_dataset=Repeats())


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
    "vit": Host(lambda: host_of("ViTModel"), _images, _row("layers"), causal=False),
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
