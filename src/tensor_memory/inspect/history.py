"""What the histories of both memories have in common."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from torch import Tensor


class History:
    """A dataclass of tensors, some of which may be None."""

    def arrays(self) -> dict[str, Tensor]:
        """Every array by name."""
        own: Any = self
        values = {field.name: getattr(self, field.name) for field in fields(own)}
        return {name: value for name, value in values.items() if value is not None}

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(array.nbytes for array in self.arrays().values())
