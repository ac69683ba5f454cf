"""Means of random samples, with their standard errors."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple


class Estimate(NamedTuple):
    """The mean of random samples and its standard error, NaN for a single sample and where one is not finite."""

    mean: float
    standard_error: float


def estimate(values: Sequence[float]) -> Estimate:
    if len(values) == 1 or not all(map(math.isfinite, values)):
        return Estimate(sum(values) / len(values), math.nan)
    return Estimate(statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values)))
