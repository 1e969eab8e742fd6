"""Means over seeds with 95 % intervals of Student's t.

For whole degrees of freedom ν the distribution has a closed form in θ = atan(t / √ν), so no table
and no statistics library is needed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Estimate:
    """A mean over runs and how far it may be off."""

    mean: float
    half_width: float | None
    """The interval is mean ± half_width; None where one run says nothing of the spread."""
    count: int


def estimate(values: Sequence[float | None]) -> Estimate:
    """Mean and interval of one value per seed. A None or NaN (diverged) makes the mean NaN.

    >>> estimate([0.91, 0.94, 0.94])  # doctest: +ELLIPSIS
    Estimate(mean=0.93, half_width=0.04302..., count=3)
    >>> estimate([0.91]).half_width is None
    True
    """
    if not values:
        raise ValueError("estimate: expected at least one value, got none")
    numbers = [math.nan if value is None else float(value) for value in values]
    count = len(numbers)
    if not all(math.isfinite(number) for number in numbers):
        return Estimate(math.nan, None, count)
    mean = math.fsum(numbers) / count
    if count == 1:
        return Estimate(mean, None, 1)
    variance = math.fsum((number - mean) ** 2 for number in numbers) / (count - 1)
    return Estimate(mean, t_quantile(count - 1) * math.sqrt(variance / count), count)


@lru_cache(maxsize=256)
def t_quantile(freedom: int, confidence: float = CONFIDENCE) -> float:
    """The t with P(|T| < t) = `confidence` at `freedom` degrees of freedom, by bisection in θ.

    >>> round(t_quantile(1), 3), round(t_quantile(4), 3), round(t_quantile(30), 3)
    (12.706, 2.776, 2.042)
    """
    if freedom < 1 or not 0 < confidence < 1:
        raise ValueError(
            "t_quantile: expected freedom of 1 or more and a confidence between 0 and 1, "
            f"got {freedom} and {confidence}"
        )
    low, high = 0.0, math.pi / 2
    for _ in range(80):  # halves π / 2 to below the rounding of a float64
        middle = (low + high) / 2
        if _central(middle, freedom) < confidence:
            low = middle
        else:
            high = middle
    return math.sqrt(freedom) * math.tan((low + high) / 2)


def _central(theta: float, freedom: int) -> float:
    """P(|T| < t) at t = √ν tan θ."""
    sine, cosine = math.sin(theta), math.cos(theta)
    odd = freedom % 2 == 1
    term, total = (cosine, 0.0) if odd else (1.0, 0.0)
    for k in range(freedom // 2):
        total += term
        step = (2 * k + 2) / (2 * k + 3) if odd else (2 * k + 1) / (2 * k + 2)
        term *= step * cosine * cosine
    return 2 / math.pi * (theta + sine * total) if odd else sine * total
