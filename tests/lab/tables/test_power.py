"""How many seeds resolve a difference, against the power of the t test by integration and by simulation."""

import math
import statistics

import numpy as np
import pytest

from bisam.lab.tables.power import MOST_SEEDS, POWER, more_seeds, seeds_to_resolve
from bisam.lab.tables.statistics import difference


def power_by_integration(size, count):
    """P(√n x̄ / s > t) for normal differences of mean `size` and deviation 1, as an integral over s, in float64."""
    freedom = count - 1
    s = np.linspace(1e-9, 1 + 12 / math.sqrt(freedom), 200_001)
    half = freedom / 2
    log_density = math.log(2) + half * math.log(half) - math.lgamma(half) + (freedom - 1) * np.log(s) - half * s**2
    erfc = np.vectorize(math.erfc)
    coarse = slice(None, None, 20)  # the integrand is smooth: Simpson on 10,001 points
    s, density = s[coarse], np.exp(log_density[coarse])
    limit = critical_value(freedom)
    beyond = 0.5 * erfc((limit * s - size * math.sqrt(count)) / math.sqrt(2))
    weights = np.ones(len(s))
    weights[1:-1:2], weights[2:-1:2] = 4, 2
    return float((weights * density * beyond).sum() * (s[1] - s[0]) / 3)


def critical_value(freedom):
    """The 97.5 % quantile of Student's t, by bisection of its integrated density."""
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(freedom * math.pi)

    def below(limit):
        x = np.linspace(0, limit, 20_001)
        y = scale * (1 + x**2 / freedom) ** (-(freedom + 1) / 2)
        return 0.5 + float((y[:-1] + y[1:]).sum() * (x[1] - x[0]) / 2)

    low, high = 1.0, 20.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if below(middle) < 0.975 else (low, middle)
    return low


@pytest.mark.parametrize("size", [0.15, 0.5, 1.0, 2.5])
def test_the_number_of_seeds_is_the_smallest_that_gives_the_paired_t_test_its_power(size):
    count = seeds_to_resolve(size, 1.0)
    assert power_by_integration(size, count) >= POWER
    assert power_by_integration(size, count - 1) < POWER


def test_simulated_experiments_resolve_the_difference_with_the_planned_power():
    count = seeds_to_resolve(0.9, 1.0)
    draws = np.random.default_rng(0).normal(0.9, 1.0, (40_000, count))
    t = math.sqrt(count) * draws.mean(1) / draws.std(1, ddof=1)
    share = (t > critical_value(count - 1)).mean()
    error = math.sqrt(POWER * (1 - POWER) / len(draws))
    assert POWER - 4 * error < share < POWER + 0.05  # one seed more or less changes the power by more than 0.03


def test_the_number_of_seeds_is_bounded_for_extreme_effects():
    assert seeds_to_resolve(0.0, 1.0) == seeds_to_resolve(1e-9, 1.0) == seeds_to_resolve(0.008, 1.0) == MOST_SEEDS
    assert 90_000 < seeds_to_resolve(0.0092, 1.0) < MOST_SEEDS  # about (2.8 / 0.0092)²
    assert seeds_to_resolve(100.0, 1e-6) == 2


@pytest.mark.parametrize("gaps", [[1.0, -0.5, 2.0], [0.1, 0.9, -0.3, 0.4], [-1.0, 0.2, 0.1], [1.0, 1.1]])
def test_the_number_of_additional_seeds_is_the_smallest_that_gives_the_power(gaps):
    found = difference(dict(enumerate(gaps)), dict.fromkeys(range(len(gaps)), 0.0))
    size, more = abs(statistics.fmean(gaps)) / statistics.stdev(gaps), more_seeds(found)
    if found.resolved:
        assert more == 0
        return
    assert power_by_integration(size, len(gaps) + more) >= POWER
    assert power_by_integration(size, len(gaps) + more - 1) < POWER


def test_without_pairs_or_scatter_there_is_no_number_of_additional_seeds():
    assert more_seeds(difference({0: 1.0, 1: 2.0}, {2: 1.5, 3: 2.5})) is None
    assert more_seeds(difference({0: 1.0}, {0: 1.5})) is None
    assert more_seeds(difference({0: 1.0, 1: 2.0}, {0: 2.0, 1: 3.0})) is None
