"""Plans that fit into a given time: search, epochs and seeds, in the order in which they are given up."""

from itertools import pairwise

import pytest

from bisam.lab.fitting.budget import StudySize, _smaller, duration, given_up, planned, seconds
from bisam.lab.fitting.rehearsal import Cost

COSTS = {"sgd": Cost(1.0, 2.0, 10), "sam": Cost(2.0, 2.0, 10)}
SEARCHED = {"sam": COSTS["sam"]}
WANTED = StudySize(epochs=20, seeds=5, grid=5, repeats=2)


def test_the_estimated_seconds_are_those_of_all_trainings_and_of_the_search():
    # five seeds of 20 epochs: 10 steps and a validation each; ten short trainings of 40 steps and a validation
    assert seconds(WANTED, COSTS, SEARCHED) == 5 * 20 * (12 + 22) + 10 * (40 * 2 + 2)
    eager = {"sam": Cost(2.0, 2.0, 10, once=7.0, searched_step=3.0)}  # once in each run, and not in the search
    assert seconds(WANTED, eager, eager) == 5 * (7 + 20 * 22) + 10 * (40 * 3 + 2)
    assert StudySize(1, 2, 5, 1).search_steps(10) == 10  # at least one epoch


def test_nothing_is_given_up_if_everything_fits():
    limit = seconds(WANTED, COSTS, SEARCHED)
    assert planned(WANTED, COSTS, SEARCHED, limit) == WANTED
    assert given_up(WANTED, WANTED) == []


@pytest.mark.parametrize("limit", [100, 200, 300, 700, 1000, 1500, 2000, 3000, 4000])
def test_the_plan_fits_into_the_given_time(limit):
    found = planned(WANTED, COSTS, SEARCHED, limit)
    assert seconds(found, COSTS, SEARCHED) <= limit
    assert found.seeds >= 2
    assert given_up(WANTED, found)


def test_more_time_never_reduces_epochs_seeds_or_the_grid():
    plans = [planned(WANTED, COSTS, SEARCHED, limit) for limit in range(100, 4000, 50)]
    for one, other in pairwise(plans):
        assert one.epochs <= other.epochs
        assert one.seeds <= other.seeds
        assert one.grid <= other.grid


def test_plans_shrink_first_in_the_search_then_in_epochs_and_last_in_seeds():
    found = [(one.epochs, one.seeds, one.grid, one.repeats) for one in _smaller(WANTED)]
    assert found == [
        (20, 5, 5, 2), (20, 5, 5, 1), (20, 5, 3, 1), (10, 5, 3, 1), (10, 4, 3, 1), (10, 3, 3, 1), (10, 3, 0, 0),
        (5, 3, 0, 0), (5, 2, 0, 0), (2, 2, 0, 0), (1, 2, 0, 0),
    ]  # fmt: skip
    found = [(one.epochs, one.seeds, one.grid, one.repeats) for one in _smaller(StudySize(2, 3, 4, 1))]
    assert found == [(2, 3, 4, 1), (2, 3, 3, 1), (1, 3, 3, 1), (1, 3, 0, 0), (1, 2, 0, 0)]


def test_everything_given_up_is_listed():
    found = given_up(WANTED, StudySize(epochs=1, seeds=2, grid=3, repeats=1))
    assert found == [
        "1 epoch instead of 20",
        "2 seeds instead of 5",
        "3 values of ρ instead of 5",
        "1 training of each ρ instead of 2",
    ]


@pytest.mark.parametrize("least", [StudySize(1, 2, 0, 0), StudySize(1, 1, 0, 0)])
def test_one_epoch_of_two_seeds_without_a_search_is_not_made_smaller(least):
    assert list(_smaller(least)) == [least]


def test_a_duration_is_a_range_where_steps_scatter_in_the_training_or_in_the_search():
    steady, unsteady = Cost(1.0, 0.0, 10), Cost(1.0, 0.0, 10, scatter=0.2)
    assert duration(StudySize(6, 10, 0, 0), {"sam": steady}, {}) == "10 minutes"  # 600 steps
    assert duration(StudySize(6, 10, 0, 0), {"sam": unsteady}, {}) == "8 to 12 minutes"
    searched = StudySize(10, 0, 5, 6)  # thirty trainings of 20 steps
    assert duration(searched, {}, {"sam": steady}) == "10 minutes"
    assert duration(searched, {}, {"sam": unsteady}) == "8 to 12 minutes"
    close = Cost(1.0, 0.0, 10, scatter=0.1)
    assert duration(StudySize(6, 10, 0, 0), {"sam": close}, {}) == "10 minutes"  # 9 to 11, less than a quarter more


@pytest.mark.parametrize(
    ("step", "text"),
    [
        (0.01, "1 second"),  # less than half a second has no range
        (2.0, "1 to 3 seconds"),
        (50.0, "25 to 75 seconds"),
        (59.9, "30 to 90 seconds"),  # up to 89.85 seconds
        (60.0, "1 to 2 minutes"),
        (62.0, "1 to 2 minutes"),
        (600.0, "5 to 15 minutes"),
    ],
)
def test_a_range_is_in_seconds_below_a_minute_and_a_half(step, text):
    assert duration(StudySize(1, 1, 0, 0), {"sam": Cost(step, 0.0, 1, scatter=0.5)}, {}) == text


def test_a_range_whose_rounded_ends_are_equal_is_one_number():
    """From 1.4 to 1.8 minutes: the whole minutes are 1 and 2; from 1.7 to 2.3 both are 2."""
    assert duration(StudySize(1, 1, 0, 0), {"sam": Cost(96.0, 0.0, 1, scatter=0.13)}, {}) == "1 to 2 minutes"
    assert duration(StudySize(1, 1, 0, 0), {"sam": Cost(120.0, 0.0, 1, scatter=0.15)}, {}) == "2 minutes"


@pytest.mark.parametrize("epochs", [[3, 1], [2, 1], [4, 2, 1], [9, 4, 2, 1]])
def test_few_epochs_are_halved_down_to_one_and_no_budget_is_repeated(epochs):
    found = list(_smaller(StudySize(epochs[0], 3, 0, 0)))
    assert list(dict.fromkeys(one.epochs for one in found)) == epochs
    assert len(found) == len(set(found))
    assert [one.epochs for one in found if one.seeds == 3] == epochs[:3]  # a quarter comes before two seeds


def test_a_search_of_three_values_is_dropped_and_not_shortened():
    found = [(one.epochs, one.seeds, one.grid, one.repeats) for one in _smaller(StudySize(1, 2, 3, 1))]
    assert found == [(1, 2, 3, 1), (1, 2, 0, 0)]


def test_a_plan_without_a_search_does_not_report_a_dropped_search():
    assert given_up(StudySize(10, 3, 0, 0), StudySize(5, 3, 0, 0)) == ["5 epochs instead of 10"]


def test_the_search_is_given_up_before_the_third_seed():
    found = planned(WANTED, COSTS, SEARCHED, 600)
    assert (found.grid, found.seeds >= 3) == (0, True)


def test_too_short_a_time_is_refused_with_one_that_suffices():
    with pytest.raises(ValueError, match="takes about 68 seconds: give --minutes 2") as refusal:
        planned(WANTED, COSTS, SEARCHED, 10)
    assert "2 seeds of 1 epoch without" in str(refusal.value)
    with pytest.raises(ValueError, match="compared, 1 seed of 1 epoch without"):
        planned(StudySize(1, 1, 0, 0), COSTS, {}, 10)
