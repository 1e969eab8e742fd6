"""One scan's inputs: their names, their order, and the checks that the rest relies on.

Letters: B batch, S steps, n axes, C channels, Q reads and M writes per step.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tensor_memory.config import MAX_AXES

Floats = tuple[
    Tensor | None, Tensor, Tensor | None, Tensor, Tensor | None, Tensor, Tensor, Tensor, Tensor
]
STEPWISE = ("read_at", "write_at", "spread", "content", "writes", "resets")  # (B, S, ...)
SHARED = ("taps", "mix", "bias")  # by all rows
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


class Request(NamedTuple):
    """The tensors of `tensor_memory.memory_scan`, in its order."""

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

    @property
    def floats(self) -> Floats:
        """All that have a gradient: everything but the masks."""
        return self[:9]

    @property
    def dtype(self) -> torch.dtype:
        """The type to compute in: that of the widest input, at least float32."""
        types = {value.dtype for value in self.floats if value is not None}
        return functools.reduce(torch.promote_types, types, torch.float32)

    def at_rest(self, dtype: torch.dtype) -> Request:
        """All floats in one type, everything contiguous, and no reads as reads of no place."""
        B, S, _, n = self.write_at.shape
        read_at = self.write_at.new_empty(B, S, 0, n) if self.read_at is None else self.read_at
        floats = (at_rest(value, dtype) for value in (read_at, *self[1:9]))
        masks = (at_rest(value, torch.bool) for value in self[9:])
        return Request(*floats, *masks)

    def empty_reads(self, dtype: torch.dtype | None = None) -> Tensor:
        """Room for what the request reads, in its own type or another: (B, S, Q, C)."""
        assert self.read_at is not None, "a request at rest"
        return self.content.new_empty(
            *self.read_at.shape[:3], self.content.shape[-1], dtype=dtype or self.content.dtype
        )

    def rows(self, rows: slice) -> Request:
        """The same request for some of the rows."""
        values = self._asdict().items()
        return Request._make(v if v is None or name in SHARED else v[rows] for name, v in values)

    def steps(self, start: int, stop: int) -> Request:
        """The same request for some of the steps."""
        changed: dict[str, Tensor | None] = {}
        for name in STEPWISE:
            value = getattr(self, name)
            changed[name] = value if value is None else value[:, start:stop].contiguous()
        return self._replace(**changed)

    def check(self) -> None:
        """Raise unless the shapes, types and devices fit together."""
        hidden, write_at = self.hidden, self.write_at
        if not 3 <= hidden.ndim <= 2 + MAX_AXES:
            raise ValueError(
                "memory_scan: expected hidden of shape (B, C, *grid) with "
                f"1 to {MAX_AXES} grid axes, got {tuple(hidden.shape)}"
            )
        if write_at.ndim != 4:
            raise ValueError(
                f"memory_scan: expected write_at of shape (B, S, M, n), got {tuple(write_at.shape)}"
            )
        B, C, *grid = hidden.shape
        S, M = write_at.shape[1:3]
        n = len(grid)
        if min(grid) < 2:
            raise ValueError(
                f"memory_scan: expected at least 2 voxels along every axis, got {tuple(grid)}"
            )
        Q = self.read_at.shape[2] if self.read_at is not None and self.read_at.ndim == 4 else 1
        expected = (
            (B, S, Q, n), (B, S, M, n), (B, S, M), (B, S, M, C), (n, 2 * C, 3), (4 * C, 2 * C),
            (4 * C,), hidden.shape, hidden.shape, (B, S), (B, S),
        )  # fmt: skip
        for name, tensor, shape in zip(self._fields, self, expected, strict=True):
            if tensor is None:
                continue
            if tensor.shape != shape:
                raise ValueError(
                    f"memory_scan: expected {name} of shape {LETTERS[name]} = {tuple(shape)} to go "
                    f"with hidden {tuple(hidden.shape)} and write_at {tuple(write_at.shape)}, "
                    f"got {tuple(tensor.shape)}"
                )
            if tensor.device != hidden.device:
                raise ValueError(
                    f"memory_scan: expected {name} on {hidden.device} like hidden, "
                    f"got {tensor.device}; move it with .to()"
                )
            if name in ("writes", "resets"):
                if tensor.dtype != torch.bool:
                    raise TypeError(
                        f"memory_scan: expected {name} of type bool, got {tensor.dtype}; "
                        "convert it with .bool()"
                    )
            elif not tensor.is_floating_point():
                raise TypeError(f"memory_scan: expected {name} of a float type, got {tensor.dtype}")


def at_rest(value: Tensor | None, dtype: torch.dtype) -> Any:
    """In this type and contiguous; asks first, which takes less than a call that does nothing."""
    if value is None:
        return None
    if value.dtype != dtype:
        value = value.to(dtype)
    return value if value.is_contiguous() else value.contiguous()
