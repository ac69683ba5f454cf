"""Before a table is trained: its runs, hours and memory, and which differences a budget resolves."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from bisam.lab.config import Config
from bisam.lab.methods import baseline_of, title_of
from bisam.lab.recipes import Recipe
from bisam.lab.tables import published
from bisam.lab.tables.cells import Cell, ResultTable
from bisam.lab.tables.costs import hours_of_run
from bisam.lab.tables.effects import paper_difference
from bisam.lab.tables.gpus import Gpu
from bisam.lab.tables.power import MOST_SEEDS, seeds_to_resolve
from bisam.lab.tables.statistics import difference

UNLIMITED = 1e9
"""Hours of a budget that leaves nothing out."""


@dataclass(frozen=True)
class Budget:
    """GPUs for a number of hours."""

    gpu: Gpu
    gpus: int
    hours: float

    def __post_init__(self) -> None:
        if self.gpus < 1:
            raise ValueError(f"--gpus is at least 1, got {self.gpus}")
        if not (math.isfinite(self.hours) and self.hours > 0):
            raise ValueError(f"--hours is a positive number, got {self.hours}")

    @property
    def gpu_hours(self) -> float:
        return self.gpus * self.hours


@dataclass(frozen=True)
class Comparison:
    """A difference of the table, and how many seeds of both methods it takes to resolve it."""

    label: str
    row: str
    method: str
    baseline: str
    effect: float
    """The difference to resolve, in points."""
    deviation: float | None
    """Standard deviation of the difference of a pair of runs; None where neither runs nor the paper have one."""
    pairs: int
    """Pairs that it was measured with here; 0 where it is the paper's."""
    is_resolved: bool
    """Whether the runs that there are resolve it."""
    diverged: frozenset[int] = frozenset()
    """Seeds of runs that diverged, of one method or both: they make no pair."""

    @property
    def needed(self) -> int:
        """Seeds of each of the two methods, `MOST_SEEDS` at most."""
        return MOST_SEEDS if self.deviation is None else seeds_to_resolve(self.effect, self.deviation)

    @property
    def seeds(self) -> int:
        """How many seeds 0, 1, 2, … have as many pairs as are needed."""
        candidates = range(self.needed + len(self.diverged))
        return [seed for seed in candidates if seed not in self.diverged][self.needed - 1] + 1

    @property
    def cells(self) -> tuple[Cell, Cell]:
        return (self.row, self.baseline), (self.row, self.method)

    @property
    def name(self) -> str:
        return f"{self.label}: {title_of(self.method)} − {title_of(self.baseline)}"


@dataclass(frozen=True)
class RankedComparison:
    """A comparison in the order of what it costs, beside those before it."""

    comparison: Comparison
    runs: int
    """Runs that it adds."""
    gpu_hours: float
    """Hours that they take, together."""
    end: float | None
    """Hours until all runs up to here are done; None where the budget does not suffice."""


@dataclass(frozen=True)
class TablePlan:
    """A table within a budget."""

    recipe: Recipe
    budget: Budget
    finished: Mapping[Cell, frozenset[int]]
    """Seeds of each cell that are trained already."""
    choices: list[RankedComparison]
    unknown: list[Comparison]
    """Comparisons without a known scatter."""
    unmeasured: tuple[str, ...] = ()
    """Models without a measured step on this GPU: with one there are no hours, and the budget leaves nothing out."""

    @property
    def affordable(self) -> list[RankedComparison]:
        return [choice for choice in self.choices if choice.end is not None]


def plan(recipe: Recipe, tables: Sequence[ResultTable], budget: Budget, effect: float | None = None) -> TablePlan:
    """The comparisons of a table, cheapest first, and how far the budget reaches.

    Args:
        recipe: the table, or a part of it.
        groups: tables of the runs that there are: for the scatter of pairs, and for the runs that are done.
        budget: GPUs and hours.
        effect: the difference to resolve, in points; the paper's where it is None.
    """
    if effect is not None and not (math.isfinite(effect) and effect > 0):
        raise ValueError(f"--effect is a positive number of points, got {effect}")
    hours = {cell: hours_on(config, budget.gpu) for cell, config in recipe.cells.items()}
    unmeasured = tuple(dict.fromkeys(recipe.cells[cell].model for cell, of_run in hours.items() if of_run is None))
    costs = {cell: 1.0 if unmeasured or of_run is None else of_run for cell, of_run in hours.items()}
    finished = {cell: _finished(tables, recipe, cell) for cell in recipe.cells}
    compared = list(comparisons(recipe, tables, effect))
    known = [one for one in compared if one.deviation is not None]
    unknown = [one for one in compared if one.deviation is None]
    choices = greedy(known, costs, finished, replace(budget, hours=UNLIMITED) if unmeasured else budget)
    return TablePlan(recipe, budget, finished, choices, unknown, unmeasured)


def comparisons(recipe: Recipe, tables: Sequence[ResultTable], effect: float | None = None) -> Iterable[Comparison]:
    """Each method with its baseline, in each line of the table."""
    own = sorted((g for g in tables if g.recipe.name == recipe.name), key=lambda table: bool(table.changes))
    for label, row, measure in recipe.lines:
        for method in recipe.methods:
            baseline = baseline_of(method, recipe.methods)
            if baseline is None or baseline not in recipe.methods:
                continue
            printed = paper_difference(recipe, label, method, baseline)
            if effect is None and printed is None:
                continue
            size = effect if effect is not None else printed.mean if printed is not None else 0.0
            scatter, pairs = _scatter(own, row, measure, method, baseline)
            if scatter is None:
                scatter = _scatter_of_paper(recipe, label, method, baseline)
            resolved = any(
                (gap := difference(*(table.measured(row, one, measure) for one in (method, baseline)))) is not None
                and gap.resolved
                for table in own
                if not table.changes
            )
            diverged = frozenset(
                run.config.seed
                for table in own
                if not table.changes
                for one in (method, baseline)
                for run in table.of(row, one)
                if run.status == "diverged"
            )
            yield Comparison(label, row, method, baseline, size, scatter, pairs, resolved, diverged)


def greedy(
    compared: Sequence[Comparison],
    costs: Mapping[Cell, float],
    finished: Mapping[Cell, frozenset[int]],
    budget: Budget,
) -> list[RankedComparison]:
    """Always the comparison that adds the fewest GPU hours next: comparisons of one row share runs.

    Seeds are 0, 1, 2, …, so the first n seeds of a cell serve all comparisons that need n or fewer.
    """
    seeds: dict[Cell, int] = {}
    left, choices = list(compared), []
    while left:
        added = {id(one): _added(one, seeds, finished) for one in left}
        spent = {key: sum(costs[cell] * count for cell, count in runs.items()) for key, runs in added.items()}
        best = min(left, key=lambda one: spent[id(one)])
        left.remove(best)
        wanted = {**seeds, **({} if best.is_resolved else {c: max(seeds.get(c, 0), best.seeds) for c in best.cells})}
        runs = [(costs[cell], missing_seeds(finished[cell], count)) for cell, count in wanted.items()]
        end = end_of(runs, budget.gpus) if _total(runs) <= budget.gpu_hours else math.inf
        fits = end <= budget.hours and (best.is_resolved or best.needed < MOST_SEEDS)
        if fits:
            seeds = wanted
        choices.append(RankedComparison(best, sum(added[id(best)].values()), spent[id(best)], end if fits else None))
    return choices


def end_of(runs: Iterable[tuple[float, int]], gpus: int) -> float:
    """Hours until the last GPU is done, longest runs first, each on the GPU that is free first.

    >>> end_of([(2.0, 3), (1.0, 2)], gpus=2)
    4.0
    """
    ends = [0.0] * gpus
    for hours, count in sorted(runs, reverse=True):
        for _ in range(count):
            heapq.heapreplace(ends, ends[0] + hours)
    return max(ends)


def _added(one: Comparison, seeds: Mapping[Cell, int], finished: Mapping[Cell, frozenset[int]]) -> dict[Cell, int]:
    """Runs that a comparison needs beside those that are chosen already."""
    if one.is_resolved:
        return {}
    have = {cell: seeds.get(cell, 0) for cell in one.cells}
    return {
        cell: missing_seeds(finished[cell], max(one.seeds, count)) - missing_seeds(finished[cell], count)
        for cell, count in have.items()
    }


def missing_seeds(finished: frozenset[int], count: int) -> int:
    """Seeds of 0 … count − 1 that are not trained yet."""
    return count - sum(seed < count for seed in finished)


def _total(runs: Iterable[tuple[float, int]]) -> float:
    return sum(hours * count for hours, count in runs)


def hours_on(config: Config, gpu: Gpu) -> float | None:
    """None for a model without a measured step."""
    return hours_of_run(config, gpu.plain_ms)


def _finished(tables: Sequence[ResultTable], recipe: Recipe, cell: Cell) -> frozenset[int]:
    runs = (run for g in tables if g.recipe.name == recipe.name and not g.changes for run in g.of(*cell))
    return frozenset(run.config.seed for run in runs if run.record.result is not None)


def _scatter(
    tables: Sequence[ResultTable], row: str, measure: str, method: str, baseline: str
) -> tuple[float | None, int]:
    """Standard deviation of the paired differences, and their number; of the unchanged recipe if it has any."""
    for table in tables:
        ours, theirs = (table.measured(row, one, measure) for one in (method, baseline))
        gap = difference(ours, theirs)
        if gap is not None and gap.deviation is not None:  # equal gaps, but for rounding, have none
            return gap.deviation, gap.runs[0]
    return None, 0


def _scatter_of_paper(recipe: Recipe, label: str, method: str, baseline: str) -> float | None:
    """That of the difference of two independent runs."""
    table = published.of(recipe)
    if table is None:
        return None
    cells = table.cells.get(label, {})
    deviations = [cells[one].std for one in (method, baseline) if one in cells]
    if len(deviations) < 2 or None in deviations:
        return None
    return math.hypot(*(each for each in deviations if each is not None)) or None
