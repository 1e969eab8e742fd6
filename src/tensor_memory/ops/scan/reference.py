"""The recurrence as the paper writes it: one function per equation, plain PyTorch.

Slow and readable. Every faster implementation is judged against this one. It runs in whatever
float type it is given and knows nothing of dispatch, modules or chunks of tokens.

Letters: B batch, S steps, n axes, V voxels, C channels, Q reads and M writes per step.
Coordinate 0 addresses the last grid axis, so coordinate n - 1 - a addresses axis a.
"""

from __future__ import annotations

import itertools
import math

import torch
import torch.nn.functional as F
from torch import Tensor

from tensor_memory.ops.border import moved_to_border

EPSILON = 1e-6  # the paper's ε under the Gaussian


def axis_points(size: int, like: Tensor) -> Tensor:
    """Voxel centres along one axis, corners included: (size,)."""
    return torch.linspace(-1, 1, size, dtype=like.dtype, device=like.device)


def voxel_position(coordinate: Tensor, size: int) -> Tensor:
    """A coordinate in [-1, 1] measured in voxels; what lies outside is moved to the border."""
    return (moved_to_border(coordinate) + 1) * (0.5 * (size - 1))


def sample(hidden: Tensor, at: Tensor) -> Tensor:
    """r = GridSample(h, μ): n-linear interpolation, by gathering the 2ⁿ corners.

    hidden (B, C, *grid), at (B, Q, n) -> (B, Q, C)
    """
    grid = hidden.shape[2:]
    corners = []  # per axis: the index and the weight of the lower and of the upper neighbour
    for axis, size in enumerate(grid):
        position = voxel_position(at[..., len(grid) - 1 - axis], size)  # (B, Q)
        # Nowhere (NaN) has no index, yet must read NaN rather than somebody else's memory.
        lower = position.detach().nan_to_num().floor().clamp(max=size - 2)
        upper_weight = position - lower
        index = lower.long()
        corners.append(((index, 1 - upper_weight), (index + 1, upper_weight)))

    voxels = hidden.flatten(2)  # (B, C, V)
    total = hidden.new_zeros(hidden.shape[0], hidden.shape[1], at.shape[1])  # (B, C, Q)
    for corner in itertools.product(*corners):
        flat = torch.zeros_like(corner[0][0])
        weight = torch.ones_like(corner[0][1])
        for (index, share), size in zip(corner, grid, strict=True):
            flat, weight = flat * size + index, weight * share
        total = total + voxels.gather(2, flat[:, None].expand_as(total)) * weight[:, None]
    return total.transpose(1, 2)


def gaussian_mask(at: Tensor, spread: Tensor, grid: tuple[int, ...]) -> Tensor:
    """M = exp(−‖G − μ‖² / (2σ² + ε)): at (B, M, n), spread (B, M) -> (B, M, *grid)."""
    n = len(grid)
    distance = at.new_zeros(())
    for axis, size in enumerate(grid):
        offset = axis_points(size, at) - at[..., n - 1 - axis, None]  # (B, M, size)
        shape = [1] * n
        shape[axis] = size
        distance = distance + offset.square().unflatten(-1, shape)
    scale = 2 * spread.square() + EPSILON
    return torch.exp(-distance / scale[(...,) + (None,) * n])


def nearest_mask(at: Tensor, grid: tuple[int, ...]) -> Tensor:
    """1 at the voxel closest to μ, 0 elsewhere: at (B, M, n) -> (B, M, *grid)."""
    flat = torch.zeros_like(at[..., 0], dtype=torch.long)
    for axis, size in enumerate(grid):
        position = voxel_position(at[..., len(grid) - 1 - axis], size)
        flat = flat * size + (position.nan_to_num() + 0.5).floor().long()
    voxels = torch.arange(math.prod(grid), device=at.device)
    return (flat[..., None] == voxels).to(at.dtype).unflatten(-1, grid)


def write_volume(content: Tensor, mask: Tensor) -> Tensor:
    """U = Σₘ contentₘ ⊗ Mₘ: content (B, M, C), mask (B, M, *grid) -> (B, C, *grid)."""
    return torch.einsum("bmc,bm...->bc...", content, mask)


def axis_filter(volume: Tensor, taps: Tensor, axis: int) -> Tensor:
    """Depthwise 3-tap filter along one grid axis, zero padding, no bias: taps (channels, 3)."""
    dim = axis + 2
    size = volume.shape[dim]
    before, centre, after = taps.t().reshape(3, 1, -1, *[1] * (volume.ndim - 2))
    padding = [0, 0] * (volume.ndim - 1 - dim) + [1, 1]
    padded = F.pad(volume, padding)
    return (
        before * padded.narrow(dim, 0, size)
        + centre * padded.narrow(dim, 1, size)
        + after * padded.narrow(dim, 2, size)
    )


def gates(volume: Tensor, taps: Tensor | None, mix: Tensor, bias: Tensor) -> Tensor:
    """G = Phys([U; h]): the axis filters, then the pointwise mix.

    volume (B, 2C, *grid) -> (B, 4C, *grid)
    """
    if taps is not None:
        for axis, axis_taps in enumerate(taps):
            volume = axis_filter(volume, axis_taps, axis)
    mixed = torch.einsum("oc,bc...->bo...", mix, volume)
    return mixed + bias.reshape(-1, *[1] * (volume.ndim - 2))


def gated_update(gates: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
    """c ← σ(f)·c + σ(i)·tanh(g); h ← σ(o)·tanh(c)."""
    i, f, o, g = gates.chunk(4, dim=1)
    cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
    return o.sigmoid() * cell.tanh(), cell


def scan(
    read_at: Tensor | None,
    write_at: Tensor,
    spread: Tensor | None,
    content: Tensor,
    taps: Tensor | None,
    mix: Tensor,
    bias: Tensor,
    hidden: Tensor,
    cell: Tensor,
    writes: Tensor | None = None,
    resets: Tensor | None = None,
) -> tuple[Tensor | None, Tensor, Tensor]:
    """All steps, one after the other; shapes as in `tensor_memory.memory_scan`."""
    grid = tuple(hidden.shape[2:])
    per_row = (-1,) + (1,) * (hidden.ndim - 1)
    if write_at.shape[1] == 0:
        hidden, cell = hidden.clone(), cell.clone()  # results never share memory with the inputs
    reads = []
    for s in range(write_at.shape[1]):
        if resets is not None:
            keep = ~resets[:, s].reshape(per_row)
            hidden, cell = hidden.where(keep, 0), cell.where(keep, 0)
        if read_at is not None:
            reads.append(sample(hidden, read_at[:, s]))
        if spread is None:
            mask = nearest_mask(write_at[:, s], grid)
        else:
            mask = gaussian_mask(write_at[:, s], spread[:, s], grid)
        volume = torch.cat([write_volume(content[:, s], mask), hidden], dim=1)
        new_hidden, new_cell = gated_update(gates(volume, taps, mix, bias), cell)
        if writes is not None:
            write = writes[:, s].reshape(per_row)
            new_hidden = new_hidden.where(write, hidden)
            new_cell = new_cell.where(write, cell)
        hidden, cell = new_hidden, new_cell
    if read_at is None:
        return None, hidden, cell
    if not reads:
        return read_at.new_zeros(*read_at.shape[:3], hidden.shape[1]), hidden, cell
    return torch.stack(reads, dim=1), hidden, cell
