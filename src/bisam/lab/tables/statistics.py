"""Differences between methods: means over seeds, with 95 % intervals."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

LEVEL = 0.95

TOO_FEW, NO_SCATTER = "too few seeds", "all pairs are equal"
"""Why a difference has no interval. Pairs are equal too if each has the same difference."""

ARITHMETIC = 1e-12
"""Relative rounding error: equal differences of accuracies are seldom the same float."""


@dataclass(frozen=True)
class Difference:
    """The difference of the means of two groups, and its 95 % interval."""

    mean: float
    low: float | None
    """None, as `high`, where the scatter cannot be estimated: too few runs, or all differences equal."""
    high: float | None
    runs: tuple[int, int]
    """Number of runs of each group."""
    paired: bool
    """Whether runs of the same seed were compared with each other."""
    deviation: float | None = None
    """Standard deviation of the difference of a pair; None without pairs or an interval."""

    @property
    def resolved(self) -> bool:
        """Whether the interval excludes 0."""
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)

    @property
    def p_value(self) -> float | None:
        """Of Student's t test of the pairs; None without pairs or an interval.

        >>> f"{difference({0: 94.2, 1: 94.9, 2: 94.5}, {0: 94.0, 1: 94.7, 2: 94.2}).p_value:.3f}"
        '0.020'
        """
        if self.deviation is None:
            return None
        from scipy.stats import t  # slow to import, as below

        pairs = self.runs[0]
        return float(2 * t.sf(abs(self.mean) / self.deviation * pairs**0.5, pairs - 1))

    @property
    def interval(self) -> str:
        return "" if self.low is None or self.high is None else f"{signed(self.low)} to {signed(self.high)}"

    @property
    def why_no_interval(self) -> str:
        """Why the scatter cannot be estimated; empty if it can.

        >>> [difference(dict.fromkeys(range(n), 94.2), dict.fromkeys(range(n), 94.0)).why_no_interval for n in (1, 2)]
        ['too few seeds', 'all pairs are equal']
        """
        if self.low is not None:
            return ""
        return TOO_FEW if min(self.runs) < 2 else NO_SCATTER

    @property
    def n(self) -> str:
        """
        >>> difference({0: 1.0, 1: 2.0}, {0: 1.5, 1: 2.0}).n
        '2 pairs'
        >>> difference({0: 1.0}, {0: 1.5}).n
        '1 run each'
        """
        first, second = self.runs
        if self.paired:
            return f"{first} pairs"
        if first == second:
            return f"{first} run{'s' * (first > 1)} each"
        return f"{first} and {second} runs"

    def describe(self, name: str, other: str) -> str:
        """
        >>> difference({0: 94.2, 1: 94.9, 2: 94.5}, {0: 94.0, 1: 94.7, 2: 94.2}).describe("BiSAM", "SAM")
        'BiSAM is better than SAM by 0.23 points, 95 % interval +0.09 to +0.38: resolved with 3 pairs'
        >>> difference({0: 94.2}, {0: 94.0}).describe("BiSAM", "SAM")
        'BiSAM is above SAM by 0.20 points: not resolved, the scatter cannot be estimated from 1 run each'
        """
        size = f"{abs(self.mean):.2f} points"
        if self.low is None:
            caution = f"not resolved, the scatter cannot be estimated from {self.n}"
            return f"{name} is {_place(self.mean, other)} {size}: {caution}"
        interval = f"95 % interval {self.interval}"
        if self.resolved:
            verdict = "better" if self.mean > 0 else "worse"
            return f"{name} is {verdict} than {other} by {size}, {interval}: resolved with {self.n}"
        return f"{name} is {_place(self.mean, other)} {size}, {interval}: not resolved with {self.n}"


def difference(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Difference | None:
    """The mean of `ours` − `theirs`, both by seed; None where one of them is empty.

    Runs of one seed share weights, split, noise and order, so two or more common seeds are compared pair by pair
    (Student's t), and the others are left aside. Without them the groups are compared as they are (Welch's t).
    """
    common = sorted(ours.keys() & theirs.keys())
    if len(common) > 1:
        gaps = [ours[seed] - theirs[seed] for seed in common]
        mean, error, freedom = statistics.fmean(gaps), _squared_error(gaps) ** 0.5, len(gaps) - 1.0
        low, high = _interval(mean, error, freedom, [*ours.values(), *theirs.values()])
        deviation = None if low is None else statistics.stdev(gaps)
        return Difference(mean, low, high, (len(gaps), len(gaps)), paired=True, deviation=deviation)
    if not ours or not theirs:
        return None
    first, second = [*ours.values()], [*theirs.values()]
    mean, runs = statistics.fmean(first) - statistics.fmean(second), (len(first), len(second))
    if min(runs) < 2:
        return Difference(mean, None, None, runs, paired=False)
    low, high = _welch(mean, (_squared_error(first), _squared_error(second)), runs, [*first, *second])
    return Difference(mean, low, high, runs, paired=False)


def holm(p_values: Sequence[float]) -> list[bool]:
    """Which of several tests reject with Holm's correction, so that the chance of any false one is at most 5 %.

    >>> holm([0.04, 0.001, 0.03])
    [False, True, False]
    """
    in_order = sorted(range(len(p_values)), key=lambda place: p_values[place])
    rejected = [False] * len(p_values)
    for rank, place in enumerate(in_order):
        if p_values[place] > (1 - LEVEL) / (len(p_values) - rank):
            break
        rejected[place] = True
    return rejected


class Moments(NamedTuple):
    """Mean and standard deviation over runs, as a table prints them."""

    mean: float
    deviation: float | None
    runs: int | None


def difference_of_means(ours: Moments, theirs: Moments) -> Difference:
    """The difference of two means with standard deviations (Welch's t).

    >>> difference_of_means(Moments(95.22, 0.13, 6), Moments(95.09, 0.12, 6)).interval
    '−0.03 to +0.29'
    """
    mean, runs = ours.mean - theirs.mean, (ours.runs or 1, theirs.runs or 1)
    if ours.deviation is None or theirs.deviation is None or min(runs) < 2:
        return Difference(mean, None, None, runs, paired=False)
    squares = (ours.deviation**2 / runs[0], theirs.deviation**2 / runs[1])
    low, high = _welch(mean, squares, runs, [ours.mean, theirs.mean])
    return Difference(mean, low, high, runs, paired=False)


def interval_of_mean(values: Sequence[float]) -> tuple[float, float] | tuple[None, None]:
    """The 95 % interval of a mean (Student's t); None for fewer than two values, or equal ones.

    >>> low, high = interval_of_mean([94.0, 95.0, 96.0])
    >>> f"{low:.2f} {high:.2f}"
    '92.52 97.48'
    """
    if len(values) < 2:
        return None, None
    return _interval(statistics.fmean(values), _squared_error(values) ** 0.5, len(values) - 1.0, values)


def _welch(
    mean: float, squares: tuple[float, float], runs: tuple[int, int], values: Sequence[float]
) -> tuple[float, float] | tuple[None, None]:
    """Of two groups with these squared standard errors."""
    total = sum(squares)
    shares = [square / total for square in squares] if total else [1.0, 0.0]  # of tiny ones the squares would be 0
    freedom = 1 / sum(share**2 / (count - 1) for share, count in zip(shares, runs, strict=True))
    return _interval(mean, total**0.5, freedom, values)


def _squared_error(values: Sequence[float]) -> float:
    """Squared standard error of the mean."""
    return statistics.variance(values) / len(values)


def _interval(
    mean: float, error: float, freedom: float, values: Sequence[float]
) -> tuple[float, float] | tuple[None, None]:
    """None where runs do not scatter: accuracies are coarse, so equal differences are common."""
    if error <= ARITHMETIC * max(map(abs, values)):
        return None, None
    from scipy.stats import t  # here: it is slow to import, and training does not need it

    half = float(t.ppf((1 + LEVEL) / 2, freedom)) * error
    assert math.isfinite(half)
    return mean - half, mean + half


def signed(value: float) -> str:
    """
    >>> signed(-0.5)
    '−0.50'
    """
    return f"{value:+.2f}".replace("-", "−")


def _place(mean: float, other: str) -> str:
    return f"above {other} by" if mean > 0 else f"below {other} by" if mean < 0 else f"level with {other}, off by"
