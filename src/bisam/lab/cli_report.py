"""The commands that show what runs came to: report and figure."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Annotated

import typer
from rich.console import Console

from bisam.lab import cells, records, summary
from bisam.lab.cli_options import RUNS, told_in_a_line
from bisam.lab.files import write_atomically
from bisam.lab.recipes import find


class Form(str, Enum):
    svg = "svg"
    png = "png"


class Figure(str, Enum):
    lower_bounds = "lower-bounds"
    flips = "flips"


Folders = Annotated[list[Path] | None, typer.Argument(metavar="FOLDER...", help="Folders of runs.  [default: runs]")]


def report(
    folders: Folders = None,
    out: Annotated[Path | None, typer.Option(help="The page.", show_default="report.html in the first folder")] = None,
    figures: Annotated[Path | None, typer.Option(help="Write every chart as a file into this folder too.")] = None,
    form: Annotated[Form, typer.Option("--format", help="Of these files.")] = Form.svg,
    markdown: Annotated[Path | None, typer.Option(help="Write the tables to this file too.")] = None,
) -> None:
    """The tables of the paper with the runs of some folders, here and as a page with their curves."""
    with told_in_a_line():
        roots = folders or [RUNS]
        collection = _collected(roots)
        sheets = summary.sheets(collection)
        console = Console()
        for line in summary.left_out(collection):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
        for sheet in sheets:
            console.print(sheet.rich())
        if not sheets:
            console.print(f"{_listed(roots)} has no run of a recipe: a first one takes two minutes, bisam demo")
        if markdown is not None:
            _write(markdown, "\n\n".join([*(sheet.markdown() for sheet in sheets), ""]))
        write_page(roots, out or roots[0] / "report.html")
        if figures is not None:
            _write_figures(collection, figures, form.value)


def figure(
    which: Annotated[Figure, typer.Argument(metavar="lower-bounds|flips", help="A figure of the paper.")],
    folders: Folders = None,
    out: Annotated[
        Path | None, typer.Option(help="The file: .svg, .png or .html.", show_default="its name, as SVG")
    ] = None,
    recipe: Annotated[
        str, typer.Option(metavar="RECIPE", help="Of flips: the row whose runs are shown.")
    ] = "cifar10/resnet56",
) -> None:
    """Draw a figure of the paper: the two bounds of the 0-1 loss, or flips along training, from records."""
    with told_in_a_line():
        charts, files = _needs("charts"), _needs("figures")
        path = out or Path(f"{which.value}.svg")
        if which is Figure.lower_bounds:
            chart, title = charts.lower_bounds(), "Lower bounds of the 0-1 loss"
        else:
            runs = _runs_of(recipe, folders or [RUNS])
            chart = charts.flips(runs, interactive=path.suffix == ".html")
            title = f"Flips per batch, {recipe}"
        files.save(chart, path, title)
        Console().print(f"wrote {path}", markup=False, soft_wrap=True)


def write_page(roots: Sequence[Path], path: Path) -> None:
    """The page of all runs in these folders."""
    _write(path, _needs("report").write(_collected(roots), roots))


def _collected(roots: Sequence[Path]) -> cells.Collection:
    return cells.collect(record for root in roots for record in records.find(root))


def _runs_of(name: str, roots: Sequence[Path]) -> list[cells.Run]:
    """The runs of a recipe, or of a part of one, that perturb."""
    wanted = find(name)
    groups = [group for group in _collected(roots).groups if group.recipe.name == wanted.name and not group.changes]
    runs = [run for group in groups for row, method in wanted.cells for run in group.of(row, method)]
    shown = [run for run in runs if run.last("flips") is not None]
    if not shown:
        raise ValueError(
            f"{_listed(roots)} has no run of {name} with flips: train one, as in bisam train {name}, or name another "
            "recipe with --recipe"
        )
    return shown


def _write_figures(collection: cells.Collection, folder: Path, form: str) -> None:
    report, files = _needs("report"), _needs("figures")
    drawn = [item for group in collection.groups for item in report.figures(group).items()]
    for name, chart in drawn:
        files.save(chart, folder / f"{name}.{form}")
    Console().print(f"wrote {len(drawn)} figures to {folder}", markup=False, soft_wrap=True)


def _needs(name: str) -> ModuleType:
    """A module of this package that draws: a training needs none of its libraries."""
    import importlib

    try:
        return importlib.import_module(f"bisam.lab.{name}")
    except ModuleNotFoundError as error:
        raise ValueError(f"charts need the library {error.name}: pip install 'bisam[lab]'") from None


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, text.encode())
    Console().print(f"wrote {path}", markup=False, soft_wrap=True)


def _listed(roots: Sequence[Path]) -> str:
    return ", ".join(map(str, roots))
