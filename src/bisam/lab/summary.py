"""What runs came to: the tables of the paper, published number beside ours."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from bisam.lab import published, records
from bisam.lab.config import Config
from bisam.lab.methods import TITLES
from bisam.lab.recipes import RECIPES, Recipe

Results = dict[tuple[str, str], list[records.Record]]


def cell_of(recipe: Recipe, config: Config) -> tuple[str, str] | None:
    """The cell of the table that this configuration is a run of, if it is unchanged."""
    for cell, expected in recipe.cells.items():
        if {**expected.as_dict(), "seed": config.seed} == config.as_dict():
            return cell
    return None


def table(recipe: Recipe, runs: Sequence[records.Record]) -> Table | None:
    """The recipe's table from its finished runs; None without one."""
    results: Results = defaultdict(list)
    for record in _finished(runs):
        config = Config.from_dict(record.config)
        cell = cell_of(recipe, config) if config.recipe == recipe.name else None
        if cell is not None:
            results[cell].append(record)
    return _shown(recipe, results, recipe.title) if results else None


def of_jobs(recipe: Recipe, runs: Sequence[records.Record]) -> Table | None:
    """The same from the runs of a command, which may have changed the recipe: then nothing of the paper is beside."""
    exact = table(recipe, runs)
    finished = _finished(runs)
    if exact is not None or not finished:
        return exact
    results: Results = defaultdict(list)
    for record in finished:
        config = Config.from_dict(record.config)
        for cell, expected in recipe.cells.items():
            if (expected.model, expected.method, expected.noise) == (config.model, config.method, config.noise):
                results[cell].append(record)
    return _shown(recipe, results, f"{recipe.title}, changed") if results else None


def _finished(runs: Sequence[records.Record]) -> list[records.Record]:
    return [run for run in runs if run.result is not None and run.result.get("test_accuracy") is not None]


def _shown(recipe: Recipe, results: Results, title: str) -> Table:
    paper = published.table(recipe.published) if recipe.published and "changed" not in title else None
    shown = Table(
        title=f"{title}: test accuracy in per cent, mean ± standard deviation" + (", (paper)" if paper else "")
    )
    shown.add_column("")
    for method in recipe.methods:
        shown.add_column(TITLES[method], justify="right")
    for row in recipe.rows:
        cells = [results.get((row, method), []) for method in recipe.methods]
        if any(cells):
            shown.add_row(
                row,
                *(_accuracy(cell, _published(paper, row, m)) for cell, m in zip(cells, recipe.methods, strict=True)),
            )
    for name, words in (("flips", "flips per batch, last epoch"), ("ms", "ms per step")):
        values = [
            _mean([_extra(run, name) for row in recipe.rows for run in results.get((row, m), [])])
            for m in recipe.methods
        ]
        shown.add_row(words, *values, style="dim")
    return shown


def _extra(run: records.Record, name: str) -> float | None:
    last = run.metrics[-1] if run.metrics else {}
    if name == "flips":
        return last.get("flips")
    rate = last.get("samples_per_second")
    return 1e3 * run.config["batch"] / rate if rate else None


def _mean(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{statistics.mean(known):.1f}" if known else "–"


def _accuracy(runs: Sequence[records.Record], paper: str) -> str:
    values = [run.result["test_accuracy"] for run in runs if run.result is not None]
    if not values:
        return f"– {paper}".strip()
    spread = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.2f}{spread} n={len(values)} {paper}".strip()


def _published(paper: Any, row: str, method: str) -> str:
    if paper is None:
        return ""
    cell = paper.cells.get(row, {}).get(method)
    return "" if cell is None else f"({cell.mean:.2f} ± {cell.std:.2f})"


def tables(root: Path) -> list[Table]:
    """All tables that have a run under this folder."""
    runs = records.find(root)
    made = [table(make(), runs) for make in RECIPES.values()]
    return [each for each in made if each is not None]
