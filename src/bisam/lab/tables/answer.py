"""Does it help? The answer of one's own runs: a sentence, and a table of methods with their differences and costs."""

from __future__ import annotations

import shlex
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bisam.lab.measures import title_of as title_of_measure
from bisam.lab.methods import perturbs, title_of, uses
from bisam.lab.records import WEIGHTS
from bisam.lab.tables.cells import ResultTable, Run, text_of
from bisam.lab.tables.power import MOST_SEEDS, POWER, more_seeds
from bisam.lab.tables.statistics import Difference, difference, signed
from bisam.lab.tables.summary import OPEN, Sheet, diverged, milliseconds, spread


@dataclass(frozen=True)
class Answer:
    """The sentence, the table, and the method that the sentence is about."""

    sentence: str
    sheet: Sheet
    method: str | None
    """The sharpness-aware method that does best on validation data; None if none has a result."""
    best: Run | None
    """The run of that method that does best on validation data."""
    better_base: Run | None = None
    """The best run of the base optimizer, if the base optimizer does better on validation data than that method."""

    def to_predict(self, folder: Path) -> list[str]:
        """Where the best weights are, in the folder of the fit, and how to predict with them; none without a result."""
        if self.best is None:
            return []
        lines = [
            f"weights of the best run of {title_of(self.best.config.method)} on validation data: {folder / WEIGHTS}",
            f"to predict with them: {_prediction(folder)}",
        ]
        if self.better_base is not None:
            lines.append(
                f"{title_of(self.better_base.config.method)} did better on validation data, as the mean of its runs. "
                f"To predict with its best run: {_prediction(self.better_base.record.folder)}"
            )
        return lines


def _prediction(folder: Path) -> str:
    return f"bisam predict {shlex.quote(str(folder))} DATA"


def answer(table: ResultTable) -> Answer:
    """The answer of a table with one row: its base optimizer against its sharpness-aware methods."""
    (row,) = table.recipe.rows
    lines = [(name, title_of_measure(name)) for _, _, name in table.recipe.lines]
    counted, measure = lines[0]
    base = next((method for method in table.recipe.methods if not perturbs(method)), None)
    on_validation = _on_validation(table, row)
    best = _best_of({method: runs for method, runs in on_validation.items() if perturbs(method)})
    first = _best_of(on_validation)
    better_base = first if best is not None and first is not None and not perturbs(first.config.method) else None
    gaps: dict[str, Difference | None] = {
        method: None
        if base is None
        else difference(table.measured(row, method, counted), table.measured(row, base, counted))
        for method in table.recipe.methods
        if method != base
    }
    head = ["", "ρ", "seeds", *(title for _, title in lines)]
    head += [f"− {title_of(base)}" if base else "difference", "95 % interval", "resolved", "more seeds", "ms per step"]
    rows = []
    for method in table.recipe.methods:
        config = table.recipe.cells[row, method]
        rho = text_of(config.rho) if uses(method, "rho") else OPEN
        values = [_spread([*table.measured(row, method, name).values()]) for name, _ in lines]
        count = str(len(table.measured(row, method, counted)))
        rows.append(
            [title_of(method), rho, count, *values, *_gap(gaps.get(method)), milliseconds(table.of(row, method))]
        )
    sheet = Sheet(
        f"{table.title}: {table.recipe.measure} in per cent", head, rows, _notes(table, row, [*gaps.values()])
    )
    sentence = _sentence(measure, base, best, gaps)
    return Answer(sentence, sheet, best.config.method if best else None, best, better_base)


def _spread(values: Sequence[float]) -> str:
    if not values:
        return OPEN
    return spread(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None)


def _gap(gap: Difference | None) -> list[str]:
    if gap is None:
        return [OPEN] * 4
    return [signed(gap.mean), gap.interval or OPEN, "yes" if gap.resolved else "no", _more(gap)]


def _more(gap: Difference) -> str:
    count = more_seeds(gap)
    if count is None:
        return "?"
    return "too many" if _is_too_many(gap, count) else f"{count:,}"


def _is_too_many(gap: Difference, more: int) -> bool:
    """Whether no number of seeds that was looked at is enough."""
    return more + gap.runs[0] >= MOST_SEEDS


def _sentence(measure: str, base: str | None, best: Run | None, gaps: dict[str, Difference | None]) -> str:
    gap = None if best is None else gaps[best.config.method]
    if base is None or best is None or gap is None:
        return "No answer: there are no two finished runs to compare, one with and one without a perturbation."
    name = f"{title_of(best.config.method)} with ρ = {text_of(best.config.rho)}"
    verdict = "Inconclusive" if not gap.resolved else "Yes" if gap.mean > 0 else "No"
    return f"{verdict}: in test {measure}, {gap.describe(name, title_of(base))}{_advice(gap)}."


def _advice(gap: Difference) -> str:
    if gap.resolved:
        return ""
    if gap.low is None and gap.paired and gap.mean == 0:
        return (
            "; both have the same result with every seed: if it is that of always naming one class, nothing was "
            "learnt, and more epochs or another lr are needed; else more test samples, or harder ones"
        )
    if gap.low is None:
        return "; two seeds or more that differ are needed"
    count = more_seeds(gap)
    if count is None:
        return "; train both with the same seeds, which are compared more exactly"
    if gap.mean == 0:
        return "; the difference is 0, which no number of seeds resolves"
    if _is_too_many(gap, count):
        return "; the difference is too small to be resolved by any practical number of seeds"
    seeds = f"about {count:,} more seed{'s' * (count > 1)}"
    return f"; {seeds} would resolve a difference of this size with a chance of {100 * POWER:.0f} %"


def _on_validation(table: ResultTable, row: str) -> dict[str, list[tuple[float, Run]]]:
    """For each method with results, sharpness-aware ones first: its runs with their results on validation data."""
    found = {
        method: [
            (value, run)
            for run in table.of(row, method)
            if (value := run.measured(f"validation_{run.config.primary}")) is not None
        ]
        for method in sorted(table.recipe.methods, key=perturbs, reverse=True)
    }
    return {method: runs for method, runs in found.items() if runs}


def _best_of(on_validation: dict[str, list[tuple[float, Run]]]) -> Run | None:
    """The best run of the method with the best mean, the first of equals. The test data choose nothing."""
    if not on_validation:
        return None
    runs = max(on_validation.values(), key=lambda runs: statistics.fmean(value for value, _ in runs))
    return max(runs, key=lambda pair: pair[0])[1]


def _notes(table: ResultTable, row: str, gaps: list[Difference | None]) -> list[str]:
    notes = [lost] if (lost := diverged(table, row, table.recipe.methods)) else []
    known = [gap for gap in gaps if gap is not None]
    if any(gap.low is not None and gap.paired for gap in known):
        notes.append("Differences and intervals are of pairs with the same seed: Student's t, each 95 % by itself.")
    if any(gap.low is not None and not gap.paired for gap in known):
        notes.append("Runs without common seeds are compared as two groups: Welch's t, each 95 % by itself.")
    if any(gap.low is None for gap in known):
        notes.append("Without an interval the scatter is not known: it takes two seeds or more that differ.")
    return [f"{note[0].upper()}{note[1:]}" for note in notes]
