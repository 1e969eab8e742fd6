"""Side paths: what stands beside attention in a layer, behind a norm and a gate of its own.

To compare another mechanism with the memory, write a `SideMemory` and name it in `stack.SIDES`. The
state of a `SideMemory` is tensors by name, first dimension the row. The library's memories have
state classes of their own; `TensorResidual` and `PlaceResidual` turn these into tensors by name for
what is carried from call to call, and back.

Letters: B batch, N tokens, d width.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tensor_memory import (
    MemoryConfig,
    MemoryResidual,
    MemoryState,
    PlaceMemory,
    PlaceState,
    TensorMemory,
)

State = dict[str, Tensor]
"""What a mechanism carries, by name."""

FLOAT_BYTES = 4
"""Of each number that is carried, in float32."""

TAPS = 4
"""Tokens that a short convolution sees, itself included."""


class SideMemory(nn.Module):
    """A mechanism that takes the memory's place in a side path."""

    dim: int

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """x (B, N, d) -> m (B, N, d), state; None starts from an empty one."""
        raise NotImplementedError

    def zeros(self, rows: int, like: Tensor) -> State:
        """An empty state."""
        raise NotImplementedError

    def state_bytes(self) -> int:
        """Bytes that one row carries."""
        raise NotImplementedError


class SideResidual(nn.Module):
    """x + σ(γ)·D(memory(LayerNorm(x))), as `MemoryResidual` does it; one per layer."""

    def __init__(
        self, memory: SideMemory, *, gate_init: float, dropout: float, own_memory: bool
    ) -> None:
        super().__init__()
        if own_memory:
            self.memory = memory
        else:  # shared, and registered where it is shared
            self.__dict__["memory"] = memory
        self.norm = nn.LayerNorm(memory.dim)
        self.gate = nn.Parameter(torch.tensor([float(gate_init)]))
        self.dropout = dropout

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """x (B, N, d) -> x (B, N, d), state."""
        m, after = self.memory(self.norm(x), state)
        m = F.dropout(m, self.dropout, self.training)
        return x + (self.gate.sigmoid() * m).to(x.dtype), after

    def zeros(self, rows: int, like: Tensor) -> State:
        """An empty state."""
        return self.memory.zeros(rows, like)

    def to_tensors(self, state: State, tokens: int, before: State) -> State:
        """The state as what is carried."""
        return state

    def from_tensors(self, carried: State, x: Tensor) -> State:
        """What is carried as the state of a call on x."""
        return carried


class TensorResidual(MemoryResidual):
    """The paper's memory as a side path."""

    def zeros(self, rows: int, like: Tensor) -> MemoryState:
        """An empty state."""
        return self.memory.empty_state(like.new_empty(rows, 0, self.memory.dim))

    def to_tensors(self, state: MemoryState, tokens: int, before: State) -> State:
        """The state after `tokens` more than what `before` held.

        An unfinished chunk is carried only where there can be one: a call without it may take the
        path on which all rows stand at the start of a chunk.
        """
        names = ["hidden", "cell"]
        if tokens % self.memory.config.chunk_size or "fill" in before:
            names += ["tokens", "fill", "readout"]
        return {name: getattr(state, name) for name in names}

    def from_tensors(self, carried: State, x: Tensor) -> MemoryState:
        """The state to start a call on x from."""
        parts: dict[str, Any] = dict(carried)
        if "fill" in parts:
            return MemoryState(**parts)
        return replace(self.zeros(x.shape[0], x), **parts)


class PlaceResidual(MemoryResidual):
    """The place memory as a side path."""

    def zeros(self, rows: int, like: Tensor) -> PlaceState:
        """An empty state."""
        return self.memory.empty_state(like.new_empty(rows, 0, self.memory.dim))

    def to_tensors(self, state: PlaceState, tokens: int, before: State) -> State:
        """The state as what is carried."""
        return {"values": state.values, "origin": state.origin}

    def from_tensors(self, carried: State, x: Tensor) -> PlaceState:
        """What is carried as the state of a call on x."""
        return PlaceState(**carried, wrap=self.memory.config.wrap)


class ShortConvolution(SideMemory):
    """A weighted sum of a token and the three before it, feature by feature, then a projection.

    It holds next to nothing, so it tells what of a memory's gain is the nearest tokens at hand.

    >>> convolution = ShortConvolution(8)
    >>> m, state = convolution(torch.randn(2, 5, 8))
    >>> m.shape, state["tokens"].shape
    (torch.Size([2, 5, 8]), torch.Size([2, 3, 8]))
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.taps = nn.Parameter(torch.randn(TAPS, dim) / TAPS**0.5)  # the last is the token's own
        self.output = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """x (B, N, d) -> m (B, N, d), state."""
        B, N, _ = x.shape
        before = self.zeros(B, x)["tokens"] if state is None else state["tokens"]
        tokens = torch.cat([before.to(x.dtype), x], dim=1)
        mixed = sum(tap * tokens[:, k : k + N] for k, tap in enumerate(self.taps))
        return self.output(mixed), {"tokens": tokens[:, N:]}

    def zeros(self, rows: int, like: Tensor) -> State:
        """No tokens before."""
        return {"tokens": like.new_zeros(rows, TAPS - 1, self.dim)}

    def state_bytes(self) -> int:
        """Bytes of the three tokens before."""
        return FLOAT_BYTES * (TAPS - 1) * self.dim


def side_residual(memory: TensorMemory | PlaceMemory | SideMemory, **options: Any) -> nn.Module:
    """The gated residual around a memory; the options are those of `SideResidual`."""
    kinds: dict[type, Any] = {TensorMemory: TensorResidual, PlaceMemory: PlaceResidual}
    return kinds.get(type(memory), SideResidual)(memory, **options)


def carried_bytes(memory: Any) -> int:
    """Bytes of what one row carries: of a tensor memory hidden and cell, of the others all."""
    if isinstance(memory, TensorMemory):
        return memory_bytes(memory.config, 1)
    if isinstance(memory, PlaceMemory):
        return memory.empty_state(torch.empty(1, 0, memory.dim, device="meta")).nbytes
    return memory.state_bytes()


def memory_bytes(memory: MemoryConfig, layers: int) -> int:
    """Bytes of hidden and cell of one row over the layers that hold a memory.

    >>> memory_bytes(MemoryConfig(), 8)  # the paper's language model: 1 MiB
    1048576
    """
    return FLOAT_BYTES * layers * memory.state_values


def side_parameters(dim: int, memory: MemoryConfig, layers: int) -> int:
    """Weights that a shared memory, its norms and its gates add.

    >>> side_parameters(384, MemoryConfig(), 8)
    2400457
    """
    with torch.device("meta"):
        shared = TensorMemory(dim, memory)
    return sum(p.numel() for p in shared.parameters()) + layers * (2 * dim + 1)
