"""Places outside [-1, 1] are moved to the border."""

from __future__ import annotations

import torch
from torch import Tensor


def moved_to_border(place: Tensor) -> Tensor:
    """Coordinates within [-1, 1]; one on the border keeps its slope, NaN stays.

    PyTorch's clamp has a slope of 1 on its bounds before 2.15 and of 0 since.
    """
    return torch.where(place.abs() > 1, place.clamp(-1, 1), place)
