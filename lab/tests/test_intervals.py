"""Means and intervals over seeds."""

from __future__ import annotations

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensor_memory_lab.records.intervals import estimate, t_quantile

# Two-sided 95 % quantiles of Student's t as printed in tables.
KNOWN = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 9: 2.262, 10: 2.228, 29: 2.045}
KNOWN |= {30: 2.042, 60: 2.000, 120: 1.980}

numbers = st.floats(-1e6, 1e6)


@pytest.mark.parametrize(("freedom", "quantile"), KNOWN.items())
def test_quantiles_are_those_of_the_tables(freedom, quantile):
    assert t_quantile(freedom) == pytest.approx(quantile, abs=5e-4)


@given(st.floats(0.01, 0.999))
def test_quantiles_of_one_and_two_degrees_have_their_closed_form(confidence):
    assert t_quantile(1, confidence) == pytest.approx(math.tan(math.pi * confidence / 2), rel=1e-9)
    two = confidence * math.sqrt(2 / (1 - confidence**2))
    assert t_quantile(2, confidence) == pytest.approx(two, rel=1e-9)


@given(st.integers(1, 60), st.floats(0.05, 0.99))
def test_quantiles_fall_with_freedom_towards_the_normal_one(freedom, confidence):
    normal = statistics.NormalDist().inv_cdf((1 + confidence) / 2)
    assert t_quantile(freedom, confidence) > t_quantile(freedom + 1, confidence) > normal


def test_quantiles_outside_their_range_are_refused():
    with pytest.raises(ValueError, match="expected freedom of 1 or more"):
        t_quantile(0)
    with pytest.raises(ValueError, match="a confidence between 0 and 1, got 3 and 1"):
        t_quantile(3, 1.0)


@given(st.lists(numbers, min_size=2, max_size=9))
def test_the_interval_is_t_times_the_standard_error(values):
    found = estimate(values)
    error = statistics.stdev(values) / math.sqrt(len(values))
    assert found.mean == pytest.approx(statistics.fmean(values), abs=1e-6)
    assert found.half_width == pytest.approx(t_quantile(len(values) - 1) * error, abs=1e-6)
    assert found.count == len(values)


@given(st.lists(numbers, min_size=2, max_size=9), numbers)
def test_moving_all_values_moves_the_mean_alone(values, by):
    moved = estimate([value + by for value in values])
    assert moved.mean == pytest.approx(estimate(values).mean + by, abs=1e-6)
    assert moved.half_width == pytest.approx(estimate(values).half_width, abs=1e-5)


def test_one_run_has_no_interval_and_a_diverged_one_no_mean():
    assert estimate([0.5]).half_width is None
    for diverged in (None, math.nan, math.inf):
        found = estimate([0.5, diverged, 0.7])
        assert math.isnan(found.mean)
        assert found.half_width is None
        assert found.count == 3
    with pytest.raises(ValueError, match="expected at least one value"):
        estimate([])
