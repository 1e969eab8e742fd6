"""Side paths that are compared with the memory: how one is added, and the shortest of them.

Letters: B batch, N tokens, d width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

State = dict[str, Tensor]
"""What a side path carries, by name."""

TAPS = 4
"""Tokens that a short convolution sees, itself included."""


class SideMemory(nn.Module):
    """What stands in a side path in the memory's place: `(x, state) -> (m, state)`."""

    dim: int

    def zeros(self, rows: int, like: Tensor) -> State:
        """An empty state."""
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
