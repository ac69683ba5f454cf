"""How many epochs and seeds, and how large a grid of ρ, fit into a time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from bisam.lab.fitting.rehearsal import Cost

SEARCHED = 0.2
"""Part of a training that is spent on each ρ of the grid."""

PRECISE = 1.25
"""A time whose ends differ by less than this factor is one number."""

LEAST_SEEDS = 2
"""One seed has no scatter."""


@dataclass(frozen=True)
class StudySize:
    """Epochs and seeds of the training; values of ρ and repeats of the search, 0 for none."""

    epochs: int
    seeds: int
    grid: int
    repeats: int

    def search_steps(self, steps: int) -> int:
        """Steps of each training of the search, from those of an epoch."""
        return max(10, math.ceil(SEARCHED * self.epochs * steps))


def seconds(budget: StudySize, costs: Mapping[str, Cost], searched: Mapping[str, Cost]) -> float:
    """What it takes to train all methods, and to search ρ of those that are searched."""
    training = sum(budget.seeds * cost.of(budget.epochs) for cost in costs.values())
    trials = budget.grid * budget.repeats
    search = sum(trials * one.of_search(budget.search_steps(one.steps)) for one in searched.values())
    return training + search


def duration(budget: StudySize, costs: Mapping[str, Cost], searched: Mapping[str, Cost]) -> str:
    """The time in words: a range where the steps of the rehearsal scattered much.

    >>> duration(StudySize(10, 3, 0, 0), {"sam": Cost(1.0, 2.0, 10)}, {})
    '6 minutes'
    >>> duration(StudySize(10, 3, 0, 0), {"sam": Cost(1.0, 2.0, 10, scatter=0.5)}, {})
    '3 to 9 minutes'
    """
    low, high = (
        seconds(
            budget,
            {name: cost.scaled(1 + sign * cost.scatter) for name, cost in costs.items()},
            {name: cost.scaled(1 + sign * cost.scatter) for name, cost in searched.items()},
        )
        for sign in (-1, 1)
    )
    length = 1 if high < 90 else 60
    least, most = (max(1, round(time / length)) for time in (low, high))
    if high <= PRECISE * low or least == most:
        return _in_words(seconds(budget, costs, searched))
    return f"{least} to {most} {'seconds' if length == 1 else 'minutes'}"


def _in_words(time: float) -> str:
    """
    >>> _in_words(0.2), _in_words(20), _in_words(90), _in_words(600)
    ('1 second', '20 seconds', '2 minutes', '10 minutes')
    """
    number, unit = (max(1, round(time)), "second") if time < 90 else (round(time / 60), "minute")
    return counted(number, unit)


def counted(number: int, noun: str) -> str:
    """
    >>> counted(1, "seed"), counted(3, "epoch")
    ('1 seed', '3 epochs')
    """
    return f"{number} {noun}{'s' * (number != 1)}"


def planned(wanted: StudySize, costs: Mapping[str, Cost], searched: Mapping[str, Cost], limit: float) -> StudySize:
    """The first of the smaller budgets that fits into `limit` seconds; ValueError if none does."""
    for budget in _smaller(wanted):
        if seconds(budget, costs, searched) <= limit:
            return budget
    least = seconds(budget, costs, searched)  # of one epoch
    raise ValueError(
        f"the least that can be compared, {counted(budget.seeds, 'seed')} of 1 epoch without a search of ρ, takes "
        f"about {_in_words(least)}: give --minutes {math.ceil(1.2 * least / 60)}, or a smaller model"
    )


def _smaller(wanted: StudySize) -> Iterator[StudySize]:
    """Budgets in the order in which they are preferred, each smaller than the one before.

    First the search gets shorter, then the training; seeds are kept longest, for without them nothing is resolved.
    """
    budget = wanted
    yield budget
    if budget.repeats > 1:
        yield (budget := replace(budget, repeats=1))
    if budget.grid > 3:
        yield (budget := replace(budget, grid=3))
    if budget.epochs > 1:
        yield (budget := replace(budget, epochs=max(1, wanted.epochs // 2)))
    while budget.seeds > 3:
        yield (budget := replace(budget, seeds=budget.seeds - 1))
    if budget.grid:
        yield (budget := replace(budget, grid=0, repeats=0))
    if budget.epochs > 1:
        yield (budget := replace(budget, epochs=max(1, wanted.epochs // 4)))
    while budget.seeds > LEAST_SEEDS:
        yield (budget := replace(budget, seeds=budget.seeds - 1))
    while budget.epochs > 1:
        yield (budget := replace(budget, epochs=budget.epochs // 2))


def given_up(wanted: StudySize, planned: StudySize) -> list[str]:
    """
    >>> given_up(StudySize(10, 3, 5, 2), StudySize(5, 3, 0, 0))
    ['5 epochs instead of 10', "no search: ρ is the paper's"]
    """
    found = []
    if planned.epochs < wanted.epochs:
        found.append(f"{counted(planned.epochs, 'epoch')} instead of {wanted.epochs}")
    if planned.seeds < wanted.seeds:
        found.append(f"{planned.seeds} seeds instead of {wanted.seeds}")
    if planned.grid == 0 < wanted.grid:
        return [*found, "no search: ρ is the paper's"]
    if planned.grid < wanted.grid:
        found.append(f"{planned.grid} values of ρ instead of {wanted.grid}")
    if planned.repeats < wanted.repeats:
        found.append(f"{planned.repeats} training of each ρ instead of {wanted.repeats}")
    return found
