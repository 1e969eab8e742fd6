"""What the image and the video model share: config, blocks with the memory, positions.

Letters: B batch, N tokens, d width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tensor_memory import MemoryResidual, PlaceMemory, TensorMemory
from tensor_memory_lab.models import Model
from tensor_memory_lab.models.block import Block
from tensor_memory_lab.models.config import TransformerConfig
from tensor_memory_lab.models.side import FLOAT_BYTES, carried_bytes


@dataclass(frozen=True)
class VisionConfig(TransformerConfig):
    """A Transformer over patches; its methods `registers`, `spatial` and `wide` are the same."""

    drop_path: float = 0.1
    """Stochastic depth: how often what a layer adds to a row is dropped in training."""
    registers: int = 8
    """Tokens of the method `registers`."""
    scope: Literal["layer", "depth"] = "layer"
    """layer: every memory layer has a state of its own. depth: one state goes through the layers,
    as published; a bidirectional encoder may, a causal one would see the future."""
    gate_init: float = -2.0


C = TypeVar("C", bound=VisionConfig)


class VisionModel(Model, Generic[C]):
    """A model whose blocks may hold registers or a memory between attention and MLP."""

    blocks: nn.ModuleList

    def __init__(self, config: C) -> None:
        super().__init__()
        self.config = config

    def make_blocks(self, attention: Callable[[], nn.Module]) -> nn.ModuleList:
        """The blocks, without the memory."""
        c = self.config
        return nn.ModuleList(
            Block(
                c.dim,
                attention=attention(),
                mlp_ratio=c.wide_ratio if c.method == "wide" else c.mlp_ratio,
                dropout=c.dropout,
                drop_path=c.drop_path,
                side_place="after_attention",
            )
            for _ in range(c.layers)
        )

    def add_mechanism(self, *, drop_path: float) -> None:
        """Registers, or one shared memory with a norm and a gate per layer.

        Last of all modules, so that the others draw the same random numbers for every method.
        """
        c = self.config
        if c.method == "registers":
            self.registers = nn.Parameter(torch.empty(c.registers, c.dim))
        memory = self.make_memory()
        if memory is not None:
            self.memory = memory
            for layer in c.with_memory:
                self.blocks[layer].side = MemoryResidual(
                    self.memory,
                    gate_init=c.gate_init,
                    dropout=c.dropout,
                    drop_path=drop_path,
                    own_memory=False,
                )

    def make_memory(self) -> TensorMemory | PlaceMemory | None:
        """The memory that all layers share, where the method has one."""
        c = self.config
        return TensorMemory(c.dim, c.memory) if c.method == "spatial" else None

    def state_bytes(self) -> int:
        """Bytes of the memory, or of the registers, of one row."""
        c = self.config
        if c.method == "registers":
            return FLOAT_BYTES * c.registers * c.dim
        memories = [layer.memory for layer in self.modules() if isinstance(layer, MemoryResidual)]
        return sum(map(carried_bytes, memories[:1] if c.scope == "depth" else memories))


def waves(rows: int, columns: int, dim: int) -> Tensor:
    """Sines and cosines of row and column, (rows · columns, d): what positions start from.

    How alike two places are then depends on how far apart they are, and is plain to attention from
    the first step. Of 64-pixel birds a small model that starts from N(0, 0.02²) throughout still
    answered the mean colour after 700 steps; from these, and `initialise(narrow=True)`, it was past
    that within 200.

    >>> table = waves(3, 4, 16)
    >>> torch.allclose(table[0] @ table[5], table[6] @ table[11])  # one down, one right
    True
    """
    row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    frequency = 10_000.0 ** -(torch.arange(dim // 4) / (dim // 4))
    angles = [place.reshape(-1, 1) * frequency for place in (row, column)]
    table = torch.cat([wave for angle in angles for wave in (angle.sin(), angle.cos())], dim=1)
    return F.pad(table, (0, dim % 4))


def summary_first(summary: Tensor, tokens: Tensor) -> Tensor:
    """Put one learned token (1, d) before each row of tokens (..., N, d)."""
    first = summary.to(tokens.dtype).expand(*tokens.shape[:-2], 1, -1)
    return torch.cat([first, tokens], dim=-2)
