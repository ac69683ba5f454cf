"""Differences of means, against scipy's intervals and against simulated coverage."""

import math
import random
import warnings

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from scipy.stats import t, ttest_ind, ttest_rel

from bisam.lab.tables.statistics import (
    Difference,
    Moments,
    difference,
    difference_of_means,
    holm,
    interval_of_mean,
)

accuracies = st.floats(0, 100)
EXACT = {"rel": 1e-9, "abs": 1e-9}  # in points: the reference sums rounded squares


def seeds(low, high, first=0):
    """Accuracies by seed."""
    numbers = st.integers(first, first + 50)
    return st.dictionaries(numbers, accuracies, min_size=low, max_size=high)


def has_scatter(values):
    return max(values) - min(values) > 1e-6


def interval_of(test):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # scipy warns of nearly identical values
        low, high = test().confidence_interval(0.95)
    return low, high


# The reference.


@given(st.lists(st.tuples(accuracies, accuracies), min_size=2, max_size=8))
def test_pairs_have_the_interval_of_the_paired_t_test(pairs):
    ours, theirs = zip(*pairs, strict=True)
    assume(has_scatter([a - b for a, b in pairs]))
    found = difference(dict(enumerate(ours)), dict(enumerate(theirs)))
    assert (found.low, found.high) == pytest.approx(interval_of(lambda: ttest_rel(ours, theirs)), **EXACT)
    assert found.mean == pytest.approx(sum(a - b for a, b in pairs) / len(pairs), **EXACT)
    assert (found.paired, found.runs, found.n) == (True, (len(pairs), len(pairs)), f"{len(pairs)} pairs")
    assert found.p_value == pytest.approx(ttest_rel(ours, theirs).pvalue, rel=1e-6)


@given(st.lists(st.floats(0, 0.1), max_size=8))
@example([0.01, 0.02, 0.03])  # all with Holm, one with a level of 5 % ÷ 3 for each
def test_holm_rejects_where_the_adjusted_p_value_is_at_most_5_percent(p_values):
    count, adjusted, highest = len(p_values), [0.0] * len(p_values), 0.0
    for rank, place in enumerate(sorted(range(count), key=p_values.__getitem__)):
        highest = max(highest, (count - rank) * p_values[place])
        adjusted[place] = highest
    assume(all(abs(value - 0.05) > 1e-9 for value in adjusted))
    assert holm(p_values) == [value < 0.05 for value in adjusted]


@given(seeds(2, 8), seeds(2, 8, first=100))
def test_groups_without_common_seeds_have_the_interval_of_welch_s_t_test(ours, theirs):
    first, second = [*ours.values()], [*theirs.values()]
    assume(has_scatter(first) or has_scatter(second))
    found = difference(ours, theirs)
    expected = interval_of(lambda: ttest_ind(first, second, equal_var=False))
    assert (found.low, found.high) == pytest.approx(expected, **EXACT)
    assert found.mean == pytest.approx(sum(first) / len(first) - sum(second) / len(second), **EXACT)
    assert (found.paired, found.runs) == (False, (len(first), len(second)))


@pytest.mark.parametrize("runs", [(2, 2), (6, 6), (3, 6), (10, 2)])
def test_means_with_standard_deviations_have_the_interval_of_welch_s_t_test(runs):
    found = difference_of_means(Moments(95.22, 0.13, runs[0]), Moments(95.09, 0.31, runs[1]))
    squares = (0.13**2 / runs[0], 0.31**2 / runs[1])
    freedom = sum(squares) ** 2 / sum(square**2 / (n - 1) for square, n in zip(squares, runs, strict=True))
    half = t.ppf(0.975, freedom) * math.sqrt(sum(squares))
    assert (found.mean, found.low, found.high) == pytest.approx((0.13, 0.13 - half, 0.13 + half))
    assert (found.runs, found.paired, found.deviation) == (runs, False, None)


@pytest.mark.parametrize(
    ("ours", "theirs", "runs"),
    [
        ((95.0, 0.1), (94.0, 0.2), 1),
        ((95.0, 0.1), (94.0, 0.2), None),
        ((95.0, None), (94.0, 0.2), 6),
        ((95.0, 0.1), (94.0, None), 6),
    ],
)
def test_means_without_several_runs_or_a_deviation_have_no_interval(ours, theirs, runs):
    found = difference_of_means(Moments(*ours, runs), Moments(*theirs, runs))
    assert (found.mean, found.low, found.high, found.resolved) == (1.0, None, None, False)
    assert (found.runs, found.paired) == ((runs or 1, runs or 1), False)


@given(st.lists(accuracies, min_size=2, max_size=6).filter(has_scatter))
def test_a_mean_has_the_interval_of_student_s_t(values):
    mean = sum(values) / len(values)
    error = math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1) / len(values))
    assert interval_of_mean(values) == pytest.approx(t.interval(0.95, len(values) - 1, mean, error), **EXACT)


@pytest.mark.parametrize("values", [[], [94.0], [94.0, 94.0, 94.0]])
def test_a_mean_without_scatter_has_no_interval(values):
    assert interval_of_mean(values) == (None, None)


@given(seeds(0, 6), seeds(0, 6))
def test_the_interval_contains_the_mean_and_swapping_the_groups_negates_both(ours, theirs):
    found, back = difference(ours, theirs), difference(theirs, ours)
    if not ours or not theirs:
        assert (found, back) == (None, None)
        return
    assert math.isfinite(found.mean)
    assert back.mean == pytest.approx(-found.mean, **EXACT)
    assert (found.low is None) == (found.high is None) == (back.low is None)
    if found.low is not None:
        assert math.isfinite(found.low)
        assert math.isfinite(found.high)
        assert found.low <= found.mean <= found.high
        assert (back.low, back.high) == pytest.approx((-found.high, -found.low), **EXACT)


# Which runs are compared.


def test_two_common_seeds_are_compared_in_pairs_and_other_seeds_are_ignored():
    found = difference({0: 94.2, 1: 94.9, 7: 10.0}, {8: 99.0, 1: 94.7, 0: 94.1})
    assert found == difference({0: 94.2, 1: 94.9}, {0: 94.1, 1: 94.7})
    assert found.n == "2 pairs"


def test_runs_are_paired_by_seed_regardless_of_their_order():
    assert difference({1: 5.0, 0: 1.0}, {0: 0.5, 1: 4.0}).mean == pytest.approx(0.75)


def test_with_one_common_seed_the_runs_are_compared_unpaired():
    found = difference({0: 94.0, 1: 95.0}, {1: 93.0, 2: 94.0, 3: 95.0})
    assert not found.paired
    assert found.n == "2 and 3 runs"
    assert found.mean == pytest.approx(0.5)


@pytest.mark.parametrize(("ours", "theirs"), [({0: 94.0}, {0: 93.0}), ({0: 94.0}, {1: 93.0, 2: 93.2})])
def test_with_one_run_there_is_a_difference_without_an_interval(ours, theirs):
    found = difference(ours, theirs)
    assert found.mean > 0
    assert (found.low, found.high, found.interval) == (None, None, "")
    assert not found.resolved
    assert not found.paired


@pytest.mark.parametrize(("ours", "theirs"), [({}, {}), ({0: 1.0, 1: 2.0}, {}), ({}, {0: 1.0})])
def test_without_runs_on_both_sides_there_is_no_difference(ours, theirs):
    assert difference(ours, theirs) is None


# No scatter, or almost none.


def test_runs_without_scatter_resolve_nothing():
    """One more correct image of 600 in each of two pairs happens by chance."""
    pairs = difference({0: 565 / 6, 1: 570 / 6}, {0: 564 / 6, 1: 569 / 6})
    groups = difference({0: 1.0, 1: 1.0}, {2: 0.5, 3: 0.5, 4: 0.5})
    for found in (pairs, groups, difference({0: 1.0, 1: 1.0}, {2: 1.0, 3: 1.0})):
        assert (found.low, found.high, found.resolved) == (None, None, False)
    assert groups.mean == 0.5


@given(
    right=st.lists(st.integers(1, 9000), min_size=2, max_size=5),
    more=st.integers(-1000, 1000),
    images=st.sampled_from([600, 5000, 9999, 10_000]),
    paired=st.booleans(),
)
@example(right=[0, 9330], more=38, images=10_000, paired=True)  # 0.38 and 0.3799999999999955 points
def test_equal_differences_have_no_scatter_whatever_their_rounding_errors(right, more, images, paired):
    if not paired:
        right = [right[0]] * len(right)
    theirs = {seed: 100 * count / images for seed, count in enumerate(right)}
    ours = {seed + 100 * (not paired): 100 * (count + more) / images for seed, count in enumerate(right)}
    found = difference(ours, theirs)
    assert found.paired == paired
    assert (found.low, found.resolved) == (None, False)


def test_a_difference_of_one_image_between_two_pairs_counts_as_scatter():
    theirs = {0: 100 * 9330 / 10_000, 1: 100 * 9426 / 10_000}
    found = difference({0: 100 * 9368 / 10_000, 1: 100 * 9465 / 10_000}, theirs)
    assert found.low < found.mean < found.high


@pytest.mark.parametrize("size", [1e-3, 1e-60, 1e-100, 1e-150, 1e-160, 1e-200, 1e-300, 5e-324])
def test_a_scatter_whose_square_underflows_causes_no_error(size):
    found = difference({0: size, 1: 2 * size}, {2: size, 3: 3 * size})
    assert found.mean == pytest.approx(-0.5 * size, rel=1e-6)
    assert found.low is None or found.low <= found.mean <= found.high


def test_with_one_group_without_scatter_the_degrees_of_freedom_are_those_of_the_other():
    found = difference({0: 1.0, 1: 2.0, 2: 4.0}, {5: 1.0, 6: 1.0})
    alone = difference({0: 1.0, 1: 2.0, 2: 4.0}, {0: 1.0, 1: 1.0, 2: 1.0})  # the same, with two degrees of freedom
    assert (found.low, found.high) == pytest.approx((alone.low, alone.high))


# Coverage.


CASES = 2000
FOUR_SIGMA = 4 * math.sqrt(0.95 * 0.05 / CASES)


@pytest.mark.parametrize(
    ("ours", "theirs", "paired"), [(2, 2, True), (5, 5, True), (3, 3, False), (6, 4, False)], ids=str
)
def test_95_percent_of_the_intervals_contain_the_true_difference(ours, theirs, paired):
    """Runs of one seed share most of their randomness; unpaired groups have unequal scatter."""
    draws = random.Random(7)
    truth, covered = 0.3, 0
    for _ in range(CASES):
        shared = [draws.gauss(0, 2.0) for _ in range(ours)]
        first = {seed: 90 + truth + shared[seed] + draws.gauss(0, 0.2) for seed in range(ours)}
        if paired:
            second = {seed: 90 + shared[seed] + draws.gauss(0, 0.2) for seed in range(theirs)}
        else:
            second = {100 + seed: draws.gauss(90, 1.0) for seed in range(theirs)}
        found = difference(first, second)
        assert found.paired == paired
        covered += found.low <= truth <= found.high
    assert covered / CASES == pytest.approx(0.95, abs=FOUR_SIGMA)


# Descriptions.


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (
            Difference(0.25, 0.1, 0.4, (3, 3), paired=True),
            "BiSAM is better than SAM by 0.25 points, 95 % interval +0.10 to +0.40: resolved with 3 pairs",
        ),
        (
            Difference(-0.25, -0.4, -0.1, (3, 2), paired=False),
            "BiSAM is worse than SAM by 0.25 points, 95 % interval −0.40 to −0.10: resolved with 3 and 2 runs",
        ),
        (
            Difference(0.25, -0.1, 0.6, (2, 2), paired=True),
            "BiSAM is above SAM by 0.25 points, 95 % interval −0.10 to +0.60: not resolved with 2 pairs",
        ),
        (
            Difference(-0.25, -0.6, 0.1, (2, 2), paired=True),
            "BiSAM is below SAM by 0.25 points, 95 % interval −0.60 to +0.10: not resolved with 2 pairs",
        ),
        (
            Difference(0.0, -0.1, 0.1, (2, 2), paired=True),
            "BiSAM is level with SAM, off by 0.00 points, 95 % interval −0.10 to +0.10: not resolved with 2 pairs",
        ),
        (
            Difference(0.25, None, None, (1, 1), paired=False),
            "BiSAM is above SAM by 0.25 points: not resolved, the scatter cannot be estimated from 1 run each",
        ),
        (
            Difference(-0.25, None, None, (1, 4), paired=False),
            "BiSAM is below SAM by 0.25 points: not resolved, the scatter cannot be estimated from 1 and 4 runs",
        ),
        (
            Difference(0.0, None, None, (1, 1), paired=False),
            "BiSAM is level with SAM, off by 0.00 points: not resolved, "
            "the scatter cannot be estimated from 1 run each",
        ),
    ],
)
def test_each_outcome_is_described_in_a_sentence(found, words):
    assert found.describe("BiSAM", "SAM") == words


@pytest.mark.parametrize(("low", "high"), [(0.0, 0.5), (-0.5, 0.0), (0.0, 0.0), (-0.5, 0.5)])
def test_an_interval_that_contains_zero_is_not_resolved(low, high):
    assert not Difference((low + high) / 2, low, high, (3, 3), paired=True).resolved
