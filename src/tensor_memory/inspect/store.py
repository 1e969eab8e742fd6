"""Arrays that grow with what is recorded, and are thinned out where a bound is met.

Letters: T chunks kept, B rows, P chunks put at once.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class LayerStore:
    """What one memory layer has shown so far."""

    def __init__(
        self,
        name: str,
        shapes: Mapping[str, tuple[int, ...]],
        dtype: torch.dtype,
        others: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    ) -> None:
        """Floats and other arrays by name, each with its shape after (T, B)."""
        self.name = name
        self.gate: float | None = None
        self.chunks = 0
        typed = {name: (shape, dtype) for name, shape in shapes.items()}
        self._arrays = {
            name: torch.empty(0, 0, *shape, dtype=kind)
            for name, (shape, kind) in {**typed, **others, "present": ((), torch.bool)}.items()
        }

    def put(self, at: Tensor, rows: Tensor, values: dict[str, Tensor]) -> None:
        """Keep P chunks: places `at` (P,) along T, `rows` (P,), values (P, ...)."""
        if not at.numel():
            return
        self._reserve(int(at.max()) + 1, int(rows.max()) + 1)
        self.chunks = max(self.chunks, int(at.max()) + 1)
        present = torch.ones_like(rows, dtype=torch.bool)
        for name, value in {**values, "present": present}.items():
            array, value = self._arrays[name], value.cpu()
            if torch.promote_types(value.dtype, array.dtype) != array.dtype:
                most = torch.finfo(array.dtype).max
                value = value.clamp(-most, most)  # what is too large for the kept type stays finite
            array[at, rows] = value.to(array.dtype)

    def thin(self) -> None:
        """Forget every second chunk."""
        self._arrays = {name: array[::2].clone() for name, array in self._arrays.items()}
        self.chunks = -(-self.chunks // 2)

    def arrays(self, rows: int) -> dict[str, Tensor]:
        """Everything put so far, for so many rows: (T, B, ...)."""
        self._reserve(self.chunks, rows)
        return {name: array[: self.chunks, :rows].clone() for name, array in self._arrays.items()}

    def _reserve(self, chunks: int, rows: int) -> None:
        have = self._arrays["present"].shape
        if chunks <= have[0] and rows <= have[1]:
            return
        # Twice what there was: a stream of single chunks is then copied a few times, not each time.
        T = max(chunks, 2 * have[0]) if chunks > have[0] else have[0]
        B = max(rows, 2 * have[1]) if rows > have[1] else have[1]
        for name, array in self._arrays.items():
            empty = float("nan") if array.is_floating_point() else 0
            grown = torch.full((T, B, *array.shape[2:]), empty, dtype=array.dtype)
            grown[: have[0], : have[1]] = array
            self._arrays[name] = grown
