"""What the recordings and the histories of both memories have in common."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    import numpy


class Arrays:
    """A dataclass of tensors, beside other values."""

    def arrays(self) -> dict[str, Tensor]:
        """Every array by name; none that this memory does not have."""
        own: Any = self
        values = {field.name: getattr(self, field.name) for field in fields(own)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}

    def __repr__(self) -> str:
        shapes = (f"{name} {tuple(array.shape)}" for name, array in self.arrays().items())
        return f"{type(self).__name__}({', '.join(shapes)})"

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(array.nbytes for array in self.arrays().values())


class History(Arrays):
    """The inputs of one layer's recurrence, row by row from index 0."""

    first: Tensor
    count: Tensor

    def check_arrays(
        self, shapes: Mapping[str, tuple[int, ...]], whole: Mapping[str, torch.dtype]
    ) -> None:
        """Raise unless there are arrays of these shapes, floats but for those in `whole`."""
        if self.arrays().keys() != shapes.keys():
            raise ValueError("history: it is one of another memory")
        for name, array in self.arrays().items():
            if tuple(array.shape) != shapes[name]:
                raise ValueError(f"history: {name} has shape {tuple(array.shape)}")
            if not (array.dtype == whole[name] if name in whole else array.is_floating_point()):
                raise ValueError(f"history: {name} holds {array.dtype}")

    def check_indices(self, limits: Iterable[tuple[Tensor, int]], unit: str) -> None:
        """Raise unless every index is at least 0 and below its limit."""
        if any(bool(((index < 0) | (index >= most)).any()) for index, most in limits):
            raise ValueError(f"history: it names rows or {unit} that it does not have")

    def asked_for(self, reads: Sequence[int] | Tensor, row: int, units: str, kind: str) -> Tensor:
        """(R,) int64: the reads of a row to be traced, each of them in its history."""
        at = torch.as_tensor(reads)
        if at.ndim != 1 or at.is_floating_point() or at.dtype == torch.bool or not at.numel():
            raise TypeError(f"trace: expected reads as a list of {kind}, got {reads!r:.80}")
        first, count = int(self.first[row]), int(self.count[row])
        if at.min() < first or at.max() >= first + count:
            told = f"{first} to {first + count - 1}" if count else "none"
            raise ValueError(
                f"trace: expected {units} that the history of row {row} has, {told}, got "
                f"{at.tolist()}; record with a larger max_tokens to keep more"
            )
        return at.long()


class LayerArrays(Arrays):
    """What was recorded of one layer: the first dimensions of its arrays are time and B rows."""

    present: Tensor
    seen: Tensor
    history: Any = None

    @property
    def rows(self) -> int:
        """B, rows."""
        return self.seen.shape[0]

    @property
    def dropped(self) -> int:
        """Chunks or tokens of all rows that were seen and not kept."""
        return int(self.seen.sum()) - int(self.present.sum())

    @property
    def nbytes(self) -> int:
        """Bytes held, those of the history too."""
        return super().nbytes + (0 if self.history is None else self.history.nbytes)

    def to_numpy(self) -> dict[str, numpy.ndarray]:
        """Every array by name, for a notebook."""
        return {name: array.numpy() for name, array in self.arrays().items()}

    def traced_history(self) -> Any:
        """The history, without which nothing can be traced."""
        if self.history is None:
            raise ValueError(
                "trace: expected a recording with the inputs of the recurrence, got one without; "
                "record with max_tokens above 0"
            )
        return self.history
