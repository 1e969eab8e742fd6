"""The write's half of the gates' input, factorised over axes, and its gradient.

A Gaussian (and a nearest voxel) is a product of one profile per axis, and a depthwise filter
along an axis touches that axis' profile alone. So the filtered volume of a write is

    U[c, x₁ … xₙ] = content[c] · Πₐ (tapsₐ,c ∗ profileₐ)[xₐ]

n short filters instead of n passes over the grid, none of which depends on the memory.

Volumes are (C, *grid, B), rows innermost: a neighbour along any axis is then a long contiguous
run away, and the gates' four blocks of channels are contiguous.

Letters: B batch, S steps, n axes, C channels, M writes per step.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tensor_memory.ops.reference import EPSILON, axis_points, voxel_position


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
    before, centre, after = taps.t()[:, :, None, None]  # (C, 1, 1) each
    padded = F.pad(profile, (0, 0, 1, 1))[:, :, None]  # (S, M, 1, size + 2, B)
    size = profile.shape[2]
    filtered = before * padded.narrow(3, 0, size)
    filtered.addcmul_(centre, padded.narrow(3, 1, size))
    return filtered.addcmul_(after, padded.narrow(3, 2, size))


def filter_profile_backward(
    grad: Tensor, profile: Tensor, taps: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Gradients of the profile and the taps from that of the filtered one (S, M, C, size, B)."""
    if taps is None:
        return grad.sum(2), None
    padded = F.pad(profile, (0, 0, 1, 1))
    grad_padded = torch.zeros_like(padded)
    grad_taps = torch.empty_like(taps)
    size = profile.shape[2]
    for k in range(3):
        grad_padded.narrow(2, k, size).add_(torch.einsum("smcib,c->smib", grad, taps[:, k]))
        grad_taps[:, k] = torch.einsum("smcib,smib->c", grad, padded.narrow(2, k, size))
    return grad_padded.narrow(2, 1, size), grad_taps


def volume(content: Tensor, factors: list[Tensor], out: Tensor) -> None:
    """U of one step, into `out` (C, *grid, B): content (M, C, B), factors (M, C or 1, size, B).

    The first axis comes last, so that the one product of the grid's size runs over long rows.
    """
    for m, written in enumerate(content):
        first, *others = _along_axes(factors, m)
        first = first * written.reshape(-1, *[1] * len(factors), written.shape[-1])
        others = _suffix_products(others, like=first)[0]
        if m == 0:
            torch.mul(first, others, out=out)
        else:
            out.addcmul_(first, others)


def volume_backward(
    grad: Tensor, content: Tensor, factors: list[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """Gradients of content and factors, the latter (M, C, size, B), from that of U (C, *grid, B).

    Axes are contracted one by one, the first first: what remains is a grid with an axis less.
    """
    C, B = grad.shape[0], grad.shape[-1]
    grad_content = torch.empty_like(content)
    grad_factors = [grad.new_empty(f.shape[0], C, *f.shape[2:]) for f in factors]
    for m, written in enumerate(content):
        shaped = _along_axes(factors, m)
        rest = _suffix_products(shaped[1:], like=grad)
        remaining = grad
        for axis, (factor, others) in enumerate(zip(shaped, rest, strict=True)):
            slope = (remaining * others).reshape(C, factor.shape[1 + axis], -1, B).sum(2)
            if axis == 0:
                grad_content[m] = (slope * factors[0][m]).sum(1)
                slope = slope * written[:, None]
                factor = factor * written.reshape(C, *[1] * len(factors), B)
            grad_factors[axis][m] = slope
            if axis + 1 < len(factors):
                remaining = (remaining * factor).sum(1 + axis, keepdim=True)
    return grad_content, grad_factors


def _along_axes(factors: list[Tensor], m: int) -> list[Tensor]:
    """Write m's factors, each shaped (C or 1, 1.. size ..1, B) to lie along its own axis."""
    shaped = []
    for axis, factor in enumerate(factors):
        shape = [1] * len(factors)
        shape[axis] = factor.shape[2]
        shaped.append(factor[m].unflatten(1, shape))
    return shaped


def _suffix_products(factors: list[Tensor], like: Tensor) -> list[Tensor]:
    """[f₁·f₂·…, f₂·…, …, 1]: the product of all factors from each one on, and of none."""
    products = [like.new_ones(())]
    for factor in reversed(factors):
        products.append(factor * products[-1] if len(products) > 1 else factor)
    return products[::-1]
