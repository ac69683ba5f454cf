"""The numbers of curves as columns, which take a quarter of the room of rows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bisam.lab.report.charts import Style, styles_in
from bisam.lab.tables import curves
from bisam.lab.tables.curves import CURVES, Rows


@dataclass
class Series:
    """Curves of several runs and the means of their methods."""

    rows: Rows
    """By run and epoch: see `curves.points`."""
    styles: Sequence[Style]
    ids: Mapping[str, str] = field(default_factory=dict)
    """The name on the page of each run, by its label in the rows."""

    @property
    def names(self) -> list[str]:
        return curves.names_of(self.rows)

    @property
    def has_unlike_lengths(self) -> bool:
        """Whether methods ended after different numbers of epochs: then gradients compare them more fairly."""
        if not all("gradients" in row for row in self.rows):
            return False
        last: dict[str, int] = {}
        for row in self.rows:
            last[row["method"]] = max(row["epoch"], last.get(row["method"], 0))
        return len({*last.values()}) > 1

    def to_dict(self) -> dict[str, Any]:
        means = curves.bands(self.rows)
        shown = {row["method"] for row in self.rows}
        return {
            "methods": [
                {
                    "title": style.title,
                    "colour": style.colour,
                    "dash": style.dash,
                    **_mean([row for row in means if row["method"] == style.title]),
                }
                for style in self.styles
                if style.title in shown
            ],
            "runs": [
                {"label": label, "id": self.ids.get(label), "method": rows[0]["method"], **_columns(rows, CURVES)}
                for label, rows in _by("run", self.rows).items()
            ],
        }


def of_methods(rows: Rows, methods: Sequence[str], ids: Mapping[str, str]) -> Series:
    shown = {row["method"] for row in rows}
    return Series(rows, styles_in(methods, shown), ids)


def _mean(rows: Rows) -> dict[str, Any]:
    """Columns of the means, and the ends of the band where it has a width."""
    made = {"n": rows[0]["n"] if rows else 0, **_columns(rows, CURVES)}
    for end in ("low", "high"):
        names = [name for name in CURVES if any(row.get(f"{name}_low") != row.get(f"{name}_high") for row in rows)]
        made[end] = {name: [row.get(f"{name}_{end}") for row in rows] for name in names}
    return made


def _columns(rows: Rows, names: Mapping[str, str]) -> dict[str, Any]:
    """Lists of the same length; null where a row has no number."""
    found: dict[str, Any] = {"epoch": [row["epoch"] for row in rows]}
    for axis in curves.AXES:
        if rows and all(axis in row for row in rows):
            found[axis] = _brief(found["epoch"], [row[axis] for row in rows])
    columns = {name: [row.get(name) for row in rows] for name in names if any(name in row for row in rows)}
    return {**found, "values": columns}


def _brief(epochs: list[int], values: list[float]) -> list[float] | float:
    """One number where each epoch has as much, as gradient evaluations do in most runs: the page multiplies.

    >>> _brief([1, 2, 3], [2.0, 4.0, 6.0]), _brief([1, 2, 3], [1.0, 2.0, 4.0])
    (2.0, [1.0, 2.0, 4.0])
    """
    each = values[-1] / epochs[-1]
    is_even = all(math.isclose(value, epoch * each, rel_tol=1e-4) for epoch, value in zip(epochs, values, strict=True))
    return each if is_even else values


def _by(field_: str, rows: Rows) -> dict[str, Rows]:
    found: dict[str, Rows] = {}
    for row in rows:
        found.setdefault(row[field_], []).append(row)
    return found
