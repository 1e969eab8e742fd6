"""n-linear reads as one gather: the 2ⁿ voxels around a point, their weights, and the gradient.

Voxels are numbered as they lie in memory, the last grid axis fastest. Everything here is plain
differentiable PyTorch except `coordinate_gradient`, which is what autograd would give, written
out for implementations that run below autograd.

Letters: n axes, C channels, Q reads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tensor_memory.ops.reference import voxel_position


def corners(at: Tensor, grid: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """The voxels around each point and their weights: at (..., n) -> two of (..., 2ⁿ)."""
    index = torch.zeros_like(at[..., :1], dtype=torch.long)
    sides = torch.arange(2, device=at.device)
    pairs = []
    for axis, size in enumerate(grid):
        lower, upper_weight = _split(at[..., len(grid) - 1 - axis], size)
        pairs.append(torch.stack([1 - upper_weight, upper_weight], dim=-1))
        step = lower.long()[..., None, None] + sides
        index = (index[..., None] * size + step).flatten(-2)
    return index, _outer(pairs)


def coordinate_gradient(grad_weight: Tensor, at: Tensor, grid: tuple[int, ...]) -> Tensor:
    """Of `at` (..., n), from that of the corners' weights (..., 2ⁿ).

    A weight is a product with one factor per axis, 1 − u or u, so its slope along an axis is the
    same product with that factor replaced by −1 or +1.
    """
    n = len(grid)
    pairs = []
    for axis, size in enumerate(grid):
        _, upper_weight = _split(at[..., n - 1 - axis], size)
        pairs.append(torch.stack([1 - upper_weight, upper_weight], dim=-1))
    slope = torch.tensor([-1, 1], dtype=at.dtype, device=at.device).expand_as(pairs[0])
    grad = torch.empty_like(at)
    for axis, size in enumerate(grid):
        along = _outer([*pairs[:axis], slope, *pairs[axis + 1 :]])
        grad[..., n - 1 - axis] = (grad_weight * along).sum(-1) * (0.5 * (size - 1))
    return grad.masked_fill_(at.abs() > 1, 0)  # beyond the border a read no longer moves


def sample(hidden: Tensor, at: Tensor) -> Tensor:
    """r = GridSample(h, μ): hidden (B, C, *grid), at (B, Q, n) -> (B, Q, C)."""
    B, C, *grid = hidden.shape
    index, weight = corners(at, tuple(grid))  # (B, Q, 2ⁿ)
    values = hidden.flatten(2).gather(2, index.flatten(1)[:, None].expand(B, C, -1))
    return (values.unflatten(2, index.shape[1:]) * weight[:, None]).sum(-1).transpose(1, 2)


def _split(coordinate: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The voxel below a coordinate, and how far towards the next one it lies, in [0, 1]."""
    position = voxel_position(coordinate, size)
    lower = position.detach().floor().nan_to_num(0).clamp(max=size - 2)  # NaN reads NaN somewhere
    return lower, position - lower


def _outer(pairs: list[Tensor]) -> Tensor:
    """Products of one factor per axis, first axis slowest: n of (..., 2) -> (..., 2ⁿ)."""
    total = pairs[0]
    for pair in pairs[1:]:
        total = (total[..., None] * pair[..., None, :]).flatten(-2)
    return total
