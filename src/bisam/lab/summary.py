"""What runs came to: the tables of the paper, the published number beside ours."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rich.table import Table

from bisam.lab import published, records
from bisam.lab.config import Config
from bisam.lab.methods import TITLES
from bisam.lab.recipes import RECIPES, Recipe

Results = dict[tuple[str, str], list[records.Record]]


@dataclass
class Sheet:
    """A table of texts, for a terminal or a page."""

    title: str
    head: list[str]
    rows: list[list[str]]

    def rich(self) -> Table:
        shown = Table(title=self.title)
        for number, name in enumerate(self.head):
            shown.add_column(name, justify="left" if number == 0 else "right")
        for row in self.rows:
            shown.add_row(*row)
        return shown

    def markdown(self) -> str:
        lines = [self.head, ["---"] * len(self.head), *self.rows]
        return "\n".join([f"**{self.title}**", "", *(f"| {' | '.join(cells)} |" for cells in lines)])


def sheet(recipe: Recipe, runs: Sequence[records.Record]) -> Sheet | None:
    """The recipe's table from its finished runs, one of each seed; None without any."""
    results: Results = defaultdict(list)
    seen = set()
    for record in runs:
        config = _config(record)
        if config is None:
            continue
        for cell, expected in recipe.cells.items():
            if config == replace(expected, seed=config.seed) and (cell, config.seed) not in seen:
                seen.add((cell, config.seed))
                results[cell].append(record)
    return _sheet(recipe, results, exact=True) if results else None


def sheet_of_changed(recipe: Recipe, runs: Sequence[records.Record]) -> Sheet | None:
    """The same from runs that changed the recipe: nothing of the paper is beside them."""
    results: Results = defaultdict(list)
    for record in runs:
        config = _config(record)
        if config is None:
            continue
        for cell, expected in recipe.cells.items():
            if (expected.model, expected.method, expected.noise) == (config.model, config.method, config.noise):
                results[cell].append(record)
    return _sheet(recipe, results, exact=False) if results else None


def sheets(runs: Sequence[records.Record]) -> list[Sheet]:
    """All tables that have a finished run among these."""
    made = [sheet(make(), runs) for make in RECIPES.values()]
    return [each for each in made if each is not None]


def left_out(runs: Sequence[records.Record]) -> list[str]:
    """What cannot be shown of them, and why: one line for each folder."""
    lines = []
    for record in runs:
        unreadable = record.result is not None and _config(record) is None
        problems = [*record.problems, *(["its configuration or result is not one of ours"] if unreadable else [])]
        if problems:
            lines.append(f"{record.folder}: {'; '.join(problems)}")
    return lines


def _config(record: records.Record) -> Config | None:
    """The configuration of a finished run; None of anything else, whatever is in its folder."""
    result, last = record.result, record.metrics[-1] if record.metrics else {}
    if result is None or (not _is_number(result.get("test_accuracy")) and result.get("status") != "diverged"):
        return None
    if not all(_is_number(last.get(name, 0.0)) for name in ("flips", "seconds", "samples_per_second")):
        return None
    if not {"recipe", "data", "model", "method", "seed", "epochs"} <= record.config.keys():
        return None
    try:
        config = Config.from_dict(record.config)
        return config if record.config.items() <= config.as_dict().items() else None  # an older one may have less
    except (TypeError, ValueError):
        return None


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _sheet(recipe: Recipe, results: Results, *, exact: bool) -> Sheet:
    paper = published.table(recipe.published) if recipe.published and exact else None
    title = f"{recipe.title}{'' if exact else ', changed'}: test accuracy in per cent{', (paper)' if paper else ''}"
    rows = []
    for row in recipe.rows:
        cells = [results.get((row, method), []) for method in recipe.methods]
        if any(cells):
            texts = [_accuracy(c, _printed(paper, row, m)) for c, m in zip(cells, recipe.methods, strict=True)]
            rows.append([row, *texts])
    everything = {
        method: [run for row in recipe.rows for run in results.get((row, method), [])] for method in recipe.methods
    }
    rows.append(
        ["flips per batch, last epoch", *(_mean([_flips(run) for run in runs]) for runs in everything.values())]
    )
    rows.append(
        ["ms per step, last epoch", *(_mean([_milliseconds(run) for run in runs]) for runs in everything.values())]
    )
    return Sheet(title, ["", *(TITLES[method] for method in recipe.methods)], rows)


def _accuracy(runs: Sequence[records.Record], paper: str) -> str:
    results = [run.result for run in runs if run.result is not None]
    values = [result["test_accuracy"] for result in results if result["status"] == "done"]
    diverged = len(results) - len(values)
    lost = f", {diverged} diverged" if diverged else ""
    if not values:
        return f"–{lost} {paper}".strip()
    spread = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.2f}{spread}, n = {len(values)}{lost} {paper}".strip()


def _printed(paper: published.Table | None, row: str, method: str) -> str:
    cell = None if paper is None else paper.cells.get(row, {}).get(method)
    return "" if cell is None else f"({cell.mean:.2f} ± {cell.std:.2f})"


def _flips(run: records.Record) -> float | None:
    return run.metrics[-1].get("flips") if run.metrics else None


def _milliseconds(run: records.Record) -> float | None:
    """Of one run's step, where several shared the device."""
    last = run.metrics[-1] if run.metrics else {}
    rate, together = last.get("samples_per_second"), last.get("together", 1)
    return 1e3 * Config.from_dict(run.config).batch / rate / together if rate else None


def _mean(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{statistics.mean(known):.1f}" if known else "–"
