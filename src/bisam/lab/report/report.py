"""The page of all runs: verdicts, differences, tables, dots, curves, sweeps and receipts."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import replace
from itertools import chain, count, repeat
from pathlib import Path

from bisam.lab.methods import title_of
from bisam.lab.recipes import RECIPES
from bisam.lab.report import charts, curves, page
from bisam.lab.report.answers import answer_of, folder_of_fit
from bisam.lab.report.dots import dots, of_cells, of_row
from bisam.lab.report.forest import forest
from bisam.lab.report.grids import grid
from bisam.lab.report.page import (
    Block,
    Cards,
    Choice,
    Curves,
    Figure,
    Figures,
    Fold,
    Grid,
    Section,
    Sentences,
    Series,
)  # fmt: skip
from bisam.lab.report.page.series import of_methods
from bisam.lab.report.runs import listing, names_of
from bisam.lab.tables import curves as numbers
from bisam.lab.tables import effects, levels, published, summary
from bisam.lab.tables.cells import Collection, ResultTable, Run, number, with_equal_runs
from bisam.lab.tables.summary import OPEN, Sheet
from bisam.lab.tables.sweeps import Sweep, sheet, sort_out
from bisam.lab.tables.verdicts import Verdict, verdicts

MOST_PROBLEMS = 12
"""Lines about folders that are not folded away."""


class _Report:
    """What several sections of the page share."""

    def __init__(self, collection: Collection) -> None:
        self.collection = collection
        self.every = numbers.stride(collection.runs)
        self.tables, self.sweeps = sort_out(collection)
        self.names = names_of(collection.runs)
        self._series: dict[tuple[int, str], Series] = {}

    def series(self, table: ResultTable, row: str) -> Series:
        """The curves of a row, once however often they are shown."""
        key = (id(table), row)
        if key not in self._series:
            runs = table.of_row(row)
            self._series[key] = self._made(runs, table.recipe.methods)
        return self._series[key]

    def series_of(self, run: Run) -> Series:
        """The curves of the row that a run is in; its own if it is in no table."""
        for table in self.collection.tables:
            for (row, _), members in table.runs.items():
                if any(one is run for one in members.values()) and not any(one is run for one in table.borrowed):
                    return self.series(table, row)
        return self._made([run], [run.config.method])

    def _made(self, runs: Sequence[Run], methods: Sequence[str]) -> Series:
        ids = {numbers.label(run): self.names[id(run)] for run in runs}
        return of_methods(numbers.points(runs, self.every), methods, ids)


def write(collection: Collection, roots: Sequence[Path]) -> str:
    """The page, as HTML."""
    found = _Report(collection)
    own, changed = ([table for table in found.tables if bool(table.changes) == has] for has in (False, True))
    first = own if all(map(folder_of_fit, own)) else []  # beside other tables, the answer of a fit is in its section
    sections = [Section(f"{table.title}: does it help?", answer_of(table), "Does it help?") for table in first]
    sections.append(Section("What came out", [*_answers(found.tables), *_problems(collection)]))
    sections += [
        Section(table.title, [*([] if first else answer_of(table)), *_blocks(found, table)], table.recipe.name)
        for table in own
    ]
    sections.append(Section("Grids", [block for sweep in found.sweeps for block in _grid(sweep)]))
    folded: list[Block] = [Fold(table.title, _blocks(found, table)) for table in changed]
    sections.append(Section("Changed recipes", folded))
    sections.append(Section("Runs and receipts", [_listing(found) if collection.runs else _nothing(roots)]))
    sections.append(Section("Tables of the paper without runs", _open_tables(collection), "Without runs"))
    return page.render("bisam: report", _lead(collection, roots), [each for each in sections if each.blocks])


def figures(collection: Collection) -> dict[str, charts.Chart]:
    """All charts of these runs, each by a name for a file."""
    drawn: dict[str, charts.Chart] = {}
    tables, found = sort_out(collection)
    for kind, part in zip(("differences", "differences-of-changed-recipes"), _parted(verdicts(tables)), strict=True):
        for verdict in part:
            drawn[_file_name(kind, verdict.title, drawn)] = forest(verdict, room=None)
    for sweep in found:
        name = f"{sweep.name}, {sweep.changes}" if sweep.changes else sweep.name
        drawn[_file_name(name, sweep.fields[0], drawn)] = grid(sweep)
    for table in tables:
        for title, chart in _dots(with_equal_runs(table, collection.runs)).items():
            drawn[_file_name(table.name, f"{title}-seeds", drawn)] = chart
        for row in table.rows:
            rows = numbers.points(table.of_row(row), numbers.stride(table.of_row(row)))
            for name in numbers.names_of(rows):
                chart = curves.drawn(rows, name, table.recipe.methods)
                drawn[_file_name(table.name, f"{row}-{name}", drawn)] = chart
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


def _answers(tables: Sequence[ResultTable]) -> list[Block]:
    """The verdicts, the differences that they count, and what would resolve the paper's."""
    found = verdicts(tables)
    if not found:
        return [Sentences(["No two methods of a table have finished runs: no comparison is possible yet."])]
    first, changed = _parted(found)
    blocks = _compared(first, caption="With 95 % intervals: one that excludes 0 is resolved.")
    if changed:
        lines = sum(len(one.placed) for one in changed)
        blocks.append(Fold(f"{lines} difference{'s' * (lines != 1)} of changed recipes", _compared(changed)))
    plans = effects.sheet_of_plans(effects.seed_plans(tables), found[0].measure)
    return blocks if plans is None else [*blocks, Grid(plans)]


def _compared(found: Sequence[Verdict], caption: str = "") -> list[Block]:
    """The counts of these differences, their plots, and each in words."""
    plots = [Figure(f"{one.name} − {one.baseline}", forest(one), caption * (one is found[0])) for one in found]
    return [Cards(found), Figures(plots, "forest"), _in_words(found)]


def _parted(found: Sequence[Verdict]) -> tuple[list[Verdict], list[Verdict]]:
    """The verdicts with the differences of tables as they are, and those with the differences of changed recipes.

    Only the first are in sight, and count: a ledger has ever more of the others. Where all are changed, they are.
    """
    parts: dict[bool, list[Verdict]] = {False: [], True: []}
    for one in found:
        for is_changed, verdicts_of in parts.items():
            kept = tuple((table, each) for table, each in one.placed if bool(table.changes) == is_changed)
            verdicts_of += [replace(one, placed=kept)] if kept else []
    own, changed = parts[False], parts[True]
    return (own, changed) if own else (changed, [])


def _in_words(found: Sequence[Verdict]) -> Fold:
    """A sentence for each difference, table by table; resolved ones first."""
    lines: dict[str, list[tuple[bool, str]]] = {}
    for verdict in found:
        for table, one in verdict.placed:
            lines.setdefault(table.title, []).append((not one.found.resolved, f"{one.row}: {one.describe()}."))
    blocks = [
        Sentences([text for _, text in sorted(of_table, key=lambda line: line[0])], title=title)
        for title, of_table in lines.items()
    ]
    total = sum(map(len, lines.values()))
    return Fold(f"The {total} difference{'s' * (total != 1)} in words", blocks)


def _problems(collection: Collection) -> list[Block]:
    lines = summary.left_out(collection)
    if not lines:
        return []
    warned = Sentences(lines, "warning")
    if len(lines) <= MOST_PROBLEMS and sum(map(len, lines)) < 200:
        return [warned]
    return [Fold(f"{len(lines)} folder{'s' * (len(lines) != 1)} or notes: not whole, or not counted", [warned])]


def _grid(sweep: Sweep) -> list[Block]:
    return [Grid(sheet(sweep)), Figure(f"{sweep.name}: {sweep.fields[0]}", grid(sweep))]


def _blocks(found: _Report, table: ResultTable) -> list[Block]:
    filled = with_equal_runs(table, found.collection.runs)
    blocks: list[Block] = [_titled(filled, summary.sheet(filled)), *_plots(filled)]
    below = (summary.sheet_of_comparisons(filled), levels.sheet_of_levels(table))
    blocks += [_titled(table, made) for made in below if made is not None]
    series = {row: found.series(table, row) for row in table.rows}
    options = {row: [Curves(one, _captions(table, row))] for row, one in series.items() if one.names}
    if options:
        blocks.append(Choice("Curves of", options))
    return blocks


def _titled(table: ResultTable, made: Sheet) -> Grid:
    """A table below the heading that names its data, which its own title need not repeat."""
    short = made.title.removeprefix(f"{table.title}: ")
    return Grid(made, short[:1].upper() + short[1:])


def _plots(table: ResultTable) -> list[Block]:
    drawn, is_one = _dots(table), table.rows_differ
    joined = "" if is_one else ", joined across methods"
    captions = chain([f"Every seed a dot{joined}; below, the mean with its 95 % interval."], repeat(""))
    plots = [Figure(f"{row}: {table.recipe.measure}", chart, next(captions)) for row, chart in drawn.items()]
    return [Figures(plots, "whole" if is_one else "")] if plots else []


def _dots(table: ResultTable) -> dict[str, charts.Chart]:
    """A dot plot for each row of the printed table that has finished runs; one for all if rows differ in methods."""
    recipe = table.recipe
    measure = f"{recipe.measure}, per cent"
    if table.rows_differ:
        cells = of_cells(table)
        return {"all settings": dots(cells, recipe.methods, measure, joined=False)} if cells else {}
    lines = {label: of_row(table, row, name) for label, row, name in recipe.lines}
    return {label: dots(found, recipe.methods, measure) for label, found in lines.items() if found}


def _captions(table: ResultTable, row: str) -> dict[str, str]:
    config = table.of_row(row)[0].config
    captions = {"flips": f"Of {config.batch} samples, those that the perturbation turns wrong."}
    if config.noise:
        captions["validation_accuracy"] = "Its labels are as noisy as those of the training data."
    return captions


def _listing(found: _Report) -> Block:
    tried = {id(run) for sweep in found.sweeps for run in sweep.tried}
    return listing(found.collection.runs, found.names, found.series_of, tried)


def _open_tables(collection: Collection) -> list[Block]:
    if collection.tables and not any(result_table.recipe.name in RECIPES for result_table in collection.tables):
        return []  # runs of data and tables of one's own alone
    present = {result_table.recipe.name for result_table in collection.tables if not result_table.changes}
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
        if table.average:
            rows.append(["average", *(_printed(table.average.get(method)) for method in recipe.methods)])
        sheet = Sheet("As published", ["", *(title_of(method) for method in recipe.methods)], rows)
        blocks.append(Fold(recipe.title, [Grid(sheet), Sentences([f"To run it: bisam reproduce {name}"])]))
    return blocks


def _nothing(roots: Sequence[Path]) -> Block:
    places = ", ".join(map(str, roots))
    return Sentences([f"No run in {places} can be read. A first one takes two minutes: bisam demo"])


def _printed(cell: published.PublishedCell | None) -> str:
    return OPEN if cell is None else summary.spread(cell.mean, cell.std)


def _seconds_of_the_device(run: Run) -> float:
    """Seconds of each epoch, divided by the runs that shared the device, added up."""
    rows = [(number(row.get("seconds")), number(row.get("together"))) for row in run.record.metrics]
    return sum((seconds or 0.0) / max(1.0, together or 1.0) for seconds, together in rows)


def _file_name(table: str, chart: str, taken: Container[str]) -> str:
    """Short enough for a file, and not among those taken.

    >>> _file_name("demo, epochs=3", "40%-flips", [])
    'demo-epochs-3-40-flips'
    >>> _file_name("demo, epochs=3", "40%-flips", ["demo-epochs-3-40-flips"])
    'demo-epochs-3-2-40-flips'
    """
    short = _for_a_file(table)[:120]
    names = (_for_a_file(f"{short}{number}-{chart}") for number in chain([""], map("-{}".format, count(2))))
    return next(name for name in names if name not in taken)


def _for_a_file(text: str) -> str:
    kept = "".join(letter if letter.isascii() and (letter.isalnum() or letter in "._") else "-" for letter in text)
    return "-".join(part for part in kept.split("-") if part)
