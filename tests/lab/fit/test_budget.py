"""What fits into a time: search, epochs and seeds, in the order in which they are given up."""

from itertools import pairwise

import pytest

from bisam.lab.fitting.budget import Budget, given_up, planned, seconds
from bisam.lab.fitting.rehearsal import Cost

COSTS = {"sgd": Cost(1.0, 2.0, 10), "sam": Cost(2.0, 2.0, 10)}
SEARCHED = {"sam": COSTS["sam"]}
WANTED = Budget(epochs=20, seeds=5, grid=5, repeats=2)


def test_seconds_are_those_of_all_trainings_and_of_the_search():
    # five seeds of 20 epochs: 10 steps and a validation each; ten short trainings of 40 steps and a validation
    assert seconds(WANTED, COSTS, SEARCHED) == 5 * 20 * (12 + 22) + 10 * (40 * 2 + 2)


def test_nothing_is_given_up_where_all_fits():
    limit = seconds(WANTED, COSTS, SEARCHED)
    assert planned(WANTED, COSTS, SEARCHED, limit) == WANTED
    assert given_up(WANTED, WANTED) == []


@pytest.mark.parametrize("limit", [100, 200, 300, 700, 1000, 1500, 2000, 3000, 4000])
def test_what_is_planned_fits(limit):
    found = planned(WANTED, COSTS, SEARCHED, limit)
    assert seconds(found, COSTS, SEARCHED) <= limit
    assert found.seeds >= 2
    assert given_up(WANTED, found)


def test_more_time_never_buys_less():
    plans = [planned(WANTED, COSTS, SEARCHED, limit) for limit in range(100, 4000, 50)]
    for one, other in pairwise(plans):
        assert one.epochs <= other.epochs
        assert one.seeds <= other.seeds
        assert one.grid <= other.grid


def test_the_search_is_given_up_before_the_third_seed():
    found = planned(WANTED, COSTS, SEARCHED, 600)
    assert (found.grid, found.seeds >= 3) == (0, True)


def test_too_short_a_time_is_refused_with_one_that_suffices():
    with pytest.raises(ValueError, match="takes about 68 seconds: give --minutes 2") as refusal:
        planned(WANTED, COSTS, SEARCHED, 10)
    assert "2 seeds of 1 epoch without" in str(refusal.value)
