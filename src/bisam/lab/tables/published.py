"""The paper's tables, number for number, by the labels that they have there."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, NamedTuple


class Cell(NamedTuple):
    """A number of the paper; the standard deviation only where it prints one."""

    mean: float
    std: float | None = None


@dataclass(frozen=True)
class Table:
    """Rows of columns of cells, and what the paper says about all of them. `average` is that of each column."""

    name: str
    cells: Mapping[str, Mapping[str, Cell]]
    average: Mapping[str, Cell]
    metric: str | None = None
    seeds: int | None = None
    dataset: str | None = None
    model: str | None = None
    hardware: str | None = None


@cache
def table(name: str) -> Table:
    """The table of that label.

    >>> table("tab:time_cifar10").cells["resnet56"]["bisam"].mean
    30.0
    >>> table("tab:cifar10").cells["resnet56"]["bisam-log"]
    Cell(mean=94.28, std=0.31)
    """
    known = tables()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.5) or known
        raise ValueError(f"the paper has no table {name!r}: the nearest labels are {', '.join(near)}")
    fields = dict(known[name])
    cells = {row: {column: _cell(x) for column, x in columns.items()} for row, columns in fields.pop("cells").items()}
    average = {column: _cell(x) for column, x in fields.pop("average", {}).items()}
    return Table(name, cells, average, **fields)


@cache
def tables() -> Mapping[str, Any]:
    """All of them, as the file has them."""
    text = resources.files("bisam.lab.tables").joinpath("published.json").read_text(encoding="utf-8")
    return json.loads(text)["tables"]


def _cell(printed: Any) -> Cell:
    if isinstance(printed, dict):
        return Cell(float(printed["mean"]), float(printed["std"]))
    if isinstance(printed, list):
        return Cell(*map(float, printed))
    return Cell(float(printed))
