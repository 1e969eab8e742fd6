"""Arrays that grow with what is recorded, and are thinned out where a bound is met.

Letters: T chunks kept, B rows, P chunks put at once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tensor_memory.config import MemoryConfig
from tensor_memory.inspect.layer_recording import LayerRecording, float_shapes


class LayerStore:
    """What one memory layer has shown so far; becomes a `LayerRecording`."""

    def __init__(self, name: str, config: MemoryConfig, dtype: torch.dtype) -> None:
        self.name, self.config = name, config
        self.gate: float | None = None
        self.chunks = 0
        self._arrays = {
            name: torch.empty(0, 0, *shape, dtype=dtype)
            for name, shape in float_shapes(config).items()
        }
        self._arrays["span"] = torch.empty(0, 0, 2, dtype=torch.long)
        self._arrays["written"] = torch.empty(0, 0, dtype=torch.bool)
        self._arrays["present"] = torch.empty(0, 0, dtype=torch.bool)

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

    def finish(self, every: int, seen: Tensor) -> LayerRecording:
        """The layer as recorded: `seen` (B,) chunks of every row."""
        T, B = self.chunks, seen.shape[0]
        self._reserve(T, B)
        arrays = {name: array[:T, :B].clone() for name, array in self._arrays.items()}
        chunk = torch.arange(T) * every
        arrays = {"spread": None, **arrays, "chunk": chunk, "seen": seen}
        return LayerRecording(self.name, self.config, self.gate, **arrays)

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
