"""Means of random samples, with their standard errors."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple


class Estimate(NamedTuple):
    """The mean of random samples and its standard error, NaN for a single sample."""

    mean: float
    standard_error: float


def estimate(values: Sequence[float]) -> Estimate:
    if len(values) == 1:
        return Estimate(values[0], math.nan)
    return Estimate(statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values)))
