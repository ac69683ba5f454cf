"""Grids of hyperparameters: the paper's, and the runs that they take."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_type_hints

from bisam.lab.config import Config, suggestion
from bisam.lab.methods import METHODS, title_of, uses
from bisam.lab.recipes import Recipe
from bisam.lab.tables.cells import Cell, text_of
from bisam.lab.tables.sweeps import NUMBERS, Values, label, name_of_cell, value_of
from bisam.lab.training.jobs import jobs_of
from bisam.lab.training.loop import Job
from bisam.lab.training.ranks import ALONE, Ranks

PAPER_GRIDS = {"alpha": (0.01, 0.1, 1.0, 10.0, 100.0), "mu": (0.1, 0.5, 1.0, 2.0, 4.0)}

NOT_SWEPT = {
    "seed": "it is not a hyperparameter: use --seeds",
    "noise": "it changes the validation data, by which the values are compared: use --set",
    "epoch_steps": "it may be none, which is no number: sweep epochs, or use --set",
    "validation": "it changes the validation data, by which the values are compared: use --set",
}


@dataclass(frozen=True)
class Axis:
    """The values of one field, in ascending order, and where they come from."""

    field: str
    values: Values
    origin: str

    @property
    def description(self) -> str:
        return f"{self.field} over {', '.join(map(text_of, self.values))} ({self.origin})"


@dataclass(frozen=True)
class CellGrid:
    """The grid of one cell, and the runs of it."""

    recipe: str
    cell: Cell
    own: Config
    """The recipe's configuration, with what was changed by hand."""
    axes: list[Axis]
    jobs: list[Job]

    @property
    def description(self) -> str:
        axes = ", ".join(axis.description for axis in self.axes)
        return f"{name_of_cell(self.recipe, self.cell)}: {axes}, {len(self.jobs)} runs"


def cell_grids(
    recipe: Recipe,
    fields: Sequence[str],
    seeds: Sequence[int],
    root: Path,
    *,
    values: Mapping[str, Sequence[str]] | None = None,
    changes: Mapping[str, str] | None = None,
    ranks: Ranks = ALONE,
) -> list[CellGrid]:
    """The runs of every cell for every point of the grid: the product of the fields' values.

    Without `values` of its own, a field has the paper's grid, or ours for ρ where the paper has none, and the recipe's
    own value. A point with the recipe's own values is the recipe's own run, in the same folder.
    """
    values, changes = values or {}, changes or {}
    jobs_of(recipe, seeds, changes, root, ranks)  # raises for fields that may not be changed
    for field in fields:
        _check_can_be_swept(field, changes)
    found = []
    for cell, config in recipe.cells.items():
        given = config.with_changes(changes)
        own = ranks.adapted(given)
        if "batch" in fields and own != given:
            raise ValueError(
                "a batch that is swept changes what each rank perturbs: use --perturb global, or --set micro_batch="
                f"{own.micro_batch}"
            )
        axes = [_axis(own, field, values.get(field)) for field in fields]
        points = [*itertools.product(*(axis.values for axis in axes))]
        if len(points) < 2:
            raise ValueError(f"a sweep compares two values or more, got {label(fields, points[0])}: give more --values")
        part = replace(recipe, cells={cell: config})
        jobs = [
            job
            for seed in seeds  # first, so that a sweep that is cut off has all points of some seeds
            for point in points
            for job in jobs_of(part, [seed], {**changes, **_as_changes(own, fields, point)}, root, ranks)
        ]
        found.append(CellGrid(recipe.name, cell, own, axes, jobs))
    return found


def _check_can_be_swept(field: str, changes: Mapping[str, str]) -> None:
    if field in changes:
        raise ValueError(f"{field} is both swept and set: remove --set {field}={changes[field]}")
    if field in NOT_SWEPT:
        raise ValueError(f"{field} cannot be swept: {NOT_SWEPT[field]}")
    if field in NUMBERS:
        return
    if field in get_type_hints(Config):
        raise ValueError(f"{field} is not a number, and only numbers can be swept")
    raise ValueError(f"unknown field {field!r}: {suggestion(field, NUMBERS, cutoff=0.4)}")


def _axis(own: Config, field: str, texts: Sequence[str] | None) -> Axis:
    if not uses(own.method, field):
        own_fields = ", ".join(METHODS[own.method].fields)
        fields = f"its own fields are {own_fields}" if own_fields else "it has no own fields"
        raise ValueError(
            f"{title_of(own.method)} does not use {field}: {fields}. Sweep another field, or leave this method out by "
            "naming table/row/method, or by --methods"
        )
    if texts is not None:
        return Axis(field, tuple(sorted({_number(own, field, text) for text in texts})), "as given")
    grid, origin = _grid(own.method, field)
    mine = value_of(own, field)
    if mine in grid:
        return Axis(field, grid, origin)
    return Axis(field, tuple(sorted([*grid, mine])), f"{origin}, and the recipe's own {text_of(mine)}")


def _grid(method: str, field: str) -> tuple[Values, str]:
    if field == "rho":
        own = METHODS[method]
        return own.rhos(), "the paper's grid" if own.is_adaptive else "our grid: the paper has none"
    if field not in PAPER_GRIDS:
        raise ValueError(f"{field} has no grid in the paper: give its values, such as --values {field}=1,2")
    return PAPER_GRIDS[field], "the paper's grid"


def _number(own: Config, field: str, text: str) -> float:
    found = getattr(own.with_changes({field: text}), field)
    if found is None:
        raise ValueError(f"{field} is swept over numbers, got {text!r}")
    return found


def _as_changes(own: Config, fields: Sequence[str], point: Values) -> dict[str, str]:
    """The point as --set has it. A field that is None stays None where None means that value: it is the same run."""
    values = dict(zip(fields, point, strict=True))
    given: dict[str, Any] = {field: value for field, value in values.items() if getattr(own, field) is not None}
    settled = replace(own, **given)
    return {
        field: repr(value)
        for field, value in values.items()
        if getattr(own, field) is not None or value_of(settled, field) != value
    }
