"""All tables of a group of runs."""

from __future__ import annotations

from collections.abc import Iterable

from bisam.lab.tables.cells import Group
from bisam.lab.tables.levels import sheet_of_levels
from bisam.lab.tables.summary import Sheet, sheet, sheet_of_comparisons


def sheets(groups: Iterable[Group]) -> list[Sheet]:
    """Of each group its table, its differences between methods and its distances from the paper."""
    made = [each for group in groups for each in (sheet(group), sheet_of_comparisons(group), sheet_of_levels(group))]
    return [each for each in made if each is not None]
