"""Student's t for whole degrees of freedom, in closed form (Abramowitz and Stegun 26.7.3, 26.7.4)."""

from __future__ import annotations

import math

MOST_FREEDOM = 200
"""With more, t is that of 200, and too large by less than one in a hundred."""


def probability_within(t: float, freedom: int) -> float:
    """The probability that |T| ≤ t.

    >>> round(probability_within(1.0, 1), 6)
    0.5
    """
    angle = math.atan(t / math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    term, total = (cosine if odd else 1.0), 0.0
    for power in range(odd, freedom - 1, 2):  # of the cosine
        total += term
        term *= cosine**2 * (power + 1) / (power + 2)
    return 2 / math.pi * (angle + sine * total) if odd else sine * total


def quantile(level: float, freedom: float) -> float:
    """The t that |T| exceeds with probability 1 − level. Degrees of freedom are rounded down.

    >>> round(quantile(0.95, 2), 3)
    4.303
    """
    whole = max(1, min(math.floor(freedom), MOST_FREEDOM))
    low, high = 0.0, 1.0
    while probability_within(high, whole) < level:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if probability_within(middle, whole) < level else (low, middle)
    return high
