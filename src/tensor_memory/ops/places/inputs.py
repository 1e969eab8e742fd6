"""One place scan's inputs by name, with the checks that the implementations rely on."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tensor_memory.config import MAX_AXES, Rule
from tensor_memory.ops.inputs import check_tensors, common_dtype, prepared, require_tensors

LETTERS = {
    "write_at": "(B, N, H, n)",
    "read_at": "(B, N, H, n)",
    "content": "(B, N, H, C)",
    "rate": "(B, N, H)",
    "log_keep": "(B, N, H)",
    "width": "(H)",
    "state": "(B, H, *grid, C)",
    "resets": "(B, N)",
}


class PlaceInputs(NamedTuple):
    """The arguments of `place_scan`, in its order; also their gradients."""

    write_at: Tensor
    read_at: Tensor | None
    content: Tensor
    rate: Tensor
    log_keep: Tensor
    width: Tensor | None
    state: Tensor
    resets: Tensor | None
    rule: Rule
    wrap: tuple[bool, ...]

    STATE = ("state",)
    CHOICES = ("rule", "wrap")

    @property
    def asked_at(self) -> Tensor:
        """Where the tokens read: where they write, unless they say otherwise."""
        return self.write_at if self.read_at is None else self.read_at

    @property
    def grid(self) -> tuple[int, ...]:
        """Voxels along each axis."""
        return tuple(self.state.shape[2:-1])

    @property
    def dtype(self) -> torch.dtype:
        """The type to compute in: that of the widest input, at least float32."""
        return common_dtype(self[:7])

    def prepared(self) -> PlaceInputs:
        """All floats in the type to compute in, everything contiguous."""
        dtype = self.dtype
        return PlaceInputs._make((*(prepared(t, dtype) for t in self[:8]), *self[8:]))

    def empty_reads(self) -> Tensor:
        """Uninitialised reads (B, N, H, C)."""
        return self.rate.new_empty(self.content.shape)

    def tokens(self, start: int, stop: int) -> PlaceInputs:
        """A stretch of the tokens alone, with the state before all of them."""
        cut = slice(start, stop)
        return self._replace(
            write_at=self.write_at[:, cut],
            read_at=None if self.read_at is None else self.read_at[:, cut],
            content=self.content[:, cut],
            rate=self.rate[:, cut],
            log_keep=self.log_keep[:, cut],
            resets=None if self.resets is None else self.resets[:, cut],
        )

    def check(self) -> None:
        """Raise unless the shapes, types and devices fit together."""
        tensors = {name: getattr(self, name) for name in LETTERS}
        require_tensors("place_scan", tensors, LETTERS, ("read_at", "width", "resets"))
        if not 4 <= self.state.ndim <= 3 + MAX_AXES:
            raise ValueError(
                f"place_scan: expected state of shape (B, H, *grid, C) with 1 to {MAX_AXES} grid "
                f"axes, got {tuple(self.state.shape)}; put the channels last"
            )
        if min(self.grid) < 2:
            raise ValueError(
                f"place_scan: expected at least 2 voxels along every axis, got {self.grid}; "
                "drop an axis of one voxel"
            )
        if not isinstance(self.rule, str) or self.rule not in ("linear", "delta"):
            raise ValueError(
                f"place_scan: expected rule 'linear' or 'delta', got {self.rule!r:.80}; leave it "
                "out for 'linear'"
            )
        n = len(self.grid)
        if len(self.wrap) != n or not all(isinstance(wraps, bool) for wraps in self.wrap):
            raise ValueError(
                f"place_scan: expected wrap with True or False per axis ({n}), got "
                f"{self.wrap!r:.80}; leave it out where no axis is a circle"
            )
        B, H = self.state.shape[:2]
        C, N = self.state.shape[-1], self.content.shape[1] if self.content.ndim == 4 else 0
        expected = (
            (B, N, H, n), (B, N, H, n), (B, N, H, C), (B, N, H), (B, N, H), (H,),
            self.state.shape, (B, N),
        )  # fmt: skip
        pairs = zip(LETTERS.items(), expected, strict=True)
        check_tensors(
            "place_scan",
            tensors,
            {name: (letters, shape) for (name, letters), shape in pairs},
            masks=("resets",),
            beside=("state", "content"),
        )
