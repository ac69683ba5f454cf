"""Sweeps: the value of a hyperparameter that does best on the validation data, all else equal.

Test accuracy is nowhere in this file: a value chosen by it would be tested on the data that chose it.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import get_args, get_type_hints

from bisam.lab.config import Config
from bisam.lab.measures import title_of
from bisam.lab.methods import METHODS, every_of, uses
from bisam.lab.recipes import Recipe
from bisam.lab.tables.cells import NUMERICS, Cell, Collection, ResultTable, Run, cell_of, changes_of, text_of
from bisam.lab.tables.statistics import Difference, difference
from bisam.lab.tables.summary import OPEN, Sheet, spread
from bisam.objectives import PAPER_MU

NUMBERS = [name for name, kind in get_type_hints(Config).items() if {int, float} & {*(get_args(kind) or (kind,))}]
"""The fields of a configuration that can be swept, as far as their kind goes."""

OF_ALL = ("lr", "weight_decay", "momentum", "label_smoothing")
"""Numbers of all methods that are commonly swept."""

Values = tuple[float, ...]
"""One for each field that is swept."""

_NONE_MEANS: dict[str, Callable[[Config], float]] = {
    "mu": lambda config: PAPER_MU[METHODS[config.method].phi or "log"],
    "micro_batch": lambda config: config.batch,
    "every": every_of,
    "clip_norm": lambda config: math.inf,
}
"""The number that None stands for, for each field that may be None and can be swept."""


@dataclass(frozen=True)
class GridPoint:
    """The runs with the same values."""

    values: Values
    accuracies: dict[int, float]
    """Validation accuracy in per cent, by seed, of the weights that the configuration selects."""
    diverged: tuple[int, ...] = ()
    """Seeds of the runs that diverged."""

    @property
    def mean(self) -> float | None:
        """Without what its arithmetic rounds: equal counts have equal means."""
        return round(statistics.fmean(self.accuracies.values()), 9) if self.accuracies else None

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
    """Values of the recipe."""
    points: list[GridPoint]
    left_out: tuple[Values, ...] = ()
    """Points without the seeds that the others share."""
    seeds_left_out: tuple[int, ...] = ()
    """Seeds that half of the points or more lack."""
    measure: str = "validation accuracy"
    changes: str = ""
    """The other fields in which its runs differ from the recipe, such as "epochs=3"."""
    runs: tuple[Run, ...] = ()
    """All runs with these changes, of any value."""

    def mark(self, point: GridPoint) -> str:
        """Text such as "chosen" or "the recipe's"; empty for most points."""
        marks = ["chosen"] * (point is self.chosen) + ["the recipe's"] * (point is self.own_point)
        return ", ".join(marks)

    def is_indistinguishable(self, point: GridPoint) -> bool:
        """Whether the interval of its difference to the chosen point includes 0."""
        chosen = self.chosen
        if chosen is None or point is chosen or point.diverged:
            return False
        gap = difference(chosen.accuracies, point.accuracies)
        return gap is not None and gap.low is not None and not gap.resolved

    @property
    def name(self) -> str:
        """Such as "cifar10/resnet56/bisam-tanh"."""
        return name_of_cell(self.recipe, self.cell)

    @property
    def tried(self) -> list[Run]:
        """Its runs with other values than the recipe's."""
        return [run for run in self.runs if tuple(value_of(run.config, field) for field in self.fields) != self.own]

    @property
    def chosen(self) -> GridPoint | None:
        """The best mean, and the recipe's own among equals. A point with a run that diverged is never chosen."""
        whole = [point for point in self.points if not point.diverged and point.mean is not None]
        return max(whole, key=lambda point: (point.mean, point.values == self.own), default=None)

    @property
    def own_point(self) -> GridPoint | None:
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
        """Fields whose chosen value is the "smallest" or "largest" of the grid; better ones may lie beyond."""
        if self.chosen is None:
            return []
        found = []
        for number, (field, value) in enumerate(zip(self.fields, self.chosen.values, strict=True)):
            tried = {point.values[number] for point in self.points}
            if len(tried) > 1 and value in (min(tried), max(tried)) and math.isfinite(value):
                found.append((field, "largest" if value == max(tried) else "smallest"))
        return found

    @property
    def conclusions(self) -> list[str]:
        """Sentences about the choice and how certain it is."""
        chosen = self.chosen
        if chosen is None:
            return ["Nothing is chosen: every point has a run that diverged."]
        sentences = [self._choice(chosen)]
        if self.gain is None or self.gain.low is None or self.gain.resolved:
            sentences += [f"It is the {end} {field} of the grid: the best may lie beyond." for field, end in self.edges]
        lost = sum(bool(point.diverged) for point in self.points)
        if lost:
            sentences.append(f"Points with a run that diverged are not chosen: {lost} of {len(self.points)}.")
        if any(map(self.is_indistinguishable, self.points)):
            sentences.append("~: not distinguishable from the choice with these seeds.")
        if self.left_out:
            points = "; ".join(label(self.fields, values) for values in self.left_out)
            sentences.append(f"Left out, since they lack the seeds of the others: {points}.")
        if self.seeds_left_out:
            seeds = ", ".join(map(str, self.seeds_left_out))
            sentences.append(f"Left out, since at most half of the points have them: seeds {seeds}.")
        return sentences

    def _choice(self, chosen: GridPoint) -> str:
        ours, own = label(self.fields, chosen.values), label(self.fields, self.own)
        theirs = f"the recipe's {own}"
        if chosen is self.own_point:
            return f"Chosen: {ours}, as in the recipe."
        if self.own_point is None and math.inf in self.own:  # which is no value that could be given
            return f"Chosen: {ours}. The recipe has {own}: bisam train {self.name} trains it, to compare with."
        if self.own_point is None:
            return f"Chosen: {ours}. The grid lacks {theirs}: add it to the values to compare with it."
        gain = self.gain
        if gain is None:
            return f"Chosen: {ours}. Every run of {theirs} diverged."
        caution = (
            f" The interval does not account for the choice among {len(self.points)} points." if gain.resolved else ""
        )
        return f"Chosen: {ours}. {gain.describe(ours, theirs)}.{caution}"


def outcome(recipe: Recipe, fields: Sequence[str], runs: Iterable[Run]) -> list[Sweep]:
    """A sweep for each cell whose finished runs have two or more values of these fields.

    Only runs count that are the recipe's in all other fields; for a sweep with changes, give a recipe with these
    changes. Only seeds count that most values have, and values that have these, since a seed decides how hard its
    validation data are.
    """
    runs, found = list(runs), []
    for cell, own in recipe.cells.items():
        name = f"validation_{own.primary}"
        finished = [run for run in runs if run.status == "diverged" or run.measured(name) is not None]
        if not all(uses(own.method, field) for field in fields):
            continue
        results: dict[Values, dict[int, float | None]] = defaultdict(dict)
        for run in finished:
            if _is_own_but_for(fields, run.config, own):
                point = tuple(value_of(run.config, field) for field in fields)
                results[point].setdefault(run.config.seed, run.measured(name))
        seeds, shared = _shared(results)
        if len(shared) > 1 and seeds:
            points = [_point(values, {seed: results[values][seed] for seed in seeds}) for values in sorted(shared)]
            values_of_recipe = tuple(value_of(own, field) for field in fields)
            rare = {seed for values in shared for seed in results[values]} - {*seeds}
            found.append(
                Sweep(
                    recipe.name,
                    cell,
                    tuple(fields),
                    values_of_recipe,
                    points,
                    left_out=tuple(sorted(results.keys() - shared)),
                    seeds_left_out=tuple(sorted(rare)),
                    measure=f"validation {title_of(name)}",
                )
            )
    return found


def sort_out(collection: Collection) -> tuple[list[ResultTable], list[Sweep]]:
    """Tables to show, and sweeps. Runs of a sweep have no table of their own, for it would show their test accuracy."""
    recipes = {table.recipe.name: table.recipe for table in collection.tables if table.changes}
    found = [sweep for recipe in recipes.values() for sweep in sweeps(recipe, collection.runs)]
    swept = {id(run) for sweep in found for run in sweep.runs}
    return [table for table in collection.tables if not table.changes or not _only(table, swept)], found


def _only(table: ResultTable, swept: Container[int]) -> bool:
    """Whether all runs of a table, except borrowed ones, belong to sweeps."""
    borrowed = {id(run) for run in table.borrowed}
    runs = [run for of_cell in table.runs.values() for run in of_cell.values()]
    return all(id(run) in swept for run in runs if id(run) not in borrowed)


def sweeps(recipe: Recipe, runs: Sequence[Run]) -> list[Sweep]:
    """Sweeps of three or more values of one number among these runs, of the recipe as it is or changed alike."""
    found: list[Sweep] = []
    places = [(cell_of(run.config, run.record.folder, recipe), run) for run in runs]
    for cell, own in recipe.cells.items():
        of_cell = [run for place, run in places if place == (recipe.name, cell)]
        of_method = METHODS[own.method].fields if own.method in METHODS else ()
        for field in (*of_method, *OF_ALL):
            alike: dict[Config, list[Run]] = defaultdict(list)
            for run in of_cell:
                same = {name: getattr(own, name) for name in ("seed", *NUMERICS, field)}
                alike[replace(run.config, **same)].append(run)
            for base, members in alike.items():
                made = outcome(replace(recipe, cells={cell: base}), [field], members)
                changes = ", ".join(changes_of(own, base).values())
                found += [
                    replace(sweep, changes=changes, runs=tuple(members)) for sweep in made if len(sweep.points) > 2
                ]
    return found


def _shared(results: Mapping[Values, Mapping[int, object]]) -> tuple[list[int], set[Values]]:
    """The seeds that more than half of the points have, and the points that have them all."""
    counts = Counter(seed for seeds in results.values() for seed in seeds)
    seeds = sorted(seed for seed, count in counts.items() if 2 * count > len(results))
    return seeds, {values for values, of_point in results.items() if set(seeds) <= of_point.keys()}


def sheet(sweep: Sweep) -> Sheet:
    """The sweep as a table, with its conclusions below."""
    rows = [
        [*map(text_of, point.values), _accuracy(point), str(len(point.accuracies)), str(len(point.diverged)),
         sweep.mark(point) + (" ~" if sweep.is_indistinguishable(point) else "")]
        for point in sweep.points
    ]  # fmt: skip
    head = [*sweep.fields, sweep.measure, "n", "diverged", ""]
    title = f"{sweep.name}{', with ' if sweep.changes else ''}{sweep.changes}: {sweep.measure} in per cent"
    return Sheet(title, head, rows, sweep.conclusions)


def label(fields: Sequence[str], values: Sequence[float]) -> str:
    """
    >>> label(["alpha", "mu"], [0.1, 10.0])
    'alpha = 0.1, mu = 10'
    """
    return ", ".join(f"{field} = {text_of(value)}" for field, value in zip(fields, values, strict=True))


def value_of(config: Config, field: str) -> float:
    """The field's number; where it is None, the one that None stands for.

    >>> value_of(Config(method="bisam-tanh"), "mu"), value_of(Config(), "clip_norm")
    (10.0, inf)
    """
    found = getattr(config, field)
    return _NONE_MEANS[field](config) if found is None else found


def name_of_cell(recipe: str, cell: Cell) -> str:
    """Such as "cifar10/resnet56/bisam-tanh"."""
    return "/".join([recipe, *cell])


def _is_own_but_for(fields: Sequence[str], config: Config, own: Config) -> bool:
    return replace(config, **{name: getattr(own, name) for name in ("seed", "title", *NUMERICS, *fields)}) == own


def _point(values: Values, results: Mapping[int, float | None]) -> GridPoint:
    """A result of None is a run that diverged."""
    accuracies = {seed: accuracy for seed, accuracy in results.items() if accuracy is not None}
    return GridPoint(values, accuracies, tuple(seed for seed in results if seed not in accuracies))


def _accuracy(point: GridPoint) -> str:
    return OPEN if point.mean is None else spread(point.mean, point.deviation)
