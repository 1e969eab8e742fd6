"""How closely two computations of the same thing must agree, per float type; the only such table.

float64 is judged absolutely by the project's 1e-10. The others allow a few hundred roundings of
values of order one: the type's machine epsilon times what the longest sums in the tests gather.

Whole scans are judged by the size of their error as a share of the result's, both root mean
squares: a few wrong values among many zeros cannot hide, nor does one rounding near zero count.
A single number that is a sum of terms which nearly cancel is judged by the size of the terms.
"""

import torch
from torch import Tensor

TOLERANCE = {
    torch.float64: 1e-10,
    torch.float32: 1e-5,
    torch.float16: 1e-2,
    torch.bfloat16: 6e-2,
}

RMS_RATIO = {
    torch.float64: 1e-12,
    torch.float32: 5e-6,
    torch.bfloat16: 2e-2,
}


def assert_same(got: Tensor, expected: Tensor, dtype: torch.dtype | None = None) -> None:
    """Equal shapes, and values within `dtype`'s tolerance (by default that of `got`)."""
    tolerance = TOLERANCE[dtype or got.dtype]
    torch.testing.assert_close(
        got.double(), expected.double(), rtol=tolerance, atol=tolerance, check_device=False
    )


def assert_same_rms(
    name: str, got: Tensor, expected: Tensor, dtype: torch.dtype, terms: Tensor | None = None
) -> None:
    """Equal shapes, and an error that is a small share of `expected`; of 1 where that is zero.

    With `terms`, of which a single number is the sum, a small share of their norm.
    """
    assert got.shape == expected.shape, f"{name}: {tuple(got.shape)} for {tuple(expected.shape)}"
    if expected.numel() == 0:
        return
    error = (got.double() - expected.double()).square().mean().sqrt().item()
    size = expected.double().square().mean().sqrt().item() or 1.0
    if terms is not None:
        assert expected.numel() == 1
        torch.testing.assert_close(terms.double().sum(), expected.double().sum())
        size = terms.double().norm().item()
    assert error <= RMS_RATIO[dtype] * size, f"{name}: rms error {error:.2e} of {size:.2e}"
