"""Which run belongs to which cell of which table."""

from __future__ import annotations

import math
import shlex
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

from bisam.lab.config import Config
from bisam.lab.recipes import RECIPES, Recipe
from bisam.lab.records import Record

Cell = tuple[str, str]
"""A row and a method."""

NUMERICS = ("compile", "deterministic")
"""How a run is computed, not what: the same cell of a table."""


@dataclass(frozen=True)
class Run:
    """A record that can be shown in a table: its configuration is known, and its numbers are numbers."""

    record: Record
    config: Config

    @property
    def status(self) -> str:
        """As in "done", "diverged" or "3 of 200 epochs"."""
        if self.record.result is not None:
            return str(self.record.result["status"])
        return f"{len(self.record.metrics)} of {self.config.epochs} epochs"

    def measured(self, name: str = "test_accuracy") -> float | None:
        """A number of the result; None without one, or if the run diverged."""
        result = self.record.result
        if result is None or result["status"] != "done":
            return None
        return _number(result.get(name))

    def last(self, name: str) -> float | None:
        """A number of the last epoch."""
        return _number(self.record.metrics[-1].get(name)) if self.record.metrics else None

    @property
    def milliseconds(self) -> float | None:
        """Of one step in the last epoch; of this run's part in it, where several shared the device."""
        rate, together = self.last("samples_per_second"), self.last("together") or 1
        return 1e3 * self.config.batch / rate / together if rate else None


@dataclass
class Group:
    """A table: a recipe, what was changed of it, and the runs of each cell, by seed."""

    recipe: Recipe
    changes: str
    """As in "epochs=3, rho=0.1"; empty for the recipe as it is."""
    runs: dict[Cell, dict[int, Run]] = field(default_factory=lambda: defaultdict(dict))

    @property
    def title(self) -> str:
        return f"{self.recipe.title}, with {self.changes}" if self.changes else self.recipe.title

    @property
    def name(self) -> str:
        """Short, and no other table's."""
        return f"{self.recipe.name}, {self.changes}" if self.changes else self.recipe.name

    @property
    def rows(self) -> list[str]:
        """Those that have runs."""
        return [row for row in self.recipe.rows if any(self.runs.get((row, m)) for m in self.recipe.methods)]

    def of(self, row: str, method: str) -> list[Run]:
        return [*self.runs.get((row, method), {}).values()]

    def of_row(self, row: str) -> list[Run]:
        return [run for method in self.recipe.methods for run in self.of(row, method)]

    def of_method(self, method: str) -> list[Run]:
        return [run for row in self.recipe.rows for run in self.of(row, method)]

    def measured(self, row: str, method: str, name: str = "test_accuracy") -> dict[int, float]:
        """By seed."""
        values = {seed: run.measured(name) for seed, run in self.runs.get((row, method), {}).items()}
        return {seed: value for seed, value in values.items() if value is not None}


@dataclass
class Collection:
    """Records, sorted into tables."""

    groups: list[Group]
    others: list[Run]
    """Runs of no table: of a recipe that is not ours, or a second one of the same cell and seed."""
    unreadable: list[tuple[Record, str]]
    """Records that cannot be shown, and why."""

    @property
    def runs(self) -> list[Run]:
        grouped = (run for group in self.groups for runs in group.runs.values() for run in runs.values())
        return [*grouped, *self.others]


def collect(records: Iterable[Record]) -> Collection:
    """Tables in the order of the recipes, unchanged ones first."""
    groups: dict[tuple[str, str], Group] = {}
    others, unreadable = [], []
    for record in records:
        run = _run(record)
        if isinstance(run, str):
            unreadable.append((record, run))
            continue
        place = _place(run.config)
        if place is None:
            others.append(run)
            continue
        cell, changes = place
        recipe = run.config.recipe
        group = groups.setdefault((recipe, changes), Group(_recipes()[recipe], changes))
        if run.config.seed in group.runs[cell]:
            others.append(run)
        else:
            group.runs[cell][run.config.seed] = run
    for group in groups.values():
        group.runs = {cell: dict(sorted(runs.items())) for cell, runs in group.runs.items()}
    order = [*RECIPES]
    ordered = sorted(groups, key=lambda key: (key[1] != "", order.index(key[0]), key[1]))
    return Collection([groups[key] for key in ordered], others, unreadable)


def fill(recipe: Recipe, records: Sequence[Record]) -> Group:
    """The cells of one recipe with runs that are known to be of it, changed or not."""
    group = Group(recipe, "")
    for record in records:
        run = _run(record)
        place = None if isinstance(run, str) else _place(run.config)
        if place is not None and not isinstance(run, str):
            cell, changes = place
            group.changes = changes or group.changes
            group.runs[cell][run.config.seed] = run
    return group


def command(run: Run) -> str:
    """What trains it again; empty for a run of no recipe of ours."""
    place = _place(run.config)
    if place is None:
        return ""
    (row, method), _ = place
    own = replace(_recipes()[run.config.recipe].cells[row, method], seed=run.config.seed)
    options = [option for change in _changes(own, run.config) for option in ("--set", change)]
    cell = f"{run.config.recipe}/{row}/{method}"
    return shlex.join(["bisam", "train", cell, "--seeds", str(run.config.seed), *options])


@cache
def _recipes() -> dict[str, Recipe]:
    return {name: make() for name, make in RECIPES.items()}


def _place(config: Config) -> tuple[Cell, str] | None:
    """The cell that a run is of, and in what it differs from it."""
    if config.recipe not in RECIPES:
        return None
    best: tuple[Cell, list[str]] | None = None
    for cell, expected in _recipes()[config.recipe].cells.items():
        if expected.method != config.method:
            continue
        expected = replace(expected, seed=config.seed, **{name: getattr(config, name) for name in NUMERICS})
        changed = _changes(expected, config)
        if best is None or len(changed) < len(best[1]):
            best = cell, changed
    return None if best is None else (best[0], ", ".join(best[1]))


def _changes(own: Config, changed: Config) -> list[str]:
    """As in ["epochs=3"]."""
    before = own.as_dict()
    return [f"{name}={_text(value)}" for name, value in changed.as_dict().items() if value != before[name]]


def _run(record: Record) -> Run | str:
    """A run, or why the record is none."""
    if not {"recipe", "data", "model", "method", "seed", "epochs"} <= record.config.keys():
        return "; ".join(record.problems) or "its configuration is not that of a run of ours"
    try:
        config = Config.from_dict(record.config)
        if not record.config.items() <= config.as_dict().items():  # an older one may have less
            return "its configuration has fields that this version does not know, or of another kind"
    except (TypeError, ValueError) as error:
        return f"its configuration is not one of ours: {error}"
    result = record.result
    if result is not None:
        status = result.get("status")
        if status not in ("done", "diverged"):
            return f"its result has the status {status!r}"
        if status == "done" and _number(result.get("test_accuracy")) is None:
            return "its result has no test accuracy"
    return Run(record, config)


def _number(value: object) -> float | None:
    if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    return None


def _text(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value).lower() if isinstance(value, bool) else str(value)
