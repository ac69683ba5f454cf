"""What the commands share: their options, how these are read, and how errors are shown."""

from __future__ import annotations

import errno
import os
import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from bisam.lab import recipe_files, recipes, records
from bisam.lab.files import explained, printable
from bisam.lab.models import FOR_ROWS, MODELS
from bisam.lab.recipes import Recipe
from bisam.lab.records.checkpoint import CheckpointError
from bisam.lab.records.storage import Storage, storage_of
from bisam.lab.training.loop import Stopped
from bisam.lab.training.ranks import RankLost, environment
from bisam.lab.workers.watch import WorkersLost

RUNS = Path("runs")
MOST_SEEDS = 10_000
"""Of one range: more is a slip of the keyboard."""
SMALL = 100_000
"""Parameters of a model that more threads make slower: the demo's has 30,762."""


def folder(text: str | Path) -> Path:
    """A path that was given; an empty one, as of a variable that is not set, would be the current folder."""
    if not str(text):
        raise typer.BadParameter("a folder has a name, got an empty text: write . for the current one")
    return Path(text)


RECIPE = "A table, table/row or table/row/method: see `bisam list`. Or a TOML or Python file."
Name = Annotated[str, typer.Argument(metavar="RECIPE", help=RECIPE)]
Names = Annotated[list[str], typer.Argument(metavar="RECIPE", help=f"{RECIPE} Several are trained in one go.")]
Seeds = Annotated[str, typer.Option(metavar="NUMBERS", help="Seeds, as in 0,1,2 or 0-5.")]
Changes = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="FIELD=VALUE", help="Change a field of the configuration; again for more."),
]
StandIn = Annotated[
    str,
    typer.Option(
        "--model", metavar="MODEL", help="A model that stands in for the recipe's: as of bisam fit.", show_default=False
    ),
]


@dataclass(frozen=True)
class Runs:
    """The folder of the runs; with a storage, that which its records are gathered in."""

    folder: Path
    storage: Storage | None = None


def runs_at(text: str | Runs) -> Runs:
    """A folder, or the URL of a storage."""
    if isinstance(text, Runs):
        return text
    try:
        storage = storage_of(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    return Runs(folder(text)) if storage is None else Runs(storage.mirror, storage)


Root = Annotated[Path, typer.Option("--runs", metavar="PATH", parser=folder, help="Folder of the runs.")]
RunsAt = Annotated[
    Runs,
    typer.Option(
        "--runs",
        metavar="PATH|URL",
        parser=runs_at,
        help="Folder of the runs, or a URL such as s3://bucket/runs, from which they are gathered here.",
        show_default="runs",
    ),
]
Folder = Annotated[
    Path | None,
    typer.Option(
        "--data",
        metavar="PATH",
        parser=folder,
        help="Folder with the data set's Parquet files; without it, the hub's.",
    ),
]
Partial = Annotated[
    bool, typer.Option("--partial-data", help="The folder may hold only a part of the data set: to try things out.")
]
DeviceOption = Annotated[str, typer.Option(metavar="auto|cpu|cuda", help="Where to train.")]
Every = Annotated[
    float,
    typer.Option(
        "--checkpoint-seconds",
        min=0,
        help="Save when an epoch ends, but not more often, nor for more than a twentieth of the time. 0: every epoch.",
    ),
]
Rows = Annotated[
    str,
    typer.Option("--models", "--rows", metavar="NAMES", help="Rows of the table, with commas between; none is all."),
]
Methods = Annotated[str, typer.Option(metavar="NAMES", help="Methods, with commas between; none is all.")]


AT_RUNS = Runs(RUNS)


ERRORS = (ValueError, records.RunInUse, records.RecordError, CheckpointError, RankLost, WorkersLost)
"""Beside OSError: errors whose message is shown alone."""


@contextmanager
def errors_in_one_line() -> Iterator[None]:
    """Print an error as one line: a traceback is for bugs."""
    try:
        yield
    except Stopped as stop:
        if is_other_rank():
            raise typer.Exit(130) from None
        _print_unchanged(f"{stop}:\n  {shlex.join(['bisam', *sys.argv[1:]])}")
        raise typer.Exit(130) from None
    except (*ERRORS, OSError) as error:
        message = str(error)
        if isinstance(error, OSError) and error.filename is not None:  # from any access to a path
            message = explained(error, f"cannot use {error.filename}")
        elif isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):  # from printing
            message = explained(error, "cannot write the output")
        _print_unchanged(f"Error: {message}")
        raise typer.Exit(1) from None


def is_other_rank() -> bool:
    """Whether torchrun has started this process beside a first one, which prints for all."""
    return (environment() or (0, 1))[0] > 0


def refuse_ranks(command: str) -> None:
    """ValueError under torchrun with several ranks, for a command that runs in one process."""
    if (environment() or (0, 1))[1] > 1:
        raise ValueError(f"bisam {command} runs in one process: start it without torchrun")


def _print_unchanged(text: str) -> None:
    """Without colours and line breaks, so that a command in it can be copied."""
    Console(stderr=True).print(printable(text), markup=False, emoji=False, highlight=False, soft_wrap=True)


@contextmanager
def threads_for(torch_device: torch.device, models: Iterable[str]) -> Iterator[None]:
    """One thread of torch for small models on a CPU, unless OMP_NUM_THREADS is set.

    Their operations are shorter than the hand-over to another thread: where processes share the cores, each waits.
    """
    if torch_device.type != "cpu" or "OMP_NUM_THREADS" in os.environ or not all(map(_is_small, models)):
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _is_small(model: str) -> bool:
    if model not in MODELS:
        return model in FOR_ROWS
    with torch.device("meta"):
        return sum(param.numel() for param in MODELS[model](10).parameters()) < SMALL


def recipe(name: str) -> Recipe:
    """The recipe of that name, of ours or of a file."""
    return recipe_files.find_recipe(name) if recipe_files.is_file(name) else recipes.find_recipe(name)


def numbers(text: str) -> list[int]:
    """
    >>> numbers("0,2-4")
    [0, 2, 3, 4]
    """
    found: list[int] = []
    for part in names(text):
        match = re.fullmatch("([0-9]{1,20})(?:-([0-9]{1,20}))?", part)
        if match is None:
            raise ValueError(f"seeds are numbers such as 0,1,2 or 0-5, got {text!r:.60}")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise ValueError(f"no seeds in {part}: the smaller number comes first, as in {last}-{first}")
        if last - first >= MOST_SEEDS:
            raise ValueError(f"{part} has {last - first + 1:,} seeds: give {MOST_SEEDS:,} at most")
        found += range(first, last + 1)
    if not found:
        raise ValueError(f"no seeds in {text!r}: give numbers such as 0,1,2 or 0-5")
    return list(dict.fromkeys(found))


def names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def change(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"a change is field=value, such as --set epochs=10, got {text!r}")
    return name.strip().replace("-", "_"), value.strip()


def changes_of(
    texts: Sequence[str] | None, *, partial_data: bool = False, options: Mapping[str, tuple[str, object]] | None = None
) -> dict[str, str]:
    """The changes of --set, --partial-data and `options`, by field.

    `options` are those that set a field too: names of fields and values, by option. Without a value, None or an empty
    text, an option was not given.

    >>> changes_of(["lr=0.1"], options={"--epochs": ("epochs", 3), "--batch": ("batch", None)})
    {'lr': '0.1', 'epochs': '3'}
    """
    given = [change(text) for text in texts or []]
    parsed = dict(given)
    for name in parsed:
        if [other for other, _ in given].count(name) > 1:
            raise ValueError(f"--set has {name} twice: give one value")
    if "partial_data" in parsed:
        raise ValueError("use --partial-data instead of --set partial_data=")
    for option, (name, value) in (options or {}).items():
        if value in (None, ""):
            continue
        if name in parsed:
            raise ValueError(f"{option} {value} and --set {name}={parsed[name]} set the same field: remove one")
        parsed[name] = str(value)
    return {**parsed, "partial_data": "true"} if partial_data else parsed


def device(wanted: str) -> torch.device:
    if wanted not in ("auto", "cpu", "cuda"):
        raise ValueError(f"--device is auto, cpu or cuda, got {wanted!r}")
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ValueError("torch finds no CUDA device here: use --device cpu")
    return (
        torch.device("cuda", torch.cuda.current_device())
        if wanted != "cpu" and torch.cuda.is_available()
        else torch.device("cpu")
    )
