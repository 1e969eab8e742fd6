"""Which patches are hidden, and patches themselves.

At test the mask of an image is a function of its id and the ratio alone: the same in every run, for
every method, in whatever batch. In training it is drawn. The visible patches stay in raster order,
so that chunks and windows over them mean neighbourhoods.

Letters: B batch, P patches, v visible patches.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor


def visible_count(patches: int, ratio: float) -> int:
    """How many of `patches` stay visible when `ratio` of them are hidden.

    >>> visible_count(196, 0.75)
    49
    """
    if not 0 < ratio < 1:
        raise ValueError(f"mask ratio: expected a number between 0 and 1, got {ratio}")
    visible = patches - round(patches * ratio)
    if not 0 < visible < patches:
        raise ValueError(
            f"mask ratio: {ratio} of {patches} patches leaves {visible} visible; "
            "expected at least one visible and one hidden"
        )
    return visible


def fixed_visible(ids: Sequence[str], patches: int, ratio: float) -> Tensor:
    """(images, v) indices of the visible patches in raster order, made of id and ratio alone."""
    import numpy as np

    v = visible_count(patches, ratio)
    rows = np.empty((len(ids), v), dtype=np.int64)
    for row, image_id in enumerate(ids):
        digest = hashlib.shake_256(f"{image_id}:{ratio:.4f}".encode()).digest(8 * patches)
        order = np.frombuffer(digest, dtype="<u8").argsort(kind="stable")
        rows[row] = np.sort(order[:v])
    return torch.from_numpy(rows)


def drawn_visible(noise: Tensor, ratio: float) -> Tensor:
    """(B, P) random numbers -> (B, v) visible patches in raster order: those of the smallest."""
    order = noise.argsort(dim=1, stable=True)
    return order[:, : visible_count(noise.shape[1], ratio)].sort(1).values


def hidden_mask(visible: Tensor, patches: int) -> Tensor:
    """(B, v) visible indices -> (B, P) bool, true where a patch is hidden."""
    hidden = torch.ones(visible.shape[0], patches, dtype=torch.bool, device=visible.device)
    return hidden.scatter(1, visible, False)


def to_patches(images: Tensor, patch: int) -> Tensor:
    """(B, 3, H, W) -> (B, P, patch·patch·3), raster order, channels last inside a patch."""
    B, channels, H, W = images.shape
    if H % patch or W % patch:
        raise ValueError(f"patch: expected a divisor of the image's {H} x {W} pixels, got {patch}")
    cut = images.reshape(B, channels, H // patch, patch, W // patch, patch)
    return cut.permute(0, 2, 4, 3, 5, 1).reshape(B, -1, patch * patch * channels)


def from_patches(patches: Tensor, patch: int, height: int, width: int) -> Tensor:
    """The inverse of `to_patches` for images of height × width pixels."""
    B, _, values = patches.shape
    cut = patches.reshape(
        B, height // patch, width // patch, patch, patch, values // (patch * patch)
    )
    return cut.permute(0, 5, 1, 3, 2, 4).reshape(B, -1, height, width)
