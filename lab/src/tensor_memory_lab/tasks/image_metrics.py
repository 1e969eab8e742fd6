"""How good a reconstruction is where something had to be reconstructed.

All images here are (B, 3, H, W) in [0, 1]; `hidden` is (B, H, W) bool, true on hidden pixels.

PSNR is over hidden pixels only. SSIM needs surroundings, so its map is made on the composed image
(visible pixels from the original, hidden ones predicted) and averaged over hidden pixels only.

The published metric is kept for comparison and labelled as such: it gives the prediction the true
mean of every hidden patch, pastes the visible patches in and scores the whole image, so predicting
nothing scores nearly as well as a trained model.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from tensor_memory_lab.tasks.masking import from_patches, to_patches

WINDOW, SIGMA = 11, 1.5
"""SSIM's Gaussian window, as Wang et al. (2004) and torchmetrics have it."""

_BELL = [math.exp(-(((i - WINDOW // 2) / SIGMA) ** 2) / 2) for i in range(WINDOW)]
TAPS = tuple(height / sum(_BELL) for height in _BELL)
"""The window along one axis."""


def hidden_pixels(hidden: Tensor, patch: int, height: int, width: int) -> Tensor:
    """(B, P) hidden patches -> (B, H, W) hidden pixels."""
    grid = hidden.reshape(-1, height // patch, width // patch)
    return grid.repeat_interleave(patch, 1).repeat_interleave(patch, 2)


def compose(predicted: Tensor, target: Tensor, hidden: Tensor) -> Tensor:
    """The target with its hidden pixels replaced by the prediction, clipped to [0, 1]."""
    return torch.where(hidden[:, None], predicted.clamp(0, 1), target)


def psnr_hidden(predicted: Tensor, target: Tensor, hidden: Tensor) -> Tensor:
    """(B,) peak signal-to-noise ratio in dB over the hidden pixels of each image."""
    wrong = (predicted.clamp(0, 1) - target).square().mean(1)  # (B, H, W)
    error = (wrong * hidden).sum((1, 2)) / hidden.sum((1, 2))
    return decibels(error)


def psnr_whole(composed: Tensor, target: Tensor) -> Tensor:
    """(B,) the same over all pixels, pasted ones among them."""
    return decibels((composed - target).square().mean((1, 2, 3)))


def decibels(error: Tensor) -> Tensor:
    """Mean squared error on the scale [0, 1] -> dB; a perfect image counts 100."""
    return -10 * error.clamp(min=1e-10).log10()


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
    and what SSIM does next, subtracting the square of a mean from the mean of squares, needs every
    digit.
    """
    images = F.pad(images, [WINDOW // 2] * 4, mode="reflect")
    for axis in (2, 3):
        length = images.shape[axis] - WINDOW + 1
        total = TAPS[0] * images.narrow(axis, 0, length)
        for shift in range(1, WINDOW):
            total = total.add(images.narrow(axis, shift, length), alpha=TAPS[shift])
        images = total
    return images


def ssim_hidden(predicted: Tensor, target: Tensor, hidden: Tensor) -> Tensor:
    """(B,) the composed image's SSIM averaged over the hidden pixels of each image."""
    similarity = ssim_map(compose(predicted, target, hidden), target).mean(1)
    return (similarity * hidden).sum((1, 2)) / hidden.sum((1, 2))


def mean_of_visible(target: Tensor, hidden: Tensor) -> Tensor:
    """A prediction that knows nothing: every pixel is the mean colour of the visible ones."""
    seen = ~hidden[:, None]
    colour = (target * seen).sum((2, 3)) / seen.sum((2, 3))
    return colour[..., None, None].expand_as(target)


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


def published_zero(target: Tensor, hidden: Tensor, patch: int) -> Tensor:
    """(B,) the published metric of a model that always answers zero: the leaked means alone."""
    return published_psnr(torch.zeros_like(target), target, hidden, patch)
