"""The paper's differences between methods, and how many seeds it would take to resolve them here."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from bisam.lab.methods import title_of
from bisam.lab.recipes import Recipe
from bisam.lab.tables import published
from bisam.lab.tables.cells import ResultTable
from bisam.lab.tables.costs import hours
from bisam.lab.tables.power import MOST_SEEDS, POWER, count_text, deviation_range, seeds_to_resolve
from bisam.lab.tables.statistics import Difference, difference_of_means, signed
from bisam.lab.tables.summary import OPEN, MethodDifference, Sheet, comparisons


def paper_difference(recipe: Recipe, label: str, method: str, baseline: str) -> Difference | None:
    """What the paper's table has for this row and these methods; None where it has not both."""
    table = published.of(recipe)
    if table is None:
        return None
    both = [table.moments(label, name) for name in (method, baseline)]
    ours, theirs = both
    return None if ours is None or theirs is None else difference_of_means(ours, theirs)


@dataclass(frozen=True)
class SeedPlan:
    """What it would take to resolve the paper's effect in one row of a table."""

    table: ResultTable
    label: str
    row: str
    method: str
    baseline: str
    effect: float
    """The paper's difference, in points."""
    deviation: float
    """Standard deviation of the difference of a pair of runs, measured here."""
    pairs: int
    """Pairs that it was measured with."""

    @property
    def needed(self) -> int:
        return seeds_to_resolve(self.effect, self.deviation)

    @property
    def needed_range(self) -> tuple[int, int]:
        """For the smallest and the largest scatter that these pairs are compatible with."""
        low, high = deviation_range(self.deviation, self.pairs)
        return seeds_to_resolve(self.effect, low), seeds_to_resolve(self.effect, high)

    @property
    def present(self) -> int:
        """Seeds that the unchanged recipe has of both methods."""
        if self.table.changes:
            return 0
        both = [self.table.measured(self.row, name).keys() for name in (self.method, self.baseline)]
        return len(both[0] & both[1])

    @property
    def hours(self) -> float | None:
        """Of the missing seeds on one H200."""
        part = self.table.recipe.only([self.row], [self.method, self.baseline])
        return hours(replace(part, seeds=max(0, self.needed - self.present)))

    @property
    def command(self) -> str:
        recipe = self.table.recipe
        parts = ["bisam", "reproduce", f"{recipe.name}/{self.row}", "--methods", f"{self.baseline},{self.method}"]
        parts += ["--seeds", f"0-{self.needed - 1}"]
        if recipe.cells[self.row, self.method].model != "densenet121":  # whose hours are those without
            parts += ["--set", "compile=true"]
        return shlex.join(parts)

    @property
    def name(self) -> str:
        return f"{self.label}: {title_of(self.method)} − {title_of(self.baseline)}"


def seed_plans(tables: Iterable[ResultTable]) -> list[SeedPlan]:
    """For each difference of the paper whose scatter is measured by two or more pairs.

    Runs of a changed recipe give the scatter only where those of the unchanged one do not.
    """
    found: dict[tuple[str, str, str], SeedPlan] = {}
    for table in sorted(tables, key=lambda table: bool(table.changes)):
        for one in comparisons(table):
            plan = _plan(table, one)
            if plan is not None:
                found.setdefault((table.recipe.name, one.row, one.method), plan)
    return [*found.values()]


def _plan(table: ResultTable, one: MethodDifference) -> SeedPlan | None:
    row = next(row for label, row, _ in table.recipe.lines if label == one.row)
    printed, found = paper_difference(table.recipe, one.row, one.method, one.baseline), one.found
    if printed is None or found.deviation is None:
        return None
    return SeedPlan(table, one.row, row, one.method, one.baseline, printed.mean, found.deviation, found.runs[0])


def sheet_of_plans(plans: Sequence[SeedPlan], measure: str = "test accuracy") -> Sheet | None:
    """The plans as a table; None if there is none."""
    if not plans:
        return None
    head = ["difference", "paper's effect", "scatter of a pair", "pairs now", "pairs needed", "GPU hours", "command"]
    rows = []
    for plan in plans:
        spent = None if plan.needed >= MOST_SEEDS else plan.hours
        rows.append([
            f"{plan.table.recipe.name}, {plan.name}",
            signed(plan.effect),
            f"{plan.deviation:.2f}, from {plan.pairs}" + (f"\nwith {plan.table.changes}" if plan.table.changes else ""),
            str(plan.present),
            count_text(plan.needed) + _range(*plan.needed_range),
            OPEN if spent is None else f"{spent:.1f}" if spent < 100 else f"{spent:,.0f}",
            plan.command if plan.present < plan.needed < MOST_SEEDS else OPEN,
        ])  # fmt: skip
    notes = [
        f"Pairs of runs with the same seed, for a chance of {100 * POWER:.0f} % that the 95 % interval excludes 0 if "
        f"the paper's effect is the true one, in points of {measure}. The range is that of the scatter, which few "
        "pairs measure poorly. Hours are those of the missing runs on one H200."
    ]
    return Sheet("Seeds needed to resolve the paper's effect", head, rows, notes)


def _range(few: int, many: int) -> str:
    """
    >>> _range(12, 1234), _range(12, MOST_SEEDS), _range(MOST_SEEDS, MOST_SEEDS)
    ('\\n95 %: 12 to 1,234', '\\n95 %: 12 or more', '')
    """
    if few >= MOST_SEEDS:
        return ""
    return f"\n95 %: {few:,} " + ("or more" if many >= MOST_SEEDS else f"to {many:,}")
