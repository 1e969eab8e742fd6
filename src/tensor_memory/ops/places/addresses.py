"""From a place to voxel weights: the address φ(p), one factor per axis, each of unit length.

Letters: B batch, N tokens, H heads, n axes, G voxels along an axis, V voxels of the grid.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tensor_memory.ops.border import moved_to_border
from tensor_memory.ops.products import product


def factors(
    places: Tensor, grid: Sequence[int], width: Tensor | None, wrap: Sequence[bool]
) -> list[Tensor]:
    """places (B, N, H, n) -> one factor (B, N, H, G) per axis, in grid order.

    With a width (H), in voxels, a factor is a Gaussian; without one it interpolates between the
    two nearest voxels. Coordinate 0 addresses the last axis.
    """
    found = []
    for axis, (size, wraps) in enumerate(zip(grid, wrap, strict=True)):
        at = voxel_coordinate(places[..., len(grid) - 1 - axis], size, wraps)
        if width is None:
            weight = _interpolation(at, size, wraps)
        else:
            weight = _gaussian(axis_distance(at, size, wraps), width)
        found.append(weight / weight.norm(dim=-1, keepdim=True))
    return found


def voxel_coordinate(place: Tensor, size: int, wraps: bool) -> Tensor:
    """A place in [-1, 1] as a coordinate in voxels, 0 to G - 1.

    A place outside is moved to the border; on an axis that wraps, to where it comes round again:
    G voxels in a circle, so that the last is the neighbour of the first.
    """
    if not wraps:
        place = moved_to_border(place)
    at = (place + 1) * ((size - 1) / 2)
    return at.remainder(size) if wraps else at


def axis_distance(at: Tensor, size: int, wraps: bool) -> Tensor:
    """(...) coordinates in voxels -> (..., G) signed distances to the voxels of an axis."""
    distance = at[..., None] - torch.arange(size, dtype=at.dtype, device=at.device)
    if wraps:
        distance = (distance + size / 2).remainder(size) - size / 2
    return distance


def _gaussian(distance: Tensor, width: Tensor) -> Tensor:
    squares = (distance / width[:, None]).square()  # (B, N, H, G) by (H, 1)
    # The nearest voxel gets 1 whatever the width, so that nothing underflows before the norm.
    return (-0.5 * (squares - squares.detach().amin(-1, keepdim=True))).exp()


def _interpolation(at: Tensor, size: int, wraps: bool) -> Tensor:
    low, upper = (part[..., None] for part in _between(at, size, wraps))
    voxel = torch.arange(size, device=at.device)
    weight = torch.where(voxel == low, 1 - upper, 0)
    return torch.where(voxel == (low + 1) % size, upper, weight)


def _between(at: Tensor, size: int, wraps: bool) -> tuple[Tensor, Tensor]:
    """The lower of the two voxels beside coordinates, and how far they are on the way to the upper.

    A coordinate on a voxel is the lower end of what follows, the last of an axis the upper end of
    what precedes: its slope is that to one side.
    """
    low = at.detach().floor().clamp(max=size - 1 if wraps else size - 2)
    return low.long().clamp(min=0), at - low  # a voxel also where the coordinate is NaN


def overlap(parts: Sequence[Tensor], others: Sequence[Tensor]) -> Tensor:
    """φ(q)·φ(p) of every pair, axis by axis: (..., T, G) and (..., L, G) -> (..., T, L)."""
    found = product(parts[0], others[0].mT)
    for part, other in zip(parts[1:], others[1:], strict=True):
        found = found * product(part, other.mT)
    return found


def corners(places: Tensor, grid: Sequence[int], wrap: Sequence[bool]) -> tuple[Tensor, Tensor]:
    """The 2ⁿ voxels that interpolation touches, and their weights, both (B, N, H, 2ⁿ).

    The same address as `factors` without a width gives, less its zeros.
    """
    index = torch.zeros((*places.shape[:-1], 1), dtype=torch.long, device=places.device)
    weight = torch.ones_like(index, dtype=places.dtype)
    for axis, (size, wraps) in enumerate(zip(grid, wrap, strict=True)):
        at = voxel_coordinate(places[..., len(grid) - 1 - axis], size, wraps)
        low, upper = _between(at, size, wraps)
        pair = torch.stack([1 - upper, upper], dim=-1)
        pair = pair / pair.norm(dim=-1, keepdim=True)
        voxel = torch.stack([low, (low + 1) % size], dim=-1)
        index = (index[..., None] * size + voxel[..., None, :]).flatten(-2)
        weight = (weight[..., None] * pair[..., None, :]).flatten(-2)
    return index, weight
