"""Learned tokens beside the text: registers, and slots that are carried from segment to segment.

Registers stand before the sequence. Recurrent slots (as in the Recurrent Memory Transformer) stand
before a segment to be read and after it to be written; what the last layer leaves in the written
ones is read by the next segment.

Letters: B batch, N tokens, m slots, d width.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


class Registers(nn.Module):
    """m learned tokens put before the sequence and taken off at the end."""

    def __init__(self, slots: int, dim: int) -> None:
        super().__init__()
        self.count = slots
        self.slots = nn.Parameter(torch.empty(slots, dim))

    def forward(self, x: Tensor, layers: Callable[[Tensor], Tensor]) -> Tensor:
        """x (B, N, d) -> what the layers make of it beside the registers, (B, N, d)."""
        slots = self.slots.to(x.dtype).expand(x.shape[0], -1, -1)
        return layers(torch.cat([slots, x], dim=1))[:, self.count :]


class RecurrentSlots(nn.Module):
    """m tokens that one segment writes and the next one reads.

    Args:
        slots: m.
        dim: d.
        segment: tokens between two writes; None takes all of a call.
    """

    def __init__(self, slots: int, dim: int, segment: int | None = None) -> None:
        super().__init__()
        if segment is not None and segment < 1:
            raise ValueError(f"segment: expected 1 or more tokens between writes, got {segment}")
        self.count, self.segment = slots, segment
        self.empty = nn.Parameter(torch.empty(slots, dim))
        self.write = nn.Parameter(torch.empty(slots, dim))
        self.norm = nn.LayerNorm(dim)  # else what is carried would grow with every segment

    def forward(
        self, x: Tensor, layers: Callable[[Tensor], Tensor], slots: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """x (B, N, d), slots (B, m, d) -> what the layers make of x, and the slots it leaves."""
        m, made = self.count, []
        held = self.start(x) if slots is None else slots
        parts = x.split(self.segment or x.shape[1], dim=1)
        # A row and segment of its own for each, so that their gradients are summed once.
        writes = self.write.to(x.dtype).expand(len(parts), *held.shape).unbind()
        for part, write in zip(parts, writes, strict=True):
            after = layers(torch.cat([held, part, held + write], dim=1))
            _, tokens, written = after.split([m, part.shape[1], m], dim=1)
            made.append(tokens)
            held = self.norm(written).to(x.dtype)
        return torch.cat(made, dim=1) if len(made) > 1 else made[0], held

    def start(self, x: Tensor) -> Tensor:
        """(B, m, d) what a row reads before anything was written."""
        return self.empty.to(x.dtype).expand(x.shape[0], -1, -1)
