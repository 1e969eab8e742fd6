"""What is written to the grid, as the gates see it: factorised over axes; and its gradient.

A Gaussian (and a nearest voxel) is a product of one profile per axis, and a depthwise filter
along an axis touches that axis' profile alone. So the filtered volume of a write is

    U[c, x₁ … xₙ] = content[c] · Πₐ (tapsₐ,c ∗ profileₐ)[xₐ]

n short filters instead of n passes over the grid, none of which depends on the memory.

Letters: B batch, S steps, n axes, C channels, M writes per step.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tensor_memory.ops.scan.reference import EPSILON, axis_points, voxel_position


def profiles(write_at: Tensor, spread: Tensor | None, grid: tuple[int, ...]) -> list[Tensor]:
    """Each axis' factor of the mask: write_at (B, S, M, n), spread (B, S, M) -> (S, M, size, B)."""
    result = []
    for axis, size in enumerate(grid):
        at = write_at[..., len(grid) - 1 - axis].permute(1, 2, 0)[:, :, None]  # (S, M, 1, B)
        if spread is None:
            nearest = (voxel_position(at, size).nan_to_num() + 0.5).floor()
            voxels = torch.arange(size, device=at.device)[:, None]
            result.append((voxels == nearest).to(at.dtype))
        else:
            scale = 2 * spread.square() + EPSILON
            offset = axis_points(size, at)[:, None] - at
            result.append(torch.exp(-offset.square() / scale.permute(1, 2, 0)[:, :, None]))
    return result


def profiles_backward(
    grads: list[Tensor],
    values: list[Tensor],
    write_at: Tensor,
    spread: Tensor | None,
    grid: tuple[int, ...],
) -> tuple[Tensor, Tensor | None]:
    """Gradients of write_at and spread from those of the profiles.

    With e = −(p − μ)² / s and s = 2σ² + ε: de/dμ = 2(p − μ)/s and de/dσ = 4σ(p − μ)²/s².
    """
    grad_at = torch.zeros_like(write_at)  # the nearest voxel does not move with its coordinate
    if spread is None:
        return grad_at, None
    grad_spread = torch.zeros_like(spread)
    scale = 2 * spread.square() + EPSILON  # (B, S, M)
    for axis, (grad, value) in enumerate(zip(grads, values, strict=True)):
        coordinate = len(grid) - 1 - axis
        at = write_at[..., coordinate].permute(1, 2, 0)[:, :, None]
        offset = axis_points(grid[axis], at)[:, None] - at  # (S, M, size, B)
        exponent = grad * value * offset
        grad_at[..., coordinate] = exponent.sum(2).permute(2, 0, 1) * 2 / scale
        grad_spread += (exponent * offset).sum(2).permute(2, 0, 1) * 4 * spread / scale.square()
    return grad_at, grad_spread


def filter_profile(profile: Tensor, taps: Tensor | None) -> Tensor:
    """tapsₐ,c ∗ profileₐ: (S, M, size, B), taps (C, 3) -> (S, M, C, size, B); C = 1 untapped."""
    if taps is None:
        return profile[:, :, None]
    neighbours = _neighbours(profile)
    return torch.matmul(taps, neighbours.flatten(3)).unflatten(3, profile.shape[2:])


def drop_tails(factor: Tensor) -> Tensor:
    """Zero where a factor is below the fourth root of the least number, 3e-10 in float32.

    A narrow Gaussian's tails multiply into denormal numbers, on which a CPU takes fifteen times as
    long. What is dropped is far below one rounding of the mask's peak.
    """
    return F.hardshrink(factor, torch.finfo(factor.dtype).tiny ** 0.25)


def filter_profile_backward(
    grad: Tensor, profile: Tensor, taps: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Gradients of the profile and the taps from that of the filtered one (S, M, C, size, B)."""
    if taps is None:
        return grad.sum(2), None
    neighbours = _neighbours(profile)
    grad_taps = torch.matmul(grad.flatten(3), neighbours.flatten(3).mT).sum((0, 1))
    before, centre, after = (
        torch.matmul(taps.t(), grad.flatten(3)).unflatten(3, profile.shape[2:]).unbind(2)
    )
    centre[:, :, :-1] += before[:, :, 1:]
    centre[:, :, 1:] += after[:, :, :-1]
    return centre, grad_taps


def _neighbours(profile: Tensor) -> Tensor:
    """What each tap sees, zeros outside: (S, M, size, B) -> (S, M, 3, size, B)."""
    size = profile.shape[2]
    padded = F.pad(profile, (0, 0, 1, 1))
    return torch.stack([padded.narrow(2, k, size) for k in range(3)], dim=2)


def volume_halves(content: Tensor, factors: list[Tensor]) -> tuple[Tensor, Tensor]:
    """All writes' volumes as outer products, U = first ⊗ rest, which are small.

    content (S, M, C, B), factors (S, M, C or 1, size, B) -> content along the first axis
    (S, M, C, D, 1, B), and the other axes (S, M, C or 1, 1, V / D, B).
    """
    first = factors[0] * content[:, :, :, None]
    rest = drop_tails(_later_products(factors)[0])
    return first[..., None, :], rest[:, :, :, None]


def volume_halves_backward(
    grad_first: Tensor, grad_rest: Tensor, content: Tensor, factors: list[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """Gradients of content and of the factors, the latter (S, M, C, size, B).

    grad_first (S, M, C, D, B), grad_rest (S, M, C, V / D, B). Axes are contracted one by one.
    """
    grad_content = (grad_first * factors[0]).sum(3)
    grad_factors = [grad_first * content[:, :, :, None]]
    remaining = grad_rest
    for axis, others in enumerate(_later_products(factors)[1:], start=1):
        if axis + 1 == len(factors):
            grad_factors.append(remaining)
            break
        factor = factors[axis]
        remaining = remaining.unflatten(3, (factor.shape[3], -1))  # (S, M, C, size, others, B)
        grad_factors.append((remaining * others[:, :, :, None]).sum(4))
        remaining = (remaining * factor[:, :, :, :, None]).sum(3)
    return grad_content, grad_factors


def _later_products(factors: list[Tensor]) -> list[Tensor]:
    """For each axis the product of the later axes' factors, (S, M, C or 1, voxels, B)."""
    none = torch.ones_like(factors[0][:, :, :1, :1])
    products = [none]
    for factor in reversed(factors[1:]):
        later = products[-1]
        if later is none:
            products.append(factor)
        else:
            products.append((factor[:, :, :, :, None] * later[:, :, :, None]).flatten(3, 4))
    return products[::-1]
