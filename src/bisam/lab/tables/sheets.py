"""All sheets of some tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from bisam.lab.tables.cells import ResultTable, Run, with_equal_runs
from bisam.lab.tables.levels import sheet_of_levels
from bisam.lab.tables.summary import Sheet, sheet, sheet_of_comparisons


def sheets(tables: Iterable[ResultTable], runs: Sequence[Run] = ()) -> list[Sheet]:
    """Of each table its cells, its differences between methods and its distances from the paper.

    `runs` are those of all tables, from which some tables borrow.
    """
    filled = [with_equal_runs(table, runs) for table in tables]
    made = [each for table in filled for each in (sheet(table), sheet_of_comparisons(table), sheet_of_levels(table))]
    return [each for each in made if each is not None]
