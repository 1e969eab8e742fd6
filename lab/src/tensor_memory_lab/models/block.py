"""The one Transformer block of every compared model, and the one initialiser.

A method may exchange the attention or put a side path into a layer; everything else is the same
code. The residual stream stays in float32 under autocast.

Letters: B batch, N tokens, d width.
"""

from __future__ import annotations

import zlib
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tensor_memory import MemoryResidual, PlaceMemory, TensorMemory
from tensor_memory_lab.models.side import SideMemory

Place = Literal["after_mlp", "after_attention"]
"""Where a side path stands in its block: the paper's language and toy models, or its ViTs."""

LayerState = tuple[Any, Any]
"""What a block carries: its attention's cache and its side path's state, each None where empty."""


Paths = tuple[Tensor | None, Tensor | None, Tensor | None]
"""What is kept of a row's attention, MLP and side path, (B, 1, 1) each; None: the call decides."""


class Block(nn.Module):
    """Attention and MLP, each behind a LayerNorm and a residual, and a place for a side path.

    Args:
        dim: d.
        attention: `(x, cache) -> (x, cache)`, x (B, N, d), with its own projections.
        mlp_ratio: width of the MLP over d.
        dropout: on what attention and MLP add.
        drop_path: probability of dropping what a sublayer adds to a whole row.
        side_place: where the side path stands, which is `side`, none at first: a module
            `(x, state, **options) -> (x, state)` with its own norm and residual, such as a
            `MemoryResidual`.
        attention_out_norm: a LayerNorm on what attention adds (the paper's "SLN").

    >>> from tensor_memory_lab.models.attention import SelfAttention
    >>> block = Block(8, attention=SelfAttention(8, heads=2))
    >>> x, state = block(torch.randn(2, 5, 8))
    >>> x.shape, state
    (torch.Size([2, 5, 8]), (None, None))
    """

    def __init__(
        self,
        dim: int,
        *,
        attention: nn.Module,
        mlp_ratio: float = 4.0,
        dropout: float = 0.0,
        drop_path: float = 0.0,
        side_place: Place = "after_mlp",
        attention_out_norm: bool = False,
    ) -> None:
        super().__init__()
        self.dropout, self.drop_path, self.side_place = dropout, drop_path, side_place
        hidden = round(dim * mlp_ratio)
        self.attention_norm = nn.LayerNorm(dim)
        self.attention = attention
        self.attention_out_norm = nn.LayerNorm(dim) if attention_out_norm else None
        self.mlp_norm = nn.LayerNorm(dim)
        self.widen = nn.Linear(dim, hidden)
        self.narrow = nn.Linear(hidden, dim)
        self.side: nn.Module | None = None

    def forward(
        self,
        x: Tensor,
        state: LayerState = (None, None),
        paths: Paths = (None, None, None),
        **side_options: Any,
    ) -> tuple[Tensor, LayerState]:
        """x (B, N, d) -> x (B, N, d), state; options go to the side path."""
        cache, remembered = state
        x, cache = self.attend(x, cache, paths[0])
        if self.side_place == "after_attention":
            x, remembered = self.remember(x, remembered, paths[2], **side_options)
        x = self.transform(x, paths[1])
        if self.side_place == "after_mlp":
            x, remembered = self.remember(x, remembered, paths[2], **side_options)
        return x, (cache, remembered)

    def draw_paths(self, x: Tensor) -> Paths:
        """Which rows of x keep what is added to them, for several calls on parts of these rows.

        A side path with a `drop_path` of its own would drop again: give it none.
        """
        first, second, third = (kept_rows(x, self.drop_path, self) for _ in range(3))
        return first, second, None if self.side is None else third

    def attend(
        self, x: Tensor, cache: Any = None, path: Tensor | None = None
    ) -> tuple[Tensor, Any]:
        """x plus its attention."""
        mixed, cache = self.attention(self.attention_norm(x), cache)
        if self.attention_out_norm is not None:
            mixed = self.attention_out_norm(mixed)
        return x + self._drop(mixed, path), cache

    def transform(self, x: Tensor, path: Tensor | None = None) -> Tensor:
        """x plus its MLP."""
        return x + self._drop(self.narrow(F.gelu(self.widen(self.mlp_norm(x)))), path)

    def remember(
        self, x: Tensor, state: Any = None, path: Tensor | None = None, **options: Any
    ) -> tuple[Tensor, Any]:
        """x plus its side path, where there is one."""
        if self.side is None:
            return x, state
        after, state = self.side(x, state, **options)
        return after if path is None else x + (after - x) * path.to(x.dtype), state

    def _drop(self, added: Tensor, path: Tensor | None) -> Tensor:
        added = F.dropout(added, self.dropout, self.training)
        path = kept_rows(added, self.drop_path, self) if path is None else path
        return added if path is None else added * path.to(added.dtype)


def kept_rows(x: Tensor, rate: float, module: nn.Module) -> Tensor | None:
    """(B, 1, ...) drawn factors: zero where a row of x is dropped, which happens with probability
    `rate` in training, larger than one elsewhere. None where none is dropped."""
    if not rate or not module.training:
        return None
    kept = torch.rand(x.shape[0], *[1] * (x.ndim - 1), device=x.device) >= rate
    return kept / (1 - rate)


@torch.no_grad()
def initialise(model: nn.Module, std: float = 0.02, *, narrow: bool = False) -> None:
    """Weights from N(0, 0.02²), biases zero; norms, gates and memories keep what they have.

    `narrow` is for models of a width at which 0.02 starves the residual stream (PyTorch's own
    1 / √(3 · inputs) comes to 0.02 at width 833): linear layers then start from that, tables of
    tokens from 0.3. Otherwise what a memory adds at the start drowns its input, and windowed
    binding takes twice the steps.

    Memories are what a side path holds, linear attention as well as the tensor memory: all project
    a normalised input, and weights of 0.02 would start one of them much weaker than another.

    A weight is drawn by its name and the seed torch was given, so that under one seed models of all
    methods start from the same values wherever they share a name and a shape, whatever else was
    drawn while they were built. Memories are drawn while they are built, and the same where all of
    their shapes are.

    >>> a, b = (nn.ModuleDict({"x": nn.Linear(2, 2), "y": nn.Linear(2, n)}) for n in (3, 4))
    >>> for model in (a, b):
    ...     initialise(model)
    >>> torch.equal(a["x"].weight, b["x"].weight), bool(a["x"].bias.any())
    (True, False)
    """
    seed = torch.initial_seed() % 2**31  # a draw would depend on what building has drawn before
    keeps = (TensorMemory, PlaceMemory, SideMemory, MemoryResidual, nn.LayerNorm)
    kept = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, keeps)
        for parameter in module.parameters()
    }
    stds = {id(parameter): std for parameter in model.parameters()}
    if narrow:
        for module in model.modules():
            if isinstance(module, nn.Linear):
                stds[id(module.weight)] = (3 * module.in_features) ** -0.5
            elif isinstance(module, nn.Embedding):
                stds[id(module.weight)] = 0.3
    for name, parameter in model.named_parameters():
        last = name.rpartition(".")[2]
        if id(parameter) in kept or last == "gate":
            continue
        if last == "bias":
            parameter.zero_()
        else:
            draw = torch.Generator().manual_seed(seed ^ zlib.crc32(name.encode()))
            drawn = torch.empty(parameter.shape).normal_(std=stds[id(parameter)], generator=draw)
            parameter.copy_(drawn)
