"""The commands that show and check results: report, figure and verify."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from bisam.lab import methods, records
from bisam.lab.cli.options import RUNS, errors_in_one_line, folder, recipe
from bisam.lab.cli.output import console, drawing_module, find_runs, print_line, write_text, writing
from bisam.lab.files import refuse_foreign
from bisam.lab.recipes import RECIPES, Recipe
from bisam.lab.spec import run_file
from bisam.lab.tables import cells, exports, summary
from bisam.lab.tables.sheets import sheets as sheets_of
from bisam.lab.tables.sweeps import sheet as sheet_of_sweep
from bisam.lab.tables.sweeps import sort_out


class Form(str, Enum):
    svg = "svg"
    png = "png"


class PaperFigure(str, Enum):
    lower_bounds = "lower-bounds"
    flips = "flips"


Folders = Annotated[
    list[Path] | None,
    typer.Argument(metavar="FOLDER...", parser=folder, help="Folders of runs.  [default: runs]"),
]
WithoutWeights = Annotated[
    bool, typer.Option("--without-weights", help="Weights were left out on purpose: they are no problem.")
]


def report(
    folders: Folders = None,
    out: Annotated[Path | None, typer.Option(help="The page.", show_default="report.html in the first folder")] = None,
    without_weights: WithoutWeights = False,
    figures: Annotated[Path | None, typer.Option(help="Write every chart as a file into this folder too.")] = None,
    form: Annotated[Form, typer.Option("--format", help="What --figures writes.")] = Form.svg,
    markdown: Annotated[Path | None, typer.Option(help="Write the tables to this file too.")] = None,
    latex: Annotated[Path | None, typer.Option(help="Write the tables to this LaTeX file too.")] = None,
    csv: Annotated[Path | None, typer.Option(help="Write every table as a file into this folder too.")] = None,
    load: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="A Python file that adds methods or tables of your own; again for more."),
    ] = None,
) -> None:
    """The tables of the paper with the runs of some folders, here and as a page with their curves."""
    with errors_in_one_line():
        roots = folders or [RUNS]
        for file in load or ():
            run_file(file)
        collection = _verified(roots, without_weights=without_weights)
        if collection.is_empty:
            others = f"; {summary.of_others(collection.foreign)}" if collection.foreign else ""
            raise ValueError(
                f"{_listed(roots)} has no runs{others}. Give the folder that has them; a first one takes two minutes, "
                "bisam demo"
            )
        tables, sweeps = sort_out(collection)
        sheets = [*sheets_of(tables, collection.runs), *map(sheet_of_sweep, sweeps)]
        if out is not None and out.suffix.lower() not in ("", ".html", ".htm"):
            raise ValueError(f"the page is written as HTML, got {out}: name it {out.with_suffix('.html').name}")
        page, wrote = out or roots[0] / "report.html", []
        try:  # files first, since the reader of a pipe may stop
            for path, written in ((markdown, summary.Sheet.markdown), (latex, exports.latex)):
                if path is not None:
                    write_text(path, "\n\n".join([*map(written, sheets), ""]))
                    wrote.append(str(path))
            if csv is not None:
                wrote.append(f"{_write_csv(sheets, csv)} tables to {csv}")
            write_text(page, drawing_module("report.report").write(collection, roots), given=out is not None)
            wrote.append(str(page))
            if figures is not None:
                wrote.append(f"{_write_figures(collection, figures, form.value)} figures to {figures}")
        finally:
            _show(collection, sheets, roots)
            for what in wrote:
                print_line(f"wrote {what}")


def _show(collection: cells.Collection, sheets: Sequence[summary.Sheet], roots: Sequence[Path]) -> None:
    for line in summary.left_out(collection):
        print_line(line)
    for sheet in sheets:
        console().print(sheet)
    if not sheets:
        print_line(f"{_listed(roots)} has no run that counts for a table")


def figure(
    which: Annotated[PaperFigure, typer.Argument(metavar="lower-bounds|flips", help="A figure of the paper.")],
    folders: Folders = None,
    out: Annotated[
        Path | None, typer.Option(help="The file: .svg, .png or .html.", show_default="its name, as SVG")
    ] = None,
    name: Annotated[
        str, typer.Option("--recipe", metavar="RECIPE", help="Of flips: the row whose runs are shown.")
    ] = "cifar10/resnet56",
) -> None:
    """Draw a figure of the paper: the two bounds of the 0-1 loss, or flips along training, from records."""
    with errors_in_one_line():
        files = drawing_module("report.figures")
        path = out or Path(f"{which.value}.svg")
        if which is PaperFigure.lower_bounds:
            if folders:
                raise ValueError("lower-bounds are drawn from their formulas: remove the folder")
            chart, title = drawing_module("report.bounds").lower_bounds(), "Bounds of the 0-1 loss"
        else:
            runs = _runs_of(name, folders or [RUNS])
            curves, title = drawing_module("report.curves"), f"Flips per batch, {name}"
            chart = curves.flips_panel(runs) if path.suffix.lower() == ".html" else curves.flips(runs)
        if out is None:
            refuse_foreign(path, "remove it, or name the file with --out")
        with writing(path):
            files.save(chart, path, title)
        print_line(f"wrote {path}")


def write_page(roots: Sequence[Path], path: Path) -> None:
    """The page of all runs in these folders, in a place that no option gave."""
    refuse_foreign(path, "remove it, or name another file with bisam report --out")
    write_text(path, drawing_module("report.report").write(_verified(roots), roots))
    print_line(f"wrote {path}")


def _found(roots: Sequence[Path]) -> list[records.Record]:
    """The records in these folders, each folder once."""
    return [*{record.folder.resolve(): record for root in roots for record in find_runs(root)}.values()]


def _collected(roots: Sequence[Path]) -> cells.Collection:
    return cells.collect(_found(roots))


def _verified(roots: Sequence[Path], *, without_weights: bool = False) -> cells.Collection:
    """The runs, with what is wrong with their weights among their problems."""
    found, lost = [], []
    for record in _found(roots):
        if problems := records.weights_problems(record):
            if records.lacks_weights(record):
                lost.append(record)
            else:
                record = replace(record, problems=[*record.problems, *problems])
        found.append(record)
    collection = cells.collect(found)
    if lost and not without_weights:
        runs = "1 finished run has" if len(lost) == 1 else f"{len(lost)} finished runs have"
        first = "" if len(lost) == 1 else "the first "
        collection.notes.append(f"{runs} lost the {records.WEIGHTS} in the receipt: {first}{lost[0].folder}")
    return collection


def verify(
    folders: Folders = None,
    without_weights: WithoutWeights = False,
) -> None:
    """Check runs: files, digests, complete epochs and the accuracy of the best one. Exits with 1 for problems."""
    with errors_in_one_line():
        roots, count, kept_none = folders or [RUNS], 0, 0
        every = _found(roots)
        found, foreign = [one for one in every if not one.foreign], [one for one in every if one.foreign]
        others = summary.of_others(foreign) if foreign else ""
        if not found:
            raise ValueError(f"{_listed(roots)} has no runs{others and f'; {others}'}: give the folder that has them")
        for record in found:
            lacking = records.lacks_weights(record)
            skipped = lacking and without_weights
            problems = records.verify(record) + ([] if skipped else records.weights_problems(record))
            kept_none += lacking
            count += len(problems)
            for problem in problems:
                print_line(f"{record.folder}: {problem}")
        for folder in sorted({record.folder.parent for record in found} - {record.folder for record in found}):
            for problem in records.copy_problems(folder):
                print_line(f"{folder}: {problem}")
                count += 1
        if kept_none:
            print_line(f"note: weights not kept, {kept_none} of {len(found)} runs")
        open_ = sum(record.result is None for record in found)
        if open_:
            print_line(f"note: not finished, {open_} of {len(found)} runs")
        for table in cells.collect(found).tables:
            for line in summary.unlike(table):
                print_line(f"note: {table.title}: {line}")
        if others:
            print_line(f"note: {others}")
        print_line(f"{len(found)} run{'s' * (len(found) != 1)}, {count} problem{'s' * (count != 1)}")
    if count:
        raise typer.Exit(1)


def _runs_of(name: str, roots: Sequence[Path]) -> list[cells.Run]:
    """The runs of a recipe, or of a part of one, that perturb."""
    found = _collected(roots).tables
    wanted = _recipe(name, found)
    if len(wanted.rows) > 1:
        row = f"{wanted.name}/{wanted.rows[0]}"
        raise ValueError(f"flips are drawn of one row of a table, got {name}: name one, as in --recipe {row}")
    if not any(methods.perturbs(method) for _, method in wanted.cells):
        row = f"{wanted.name}/{wanted.rows[0]}"
        raise ValueError(f"flips are of methods that perturb, and {name} has none: name the row, as in --recipe {row}")
    tables = [table for table in found if table.recipe.name == wanted.name and not table.changes]
    runs = [run for table in tables for row, method in wanted.cells for run in table.of(row, method)]
    shown = [run for run in runs if run.last("flips") is not None]
    if not shown:
        raise ValueError(
            f"{_listed(roots)} has no unchanged run of {name} with flips: train one, as in bisam train {name}, or name "
            "another recipe with --recipe"
        )
    return shown


def _recipe(name: str, tables: Sequence[cells.ResultTable]) -> Recipe:
    """The recipe of that name, or a part of it: made from these records, of a file, or of the lab."""
    made = {
        result_table.recipe.name: result_table.recipe
        for result_table in tables
        if result_table.recipe.name not in RECIPES
    }
    table, *part = name.split("/")
    return made[table].only(part[:1], part[1:]) if table in made else recipe(name)


def _write_figures(collection: cells.Collection, folder: Path, form: str) -> int:
    """Returns how many they are."""
    report, files = drawing_module("report.report"), drawing_module("report.figures")
    drawn = report.figures(collection)
    for name, chart in drawn.items():
        path = folder / f"{name}.{form}"
        with writing(path):
            files.save(chart, path, name.replace("-", " "), follow_links=False)
    return len(drawn)


def _write_csv(sheets: Sequence[summary.Sheet], folder: Path) -> int:
    """Returns how many they are. Tables of the same name have a number."""
    taken: set[str] = set()
    for sheet in sheets:
        short = exports.file_name(sheet.title)
        name = next(one for one in (short, *(f"{short}-{n}" for n in range(2, len(sheets) + 2))) if one not in taken)
        taken.add(name)
        write_text(folder / f"{name}.csv", exports.csv_text(sheet))
    return len(taken)


def _listed(roots: Sequence[Path]) -> str:
    return ", ".join(map(str, roots))
