"""Masks that belong to an image, and measures over what was hidden."""

import math
from functools import partial

import pytest
import torch

from tensor_memory_lab.tasks.masked_images import (
    drawn_visible,
    fixed_visible,
    hidden_mask,
    hidden_pixels,
    mean_of_visible,
    psnr_hidden,
    published_psnr,
    ssim_hidden,
    ssim_map,
    visible_count,
)


def test_a_mask_belongs_to_id_and_ratio_and_to_nothing_else():
    alone = fixed_visible(["b"], 196, 0.75)
    among = fixed_visible(["a", "b", "c"], 196, 0.75)
    assert torch.equal(alone[0], among[1])
    assert not torch.equal(among[0], among[1])
    assert fixed_visible(["b"], 196, 0.5).shape == (1, 98)
    assert fixed_visible(["bird"], 16, 0.75).tolist() == [[0, 5, 11, 15]]  # on every machine


@pytest.mark.parametrize("ratio", [0.25, 0.5, 0.75])
def test_visible_patches_stay_in_raster_order(ratio):
    noise = torch.rand(5, 49)
    drawn = drawn_visible(noise, ratio)
    smallest = noise.sort(1).values[:, : drawn.shape[1]]
    assert torch.equal(noise.gather(1, drawn).sort(1).values, smallest)
    for visible in (fixed_visible(["a", "b"], 49, ratio), drawn):
        assert visible.shape[1] == visible_count(49, ratio)
        assert (visible.diff(dim=1) > 0).all()
        assert visible.min() >= 0
        assert visible.max() < 49


def test_every_patch_is_hidden_about_equally_often():
    visible = fixed_visible([str(i) for i in range(2000)], 16, 0.75)
    shown = torch.bincount(visible.flatten(), minlength=16) / 2000
    assert (shown - 0.25).abs().max() < 0.05  # five standard deviations of a fair draw


def test_hidden_is_what_is_not_visible():
    hidden = hidden_mask(torch.tensor([[1, 2]]), 4)
    assert hidden.tolist() == [[True, False, False, True]]
    pixels = hidden_pixels(hidden, 2, (2, 2))
    assert pixels.int().tolist() == [[[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 1], [0, 0, 1, 1]]]


@pytest.mark.parametrize("ratio", [0, 1, 0.01])
def test_a_ratio_that_hides_nothing_or_everything_is_refused(ratio):
    with pytest.raises(ValueError, match="mask ratio"):
        visible_count(16, ratio)


@pytest.fixture
def pictures():
    target = torch.rand(2, 3, 24, 24)
    visible = fixed_visible(["a", "b"], 9, 0.5)
    hidden = hidden_pixels(hidden_mask(visible, 9), 8, (3, 3))
    return target, hidden


def test_psnr_is_minus_ten_log_of_the_hidden_error(pictures):
    target, hidden = pictures
    target = target * 0.5
    off = torch.where(hidden[:, None], target + 0.1, target + 0.4)  # visible errors do not count
    assert psnr_hidden(off, target, hidden).tolist() == pytest.approx([20.0, 20.0], abs=1e-4)


def test_ssim_is_the_map_of_the_composed_image_over_hidden_pixels(pictures):
    from torchmetrics.functional.image import structural_similarity_index_measure  # slow

    target, hidden = pictures
    guess = torch.rand_like(target)
    composed = torch.where(hidden[:, None], guess, target)
    _, full = structural_similarity_index_measure(
        composed, target, data_range=1.0, return_full_image=True
    )
    assert torch.allclose(ssim_map(composed, target), full, atol=1e-5)
    expected = [full[i].mean(0)[hidden[i]].mean().item() for i in range(2)]
    assert ssim_hidden(guess, target, hidden).tolist() == pytest.approx(expected, abs=1e-5)
    elsewhere = torch.where(hidden[:, None], guess, torch.rand_like(target))
    assert torch.equal(ssim_hidden(elsewhere, target, hidden), ssim_hidden(guess, target, hidden))
    assert ssim_hidden(target, target, hidden).tolist() == pytest.approx([1, 1])


def test_mean_of_visible_looks_at_visible_pixels_alone(pictures):
    target, hidden = pictures
    guess = mean_of_visible(target, hidden)
    for row in range(2):
        colour = target[row][:, ~hidden[row]].mean(1)
        assert torch.allclose(guess[row], colour[:, None, None].expand(3, 24, 24))
    spoiled = torch.where(hidden[:, None], 9.0, target)
    assert torch.equal(mean_of_visible(spoiled, hidden), guess)


def test_the_published_metric_by_hand():
    target = torch.zeros(1, 3, 2, 4)
    target[..., 2:] = torch.tensor([[0.2, 0.4], [0.6, 0.8]])  # the second patch, mean 0.5
    hidden = torch.zeros(1, 2, 4, dtype=torch.bool)
    hidden[..., 2:] = True
    variance = (0.3**2 + 0.1**2 + 0.1**2 + 0.3**2) / 4
    zero = -10 * math.log10(variance / 2)  # half of the image is pasted
    nothing = torch.zeros_like(target)
    assert published_psnr(nothing, target, hidden, 2).item() == pytest.approx(zero, abs=1e-4)
    flat = torch.full_like(target, 0.9)  # a wrong mean costs nothing here
    assert published_psnr(flat, target, hidden, 2).item() == pytest.approx(zero, abs=1e-4)
    shape = torch.where(hidden[:, None], target - 0.15, target)
    assert published_psnr(shape, target, hidden, 2).item() == 100.0


def test_every_metric_takes_a_prediction_as_it_would_be_shown():
    target, predicted = torch.rand(2, 3, 16, 16), 3 * torch.rand(2, 3, 16, 16) - 1
    hidden = torch.rand(2, 16, 16) < 0.5
    shown = predicted.clamp(0, 1)
    for metric in (psnr_hidden, ssim_hidden, partial(published_psnr, patch=4)):
        assert torch.equal(metric(predicted, target, hidden), metric(shown, target, hidden))
