"""n-linear reads as one gather: the 2ⁿ voxels around a point, their weights, and the gradient.

Voxels are numbered as they lie in memory, the last grid axis fastest. Everything here is plain
differentiable PyTorch except `coordinate_gradient`, which is what autograd would give, written
out for implementations that run below autograd.

Letters: n axes, C channels, Q reads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tensor_memory.ops.border import moved_to_border
from tensor_memory.ops.products import outer


def corners(at: Tensor, grid: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """The voxels around each point and their weights: at (..., n) -> two of (..., 2ⁿ)."""
    lower, upper_weight = _split(at, grid)
    index = torch.zeros_like(lower[..., :1], dtype=torch.long)
    steps = lower.long()[..., None] + torch.arange(2, device=at.device)  # (..., n, 2)
    for axis, size in enumerate(grid):
        index = (index[..., None] * size + steps[..., axis, None, :]).flatten(-2)
    pairs = torch.stack([1 - upper_weight, upper_weight], dim=-1)  # (..., n, 2)
    return index, outer(pairs.unbind(-2))


def coordinate_gradient(grad_weight: Tensor, at: Tensor, grid: tuple[int, ...]) -> Tensor:
    """Of `at` (..., n), from that of the corners' weights (..., 2ⁿ).

    A weight is a product with one factor per axis, 1 − u or u, so its slope along an axis is the
    same product with that factor replaced by −1 or +1.
    """
    _, upper_weight = _split(at, grid)
    pairs = list(torch.stack([1 - upper_weight, upper_weight], dim=-1).unbind(-2))
    slope = (2 * torch.arange(2, dtype=at.dtype, device=at.device) - 1).expand_as(pairs[0])
    along = [outer([*pairs[:a], slope, *pairs[a + 1 :]]) for a in range(len(grid))]
    grad = (torch.stack(along, dim=-2) * grad_weight[..., None, :]).sum(-1)  # (..., n)
    grad = grad * _voxels_per_unit(at, grid)
    return grad.flip(-1).masked_fill_(at.abs() > 1, 0)  # beyond the border a read does not move


def sample(hidden: Tensor, at: Tensor) -> Tensor:
    """r = GridSample(h, μ): hidden (B, C, *grid), at (B, Q, n) -> (B, Q, C)."""
    B, C, *grid = hidden.shape
    index, weight = corners(at, tuple(grid))  # (B, Q, 2ⁿ)
    values = hidden.flatten(2).gather(2, index.flatten(1)[:, None].expand(B, C, -1))
    return (values.unflatten(2, index.shape[1:]) * weight[:, None]).sum(-1).transpose(1, 2)


def _split(at: Tensor, grid: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """The voxel below a point, and how far towards the next it lies, in [0, 1]: grid order."""
    position = (moved_to_border(at).flip(-1) + 1) * _voxels_per_unit(at, grid)
    most = _sizes(at, grid) - 2
    # Nowhere (NaN) has no index, yet must read NaN rather than somebody else's memory.
    lower = position.detach().floor().nan_to_num(0).minimum(most)
    return lower, position - lower


def _voxels_per_unit(at: Tensor, grid: tuple[int, ...]) -> Tensor:
    """Coordinates go from -1 to 1, corners included: (n,)."""
    return 0.5 * (_sizes(at, grid) - 1)


def _sizes(at: Tensor, grid: tuple[int, ...]) -> Tensor:
    """The grid as a tensor made on the device: copying it there would stall a GPU."""
    return torch.stack([at.new_full((), size) for size in grid])
