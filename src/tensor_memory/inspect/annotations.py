"""What the tokens of a recording were: their texts, or the frames they were cut from."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

THUMBNAIL = 96
"""The longest side, in pixels, that a frame keeps."""

PICTURE = 512
"""The same of a picture under a grid."""


def checked_texts(texts: Sequence[Sequence[str]], rows: int) -> list[list[str]]:
    """A list of strings for each of `rows` rows."""
    if not isinstance(texts, Collection) or any(not isinstance(row, Collection) for row in texts):
        raise TypeError(
            f"texts: expected a list of token texts per row, got {texts!r:.60}; give a list of "
            "lists of strings"
        )
    kept = [[*row] for row in texts]
    if isinstance(texts, str) or any(isinstance(row, str) for row in texts):
        raise TypeError(
            "texts: expected a list of token texts per row, got one string for a row or for all; "
            "split it into the texts of its tokens"
        )
    if any(not isinstance(text, str) for row in kept for text in row):
        raise TypeError("texts: expected every token's text as a string; decode the ids first")
    if len(kept) < rows:
        raise ValueError(f"texts: expected one list per row, {rows} of them, got {len(kept)}")
    return kept[:rows]


def checked_images(image: Tensor, rows: int) -> Tensor:
    """(1 or B, h, w, 3) uint8, made as small as `PICTURE`."""
    shape = tuple(image.shape) if isinstance(image, Tensor) else type(image).__name__
    one = isinstance(image, Tensor) and image.ndim == 3
    images = image[None] if one else image
    if not isinstance(images, Tensor) or images.dtype != torch.uint8 or images.ndim != 4:
        got = f"{image.dtype} of {shape}" if isinstance(image, Tensor) else shape
        remedy = "colours from 0 to 1 are (255 * image).to(torch.uint8)"
        if not isinstance(image, Tensor):
            remedy = "torch.tensor(numpy.array(image)) makes one of an array or a photo"
        raise TypeError(
            f"image: expected a uint8 tensor of shape (h, w, 3), or (B, h, w, 3), got {got}; "
            f"{remedy}"
        )
    if images.shape[3] != 3 or not images.numel() or (not one and len(images) != rows):
        raise ValueError(
            f"image: expected shape (h, w, 3), or (B, h, w, 3) with B = {rows} rows, got {shape}; "
            "colours come last"
        )
    return _shrunk(images[None].cpu(), PICTURE)[0]


def thumbnails(frames: Tensor, rows: int) -> Tensor:
    """(B, F, h, w, 3) uint8 of `rows` rows, made as small as `THUMBNAIL`."""
    if not isinstance(frames, Tensor) or frames.dtype != torch.uint8:
        got = frames.dtype if isinstance(frames, Tensor) else type(frames).__name__
        raise TypeError(f"frames: expected a uint8 tensor of shape (B, F, h, w, 3), got {got}")
    if frames.ndim != 5 or frames.shape[-1] != 3 or frames.shape[0] < rows:
        wanted = f" with B = {rows} rows" if rows else ""  # before a recording there are none
        raise ValueError(
            f"frames: expected shape (B, F, h, w, 3){wanted}, got {tuple(frames.shape)}; colours "
            "come last"
        )
    return _shrunk(frames[:rows].cpu(), THUMBNAIL)


def _shrunk(frames: Tensor, most: int) -> Tensor:
    """(B, F, h, w, 3) with the longest side no longer than `most` pixels."""
    longest = max(frames.shape[2:4])
    if longest <= most:
        return frames.contiguous()
    size = [max(1, round(side * most / longest)) for side in frames.shape[2:4]]
    flat = frames.flatten(0, 1).permute(0, 3, 1, 2).float()  # (B·F, 3, h, w)
    small = F.interpolate(flat, size, mode="area").round().to(torch.uint8)
    return small.permute(0, 2, 3, 1).unflatten(0, frames.shape[:2]).contiguous()
