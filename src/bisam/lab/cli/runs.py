"""The commands about runs: train, reproduce, demo, data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer

from bisam.lab import records
from bisam.lab.cli import options as cli_options
from bisam.lab.cli import report as cli_report
from bisam.lab.cli.groups import Spread, Tracking, UnderTorchrun, Where, with_groups
from bisam.lab.cli.options import (
    AT_RUNS,
    RUNS,
    Changes,
    DeviceOption,
    Every,
    Folder,
    Methods,
    Names,
    Partial,
    Root,
    Rows,
    Runs,
    RunsAt,
    Seeds,
    StandIn,
    errors_in_one_line,
)  # fmt: skip
from bisam.lab.cli.output import console, print_line, quiet_console
from bisam.lab.config import Config
from bisam.lab.data.sources import Source, describe, open_source
from bisam.lab.recipes import Recipe, find_recipe
from bisam.lab.tables import cells
from bisam.lab.tables.sheets import sheets
from bisam.lab.training import jobs as runs
from bisam.lab.training.loop import SECONDS_BETWEEN_CHECKPOINTS, Job
from bisam.lab.training.progress import Progress
from bisam.lab.training.ranks import device_of_rank, unlike_fields
from bisam.lab.workers import watch as workers_watch


@with_groups
def train(
    recipes: Names,
    seeds: Seeds = "0",
    model: StandIn = "",
    changes: Changes = None,
    root: Root = RUNS,
    folder: Folder = None,
    partial_data: Partial = False,
    *,
    where: Where,
    tracking: Tracking,
    every: Every = SECONDS_BETWEEN_CHECKPOINTS,
    torchrun: UnderTorchrun,
) -> None:
    """Train every cell of a recipe, or of a part of it. Finished runs are skipped, interrupted ones resumed."""
    with errors_in_one_line():
        load = partial(open_source, folder=folder, partial=partial_data)
        parsed = _parsed(changes, model, partial_data=partial_data)
        wanted = [(cli_options.recipe(name), seeds) for name in recipes]
        _run(wanted, parsed, Runs(root), load, where, tracking, torchrun, every=every)


@with_groups
def reproduce(
    recipes: Names,
    models: Rows = "",
    methods: Methods = "",
    seeds: Annotated[
        str, typer.Option(metavar="NUMBERS", help="Seeds, as in 0,1,2 or 0-5; none is as many as the paper's.")
    ] = "",
    model: StandIn = "",
    changes: Changes = None,
    root: RunsAt = AT_RUNS,
    folder: Folder = None,
    partial_data: Partial = False,
    *,
    where: Where,
    tracking: Tracking,
    every: Every = SECONDS_BETWEEN_CHECKPOINTS,
    torchrun: UnderTorchrun,
    spread: Spread,
) -> None:
    """Train what is missing of a table of the paper, and show it beside the published one."""
    with errors_in_one_line():
        rows, names = cli_options.names(models), cli_options.names(methods)
        tables = [cli_options.recipe(name).only(rows, names) for name in recipes]
        wanted = [(table, seeds or f"0-{table.seeds - 1}") for table in tables]
        workers = spread.backend_of(where, root)
        load = partial(open_source, folder=folder, partial=partial_data)
        parsed = _parsed(changes, model, partial_data=partial_data)
        _run(wanted, parsed, root, load, where, tracking, torchrun, every=every, skip_equal=True, workers=workers)


def demo(
    seeds: Seeds = "0-2",
    root: Root = RUNS,
    device: DeviceOption = "cpu",
    changes: Changes = None,
    every: Every = SECONDS_BETWEEN_CHECKPOINTS,
) -> None:
    """Sharpness-aware training against label noise, on data that ships with scikit-learn: about two minutes."""
    with errors_in_one_line():
        cli_options.refuse_ranks("demo")
        load, where, parsed = partial(open_source), Where(device), cli_options.changes_of(changes)
        _run([(find_recipe("demo"), seeds)], parsed, Runs(root), load, where, Tracking(), UnderTorchrun(), every=every)
        cli_report.write_page([root], root / "report.html")


def data(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The data set.")],
    folder: Folder = None,
    partial_data: Partial = False,
) -> None:
    """Prepare a data set, check it, and describe it."""
    with errors_in_one_line():
        for line in describe(name, log=print_line, folder=folder, partial=partial_data):
            print_line(line)


def _run(
    wanted: Sequence[tuple[Recipe, str]], changes: dict[str, str], root: Runs, load: partial[Source], where: Where,
    tracking: Tracking, torchrun: UnderTorchrun, *, every: float, skip_equal: bool = False,
    workers: workers_watch.WorkerBackend | None = None,
) -> None:  # fmt: skip
    """Train these tables with these seeds, and print each of them."""
    device = device_of_rank(cli_options.device(where.device)) if workers is None else torch.device("cpu")
    with torchrun.joined(device) as ranks:
        tables = [
            (recipe, runs.jobs_of(recipe, cli_options.numbers(seeds), changes, root.folder, ranks))
            for recipe, seeds in _joined(wanted)
        ]
        jobs = [job for _, table in tables for job in table]
        instead: dict[Path, Job] = {}
        ranks.refuse_unlike(unlike_fields([job.config for job in jobs], ranks.options))
        shown = tracking.trackers(root, where, workers, ranks)
        models = {job.config.model for job in jobs}
        output = None if ranks.is_first else quiet_console()
        with cli_options.threads_for(device, models), Progress(output, trackers=shown) as progress:
            if ranks.is_first:
                instead = _note_equal_runs(jobs, progress, skip=skip_equal)
                jobs = [*{job.folder: job for job in (instead.get(each.folder, each) for each in jobs)}.values()]
            workers_watch.train(
                jobs, load, workers, progress, device=device, root=root.folder, storage=root.storage,
                together=where.together, checkpoint_seconds=every, ranks=ranks,
            )  # fmt: skip
    if ranks.is_first:
        for recipe, table in tables:
            _show(recipe, [instead.get(job.folder, job) for job in table])


def _joined(wanted: Sequence[tuple[Recipe, str]]) -> list[tuple[Recipe, str]]:
    """Parts of one table are one table: rows and methods that were named apart are compared with each other."""
    found: dict[tuple[str, str, str], Recipe] = {}
    _refuse_unlike(recipe for recipe, _ in wanted)
    for recipe, seeds in wanted:
        key = recipe.name, recipe.title, seeds
        found[key] = replace(recipe, cells={**found[key].cells, **recipe.cells}) if key in found else recipe
    return [(recipe, seeds) for (_, _, seeds), recipe in found.items()]


def _refuse_unlike(recipes: Iterable[Recipe]) -> None:
    """Tables of one name whose cells differ: they would share their folders."""
    known: dict[tuple[str, cells.Cell], Config] = {}
    for recipe in recipes:
        for cell, config in recipe.cells.items():
            if known.setdefault((recipe.name, cell), config) != config:
                raise ValueError(
                    f"two tables are called {recipe.name}, and their {'/'.join(cell)} differ: rename one of the files"
                )


def _show(recipe: Recipe, jobs: list[Job]) -> None:
    table = cells.fill(recipe, [records.read(job.folder) for job in jobs])
    for sheet in sheets([table] if table.runs else []):
        console().print(sheet)


def _parsed(changes: list[str] | None, model: str, *, partial_data: bool) -> dict[str, str]:
    return cli_options.changes_of(changes, partial_data=partial_data, options={"--model": ("model", model)})


def _note_equal_runs(jobs: list[Job], progress: Progress, *, skip: bool) -> dict[Path, Job]:
    """Note the cells and seeds that have a finished run already, computed otherwise.

    Returns, with `skip`, that run for the folder of each of them.
    """
    equal_runs = runs.equal_finished_runs(jobs)
    for job in (job for job in jobs if job.folder in equal_runs):
        finished = equal_runs[job.folder]
        same = f"{finished.folder} is finished and is the same training, except for {' and '.join(cells.NUMERICS)}"
        progress.note(f"{same}: it counts" if skip else f"{same}: reports count one of the two")
    return equal_runs if skip else {}
