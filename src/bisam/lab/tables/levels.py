"""How far the accuracies of our runs are from the paper's."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from bisam.lab.methods import title_of
from bisam.lab.tables.cells import ResultTable
from bisam.lab.tables.statistics import Difference, Moments, difference_of_means, signed
from bisam.lab.tables.summary import OPEN, Sheet, published_of, spread


@dataclass(frozen=True)
class Level:
    """The mean of a cell, beside the paper's."""

    row: str
    method: str
    ours: Moments
    paper: Moments
    found: Difference
    """Ours − the paper's, taken as independent (Welch's t)."""


def levels(table: ResultTable) -> list[Level]:
    """Of the cells that have runs and a number in the paper; none where another network stands in for the paper's."""
    paper = None if table.fields else published_of(table)
    if paper is None:
        return []
    made = []
    for label, row, name in table.recipe.lines:
        for method in table.recipe.methods:
            values, printed = [*table.measured(row, method, name).values()], paper.moments(label, method)
            if values and printed is not None:
                deviation = statistics.stdev(values) if len(values) > 1 else None
                ours = Moments(statistics.fmean(values), deviation, len(values))
                made.append(Level(label, method, ours, printed, difference_of_means(ours, printed)))
    return made


def sheet_of_levels(table: ResultTable) -> Sheet | None:
    """The levels with their intervals; None without any."""
    found = levels(table)
    if not found:
        return None
    head = ["level", "ours", "paper's", "ours − paper's", "95 % interval", "apart?"]
    rows = [
        [
            f"{one.row}: {title_of(one.method)}",
            _text(one.ours),
            _text(one.paper),
            signed(one.found.mean),
            one.found.interval or OPEN,
            OPEN if one.found.low is None else "yes" if one.found.resolved else "no",
        ]
        for one in found
    ]
    notes = [
        "Welch's t, from means, standard deviations and numbers of runs. Apart: the interval excludes 0. Methods of "
        "one row share seeds, so their levels are not independent of each other."
    ]
    return Sheet(f"{table.title}: distance from the paper in points of {table.recipe.measure}", head, rows, notes)


def _text(one: Moments) -> str:
    text = spread(one.mean, one.deviation)
    return text if one.runs is None else f"{text}, n = {one.runs}"
