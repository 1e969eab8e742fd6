"""Masked patch reconstruction: most patches of an image are hidden, and their pixels asked for.

The target is the pixels, normalised by one mean and deviation for all images: nothing of a hidden
patch is given away. Training hides a drawn 75 %; test hides 25, 50 and 75 % by masks that belong to
the image. Letters: B batch, P patches, v visible patches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from tensor_memory_lab.tasks import Annotations, Batch, Outputs, Sums, image_metrics
from tensor_memory_lab.tasks.epochs import drawn, epoch_rows
from tensor_memory_lab.tasks.image_files import (
    CUB_LAYOUT,
    Source,
    cub_images,
    folder_images,
    split_images,
)
from tensor_memory_lab.tasks.images import ImageStore, centre, load_images
from tensor_memory_lab.tasks.masking import (
    drawn_visible,
    fixed_visible,
    from_patches,
    hidden_mask,
    to_patches,
    visible_count,
)
from tensor_memory_lab.tasks.synthetic import generator

MEAN = (0.485, 0.456, 0.406)
DEVIATION = (0.229, 0.224, 0.225)
"""Of ImageNet's pixels, per channel on the scale [0, 1]: fixed, so no split tells another."""


@dataclass(frozen=True)
class MaskedImagesConfig:
    """Which images, how large, how much is hidden."""

    data_dir: str = "CUB_200_2011.zip"
    """Folder of the images, or a .zip of it."""
    cache_dir: str = "runs/decoded"
    """Where decoded images are kept."""
    layout: Literal["cub", "folder"] = "cub"
    """cub: CUB-200-2011 with its official split. folder: any images, split by the hash of ids."""
    side: int = 120
    """Short side of the decoded images in pixels."""
    crop: int = 112
    """Side of the square a model sees."""
    patch: int = 8
    """Side of a patch."""
    mask_ratio: float = 0.75
    """Part of the patches hidden in training and validation."""
    test_ratios: tuple[float, ...] = (0.25, 0.5, 0.75)
    """Parts of the patches hidden at test, a split for each."""
    valid_fraction: float = 0.1
    """Part of the training images held out to choose the best checkpoint by."""
    test_fraction: float = 0.2
    """Part of a plain folder that is for testing."""

    def __post_init__(self) -> None:
        if self.layout not in ("cub", "folder"):
            raise ValueError(f"task.layout: expected cub or folder, got {self.layout!r}")
        if self.patch < 1 or self.crop % self.patch:
            raise ValueError(
                f"task.patch: expected a divisor of task.crop = {self.crop}, got {self.patch}"
            )
        if self.crop > self.side:
            raise ValueError(
                f"task.crop: expected at most task.side = {self.side} pixels, got {self.crop}"
            )
        for ratio in (self.mask_ratio, *self.test_ratios):
            visible_count((self.crop // self.patch) ** 2, ratio)

    def build(self, seed: int) -> MaskedImages:
        """Read the lists and decode what is not decoded yet."""
        if self.layout == "cub":
            source = Source(self.data_dir, CUB_LAYOUT)
            images, name = cub_images(source), "cub200"
        else:
            source = Source(self.data_dir)
            images = folder_images(source, test_fraction=self.test_fraction)
            name = source.path.stem.lower()
        store = load_images(source, images, side=self.side, cache=self.cache_dir)
        splits = split_images(images, valid_fraction=self.valid_fraction)
        ids = {split: [image.id for image in part] for split, part in splits.items()}
        return MaskedImages(self, seed, f"{name}@{self.side}px", store, ids)


class MaskedImages:
    """Batches: `patches` (B, P, values) normalised, `visible` (B, v) in raster order."""

    metric = "psnr"
    higher_is_better = True
    carries = False

    def __init__(
        self,
        config: MaskedImagesConfig,
        seed: int,
        name: str,
        store: ImageStore,
        ids: dict[str, list[str]],
    ) -> None:
        self.config, self.seed, self.name = config, seed, name
        self.store, self.ids = store, ids
        self.grid = (config.crop // config.patch, config.crop // config.patch)
        self.patches = self.grid[0] * self.grid[1]
        self.values = 3 * config.patch**2
        """Numbers in a patch."""
        self.ratios = {split_name(ratio): ratio for ratio in config.test_ratios}
        self.test_splits = tuple(self.ratios)
        self.device = store.pixels.device
        self._rows = {
            split: torch.tensor([store.row[i] for i in part], device=self.device)
            for split, part in ids.items()
        }
        self._mean = torch.tensor(MEAN, device=self.device)[:, None, None]
        self._deviation = torch.tensor(DEVIATION, device=self.device)[:, None, None]
        self._masks: dict[str, Tensor] = {}

    def to(self, device: torch.device) -> MaskedImages:
        """The same task with its images on `device`: 0.7 GB for CUB at 120 pixels."""
        return MaskedImages(self.config, self.seed, self.name, self.store.to(device), self.ids)

    def batch(self, split: str, index: int, size: int) -> Batch:
        """Random crops, flips and masks in training; the middle and fixed masks elsewhere."""
        c = self.config
        if split == "train":
            random = generator(self.seed, "images", index)
            at = drawn(size, 2, random=random, device=self.device)
            flip = drawn(size, random=random, device=self.device) < 0.5
            noise = drawn(size, self.patches, random=random, device=self.device)
            count, first = len(self.ids["train"]), index * size
            order = epoch_rows(count, self.seed, first, first + size, device=self.device)
            rows = self._rows["train"][order]
            visible = drawn_visible(noise, c.mask_ratio)
        else:
            chosen = slice(index * size, (index + 1) * size)
            rows = self._rows[self._part(split)][chosen]
            if not len(rows):
                raise IndexError(f"batch {index} of {size} rows: {split} has fewer")
            at, flip = centre(len(rows), self.device)
            visible = self._fixed(split)[chosen]
        images = self.store.crops(rows, c.crop, at, flip).float() / 255
        patches = to_patches((images - self._mean) / self._deviation, c.patch)
        return {"patches": patches, "visible": visible}

    def batches(self, split: str, size: int) -> int:
        """Batches of one pass."""
        return -(-len(self.ids[self._part(split)]) // size)

    def loss(self, outputs: Outputs, batch: Batch) -> Tensor:
        """Mean squared error over the hidden patches, in deviations."""
        wrong = (outputs["patches"].float() - batch["patches"]).square().mean(-1)  # (B, P)
        hidden = hidden_mask(batch["visible"], self.patches)
        return (wrong * hidden).sum() / hidden.sum()

    def measure(self, outputs: Outputs, batch: Batch) -> Sums:
        """PSNR and SSIM over hidden patches, the published metric, and what knows nothing."""
        predicted = self.images(outputs["patches"].float())
        target = self.images(batch["patches"])
        hidden = self.hidden(batch["visible"])
        patch = self.config.patch
        nothing = image_metrics.mean_of_visible(target, hidden)
        pasted = image_metrics.compose(nothing, target, hidden)
        found = {
            "psnr": image_metrics.psnr_hidden(predicted, target, hidden),
            "ssim": image_metrics.ssim_hidden(predicted, target, hidden),
            "psnr_mean_of_visible": image_metrics.psnr_hidden(nothing, target, hidden),
            "ssim_mean_of_visible": image_metrics.ssim_hidden(nothing, target, hidden),
            "published_psnr": image_metrics.published_psnr(predicted, target, hidden, patch),
            "published_psnr_zero": image_metrics.published_zero(target, hidden, patch),
            "published_psnr_mean_of_visible": image_metrics.psnr_whole(pasted, target),
        }
        rows = torch.full((), len(target), device=target.device)  # torch.tensor would travel there
        loss = self.loss(outputs, batch) * rows
        return {"loss": (loss, rows)} | {k: (v.double().sum(), rows) for k, v in found.items()}

    def finish(self, means: dict[str, float]) -> dict[str, float]:
        """Nothing to add: all are means over images."""
        return means

    def ceiling(self, split: str) -> float | None:
        """Nobody knows what can be guessed of a hidden patch."""
        return None

    def facts(self) -> dict[str, Any]:
        """Sizes and what the measures are over."""
        return {
            "images": {split: len(part) for split, part in self.ids.items()},
            "crop": self.config.crop,
            "patch": self.config.patch,
            "patches": self.patches,
            "resident_bytes": self.store.pixels.numel(),
            "trained_at_mask_ratio": self.config.mask_ratio,
            "target": "pixels, normalised by one mean and deviation per channel",
            "psnr": "dB over hidden pixels of each image, averaged over images",
            "ssim": "map of the composed image, averaged over hidden pixels, then over images",
            "published_psnr": "whole image, visible patches pasted, true mean of each hidden patch",
        }

    def describe(self, batch: Batch) -> Annotations:
        """The image with what is hidden in grey: one picture for a summary token and all patches.

        Tokens are the visible patches alone, in raster order.
        """
        visible = batch["visible"]
        shown = self.images(batch["patches"]).masked_fill(self.hidden(visible)[:, None], 0.5)
        frames = (shown.clamp(0, 1) * 255).round().to(torch.uint8).permute(0, 2, 3, 1)
        return {"frames": frames[:, None], "tokens_per_frame": 1 + visible.shape[1]}

    def images(self, patches: Tensor) -> Tensor:
        """Normalised patches (B, P, values) -> images (B, 3, H, W) on the scale [0, 1]."""
        c = self.config
        return from_patches(patches, c.patch, c.crop, c.crop) * self._deviation + self._mean

    def hidden(self, visible: Tensor) -> Tensor:
        """Visible patches (B, v) -> hidden pixels (B, H, W) bool."""
        c = self.config
        mask = hidden_mask(visible, self.patches)
        return image_metrics.hidden_pixels(mask, c.patch, c.crop, c.crop)

    def _part(self, split: str) -> str:
        part = "test" if split in self.ratios else split
        if part not in self.ids:
            raise ValueError(
                f"split: expected train, valid, {', '.join(self.test_splits)}, got {split!r}"
            )
        return part

    def _fixed(self, split: str) -> Tensor:
        """(images, v) masks of an evaluation split, made once."""
        if split not in self._masks:
            ids = self.ids[self._part(split)]
            ratio = self.ratios.get(split, self.config.mask_ratio)
            self._masks[split] = fixed_visible(ids, self.patches, ratio).to(self.device)
        return self._masks[split]


def split_name(ratio: float) -> str:
    """Name of the test split that hides `ratio` of the patches.

    >>> split_name(0.25)
    'test@25%'
    """
    return f"test@{100 * ratio:g}%"
