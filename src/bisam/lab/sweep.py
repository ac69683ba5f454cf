"""Grids of hyperparameters: the runs that they take, and the values that do best on the validation data.

`plans` has the runs of each cell of a recipe, `outcome` what they came to. Test accuracy is nowhere in this file: a
value that was chosen by it would be tested on what it has seen.
"""

from __future__ import annotations

import difflib
import itertools
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

from bisam.lab.cells import NUMERICS, Cell, Run
from bisam.lab.config import Config
from bisam.lab.methods import TITLES
from bisam.lab.recipes import Recipe
from bisam.lab.runs import jobs_of
from bisam.lab.statistics import Difference, difference
from bisam.lab.summary import OPEN, Sheet
from bisam.lab.train import Job
from bisam.objectives import PAPER_MU

PAPER_GRIDS = {"alpha": (0.01, 0.1, 1.0, 10.0, 100.0), "mu": (0.1, 0.5, 1.0, 2.0, 4.0)}
PAPER_RHO_OF_ADAPTIVE = (0.1, 0.5, 1.0, 2.0, 3.0)
OUR_RHO = (0.01, 0.02, 0.05, 0.1, 0.2)
"""For the methods of which the paper says no grid: about two octaves on either side of its 0.05."""

_SAM, _ASAM, _ESAM = ("rho", "micro_batch"), ("rho", "micro_batch", "eta"), ("rho", "micro_batch", "beta", "gamma")
FIELDS = {
    "sgd": (),
    "sam": _SAM,
    "bisam-log": (*_SAM, "mu"),
    "bisam-tanh": (*_SAM, "mu", "alpha"),
    "asam": _ASAM,
    "abisam-log": (*_ASAM, "mu"),
    "abisam-tanh": (*_ASAM, "mu", "alpha"),
    "esam": _ESAM,
    "ebisam-log": (*_ESAM, "mu"),
    "ebisam-tanh": (*_ESAM, "mu", "alpha"),
}
"""What of a configuration each method uses that not every method does."""

NUMBERS = [name for name, kind in get_type_hints(Config).items() if {int, float} & {*(get_args(kind) or (kind,))}]
NOT_SWEPT = {
    "seed": "it is no choice: use --seeds",
    "noise": "it changes the validation data, by which the values are compared: use --set",
    "validation": "it changes the validation data, by which the values are compared: use --set",
}

Values = tuple[float, ...]
"""One for each field that is swept."""


@dataclass(frozen=True)
class Axis:
    """The values of one field, in their order, and whose choice they are."""

    field: str
    values: Values
    origin: str

    @property
    def words(self) -> str:
        return f"{self.field} over {', '.join(map(_text, self.values))} ({self.origin})"


@dataclass(frozen=True)
class Plan:
    """What a sweep of one cell takes."""

    recipe: str
    cell: Cell
    own: Config
    """The recipe's configuration, with what was changed by hand."""
    axes: list[Axis]
    jobs: list[Job]

    @property
    def words(self) -> str:
        return f"{_name(self.recipe, self.cell)}: {', '.join(axis.words for axis in self.axes)}, {len(self.jobs)} runs"


def plans(
    recipe: Recipe,
    fields: Sequence[str],
    seeds: Sequence[int],
    root: Path,
    *,
    values: Mapping[str, Sequence[str]] | None = None,
    changes: Mapping[str, str] | None = None,
) -> list[Plan]:
    """The runs of every cell for every point of the grid: the product of the fields' values.

    Without `values` of its own, a field has the paper's grid, or ours for ρ where the paper has none, and the recipe's
    own value. A point with the recipe's own values is the recipe's own run, in the same folder.
    """
    values, changes = values or {}, changes or {}
    jobs_of(recipe, seeds, changes, root)  # refuses what may not be changed
    for field in fields:
        _check_can_be_swept(field, changes)
    found = []
    for cell, config in recipe.cells.items():
        own = config.with_changes(changes)
        axes = [_axis(own, field, values.get(field)) for field in fields]
        points = [*itertools.product(*(axis.values for axis in axes))]
        if len(points) < 2:
            raise ValueError(f"a sweep compares two values or more, got {label(fields, points[0])}: give more --values")
        part = replace(recipe, cells={cell: config})
        jobs = [
            job
            for seed in seeds  # first, so that a sweep that is cut off has all points of some seeds
            for point in points
            for job in jobs_of(part, [seed], {**changes, **_as_changes(own, fields, point)}, root)
        ]
        found.append(Plan(recipe.name, cell, own, axes, jobs))
    return found


@dataclass(frozen=True)
class Point:
    """The runs with the same values."""

    values: Values
    accuracies: dict[int, float]
    """On the validation data, in per cent, by seed; of the weights that the configuration selects."""
    diverged: tuple[int, ...] = ()
    """Seeds whose runs did."""

    @property
    def mean(self) -> float | None:
        return statistics.fmean(self.accuracies.values()) if self.accuracies else None

    @property
    def deviation(self) -> float | None:
        return statistics.stdev(self.accuracies.values()) if len(self.accuracies) > 1 else None


@dataclass(frozen=True)
class Sweep:
    """A cell with all points of its grid, in the order of their values. Every point has the same seeds."""

    recipe: str
    cell: Cell
    fields: tuple[str, ...]
    own: Values
    """The recipe's."""
    points: list[Point]

    @property
    def name(self) -> str:
        """As in "cifar10/resnet56/bisam-tanh"."""
        return _name(self.recipe, self.cell)

    @property
    def chosen(self) -> Point | None:
        """The best mean, and the recipe's own among equals. A point with a run that diverged is never chosen."""
        whole = [point for point in self.points if not point.diverged and point.mean is not None]
        return max(whole, key=lambda point: (point.mean, point.values == self.own), default=None)

    @property
    def own_point(self) -> Point | None:
        """None if the recipe's own values are not in the grid."""
        return next((point for point in self.points if point.values == self.own), None)

    @property
    def gain(self) -> Difference | None:
        """The chosen point − the recipe's own; None if it is the same, or one of them has no run."""
        chosen, own = self.chosen, self.own_point
        if chosen is None or own is None or chosen is own:
            return None
        return difference(chosen.accuracies, own.accuracies)

    @property
    def edges(self) -> list[tuple[str, str]]:
        """Where the choice is the "smallest" or "largest" value of a field, beyond which may be better ones."""
        if self.chosen is None:
            return []
        found = []
        for number, (field, value) in enumerate(zip(self.fields, self.chosen.values, strict=True)):
            tried = {point.values[number] for point in self.points}
            if len(tried) > 1 and value in (min(tried), max(tried)):
                found.append((field, "largest" if value == max(tried) else "smallest"))
        return found

    @property
    def words(self) -> list[str]:
        """What was chosen, and how sure that is: a sentence or two each."""
        chosen = self.chosen
        if chosen is None:
            return ["Nothing is chosen: every point has a run that diverged."]
        sentences = [self._choice(chosen)]
        sentences += [f"It is the {end} {field} of the grid: the best may lie beyond." for field, end in self.edges]
        lost = sum(bool(point.diverged) for point in self.points)
        if lost:
            sentences.append(f"Points with a run that diverged are not chosen: {lost} of {len(self.points)}.")
        return sentences

    def _choice(self, chosen: Point) -> str:
        ours, theirs = label(self.fields, chosen.values), f"the recipe's {label(self.fields, self.own)}"
        if chosen is self.own_point:
            return f"Chosen: {ours}, as in the recipe."
        if self.own_point is None:
            return f"Chosen: {ours}. There are no runs of {theirs} to compare it with."
        gain = self.gain
        if gain is None:
            return f"Chosen: {ours}. Every run of {theirs} diverged."
        caution = f" The interval knows nothing of the choice among {len(self.points)}." if gain.resolved else ""
        return f"Chosen: {ours}. {gain.words(ours, theirs)}.{caution}"


def outcome(recipe: Recipe, fields: Sequence[str], runs: Iterable[Run]) -> list[Sweep]:
    """What the finished runs among these say of each cell that has two or more values of these fields.

    Only runs count that are the recipe's in all other fields; for a sweep with changes, give a recipe with these
    changes. Only seeds count that every value has, since a seed decides how hard its validation data are.
    """
    finished = [run for run in runs if run.status == "diverged" or run.measured("validation_accuracy") is not None]
    found = []
    for cell, own in recipe.cells.items():
        if not all(_uses(own.method, field) for field in fields):
            continue
        results: dict[Values, dict[int, float | None]] = defaultdict(dict)
        for run in finished:
            if _is_own_but_for(fields, run.config, own):
                point = tuple(value_of(run.config, field) for field in fields)
                results[point].setdefault(run.config.seed, run.measured("validation_accuracy"))
        seeds = sorted(set.intersection(*map(set, results.values()))) if results else []
        if len(results) > 1 and seeds:
            points = [_point(values, {seed: results[values][seed] for seed in seeds}) for values in sorted(results)]
            values_of_recipe = tuple(value_of(own, field) for field in fields)
            found.append(Sweep(recipe.name, cell, tuple(fields), values_of_recipe, points))
    return found


def sheet(sweep: Sweep) -> Sheet:
    """The sweep as a table, with its words below."""
    marks = {id(sweep.chosen): "chosen"}
    own = sweep.own_point
    if own is not None:
        marks[id(own)] = "chosen, the recipe's" if own is sweep.chosen else "the recipe's"
    rows = [
        [*map(_text, point.values), _accuracy(point), str(len(point.accuracies)), str(len(point.diverged)),
         marks.get(id(point), "")]
        for point in sweep.points
    ]  # fmt: skip
    head = [*sweep.fields, "validation accuracy", "n", "diverged", ""]
    return Sheet(f"{sweep.name}: validation accuracy in per cent", head, rows, sweep.words)


def label(fields: Sequence[str], values: Sequence[float]) -> str:
    """
    >>> label(["alpha", "mu"], [0.1, 10.0])
    'alpha = 0.1, mu = 10'
    """
    return ", ".join(f"{field} = {_text(value)}" for field, value in zip(fields, values, strict=True))


def value_of(config: Config, field: str) -> float:
    """The field's number; where it is None, the one that None stands for.

    >>> value_of(Config(method="bisam-tanh"), "mu")
    10.0
    """
    found = getattr(config, field)
    if found is None:
        found = config.batch if field == "micro_batch" else PAPER_MU[config.method.partition("-")[2]]
    return found


def _name(recipe: str, cell: Cell) -> str:
    return "/".join([recipe, *cell])


# Grids.


def _check_can_be_swept(field: str, changes: Mapping[str, str]) -> None:
    if field in changes:
        raise ValueError(f"{field} is swept and set at once: leave away --set {field}={changes[field]}")
    if field in NOT_SWEPT:
        raise ValueError(f"{field} cannot be swept: {NOT_SWEPT[field]}")
    if field in NUMBERS:
        return
    if field in get_type_hints(Config):
        raise ValueError(f"{field} is not a number, and only numbers can be swept")
    near = difflib.get_close_matches(field, NUMBERS, n=3, cutoff=0.4) or NUMBERS
    raise ValueError(f"no number of a run is called {field!r}: the nearest names are {', '.join(near)}")


def _axis(own: Config, field: str, texts: Sequence[str] | None) -> Axis:
    if not _uses(own.method, field):
        fields = f"its own fields are {', '.join(FIELDS[own.method])}" if FIELDS[own.method] else "it has no own fields"
        raise ValueError(
            f"{TITLES[own.method]} does not use {field}: {fields}. Sweep another field, or leave this method out by "
            "naming table/row/method, or by --methods"
        )
    if texts is not None:
        return Axis(field, tuple(sorted({_number(own, field, text) for text in texts})), "as given")
    grid, origin = _grid(own.method, field)
    mine = value_of(own, field)
    if mine in grid:
        return Axis(field, grid, origin)
    return Axis(field, tuple(sorted([*grid, mine])), f"{origin}, and the recipe's own {_text(mine)}")


def _grid(method: str, field: str) -> tuple[Values, str]:
    if field == "rho":
        adaptive = "eta" in FIELDS[method]
        return (PAPER_RHO_OF_ADAPTIVE, "the paper's grid") if adaptive else (OUR_RHO, "our grid: the paper has none")
    if field not in PAPER_GRIDS:
        raise ValueError(f"{field} has no grid in the paper: give its values, such as --values {field}=1,2")
    return PAPER_GRIDS[field], "the paper's grid"


def _number(own: Config, field: str, text: str) -> float:
    found = getattr(own.with_changes({field: text}), field)
    if found is None:
        raise ValueError(f"{field} is swept over numbers, got {text!r}")
    return found


def _uses(method: str, field: str) -> bool:
    of_some = {field for fields in FIELDS.values() for field in fields}
    return field not in of_some or field in FIELDS[method]


def _as_changes(own: Config, fields: Sequence[str], point: Values) -> dict[str, str]:
    """The point in words. A field that is None stays so where None stands for that value: it is the same run."""
    values = dict(zip(fields, point, strict=True))
    given: dict[str, Any] = {field: value for field, value in values.items() if getattr(own, field) is not None}
    settled = replace(own, **given)
    return {
        field: repr(value)
        for field, value in values.items()
        if getattr(own, field) is not None or value_of(settled, field) != value
    }


# Results.


def _is_own_but_for(fields: Sequence[str], config: Config, own: Config) -> bool:
    return replace(config, **{name: getattr(own, name) for name in ("seed", *NUMERICS, *fields)}) == own


def _point(values: Values, results: Mapping[int, float | None]) -> Point:
    """None is the accuracy of a run that diverged."""
    accuracies = {seed: accuracy for seed, accuracy in results.items() if accuracy is not None}
    return Point(values, accuracies, tuple(seed for seed in results if seed not in accuracies))


def _accuracy(point: Point) -> str:
    if point.mean is None:
        return OPEN
    return f"{point.mean:.2f}" + ("" if point.deviation is None else f" ± {point.deviation:.2f}")


def _text(value: float) -> str:
    return f"{value:.12g}"
