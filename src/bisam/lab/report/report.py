"""The page of all runs: answers, tables, differences, curves, sweeps and receipts."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Container, Iterable, Sequence
from itertools import chain, count
from pathlib import Path
from typing import Any

from bisam.lab.methods import title_of
from bisam.lab.recipes import RECIPES
from bisam.lab.report import charts, page
from bisam.lab.report.page import Block, Choice, Figure, Figures, Fold, Grid, Section, Sentences
from bisam.lab.tables import published, summary
from bisam.lab.tables.cells import Collection, Group, Run, command, number
from bisam.lab.tables.summary import OPEN, MethodDifference, Sheet
from bisam.lab.tables.sweeps import Sweep, sheet, sort_out

MOST_ANSWERS = 12
"""Sentences at the top of the page; the others are with their tables."""


def write(collection: Collection, roots: Sequence[Path]) -> str:
    """The page, as HTML."""
    every = charts.stride(collection.runs)
    groups, found = sort_out(collection)
    own, changed = ([group for group in groups if bool(group.changes) == has] for has in (False, True))
    sections = [Section("What came out", [*_answers(own or changed), *_problems(collection)])]
    sections += [Section(_heading(group), _blocks(group, every)) for group in own]
    sections.append(Section("Grids", [block for sweep in found for block in _grid(sweep)]))
    sections.append(Section("Changed recipes", [Fold(group.title, _blocks(group, every)) for group in changed]))
    listing = _listing(collection.runs, found) if collection.runs else _nothing(roots)
    sections.append(Section("Runs and receipts", [listing]))
    sections.append(Section("Tables of the paper without runs", _open_tables(collection)))
    return page.render("bisam: report", _lead(collection, roots), [each for each in sections if each.blocks])


def figures(collection: Collection) -> dict[str, charts.Chart]:
    """All charts of these runs, each by a name for a file."""
    drawn: dict[str, charts.Chart] = {}
    groups, found = sort_out(collection)
    for sweep in found:
        name = f"{sweep.name}, {sweep.changes}" if sweep.changes else sweep.name
        drawn[_file_name(name, sweep.fields[0], drawn)] = charts.grid(sweep)
    for group in groups:
        for row in group.rows:
            rows = charts.points(group.of_row(row), charts.stride(group.of_row(row)))
            for name in _curves(rows):
                chart = charts.curve(rows, name, group.recipe.methods, interactive=False)
                drawn[_file_name(group.name, f"{row}-{name}", drawn)] = chart
        compared = _with_intervals(summary.comparisons(group))
        if compared:
            drawn[_file_name(group.name, "differences", drawn)] = charts.forest(compared)
    return drawn


def _lead(collection: Collection, roots: Sequence[Path]) -> str:
    runs = collection.runs
    done = sum(run.status == "done" for run in runs)
    diverged = sum(run.status == "diverged" for run in runs)
    not_counted = sum(run.status == "not counted" for run in runs)
    under_way = len(runs) - done - diverged - not_counted
    counts = [f"{done} finished", f"{diverged} diverged", f"{under_way} not finished"]
    counts += [f"{not_counted} not counted"] * bool(not_counted)
    hours = sum(_seconds_of_the_device(run) for run in runs) / 3600
    time = f"{hours:.1f} hours of training" if hours >= 1 else f"{60 * hours:.1f} minutes of training"
    if hours < 1 / 60:
        time = f"{3600 * hours:.0f} seconds of training"
    places = ", ".join(map(str, roots))
    return f"{len(runs)} run{'s' * (len(runs) != 1)} in {places}: {', '.join(counts)}; {time}."


def _answers(groups: Sequence[Group]) -> list[Block]:
    """A sentence for each difference of each table; resolved ones first."""
    blocks: list[Block] = []
    for group in groups:
        found = sorted(summary.comparisons(group), key=lambda one: not one.found.resolved)
        lines = [f"{one.row}: {one.describe()}." for one in found]
        if lines:
            blocks.append(Sentences(lines[:MOST_ANSWERS], title=group.title))
        if len(lines) > MOST_ANSWERS:
            blocks.append(Fold(f"{len(lines) - MOST_ANSWERS} more", [Sentences(lines[MOST_ANSWERS:])]))
    return blocks or [Sentences(["No two methods of a table have finished runs: no comparison is possible yet."])]


def _problems(collection: Collection) -> list[Block]:
    lines = summary.left_out(collection)
    if not lines:
        return []
    warned = Sentences(lines, "warning")
    return (
        [warned]
        if len(lines) <= MOST_ANSWERS
        else [Fold(f"{len(lines)} folders are not whole or not counted", [warned])]
    )


def _grid(sweep: Sweep) -> list[Block]:
    return [Grid(sheet(sweep)), Figure(f"{sweep.name}: {sweep.fields[0]}", charts.grid(sweep))]


def _heading(group: Group) -> str:
    return f"{group.title} ({group.recipe.name})"


def _blocks(group: Group, every: int) -> list[Block]:
    blocks: list[Block] = [Grid(summary.sheet(group))]
    compared = summary.comparisons(group)
    differences = summary.sheet_of_comparisons(group)
    if differences is not None:
        blocks.append(Grid(differences))
    if _with_intervals(compared):
        caption = "With 95 % intervals: one that leaves 0 out resolves the sign."
        blocks.append(Figure("Is the difference real?", charts.forest(_with_intervals(compared)), caption))
    points = {row: charts.points(group.of_row(row), every) for row in group.rows}
    options = {row: [_figures(group, row, rows)] for row, rows in points.items() if rows}
    if options:
        blocks.append(Choice("Curves of", options))
    return blocks


def _figures(group: Group, row: str, rows: charts.Rows) -> Figures:
    methods = group.recipe.methods
    config = group.of_row(row)[0].config
    captions = {"flips": f"Of {config.batch} samples, those that the perturbation turns wrong."}
    if config.noise:
        captions["validation_accuracy"] = "Its labels are as noisy as those of the training data."
    return Figures(
        [
            Figure(f"{row}: {charts.CURVES[name]}", charts.curve(rows, name, methods), captions.get(name, ""))
            for name in _curves(rows)
        ]
    )


def _curves(rows: charts.Rows) -> list[str]:
    """The curves that have data."""
    return [name for name in charts.CURVES if any(name in row for row in rows)]


def _with_intervals(found: Iterable[MethodDifference]) -> list[MethodDifference]:
    return [one for one in found if one.found.low is not None]


def _listing(runs: Sequence[Run], sweeps: Iterable[Sweep]) -> Block:
    """All runs; without test accuracies of the values of a sweep, by which none may be chosen."""
    tried = {id(run) for sweep in sweeps for run in sweep.tried}
    head = [
        "run", "status", "validation, %", "test, %", "tested epoch", "training, s", "s per epoch", "runs at once",
        "hardware", "commit", "date", "torch", "data", "command",
    ]  # fmt: skip
    rows = [_listed(run, tested=id(run) not in tried) for run in runs]
    times = Counter(name for name, *_ in rows)
    for run, row in zip(runs, rows, strict=True):
        if times[row[0]] > 1:  # of several folders
            row[0] = str(run.record.folder)
    return Grid(Sheet(f"{len(runs)} run{'s' * (len(runs) != 1)}", head, rows), searchable=len(rows) > 10)


def _listed(run: Run, *, tested: bool) -> list[str]:
    result, receipt = run.record.result or {}, run.record.receipt or {}
    seconds, best = _seconds(run), number(result.get("best_epoch"))
    return [
        f"{run.config.recipe}/{run.record.folder.name}",
        run.status,
        _percent(run.measured("validation_accuracy")),
        _percent(run.measured()) if tested else OPEN,
        OPEN if best is None or best < 0 else f"{best + 1:.0f}",
        f"{sum(seconds):.0f}" if seconds else OPEN,
        f"{statistics.median(seconds):.2f}" if seconds else OPEN,
        run.together,
        run.record.hardware or OPEN,
        run.record.commits or OPEN,
        *(_text(receipt.get(name)) for name in ("date", "torch")),
        _text(receipt.get("data_checksum"))[:12],
        command(run) or OPEN,
    ]


def _open_tables(collection: Collection) -> list[Block]:
    present = {group.recipe.name for group in collection.groups if not group.changes}
    blocks: list[Block] = []
    for name, make in RECIPES.items():
        recipe = make()
        table = published.of(recipe)
        if name in present or table is None:
            continue
        rows = [
            [label, *(_printed(table.cells.get(label, {}).get(method)) for method in recipe.methods)]
            for label, _, _ in recipe.lines
        ]
        sheet = Sheet("As published", ["", *(title_of(method) for method in recipe.methods)], rows)
        blocks.append(Fold(recipe.title, [Grid(sheet), Sentences([f"To run it: bisam reproduce {name}"])]))
    return blocks


def _nothing(roots: Sequence[Path]) -> Block:
    places = ", ".join(map(str, roots))
    return Sentences([f"There are no runs in {places}. A first one takes two minutes: bisam demo"])


def _printed(cell: published.PublishedCell | None) -> str:
    return OPEN if cell is None else summary.spread(cell.mean, cell.std)


def _seconds(run: Run) -> list[float]:
    """Seconds of each epoch so far."""
    return [value for row in run.record.metrics if (value := number(row.get("seconds"))) is not None]


def _seconds_of_the_device(run: Run) -> float:
    """Seconds of each epoch, divided by the runs that shared the device, added up."""
    rows = [(number(row.get("seconds")), number(row.get("together"))) for row in run.record.metrics]
    return sum((seconds or 0.0) / max(1.0, together or 1.0) for seconds, together in rows)


def _percent(value: float | None) -> str:
    return OPEN if value is None else f"{value:.2f}"


def _text(value: Any) -> str:
    return OPEN if value is None else str(value)


def _file_name(group: str, chart: str, taken: Container[str]) -> str:
    """Short enough for a file, and not among those taken.

    >>> _file_name("demo, epochs=3", "40%-flips", [])
    'demo-epochs-3-40-flips'
    >>> _file_name("demo, epochs=3", "40%-flips", ["demo-epochs-3-40-flips"])
    'demo-epochs-3-2-40-flips'
    """
    short = _for_a_file(group)[:120]
    names = (_for_a_file(f"{short}{number}-{chart}") for number in chain([""], map("-{}".format, count(2))))
    return next(name for name in names if name not in taken)


def _for_a_file(text: str) -> str:
    kept = "".join(letter if letter.isascii() and (letter.isalnum() or letter in "._") else "-" for letter in text)
    return "-".join(part for part in kept.split("-") if part)
