"""The paper's tables, number for number, by the labels that they have there."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import Any, NamedTuple

from bisam.lab.recipes import Recipe
from bisam.lab.tables.statistics import Moments


class PublishedCell(NamedTuple):
    """A number of the paper; the standard deviation only where it prints one."""

    mean: float
    std: float | None = None


@dataclass(frozen=True)
class PublishedTable:
    """Rows of columns of cells, and what holds for all of them. `average` has the mean of each column."""

    name: str
    cells: Mapping[str, Mapping[str, PublishedCell]]
    average: Mapping[str, PublishedCell]
    metric: str | None = None
    seeds: int | None = None
    dataset: str | None = None
    model: str | None = None
    hardware: str | None = None

    def moments(self, row: str, method: str) -> Moments | None:
        """What a cell prints, with its number of runs; None for a cell that is not there."""
        cell = self.cells.get(row, {}).get(method)
        return None if cell is None else Moments(*cell, self.seeds)


@cache
def table(name: str) -> PublishedTable:
    """The table of that label.

    >>> table("tab:time_cifar10").cells["resnet56"]["bisam"].mean
    30.0
    >>> table("tab:cifar10").cells["resnet56"]["bisam-log"]
    PublishedCell(mean=94.28, std=0.31)
    """
    found = tables()
    if name not in found:
        near = difflib.get_close_matches(name, found, n=3, cutoff=0.5) or found
        raise ValueError(f"the paper has no table {name!r}: the nearest labels are {', '.join(near)}")
    fields = dict(found[name])
    cells = {row: {column: _cell(x) for column, x in columns.items()} for row, columns in fields.pop("cells").items()}
    average = {column: _cell(x) for column, x in fields.pop("average", {}).items()}
    return PublishedTable(name, cells, average, **fields)


def of(recipe: Recipe) -> PublishedTable | None:
    """The table of a recipe, with a row for each of its lines; None where it is not the paper's.

    >>> from bisam.lab.recipes import find_recipe
    >>> found = of(find_recipe("glue"))
    >>> found.cells["cola_mcc"]["adamw"].mean, found.average["sam"].mean
    (56.63, 75.6)
    """
    if recipe.published is None:
        return None
    found = table(recipe.published)
    if not recipe.by_method:
        return found
    labels = dict.fromkeys(label for columns in found.cells.values() for label in columns)
    cells = {label: {method: columns[label] for method, columns in found.cells.items()} for label in labels}
    return replace(found, average=cells.pop(recipe.name), cells=cells)


@cache
def tables() -> Mapping[str, Any]:
    """The contents of published.json, by label."""
    text = resources.files("bisam.lab.tables").joinpath("published.json").read_text(encoding="utf-8")
    return json.loads(text)["tables"]


def _cell(printed: Any) -> PublishedCell:
    if isinstance(printed, dict):
        return PublishedCell(float(printed["mean"]), float(printed["std"]))
    if isinstance(printed, list):
        return PublishedCell(*map(float, printed))
    return PublishedCell(float(printed))
