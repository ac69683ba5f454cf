"""The command's part: which runs are left, the tasks that train them, and what it shows of them."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Protocol

import torch

from bisam.lab import records
from bisam.lab.records.storage import Storage
from bisam.lab.training import jobs as runs
from bisam.lab.training.loop import SECONDS_BETWEEN_CHECKPOINTS, Job, Stopped, signals
from bisam.lab.training.progress import Progress, name_of
from bisam.lab.training.ranks import ALONE, Ranks
from bisam.lab.training.run import BuildModel, build_by_name
from bisam.lab.workers.messages import Begun, Done, Failed, Happening, InUse, Lost, Shown
from bisam.lab.workers.task import Load, Task


class WorkersLost(RuntimeError):  # noqa: N818
    """Runs whose workers died once too often. The others are trained."""


class WorkerBackend(Protocol):
    """Where tasks are run: processes of this machine, or a Ray cluster."""

    is_elsewhere: bool
    """Whether workers may be on other machines."""

    def open(self) -> AbstractContextManager[None]:
        """Connect, before signals are caught; ValueError with a remedy if that is not possible."""

    def run(self, tasks: Sequence[Task], stopping: Sequence[str]) -> Happening:
        """Run all tasks, and yield what happens, by the number of the task; each ends with Done, InUse, Failed or Lost.

        A name in `stopping` makes every worker save its runs and stop, and so does closing the iterator.
        """


def train(
    jobs: Sequence[Job],
    load: Load,
    backend: WorkerBackend | None,
    progress: Progress,
    *,
    device: torch.device,
    root: Path,
    storage: Storage | None,
    together: int,
    checkpoint_seconds: float,
    build: BuildModel = build_by_name,
    ranks: Ranks = ALONE,
) -> None:
    """Train what is not done, with the workers of a backend; without one in this process, on this device."""
    if backend is not None:
        run(
            jobs, load, backend, progress,
            root=root, storage=storage, together=together, checkpoint_seconds=checkpoint_seconds,
        )  # fmt: skip
        return
    runs.run(
        jobs, partial(load, log=progress.note), device, progress,
        together=together, checkpoint_seconds=checkpoint_seconds, build=build, ranks=ranks,
    )  # fmt: skip


def run(
    jobs: Sequence[Job],
    load: Load,
    backend: WorkerBackend,
    progress: Progress,
    *,
    root: Path,
    storage: Storage | None = None,
    together: int = 1,
    checkpoint_seconds: float = SECONDS_BETWEEN_CHECKPOINTS,
) -> None:
    """Train what is not done, in tasks of `together` runs that can step together.

    With a `storage` the runs are kept there, and their records are gathered below `root`. Raises Stopped after a
    signal, ValueError for an error that stops all workers, WorkersLost at the end if runs could not be trained.
    """
    names = [job.folder.relative_to(root).as_posix() for job in jobs]
    if storage is not None:
        storage.gather(names, root)
    pending = runs.pending_of(jobs, progress)
    progress.expect(job.config for job in pending)
    if not pending:
        return
    if storage is not None:
        storage.check()
    if not backend.is_elsewhere:  # once, and not in each worker: data may be downloaded, or be wrong
        for name in dict.fromkeys(job.config.data for job in pending):
            load(name, log=progress.note).prepare()
    shared = root if backend.is_elsewhere and storage is None else None
    with backend.open(), _token(shared) as token, signals() as stopping:
        tasks = _tasks(pending, together, root, load, checkpoint_seconds, storage, token)
        try:
            with closing(backend.run(tasks, stopping)) as happening:  # now, and not when the memory is cleaned up
                _watch(happening, tasks, progress)
        finally:
            if storage is not None:
                storage.gather(names, root)
                progress.note(f"the records of {storage.shown} are gathered in {root}")
        if stopping:
            raise Stopped(f"stopped by {stopping[0]}: the same command resumes there")


def _tasks(
    pending: Sequence[Job], together: int, root: Path, load: Load, checkpoint_seconds: float,
    storage: Storage | None, token: Path | None,
) -> list[Task]:  # fmt: skip
    here, root = Path.cwd(), root.absolute()
    groups = [
        group[first : first + together] for group in runs.alike(pending) for first in range(0, len(group), together)
    ]
    return [
        Task(
            tuple(Job(job.config, job.folder.absolute()) for job in group),
            root, load, checkpoint_seconds, here, storage, token,
        )
        for group in groups
    ]  # fmt: skip


@contextmanager
def _token(root: Path | None) -> Iterator[Path | None]:
    """A new file in that folder, which is removed again; None without a folder."""
    if root is None:
        yield None
        return
    root.mkdir(parents=True, exist_ok=True)
    path = root.absolute() / f".shared-{secrets.token_hex(8)}"
    path.touch(exist_ok=False)
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


def _watch(happening: Happening, tasks: Sequence[Task], progress: Progress) -> None:
    """Show what happens until all tasks have ended."""
    in_use: list[records.RunInUse] = []
    lost: list[str] = []
    finished = set()
    for number, message in happening:
        task = tasks[number]
        match message:
            case Shown(method, arguments):
                getattr(progress, method)(*arguments)
                if method == "finish":
                    finished.add(arguments[0])
            case Begun() | Done():
                pass
            case InUse(error):
                in_use.append(error)
            case Failed(text):
                raise ValueError(text)
            case Lost(worker, reason, again):
                then = "it starts again from its last checkpoint" if again else "it is not tried again"
                progress.note(f"{task.name}: the worker ({worker}) {reason}; {then}")
                if not again:
                    lost += [f"{name_of(job.config)} ({reason})" for job in task.jobs if job.config not in finished]
        if isinstance(message, Done):
            for job in task.jobs:  # of a worker that died between the result and the message about it
                result = records.read(job.folder).result if job.config not in finished else None
                if result is not None:
                    progress.finish(job.config, result)
    runs.note_elsewhere(in_use, progress, is_all=len(in_use) == len(tasks))
    if lost:
        raise WorkersLost(
            f"{len(lost)} of {sum(len(task.jobs) for task in tasks)} runs have no result, because their workers were "
            f"lost: {', '.join(lost)}. The others are trained; the same command resumes these"
        )
