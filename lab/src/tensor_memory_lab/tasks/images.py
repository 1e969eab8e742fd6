"""Images as one resident block of bytes, cropped and flipped where they lie.

Every image is decoded once, its short side resized to `side`, and laid into one flat array with its
height and width beside it: whole images of any shape, no padding. A batch of crops is then one
gather on the device, so a GPU never waits for a decoder.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tensor_memory_lab.progress import progress
from tensor_memory_lab.tasks.decoded_cache import (
    CacheWriter,
    Wanted,
    open_or_make,
    require_same_sizes,
)
from tensor_memory_lab.tasks.image_files import ImageFile, Source

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class ImageStore:
    """Decoded images, RGB, one after the other."""

    pixels: Tensor
    """(all pixels, 3) uint8."""
    start: Tensor
    """(images,) first pixel of each."""
    height: Tensor
    width: Tensor
    row: dict[str, int]
    """Image id to its place."""

    def to(self, device: torch.device) -> ImageStore:
        """The same images on a device."""
        moved = (t.to(device) for t in (self.pixels, self.start, self.height, self.width))
        return ImageStore(*moved, row=self.row)

    def crops(self, rows: Tensor, size: int, at: Tensor, flip: Tensor) -> Tensor:
        """Square crops (B, 3, size, size) uint8.

        Args:
            rows: (B,) which images.
            size: side of the crop in pixels, at most the images' short side.
            at: (B, 2) where between top and bottom, left and right, each in [0, 1].
            flip: (B,) bool, mirror left and right.
        """
        height, width = self.height[rows], self.width[rows]
        top = (at[:, 0] * (height - size + 1)).long().clamp(max=height - size)
        left = (at[:, 1] * (width - size + 1)).long().clamp(max=width - size)
        along = torch.arange(size, device=rows.device)
        y = top[:, None] + along  # (B, size)
        x = left[:, None] + torch.where(flip[:, None], size - 1 - along, along)
        index = self.start[rows, None, None] + y[:, :, None] * width[:, None, None] + x[:, None]
        return self.pixels[index].permute(0, 3, 1, 2)


def centre(count: int, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """`at` and `flip` of `ImageStore.crops` for evaluation: the middle, not mirrored."""
    at = torch.full((count, 2), 0.5, device=device)
    return at, torch.zeros(count, dtype=torch.bool, device=device)


def load_images(
    source: Source,
    images: Sequence[ImageFile],
    *,
    side: int,
    cache: str | os.PathLike[str],
) -> ImageStore:
    """All images of a source with their short side at `side`, decoded now or found in `cache`."""
    wanted = Wanted("images", {"short_side": side}, [image.path for image in images])

    def decode(folder: Path) -> None:
        decode_images(source, wanted, folder, side=side)

    folder, arrays, facts = open_or_make(cache, wanted, decode)
    require_same_sizes(folder, facts["sizes"], source.sizes)
    height, width = torch.tensor(facts["heights"]), torch.tensor(facts["widths"])
    area = height * width
    return ImageStore(
        pixels=torch.from_numpy(arrays["pixels"]),
        start=area.cumsum(0) - area,
        height=height,
        width=width,
        row={image.id: i for i, image in enumerate(images)},
    )


def decode_images(source: Source, wanted: Wanted, folder: Path, *, side: int) -> None:
    """Decode with a pool of threads (Pillow lets go of the interpreter) into a new cache."""
    import numpy as np

    shapes, blocks = [], []
    with (
        ThreadPoolExecutor(os.cpu_count()) as pool,
        progress("decoding", len(wanted.files), unit="images") as advance,
    ):
        for pixels in pool.map(lambda name: decode_image(source, name, side), wanted.files):
            shapes.append(pixels.shape[:2])
            blocks.append(pixels.reshape(-1, 3))
            advance()
    with CacheWriter(folder, wanted) as writer:
        whole = writer.array("pixels", (sum(len(block) for block in blocks), 3))
        np.concatenate(blocks, out=whole)
        facts = {
            "heights": [height for height, _ in shapes],
            "widths": [width for _, width in shapes],
            "sizes": {name: source.sizes[name] for name in wanted.files},
        }
        writer.finish({"pixels": whole}, facts)


def decode_image(source: Source, name: str, side: int) -> np.ndarray:
    """One image as (H, W, 3) uint8 with min(H, W) = side; a broken file is an error."""
    import numpy as np
    from PIL import Image

    try:
        with source.open(name) as file, Image.open(file) as image:
            image = image.convert("RGB")
    except (OSError, SyntaxError) as error:  # Pillow's names for what it cannot read
        raise ValueError(
            f"{source.path / name}: expected an image, but it cannot be decoded ({error}); "
            "take the file from the original archive again"
        ) from error
    short = min(image.size)
    if short != side:
        scale = side / short
        width, height = (max(side, round(length * scale)) for length in image.size)
        image = image.resize((width, height), Image.Resampling.BICUBIC)
    return np.asarray(image)
