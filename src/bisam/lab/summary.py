"""What runs came to: the tables of the paper, the published number beside ours."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

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
    """The recipe's table from its finished runs; None without one."""
    results: Results = defaultdict(list)
    for record in _finished(runs):
        config = Config.from_dict(record.config)
        for cell, expected in recipe.cells.items():
            if {**expected.as_dict(), "seed": config.seed} == config.as_dict():
                results[cell].append(record)
    return _sheet(recipe, results, exact=True) if results else None


def sheet_of_changed(recipe: Recipe, runs: Sequence[records.Record]) -> Sheet | None:
    """The same from runs that changed the recipe: nothing of the paper is beside them."""
    results: Results = defaultdict(list)
    for record in _finished(runs):
        config = Config.from_dict(record.config)
        for cell, expected in recipe.cells.items():
            if (expected.model, expected.method, expected.noise) == (config.model, config.method, config.noise):
                results[cell].append(record)
    return _sheet(recipe, results, exact=False) if results else None


def sheets(root: Path) -> list[Sheet]:
    """All tables that have a finished run under this folder."""
    runs = records.find(root)
    made = [sheet(make(), runs) for make in RECIPES.values()]
    return [each for each in made if each is not None]


def _finished(runs: Sequence[records.Record]) -> list[records.Record]:
    return [run for run in runs if run.result is not None and run.result.get("test_accuracy") is not None]


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
    values = [run.result["test_accuracy"] for run in runs if run.result is not None]
    if not values:
        return f"– {paper}".strip()
    spread = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.2f}{spread}, n = {len(values)} {paper}".strip()


def _printed(paper: published.Table | None, row: str, method: str) -> str:
    cell = None if paper is None else paper.cells.get(row, {}).get(method)
    return "" if cell is None else f"({cell.mean:.2f} ± {cell.std:.2f})"


def _flips(run: records.Record) -> float | None:
    return run.metrics[-1].get("flips") if run.metrics else None


def _milliseconds(run: records.Record) -> float | None:
    rate = run.metrics[-1].get("samples_per_second") if run.metrics else None
    return 1e3 * run.config["batch"] / rate if rate else None


def _mean(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{statistics.mean(known):.1f}" if known else "–"
