"""All tables of a group of runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from bisam.lab.tables.cells import Group, Run, with_equal_runs
from bisam.lab.tables.levels import sheet_of_levels
from bisam.lab.tables.summary import Sheet, sheet, sheet_of_comparisons


def sheets(groups: Iterable[Group], runs: Sequence[Run] = ()) -> list[Sheet]:
    """Of each group its table, its differences between methods and its distances from the paper.

    `runs` are those of all tables, from which some tables borrow.
    """
    filled = [with_equal_runs(group, runs) for group in groups]
    made = [each for group in filled for each in (sheet(group), sheet_of_comparisons(group), sheet_of_levels(group))]
    return [each for each in made if each is not None]
