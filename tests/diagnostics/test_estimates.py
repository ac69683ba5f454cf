"""Means of random samples and their standard errors, computed by hand."""

import math

import pytest

from bisam.diagnostics.estimates import estimate


def test_the_standard_error_is_that_of_the_mean():
    # squared distances from the mean 3: 4, 4, 1, 9, 18 in all, of three degrees of freedom
    assert estimate([1.0, 1.0, 4.0, 6.0]) == pytest.approx((3.0, math.sqrt(18 / 3 / 4)))


def test_one_sample_has_no_standard_error():
    mean, error = estimate([2.5])
    assert mean == 2.5
    assert math.isnan(error)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_if_a_sample_is_not_finite_neither_is_the_mean(value):
    mean, error = estimate([1.0, value, 2.0])
    assert mean == value or (math.isnan(mean) and math.isnan(value))
    assert math.isnan(error)
