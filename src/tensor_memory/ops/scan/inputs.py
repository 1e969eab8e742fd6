"""The tensors of `memory_scan`: their names, their order and their checks.

Letters: B batch, S steps, n axes, C channels, Q reads and M writes per step.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tensor_memory.config import MAX_AXES
from tensor_memory.ops.inputs import check_tensors, common_dtype, prepared, require_tensors

LETTERS = {
    "read_at": "(B, S, Q, n)",
    "write_at": "(B, S, M, n)",
    "spread": "(B, S, M)",
    "content": "(B, S, M, C)",
    "taps": "(n, 2C, 3)",
    "mix": "(4C, 2C)",
    "bias": "(4C)",
    "hidden": "(B, C, *grid)",
    "cell": "(B, C, *grid)",
    "writes": "(B, S)",
    "resets": "(B, S)",
}

OPTIONAL = ("read_at", "spread", "taps", "writes", "resets")


class Steering(NamedTuple):
    """What a memory's heads tell the scan: its first four inputs."""

    read_at: Tensor
    write_at: Tensor
    spread: Tensor | None
    content: Tensor


class ScanInputs(NamedTuple):
    """The tensors of `memory_scan` in its order; also their gradients, None for the masks."""

    read_at: Tensor | None
    write_at: Tensor
    spread: Tensor | None
    content: Tensor
    taps: Tensor | None
    mix: Tensor
    bias: Tensor
    hidden: Tensor
    cell: Tensor
    writes: Tensor | None = None
    resets: Tensor | None = None

    # Which of them are cut along S, which all rows share, and which are the state.
    STEPWISE = ("read_at", "write_at", "spread", "content", "writes", "resets")
    SHARED = ("taps", "mix", "bias")
    STATE = ("hidden", "cell")
    MASKS = ("writes", "resets")

    @property
    def length(self) -> int:
        """S, the number of steps."""
        return self.write_at.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        """The type to compute in: that of the widest input, at least float32."""
        return common_dtype(self)

    def prepared(self) -> ScanInputs:
        """All floats in one type, everything contiguous; no reads become reads of Q = 0 places."""
        B, S, _, n = self.write_at.shape
        read_at = self.write_at.new_empty(B, S, 0, n) if self.read_at is None else self.read_at
        dtype = self.dtype
        return ScanInputs(*(prepared(t, dtype) for t in self._replace(read_at=read_at)))

    def empty_reads(self) -> Tensor:
        """Uninitialised reads (B, S, Q, C)."""
        assert self.read_at is not None, "prepared() gives inputs without reads a read_at"
        return self.content.new_empty(*self.read_at.shape[:3], self.content.shape[-1])

    def rows(self, rows: slice) -> ScanInputs:
        """The same inputs for some of the rows."""
        return ScanInputs._make(
            t if t is None or name in self.SHARED else t[rows] for name, t in self._asdict().items()
        )

    def steps(self, start: int, stop: int) -> ScanInputs:
        """The same inputs for some of the steps."""
        cut = {name: getattr(self, name) for name in self.STEPWISE}
        return self._replace(
            **{n: None if t is None else t[:, start:stop].contiguous() for n, t in cut.items()}
        )

    def check(self) -> None:
        """Raise unless the shapes, types and devices fit together."""
        require_tensors("memory_scan", self._asdict(), LETTERS, OPTIONAL)
        hidden, write_at, read_at = self.hidden, self.write_at, self.read_at
        if not 3 <= hidden.ndim <= 2 + MAX_AXES:
            raise ValueError(
                "memory_scan: expected hidden of shape (B, C, *grid) with "
                f"1 to {MAX_AXES} grid axes, got {tuple(hidden.shape)}; put the channels before "
                "the grid"
            )
        if write_at.ndim != 4:
            raise ValueError(
                "memory_scan: expected write_at of shape (B, S, M, n), got "
                f"{tuple(write_at.shape)}; one write per step is M = 1"
            )
        B, C, *grid = hidden.shape
        if min(grid) < 2:
            raise ValueError(
                f"memory_scan: expected at least 2 voxels along every axis, got {tuple(grid)}; "
                "drop an axis of one voxel"
            )
        S, M = write_at.shape[1:3]
        Q = read_at.shape[2] if read_at is not None and read_at.ndim == 4 else 1
        n = len(grid)
        sizes = (
            (B, S, Q, n), (B, S, M, n), (B, S, M), (B, S, M, C), (n, 2 * C, 3), (4 * C, 2 * C),
            (4 * C,), hidden.shape, hidden.shape, (B, S), (B, S),
        )  # fmt: skip
        pairs = zip(LETTERS.items(), sizes, strict=True)
        shapes = {name: (letters, size) for (name, letters), size in pairs}
        beside = ("hidden", "write_at")
        check_tensors("memory_scan", self._asdict(), shapes, masks=self.MASKS, beside=beside)
