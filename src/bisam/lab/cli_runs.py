"""The commands about runs: list, train, reproduce, report, demo, data."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from bisam.lab import costs, records, runs, summary
from bisam.lab import data as datasets
from bisam.lab.checkpoint import CheckpointError
from bisam.lab.data import DataError
from bisam.lab.files import write_atomically
from bisam.lab.progress import Progress
from bisam.lab.recipes import RECIPES, Recipe, find
from bisam.lab.sources import InMemory, OnDisk, Source
from bisam.lab.trackers import trackers
from bisam.lab.train import SECONDS_BETWEEN_CHECKPOINTS, Stopped

RUNS = Path("runs")

Name = Annotated[
    str, typer.Argument(metavar="RECIPE", help="A table, table/row or table/row/method: see `bisam list`.")
]
Seeds = Annotated[str, typer.Option(metavar="NUMBERS", help="Seeds, as in 0,1,2 or 0-5.")]
Changes = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="FIELD=VALUE", help="Change a field of the configuration; again for more."),
]
Root = Annotated[Path, typer.Option("--runs", help="Folder of the runs.")]
Folder = Annotated[
    Path | None, typer.Option("--data", help="Folder with the data set's Parquet files; without it, the hub's.")
]
Partial = Annotated[
    bool, typer.Option("--partial-data", help="The folder may hold only a part of the data set: to try things out.")
]
Place = Annotated[str, typer.Option(metavar="auto|cpu|cuda", help="Where to train.")]
Together = Annotated[int, typer.Option(min=1, help="So many runs at once, in one CUDA graph.")]
TensorBoard = Annotated[bool, typer.Option("--tensorboard", help="Write curves for TensorBoard beside the runs.")]
Track = Annotated[str | None, typer.Option(metavar="wandb|trackio", help="Send curves there, if it is installed.")]
Every = Annotated[
    float, typer.Option("--checkpoint-seconds", min=0, help="Save when an epoch ends, but not more often.")
]
ManyNames = Annotated[str, typer.Option(metavar="NAMES", help="With commas between; none is all.")]


def list_recipes() -> None:
    """All recipes, and what each costs."""
    table = Table(title="Recipes: bisam train RECIPE, bisam reproduce RECIPE")
    for column in ("recipe", "what", "rows", "methods", "seeds", "hours on an H200"):
        table.add_column(column, overflow="fold")
    for name, make in RECIPES.items():
        recipe = make()
        rows, methods = ", ".join(recipe.rows), ", ".join(recipe.methods)
        table.add_row(name, recipe.title, rows, methods, str(recipe.seeds), costs.words(recipe))
    console = Console()
    console.print(table)
    console.print(
        "Hours are of all cells and seeds, one after the other, from the milliseconds per step in the docs on speed; a "
        "question mark: that model was not measured. A part of a table is table/row/method, such as "
        "label_noise/80%/bisam-log.",
        markup=False,
    )


def train(
    recipe: Name,
    seeds: Seeds = "0",
    changes: Changes = None,
    root: Root = RUNS,
    folder: Folder = None,
    partial_data: Partial = False,
    device: Place = "auto",
    together: Together = 1,
    tensorboard: TensorBoard = False,
    track: Track = None,
    every: Every = SECONDS_BETWEEN_CHECKPOINTS,
) -> None:
    """Train every cell of a recipe, or of a part of it. What is done is skipped, what was cut off goes on."""
    with _explained():
        _run(
            find(recipe),
            seeds,
            changes,
            root,
            partial(_source, folder=folder, partial=partial_data),
            device,
            together,
            tensorboard=tensorboard,
            track=track,
            every=every,
        )


def reproduce(
    recipe: Name,
    models: ManyNames = "",
    methods: ManyNames = "",
    seeds: Annotated[
        str, typer.Option(metavar="NUMBERS", help="Seeds, as in 0,1,2 or 0-5; none is as many as the paper's.")
    ] = "",
    changes: Changes = None,
    root: Root = RUNS,
    folder: Folder = None,
    partial_data: Partial = False,
    device: Place = "auto",
    together: Together = 1,
    tensorboard: TensorBoard = False,
    track: Track = None,
    every: Every = SECONDS_BETWEEN_CHECKPOINTS,
) -> None:
    """Train what is missing of a table of the paper, and show it beside the published one."""
    with _explained():
        wanted = find(recipe).only(_names(models), _names(methods))
        all_seeds = seeds or f"0-{wanted.seeds - 1}"
        _run(
            wanted,
            all_seeds,
            changes,
            root,
            partial(_source, folder=folder, partial=partial_data),
            device,
            together,
            tensorboard=tensorboard,
            track=track,
            every=every,
        )


def report(
    root: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder of the runs.")] = RUNS,
    out: Annotated[Path | None, typer.Option(help="Write the tables to this file too, in Markdown.")] = None,
) -> None:
    """The tables of the paper with the runs of a folder."""
    with _explained():
        found = records.find(root)
        sheets = summary.sheets(found)
        unfinished = [record for record in found if record.result is None]
        console = Console()
        for line in summary.left_out(found):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
        for sheet in sheets:
            console.print(sheet.rich())
        if not sheets:
            console.print(f"{root} has no finished run of an unchanged recipe", markup=False)
        if unfinished:
            console.print(f"{len(unfinished)} runs are not finished", markup=False)
        if out is not None:
            _write_report(sheets, out)


def demo(
    seeds: Seeds = "0-2",
    root: Root = RUNS,
    device: Place = "cpu",
    changes: Changes = None,
    every: Every = SECONDS_BETWEEN_CHECKPOINTS,
) -> None:
    """Sharpness-aware training against label noise, on data that ships with scikit-learn: about two minutes."""
    with _explained():
        _run(
            find("demo"), seeds, changes, root, partial(_source), device, 1, tensorboard=False, track=None, every=every
        )
        _write_report(summary.sheets(records.find(root)), root / "report.md")


def data(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The data set.")],
    folder: Folder = None,
    partial_data: Partial = False,
) -> None:
    """Prepare a data set, check it, and say what it is."""
    with _explained():
        console = Console()
        source = _source(name, say=console.print, folder=folder, partial=partial_data)
        for line in source.described():
            console.print(line, markup=False, highlight=False, soft_wrap=True)


def _run(
    recipe: Recipe, seeds: str, changes: list[str] | None, root: Path, load: partial[Source], device: str,
    together: int, *, tensorboard: bool, track: str | None, every: float,
) -> None:  # fmt: skip
    parsed = dict(_pair(change) for change in changes or [])
    if "partial_data" in parsed:
        raise ValueError("a part of a data set is asked for by --partial-data")
    if load.keywords.get("partial"):
        parsed["partial_data"] = "true"
    jobs = runs.jobs_of(recipe, _numbers(seeds), parsed, root)
    place = _device(device)
    with Progress(trackers=trackers(root, tensorboard=tensorboard, service=track, together=together)) as progress:
        runs.run(
            jobs,
            partial(load, say=progress.note),
            place,
            progress,
            together=together,
            checkpoint_seconds=every,
        )
    done = [records.read(job.folder) for job in jobs]
    sheet = summary.sheet_of_changed(recipe, done) if parsed else summary.sheet(recipe, done)
    if sheet is not None:
        Console().print(sheet.rich())


def _write_report(sheets: list[summary.Sheet], path: Path) -> None:
    write_atomically(path, "\n\n".join([*(sheet.markdown() for sheet in sheets), ""]).encode())
    Console().print(f"wrote {path}", markup=False, soft_wrap=True)


def _source(name: str, *, say: Callable[[str], None], folder: Path | None = None, partial: bool = False) -> Source:
    if datasets.known(name).size is None:
        return OnDisk(name, folder, partial=partial)
    return InMemory(datasets.load(name, folder, say=say, partial=partial))


@contextmanager
def _explained() -> Iterator[None]:
    """What went wrong, in a line: a trace is for faults of this program."""
    try:
        yield
    except Stopped as stop:
        Console(stderr=True).print(f"{stop}:\n  {shlex.join(['bisam', *sys.argv[1:]])}", markup=False)
        raise typer.Exit(130) from None
    except (DataError, ValueError, records.RunInUse, records.RecordError, CheckpointError, OSError) as error:
        Console(stderr=True).print(f"Error: {error}", markup=False, highlight=False)
        raise typer.Exit(1) from None


def _numbers(text: str) -> list[int]:
    """
    >>> _numbers("0,2-4")
    [0, 2, 3, 4]
    """
    found: list[int] = []
    for part in _names(text):
        first, _, last = part.partition("-")
        try:
            found += range(int(first), int(last or first) + 1)
        except ValueError:
            raise ValueError(f"seeds are numbers such as 0,1,2 or 0-5, got {text!r}") from None
    if not found:
        raise ValueError(f"no seeds in {text!r}: give numbers such as 0,1,2 or 0-5")
    return list(dict.fromkeys(found))


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _pair(change: str) -> tuple[str, str]:
    name, equals, value = change.partition("=")
    if not equals:
        raise ValueError(f"a change is field=value, such as --set epochs=10, got {change!r}")
    return name.strip().replace("-", "_"), value.strip()


def _device(wanted: str) -> torch.device:
    if wanted not in ("auto", "cpu", "cuda"):
        raise ValueError(f"--device is auto, cpu or cuda, got {wanted!r}")
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ValueError("torch finds no CUDA device here: use --device cpu")
    return (
        torch.device("cuda", torch.cuda.current_device())
        if wanted != "cpu" and torch.cuda.is_available()
        else torch.device("cpu")
    )
