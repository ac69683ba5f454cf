"""The list of runs, and what the drawer of each has: result, configuration, receipt, command and curves."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

from bisam.lab.files import printable
from bisam.lab.methods import title_of
from bisam.lab.recipes import RECIPES
from bisam.lab.report.page import Runs
from bisam.lab.report.page.series import Series
from bisam.lab.tables.cells import Run, cell_of, changes_of, command, number, text_of
from bisam.lab.tables.summary import OPEN, Sheet

HEAD = [
    "run", "status", "validation, %", "test, %", "tested epoch", "training, s", "s per epoch", "runs at once",
    "hardware", "commit", "date", "torch", "data", "command",
]  # fmt: skip
SHOWN = ("status", "validation, %", "test, %", "training, s", "hardware")
"""Columns of the list; the drawer has them all."""


def names_of(runs: Sequence[Run]) -> dict[int, str]:
    """A name for each run, by its id: recipe and folder, or the whole path where two would have the same."""
    short = {id(run): printable(f"{run.config.recipe}/{run.record.folder.name}") for run in runs}
    times = Counter(short.values())
    folders = {id(run): printable(str(run.record.folder)) for run in runs}
    return {key: name if times[name] == 1 else folders[key] for key, name in short.items()}


def listing(
    runs: Sequence[Run], names: Mapping[int, str], series_of: Callable[[Run], Series], tried: Container[int]
) -> Runs:
    """All runs; without test accuracies of the values of a sweep (`tried`), by which none may be chosen."""
    rows = [_row(run, names[id(run)], tested=id(run) not in tried) for run in runs]
    listed = [_listed(run, row, series_of(run)) for run, row in zip(runs, rows, strict=True)]
    return Runs(listed, Sheet(f"{len(runs)} run{'s' * (len(runs) != 1)}", HEAD, rows))


def _listed(run: Run, row: Sequence[str], series: Series) -> dict[str, Any]:
    """What the page has of a run."""
    known = dict(zip(HEAD, row, strict=True))
    place = cell_of(run.config, run.record.folder)
    status = run.status if run.status in ("done", "diverged", "not counted") else "not finished"
    own = {
        "recipe": run.config.recipe,
        "row": place[1][0] if place else run.config.row or OPEN,
        "method": title_of(run.config.method),
    }
    columns = {**own, "seed": str(run.config.seed), **{name: known[name] for name in SHOWN}}
    return {
        "id": known["run"],
        **own,
        "seed": str(run.config.seed),
        "status": status,
        "columns": {name: text for name, text in columns.items() if name != "recipe"},
        "result": [[name, known[name]] for name in HEAD[1:8]],
        "receipt": [
            *([name, known[name]] for name in HEAD[8:13]),
            *([["data notes", notes]] if (notes := _data_notes(run)) else []),
            ["folder", printable(str(run.record.folder))],
        ],
        "config": {name: text_of(value) for name, value in run.config.as_dict().items()},
        "changed": _changed(run),
        "command": "" if known["command"] == OPEN else known["command"],
        "series": series,
    }


def _data_notes(run: Run) -> str:
    """What was assumed about the data, or left out of them."""
    found = (run.record.receipt or {}).get("data_notes")
    return ". ".join(map(_text, found)) if isinstance(found, list) else ""


def _changed(run: Run) -> list[str]:
    """Names of the fields in which a run differs from its recipe."""
    place = cell_of(run.config, run.record.folder)
    if place is None:
        return []
    own = RECIPES[place[0]]().cells[place[1]]
    return [name for name in changes_of(own, run.config) if name != "seed"]


def _row(run: Run, name: str, *, tested: bool) -> list[str]:
    result, receipt = run.record.result or {}, run.record.receipt or {}
    seconds, best = _seconds(run), number(result.get("best_epoch"))
    return [
        name,
        run.status,
        _percent(run.measured(f"validation_{run.config.primary}")),
        _percent(run.measured(f"test_{run.config.primary}")) if tested else OPEN,
        OPEN if best is None or best < 0 else f"{best + 1:.0f}",
        f"{sum(seconds):.0f}" if seconds else OPEN,
        f"{statistics.median(seconds):.2f}" if seconds else OPEN,
        run.together,
        _text(run.record.hardware or OPEN),
        _text(run.record.commits or OPEN),
        *(_text(receipt.get(name)) for name in ("date", "torch")),
        _text(receipt.get("data_checksum"))[:12],
        command(run) or OPEN,
    ]


def _seconds(run: Run) -> list[float]:
    """Seconds of each epoch so far."""
    return [value for row in run.record.metrics if (value := number(row.get("seconds"))) is not None]


def _percent(value: float | None) -> str:
    return OPEN if value is None else f"{value:.2f}"


def _text(value: Any) -> str:
    return OPEN if value is None else _encodable(str(value))


def _encodable(text: str) -> str:
    """Half a character, which a file may have, is escaped."""
    return text.encode(errors="backslashreplace").decode()
