"""Depthwise 3-tap filters along one axis of a volume (C, *grid, B), bound to their buffers.

Along an axis, zero padding included, a filter is a matrix with three diagonals per channel. On a
short axis one batched product with it is faster than three shifted passes over the volume, though
most of the matrix is zero. The same holds for the taps' gradient: sums along the diagonals of
Σ grad · xᵀ, which is one batched product where enough lies behind the axis to sum over.

Letters: B rows, C channels.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

SHORT_AXIS = 16  # voxels up to which a product with the whole matrix wins
LONG_RUN = 128  # values behind the axis from which on it does


class AxisFilter:
    """y ← taps ∗ x along `axis`: taps (C, 3), x and y (C, *grid, B).

    The transpose of a filter is the filter with its taps reversed.
    """

    def __init__(self, taps: Tensor, axis: int, x: Tensor, y: Tensor) -> None:
        self.matrix: Tensor | None = None
        C, size = x.shape[0], x.shape[1 + axis]
        if _is_short(x, axis):
            outer = math.prod(x.shape[1 : 1 + axis])
            matrix = taps.new_zeros(C, outer, size, size)
            for k, tap in enumerate(taps.t()):
                matrix.diagonal(k - 1, 2, 3).copy_(tap[:, None, None])
            self.matrix = matrix.flatten(0, 1)
            self.x, self.y = _matrices(x, axis), _matrices(y, axis)
        else:
            self.taps = taps.t().reshape(3, C, *[1] * (x.ndim - 1)).unbind()
            self.x, self.y = x, y
            self.x_start, self.x_end = _but_last(x, axis), _but_first(x, axis)
            self.y_start, self.y_end = _but_last(y, axis), _but_first(y, axis)

    def apply(self) -> None:
        """Compute y."""
        if self.matrix is not None:
            torch.bmm(self.matrix, self.x, out=self.y)
            return
        before, centre, after = self.taps
        torch.mul(self.x, centre, out=self.y)
        self.y_end.addcmul_(self.x_start, before)
        self.y_start.addcmul_(self.x_end, after)


class TapGradient:
    """Adds up the gradient of an `AxisFilter`'s taps, from its input and its output's gradient.

    `scratch` is a volume that may be overwritten.
    """

    def __init__(self, axis: int, x: Tensor, grad: Tensor, scratch: Tensor) -> None:
        self.C = x.shape[0]
        self.gram: Tensor | None = None
        if _is_short(x, axis):
            size = x.shape[1 + axis]
            self.x, self.grad = _matrices(x, axis).mT, _matrices(grad, axis)
            self.gram = x.new_zeros(self.grad.shape[0], size, size)
        else:
            self.sums = x.new_zeros(3, self.C)
            self.terms = []
            for ours, theirs in (
                (_but_last(x, axis), _but_first(grad, axis)),
                (x, grad),
                (_but_first(x, axis), _but_last(grad, axis)),
            ):
                product = scratch.flatten()[: ours.numel()].view_as(ours)
                self.terms.append((ours, theirs, product, product.flatten(1)))

    def add(self) -> None:
        """Take the buffers' present contents into account."""
        if self.gram is not None:
            torch.baddbmm(self.gram, self.grad, self.x, out=self.gram)
            return
        for total, (x, grad, product, flat) in zip(self.sums, self.terms, strict=True):
            torch.mul(x, grad, out=product)
            total += flat.sum(1)

    def total(self) -> Tensor:
        """(C, 3)."""
        if self.gram is None:
            return self.sums.t()
        gram = self.gram.unflatten(0, (self.C, -1)).sum(1)  # (C, size, size): output, input
        return torch.stack([gram.diagonal(k, 1, 2).sum(1) for k in (-1, 0, 1)], dim=1)


def _is_short(volume: Tensor, axis: int) -> bool:
    return volume.shape[1 + axis] <= SHORT_AXIS and math.prod(volume.shape[2 + axis :]) >= LONG_RUN


def _matrices(volume: Tensor, axis: int) -> Tensor:
    """(C, *grid, B) as (C · before the axis, along it, behind it · B)."""
    size = volume.shape[1 + axis]
    return volume.view(math.prod(volume.shape[: 1 + axis]), size, -1)


def _but_last(volume: Tensor, axis: int) -> Tensor:
    return volume.narrow(1 + axis, 0, volume.shape[1 + axis] - 1)


def _but_first(volume: Tensor, axis: int) -> Tensor:
    return volume.narrow(1 + axis, 1, volume.shape[1 + axis] - 1)
