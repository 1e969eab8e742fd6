"""The compared models at their published sizes, with and without memory, and a batch for each.

These are the models of the recipes: fused attention, one product for q, k and v, a loss that never
holds the logits of the whole batch in float32. A slow host would flatter the memory.

Letters: B batch, N tokens, T frames.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tensor_memory import MemoryConfig, PlaceConfig, PlaceMemory, TensorMemory, attach
from tensor_memory_lab.bench.place_shapes import PlaceShape
from tensor_memory_lab.bench.shapes import ScanShape, Shape
from tensor_memory_lab.models import Model
from tensor_memory_lab.models.language import LanguageModel, LanguageModelConfig
from tensor_memory_lab.models.video import VideoModel, VideoModelConfig
from tensor_memory_lab.tasks import Batch

Memory = MemoryConfig | PlaceConfig


@dataclass(frozen=True)
class Host:
    """A model with its published memory."""

    dim: int
    layers: int
    memory: Memory
    build: Callable[[Memory | None, Sequence[int]], Any]
    """The model with this memory on these layers, or without one."""


@dataclass(frozen=True)
class TrainedHost(Host):
    """Also what goes through it in a step."""

    batch: int
    draw: Callable[[torch.device], Batch]
    loss: Callable[[Model, Batch], Tensor]
    tokens: tuple[int, int]
    """Pieces whose ends are written, and tokens in each: one sequence, or 8 frames."""

    def steps(self, chunk_size: int) -> int:
        """S, the scan's length per layer."""
        pieces, tokens = self.tokens
        return pieces * -(-tokens // chunk_size)

    def scan_shape(self, products: torch.dtype) -> Shape:
        """The scan of one of its layers in a step."""
        memory = self.memory
        if isinstance(memory, PlaceConfig):
            return PlaceShape(self.batch, self.steps(1), memory, products)
        reads = memory.chunk_size if memory.reads == "token" else 1
        steps = self.steps(memory.chunk_size)
        return ScanShape(self.batch, steps, memory.channels, memory.grid, products, reads=reads)


def language_host(*, quick: bool = False, batch: int = 32, memory: str = "tensor") -> TrainedHost:
    """d 384, 8 heads, 8 layers, 30,000 words, B × 512 tokens.

    Its memory: the published one, C 32, 8³, K 16; or "place", 4 heads of 8 × 8 × 32.
    """
    config, words, length = LanguageModelConfig(), 30_000, 512
    if quick:
        small = MemoryConfig(channels=16, grid=(3, 3, 3), chunk_size=8)
        place = PlaceConfig(channels=4, grid=(3, 3), heads=2)
        config = replace(config, dim=16, heads=2, layers=2, memory=small, place=place)
        words, batch, length = 50, 2, 24

    def build(memory: Memory | None, layers: Sequence[int]) -> Model:
        chosen = config
        if memory is not None:
            chosen = replace(config, memory_layers=tuple(layers))
        if isinstance(memory, MemoryConfig):
            chosen = replace(chosen, method="tensor", memory=memory)
        elif isinstance(memory, PlaceConfig):
            chosen = replace(chosen, method="place", place=memory)
        return LanguageModel(chosen, words, length)

    def draw(device: torch.device) -> Batch:
        ids = torch.randint(words, (batch, length + 1)).to(device)
        return {"ids": ids[:, :-1].contiguous(), "targets": ids[:, 1:].contiguous()}

    return TrainedHost(
        dim=config.dim,
        layers=config.layers,
        batch=batch,
        memory=config.place if memory == "place" else config.memory,
        build=build,
        draw=draw,
        loss=lambda model, given: model(given)[0]["nll"].mean(),
        tokens=(1, length),
    )


def video_host(*, quick: bool = False, batch: int = 32) -> TrainedHost:
    """d 256, 8 heads, 6 layers, B clips of 8 frames of 1 + 196 tokens; C 64, 8³, K 8."""
    config, side, patch, frames, classes = VideoModelConfig(), 14, 16, 8, 101
    if quick:
        memory = MemoryConfig(channels=16, grid=(3, 3, 3), chunk_size=4)
        config = replace(config, dim=16, heads=2, layers=2, memory=memory)
        side, patch, frames, batch = 3, 2, 2, 2

    def build(memory: Memory | None, layers: Sequence[int]) -> Model:
        chosen = config
        if memory is not None:
            assert isinstance(memory, MemoryConfig)
            chosen = replace(config, method="spatial", memory=memory, memory_layers=tuple(layers))
        return VideoModel(chosen, (side, side), patch, frames, classes)

    def draw(device: torch.device) -> Batch:
        pixels = side * patch
        clip = torch.randint(256, (batch, frames, pixels, pixels, 3), dtype=torch.uint8)
        return {"clip": clip.to(device), "targets": torch.randint(classes, (batch,)).to(device)}

    def loss(model: Model, given: Batch) -> Tensor:
        logits = model({"clip": given["clip"]})[0]["logits"].float()
        return F.cross_entropy(logits, given["targets"], label_smoothing=0.1)

    return TrainedHost(
        dim=config.dim,
        layers=config.layers,
        batch=batch,
        memory=config.memory,
        build=build,
        draw=draw,
        loss=loss,
        tokens=(frames, 1 + side * side),
    )


def attached_host(*, quick: bool = False, memory: str = "tensor") -> Host:
    """A small Llama of transformers, d 64, 4 heads, 3 layers, with the memory attached.

    What a user's own small model pays for `attach`, its hooks and its cache included.
    """
    # Of the extra `hf`, which only this host needs; from `transformers` itself, pyright would read
    # every model of it.
    from transformers.models.llama import LlamaConfig, LlamaForCausalLM

    layers = 1 if quick else 3
    settings = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=layers,
        num_attention_heads=4,
        max_position_embeddings=4096,
    )

    def build(memory: Memory | None, layers: Sequence[int]) -> Any:
        model = LlamaForCausalLM(settings)
        if memory is not None:
            attach(model, memory)
        return model

    chosen = PlaceConfig() if memory == "place" else MemoryConfig.paper()
    return Host(64, layers, chosen, build)


HOSTS = {"language": language_host, "video": video_host}

MEMORIES: dict[str, tuple[Any, Any]] = {
    "tensor": (MemoryConfig, TensorMemory),
    "place": (PlaceConfig, PlaceMemory),
}
"""Config and module of each memory."""
CHOICES = ("channels", "grid", "chunk_size", "reads", "heads", "rule", "kernel")
"""Options that are fields of a config."""


def add_memory_options(parser: argparse.ArgumentParser) -> None:
    """Which memory is measured, and how it is changed."""
    add = parser.add_argument
    add("--memory", choices=MEMORIES, default="tensor", help="the paper's, or ours")
    reads = "of the tensor memory: what each read is for (default: chunk)"
    add("--reads", choices=("chunk", "token"), help=reads)
    add("--rule", choices=("linear", "delta"), help="of the place memory (default: linear)")


def memory_changes(parser: argparse.ArgumentParser, options: argparse.Namespace) -> dict[str, Any]:
    """Fields of the memory's config that were named; one of the other memory is refused."""
    asked = {name: getattr(options, name, None) for name in CHOICES}
    changes = {name: value for name, value in asked.items() if value is not None}
    known = {field.name for field in fields(MEMORIES[options.memory][0])}
    for name in changes:
        if name not in known:
            option = name.replace("_", "-")
            parser.error(f"--{option}: not an option of --memory {options.memory}")
    return changes | {"backend": options.backend}
