"""Masked patch reconstruction: most patches of an image are hidden, and their pixels asked for.

The target is the pixels, normalised by one mean and deviation for all images: nothing of a hidden
patch is given away. Training hides a drawn 75 %; test hides 25, 50 and 75 % by masks that belong to
the image. The visible patches stay in raster order, so that chunks and windows over them mean
neighbourhoods.

PSNR is over hidden pixels. SSIM needs surroundings: its map is made on the composed image (hidden
pixels predicted, the others from the original) and averaged over hidden pixels. The published
metric is a labelled extra: it gives a prediction the true mean of every hidden patch, pastes the
visible patches in and scores the whole image, so predicting nothing scores nearly as well as a
trained model.

Letters: B batch, P patches, v visible patches. Images are (B, 3, H, W) in [0, 1], `hidden` is
(B, H, W) bool, true on hidden pixels.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tensor_memory_lab.choices import check_choices
from tensor_memory_lab.tasks import Annotations, Batch, Outputs, Sums, Task
from tensor_memory_lab.tasks.epochs import drawn, epoch_rows
from tensor_memory_lab.tasks.images import (
    DEVIATION,
    MEAN,
    Images,
    from_patches,
    open_images,
    to_patches,
)
from tensor_memory_lab.tasks.synthetic import generator

WINDOW, SIGMA = 11, 1.5
"""SSIM's Gaussian window, as Wang et al. (2004) and torchmetrics have it."""

_BELL = [math.exp(-(((i - WINDOW // 2) / SIGMA) ** 2) / 2) for i in range(WINDOW)]
TAPS = tuple(height / sum(_BELL) for height in _BELL)
"""The window along one axis."""


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
        check_choices(self, "task")
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
        images = open_images(
            self.data_dir,
            self.layout,
            side=self.side,
            cache=self.cache_dir,
            valid_fraction=self.valid_fraction,
            test_fraction=self.test_fraction,
        )
        return MaskedImages(self, seed, images)


class MaskedImages(Task):
    """Batches: `patches` (B, P, values) normalised, `visible` (B, v) in raster order."""

    metric = "psnr"
    higher_is_better = True

    def __init__(self, config: MaskedImagesConfig, seed: int, images: Images) -> None:
        self.config, self.seed, self.source, self.name = config, seed, images, images.name
        self.store, self.ids = images.store, images.ids
        self.grid = (config.crop // config.patch, config.crop // config.patch)
        self.patches = self.grid[0] * self.grid[1]
        self.values = 3 * config.patch**2
        """Numbers in a patch."""
        self.ratios = {f"test@{100 * ratio:g}%": ratio for ratio in config.test_ratios}
        self.test_splits = tuple(self.ratios)
        self.device = self.store.pixels.device
        self._rows = images.rows
        self._mean = torch.tensor(MEAN, device=self.device)[:, None, None]
        self._deviation = torch.tensor(DEVIATION, device=self.device)[:, None, None]
        self._masks: dict[str, Tensor] = {}

    def to(self, device: torch.device) -> MaskedImages:
        """The same task with its images on `device`: 0.7 GB for CUB at 120 pixels."""
        return MaskedImages(self.config, self.seed, self.source.to(device))

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
            at = torch.full((len(rows), 2), 0.5, device=self.device)
            flip = torch.zeros(len(rows), dtype=torch.bool, device=self.device)
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
        nothing = mean_of_visible(target, hidden)
        found = {
            "psnr": psnr_hidden(predicted, target, hidden),
            "ssim": ssim_hidden(predicted, target, hidden),
            "psnr_mean_of_visible": psnr_hidden(nothing, target, hidden),
            "ssim_mean_of_visible": ssim_hidden(nothing, target, hidden),
            "published_psnr": published_psnr(predicted, target, hidden, patch),
            "published_psnr_zero": published_psnr(torch.zeros_like(target), target, hidden, patch),
            "published_psnr_mean_of_visible": psnr_whole(compose(nothing, target, hidden), target),
        }
        rows = torch.full((), len(target), device=target.device)  # torch.tensor would travel there
        loss = self.loss(outputs, batch) * rows
        return {"loss": (loss, rows)} | {k: (v.double().sum(), rows) for k, v in found.items()}

    def assets(self) -> dict[str, str]:
        """Which images it was trained on."""
        return self.source.assets()

    def facts(self) -> dict[str, Any]:
        """Sizes and what the measures are over."""
        return {
            "images": {split: len(part) for split, part in self.ids.items()},
            "images_checksum": self.store.checksum,
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
        return hidden_pixels(hidden_mask(visible, self.patches), self.config.patch, self.grid)

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


def hidden_pixels(hidden: Tensor, patch: int, grid: tuple[int, int]) -> Tensor:
    """(B, P) hidden patches in rows and columns -> (B, H, W) hidden pixels."""
    return hidden.unflatten(1, grid).repeat_interleave(patch, 1).repeat_interleave(patch, 2)


def compose(predicted: Tensor, target: Tensor, hidden: Tensor) -> Tensor:
    """The target with its hidden pixels replaced by the prediction, clipped to [0, 1]."""
    return torch.where(hidden[:, None], predicted.clamp(0, 1), target)


def mean_of_visible(target: Tensor, hidden: Tensor) -> Tensor:
    """A prediction that knows nothing: every pixel is the mean colour of the visible ones."""
    seen = ~hidden[:, None]
    colour = (target * seen).sum((2, 3)) / seen.sum((2, 3))
    return colour[..., None, None].expand_as(target)


def psnr_hidden(predicted: Tensor, target: Tensor, hidden: Tensor) -> Tensor:
    """(B,) peak signal-to-noise ratio in dB over the hidden pixels of each image."""
    wrong = (predicted.clamp(0, 1) - target).square().mean(1)  # (B, H, W)
    return decibels((wrong * hidden).sum((1, 2)) / hidden.sum((1, 2)))


def psnr_whole(composed: Tensor, target: Tensor) -> Tensor:
    """(B,) the same over all pixels, pasted ones among them."""
    return decibels((composed - target).square().mean((1, 2, 3)))


def decibels(error: Tensor) -> Tensor:
    """Mean squared error on the scale [0, 1] -> dB; a perfect image counts 100."""
    return -10 * error.clamp(min=1e-10).log10()


def ssim_hidden(predicted: Tensor, target: Tensor, hidden: Tensor) -> Tensor:
    """(B,) the composed image's SSIM averaged over the hidden pixels of each image."""
    similarity = ssim_map(compose(predicted, target, hidden), target).mean(1)
    return (similarity * hidden).sum((1, 2)) / hidden.sum((1, 2))


def ssim_map(image: Tensor, target: Tensor) -> Tensor:
    """(B, 3, H, W) structural similarity around every pixel, reflecting borders, range 1."""
    mean_x, mean_y = blur(image), blur(target)
    variance_x = (blur(image * image) - mean_x**2).clamp(min=0)
    variance_y = (blur(target * target) - mean_y**2).clamp(min=0)
    covariance = blur(image * target) - mean_x * mean_y
    c1, c2 = 0.01**2, 0.03**2
    similarity = (2 * mean_x * mean_y + c1) * (2 * covariance + c2)
    return similarity / ((mean_x**2 + mean_y**2 + c1) * (variance_x + variance_y + c2))


def blur(images: Tensor) -> Tensor:
    """Every pixel the Gaussian mean of its surroundings, (B, 3, H, W), reflecting borders.

    Shifted and added: a convolution would round to bf16 under autocast and to TF32 on some GPUs,
    and SSIM subtracts the square of a mean from the mean of squares, which needs every digit.
    """
    images = F.pad(images, [WINDOW // 2] * 4, mode="reflect")
    for axis in (2, 3):
        length = images.shape[axis] - WINDOW + 1
        total = TAPS[0] * images.narrow(axis, 0, length)
        for shift in range(1, WINDOW):
            total = total.add(images.narrow(axis, shift, length), alpha=TAPS[shift])
        images = total
    return images


def published_psnr(predicted: Tensor, target: Tensor, hidden: Tensor, patch: int) -> Tensor:
    """(B,) PSNR as published: every hidden patch gets its true mean, visible ones are pasted in.

    The published models predict patches normalised by their own true mean and deviation, which are
    put back before scoring. A prediction in pixels has a mean of its own: it is replaced by the
    true one; its contrast stays, for dividing by the true deviation and multiplying again cancels.
    """
    H, W = target.shape[-2:]
    guess, truth = to_patches(predicted.clamp(0, 1), patch), to_patches(target, patch)
    given = guess - guess.mean(-1, keepdim=True) + truth.mean(-1, keepdim=True)
    return psnr_whole(compose(from_patches(given, patch, H, W), target, hidden), target)
