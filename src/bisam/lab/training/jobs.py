"""From a recipe to its runs: which folders they have, which are done, which are trained together."""

from __future__ import annotations

import shutil
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bisam.lab import records, spec
from bisam.lab.config import Config
from bisam.lab.data.sources import Source
from bisam.lab.methods import uses
from bisam.lab.recipes import Recipe
from bisam.lab.records import model_code
from bisam.lab.tables.cells import cell_of, collect, folder_name, tables_with, training_of, without_numerics
from bisam.lab.training.loop import SECONDS_BETWEEN_CHECKPOINTS, Job, signals, train
from bisam.lab.training.progress import Progress
from bisam.lab.training.ranks import ALONE, Ranks
from bisam.lab.training.run import BuildModel, build_by_name


def jobs_of(
    recipe: Recipe, seeds: Iterable[int], changes: Mapping[str, str], root: Path, ranks: Ranks = ALONE
) -> list[Job]:
    """A job for each cell and seed. Changed fields are part of the folder's name: it is not the recipe's run.

    A field that a method does not use, such as ρ of SGD, keeps its value. `ranks` that perturb each by itself change
    the micro-batch: see `Ranks.adapted`.
    """
    for name, remedy in {"seed": "--seeds", "method": "table/row/method", "recipe": "another recipe"}.items():
        if name in changes:
            raise ValueError(f"{name} is part of a run's name: use {remedy} instead of --set {name}=")
    refuse_unused(changes, recipe.methods)
    jobs = []
    rows: dict[str, str] = {}
    for seed in seeds:
        for (row, _), config in recipe.cells.items():
            own = replace(config, seed=seed)
            changed = own.with_changes({name: text for name, text in changes.items() if uses(own.method, name)})
            changed = ranks.adapted(changed)
            name = folder_name(row, own, changed)
            if rows.setdefault(name, row) != row:
                raise ValueError(
                    f"the rows {rows[name]!r} and {row!r} of {recipe.name} would share the folder {name}: rename one"
                )
            jobs.append(Job(changed, root / recipe.name / name))
    return jobs


def refuse_unused(changes: Iterable[str], methods: Sequence[str], option: str = "--set {}=") -> None:
    """ValueError for a changed field that none of the methods uses; `option` is how it was given."""
    for name in changes:
        if not any(uses(method, name) for method in methods):
            raise ValueError(f"{_listed(methods)} not use {name}: remove {option.format(name)}")


def _listed(methods: Sequence[str]) -> str:
    """
    >>> _listed(["sgd"]), _listed(["sgd", "sam"])
    ('sgd does', 'sgd, sam do')
    """
    return f"{', '.join(methods)} {'does' if len(methods) == 1 else 'do'}"


def equal_finished_runs(jobs: Sequence[Job]) -> dict[Path, Job]:
    """For the folder of each unfinished job, a finished run of the same training, but for `NUMERICS`.

    It has the same cell and seed, or is a run of another table of the lab, beside this one, that has an equal cell.
    """
    done: dict[Any, Job] = {}
    ended: set[Path] = set()
    for parent in _tables(jobs):
        folders = [path for path in sorted(parent.iterdir()) if (path / records.CONFIG).is_file()]
        for run in collect(map(records.read, folders)).runs:
            if run.record.result is not None:
                ended.add(run.record.folder)
                if not run.record.not_counted and not _is_damaged(run.record):
                    done.setdefault(_cell_of(run.config, run.record.folder), Job(run.config, run.record.folder))
                    done.setdefault(training_of(run.config), Job(run.config, run.record.folder))
    found: dict[Path, Job] = {}
    for job in jobs:
        own, equal = done.get(_cell_of(job.config, job.folder)), done.get(training_of(job.config))
        finished = own or (equal if equal is not None and equal.folder.parent != job.folder.parent else None)
        if finished is not None and job.folder not in ended:
            found[job.folder] = finished
    return found


def _tables(jobs: Sequence[Job]) -> list[Path]:
    """The folders of these runs, and those beside them of tables that have an equal cell."""
    own = dict.fromkeys(job.folder.parent for job in jobs)
    beside = [parent.parent / name for parent in own for name in tables_with(job.config for job in jobs)]
    return [folder for folder in dict.fromkeys([*own, *beside]) if folder.is_dir()]


def _cell_of(config: Config, folder: Path) -> tuple[Any, Config]:
    """A key that is the same for runs of one cell and seed that differ only in `NUMERICS`."""
    return cell_of(config, folder), without_numerics(config)


def _is_damaged(record: records.Record) -> bool:
    return any(problem.startswith(records.CONFIG) for problem in record.problems)


def _record(job: Job) -> records.Record:
    """The record in the job's folder, which must have its configuration, and a result that counts if it has one."""
    records.check(job.folder, job.config.as_dict())
    record = records.read(job.folder)
    records.check_result(job.folder, record.result)
    return record


def run(
    jobs: Sequence[Job],
    load: Callable[[str], Source],
    device: torch.device,
    progress: Progress,
    *,
    together: int = 1,
    checkpoint_seconds: float = SECONDS_BETWEEN_CHECKPOINTS,
    build: BuildModel = build_by_name,
    ranks: Ranks = ALONE,
) -> None:
    """Train what is not done, `together` runs at a time where they can step together.

    Runs that another process trains are skipped, so that two processes share a table. RunInUse if no other is left.
    Several `ranks` train one run after the other, all of them each.
    """
    ranks.refuse_together(together)
    with _kept_by_first(ranks) as scratch:
        pending = ranks.of_first(pending_of(jobs, progress) if ranks.is_first else [])
        if scratch is not None:
            pending = [Job(job.config, scratch / str(number)) for number, job in enumerate(pending)]
        progress.expect(job.config for job in pending)
        with ranks.first_before_others():
            sources = {name: load(name) for name in dict.fromkeys(job.config.data for job in pending)}
            for source in sources.values():
                source.prepare()
        elsewhere: list[records.RunInUse] = []
        with signals() as stopping:  # only now: while data are loaded, Ctrl-C may stop at once
            for group in alike(pending):
                source = sources[group[0].config.data]
                elsewhere += train(
                    group, source, device, progress, stopping, together=together,
                    checkpoint_seconds=checkpoint_seconds, build=build, ranks=ranks,
                )  # fmt: skip
    note_elsewhere(elsewhere, progress, is_all=len(elsewhere) == len(pending))


def note_elsewhere(in_use: Sequence[records.RunInUse], progress: Progress, *, is_all: bool) -> None:
    """A line about runs that another process had open when this one came to them, by what their folders have now.

    If they are all, and none has a result yet, the first error is raised.
    """
    trained = sum(records.read(error.folder).result is not None for error in in_use)
    unfinished = len(in_use) - trained
    if is_all and in_use and not trained:
        raise in_use[0]
    parts = [f"{_runs(trained, 'was', 'were')} trained by another process"] if trained else []
    if unfinished:
        where = "there" if trained else "in another process"
        again = "run the same command again for the complete table"
        parts.append(f"{_runs(unfinished, 'is', 'are')} still in training {where}: {again}")
    if parts:
        progress.note(", ".join(parts))


def _runs(count: int, is_: str, are: str) -> str:
    return f"{count} run {is_}" if count == 1 else f"{count} runs {are}"


@contextmanager
def _kept_by_first(ranks: Ranks) -> Iterator[Path | None]:
    """A folder for what other ranks than the first would write, which is removed; None for the first."""
    if ranks.is_first:
        yield None
        return
    with tempfile.TemporaryDirectory() as scratch:
        yield Path(scratch)


def pending_of(jobs: Sequence[Job], progress: Progress) -> list[Job]:
    """The jobs to train, with notes about the others."""
    for table, model in dict.fromkeys((job.folder.parent, job.config.model) for job in jobs):
        model_code.refuse_other_code(table, model, spec.code_of(model))
    there = [_record(job) for job in jobs]
    done = sum(record.result is not None for record in there)
    if done:
        progress.note(f"{done} of {len(jobs)} runs are done already")
    for record in there:
        if record.result is not None:  # its process may have been killed before it could clean up
            shutil.rmtree(record.folder / records.CHECKPOINTS, ignore_errors=True)
            for problem in (*record.problems, *records.weights_problems(record)):
                progress.note(f"{record.folder.name}: {problem}")
        if record.not_counted:
            progress.note(
                f"{record.folder} is not counted; move the folder elsewhere to train it again: {record.not_counted}"
            )
    return [job for job, one in zip(jobs, there, strict=True) if one.result is None and not one.not_counted]


def alike(jobs: Iterable[Job]) -> Iterable[list[Job]]:
    """Groups of jobs that can step together: the same data, batch size, length of epochs and numerics."""
    groups: dict[Any, list[Job]] = defaultdict(list)
    for job in jobs:
        config = job.config
        groups[config.data, config.batch, config.validation, config.epoch_steps, config.deterministic].append(job)
    return groups.values()
