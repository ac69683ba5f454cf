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


def cell_of(recipe: Recipe, config: Config) -> tuple[str, str] | None:
    """The cell of the table that this configuration is a run of, if it is unchanged."""
    for cell, expected in recipe.cells.items():
        if {**expected.as_dict(), "seed": config.seed} == config.as_dict():
            return cell
    return None


def by_cell(recipe: Recipe, runs: Sequence[records.Record]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """The results of the finished runs of a recipe."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for record in runs:
        if record.config is None or record.result is None or record.config.get("recipe") != recipe.name:
            continue
        cell = cell_of(recipe, Config.from_dict(record.config))
        if cell is not None and record.result.get("test_accuracy") is not None:
            last = record.metrics[-1] if record.metrics else {}
            found[cell].append({**record.result, "flips": last.get("flips"), "samples_per_second": last.get("samples_per_second")})
    return dict(found)


def table(recipe: Recipe, runs: Sequence[records.Record]) -> Table | None:
    """The recipe's table; None without a finished run."""
    cells = by_cell(recipe, runs)
    if not cells:
        return None
    paper = published.table(recipe.published) if recipe.published else None
    shown = Table(title=f"{recipe.title}: per cent, mean ± standard deviation" + (", (paper)" if paper else ""))
    shown.add_column("")
    for method in recipe.methods:
        shown.add_column(TITLES[method], justify="right")
    for row in recipe.rows:
        texts = [_accuracy(cells.get((row, method), []), _published(paper, row, method)) for method in recipe.methods]
        shown.add_row(row, *texts)
    return shown


def _accuracy(results: list[dict[str, Any]], paper: str) -> str:
    if not results:
        return f"– {paper}".strip()
    values = [result["test_accuracy"] for result in results]
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
