"""How many seeds resolve a difference: the power of the paired t test. The one rule of answers, reports and plans."""

from __future__ import annotations

import math

from bisam.lab.tables.statistics import LEVEL, Difference

POWER = 0.8
"""Chance to resolve an effect that is there, as sample sizes are usually planned."""

MOST_SEEDS = 100_000
"""This many or more are shown as too many."""


def seeds_to_resolve(effect: float, deviation: float) -> int:
    """Pairs of runs with which a paired t test (95 %, two-sided) finds this effect with a chance of 80 %.

    `deviation` is the standard deviation of the difference of a pair. `MOST_SEEDS` at most.

    >>> [seeds_to_resolve(effect, 1.0) for effect in (0.5, 0.8, 1.0)]
    [34, 15, 10]
    """
    size = abs(effect) / deviation
    if size == 0 or (2.8 / size) ** 2 > MOST_SEEDS:
        return MOST_SEEDS
    enough = 2
    while _power(size, enough) < POWER:
        enough *= 2
    too_few = enough // 2
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        too_few, enough = (too_few, middle) if _power(size, middle) >= POWER else (middle, enough)
    return enough


def more_seeds(found: Difference) -> int | None:
    """Seeds that `seeds_to_resolve` a difference of this size and scatter, without those that it has.

    0 if it is resolved; None where it is not of pairs, or the scatter of the pairs is not known.

    >>> from bisam.lab.tables.statistics import difference
    >>> more_seeds(difference({0: 1.0, 1: 2.0, 2: 4.0}, {0: 0.0, 1: 1.5, 2: 1.0}))
    6
    """
    if found.resolved:
        return 0
    return None if found.deviation is None else seeds_to_resolve(found.mean, found.deviation) - found.runs[0]


def deviation_range(deviation: float, count: int) -> tuple[float, float]:
    """The 95 % interval of a standard deviation that was estimated from `count` normal values.

    >>> "{:.2f} {:.2f}".format(*deviation_range(1.0, 3))
    '0.52 6.28'
    """
    from scipy.stats import chi2

    freedom = count - 1
    low, high = (float(chi2.ppf(q, freedom)) for q in ((1 + LEVEL) / 2, (1 - LEVEL) / 2))
    return deviation * math.sqrt(freedom / low), deviation * math.sqrt(freedom / high)


def count_text(count: int) -> str:
    """A number of seeds, for a table.

    >>> count_text(1234), count_text(MOST_SEEDS)
    ('1,234', 'too many')
    """
    return "too many" if count >= MOST_SEEDS else f"{count:,}"


def _power(size: float, count: int) -> float:
    from scipy.stats import nct, t  # here: it is slow to import, and training does not need it

    freedom, shift = count - 1, size * math.sqrt(count)
    limit = float(t.ppf((1 + LEVEL) / 2, freedom))
    power = float(nct.sf(limit, freedom, shift))
    return 1.0 if math.isnan(power) else power  # so far out that its tail cannot be computed
