"""A task: some runs that one worker trains, and how it does so in whatever place it is."""

from __future__ import annotations

import os
import platform
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from bisam.lab.config import Config
from bisam.lab.data.sources import Source
from bisam.lab.files import explained
from bisam.lab.records import RecordError, RunInUse
from bisam.lab.records.checkpoint import CheckpointError
from bisam.lab.records.storage import Storage, StorageError
from bisam.lab.training import jobs as runs
from bisam.lab.training.loop import Job
from bisam.lab.training.progress import Progress, name_of
from bisam.lab.workers.messages import Done, Failed, InUse, Message, Shown

SECONDS_BETWEEN_STEPS = 0.2
"""Between two messages about the steps of a task."""

Load = Callable[..., Source]
"""Opens a data set by its name; `log` is a keyword."""


@dataclass(frozen=True)
class Task:
    """Runs that train together, in one worker."""

    jobs: tuple[Job, ...]
    root: Path
    """The folder that the runs' folders are below."""
    load: Load
    checkpoint_seconds: float
    here: Path
    """The current folder of the command, which paths in configurations may be relative to."""
    storage: Storage | None = None
    """Where the runs are kept; None is in their folders."""
    token: Path | None = None
    """A file that a worker sees if it shares the folder of the runs with the command."""

    @property
    def name(self) -> str:
        first, more = name_of(self.jobs[0].config), len(self.jobs) - 1
        return f"{first} and {more} more" if more else first

    def name_of_folder(self, job: Job) -> str:
        """The path of a run's folder below the root."""
        return job.folder.relative_to(self.root).as_posix()


def train(task: Task, device: torch.device, send: Callable[[Message], None]) -> Message:
    """Train the runs of a task in this process, each from its last checkpoint.

    Raises Stopped after a signal, and whatever a new worker may not raise again.
    """
    try:
        _check_shared(task)
        if task.here.is_dir():
            os.chdir(task.here)
        with _folders(task) as jobs:
            relay = Relay(task, jobs, send)
            runs.run(
                jobs, partial(_source, task.load, log=relay.note), device, relay, together=len(jobs),
                checkpoint_seconds=task.checkpoint_seconds,
            )  # fmt: skip
    except RunInUse as error:
        return InUse(error)
    except StorageError:
        raise
    except OSError as error:
        return Failed(explained(error, f"cannot use {error.filename}") if error.filename else str(error))
    except (ValueError, RecordError, CheckpointError) as error:
        return Failed(str(error))
    return Done()


class Relay(Progress):
    """A progress that is shown elsewhere: it sends what happens, and pushes the runs to their storage."""

    def __init__(self, task: Task, jobs: Sequence[Job], send: Callable[[Message], None]) -> None:
        super().__init__(Console(quiet=True))
        self._task, self._send = task, send
        self._folders = {own.config: (own.folder, given) for own, given in zip(jobs, task.jobs, strict=True)}
        self._stepping: list[Config] = []
        self._sent = 0.0
        self._is_heard = True

    def _show(self, method: str, *arguments: Any) -> None:
        if self._is_heard:
            try:
                self._send(Shown(method, arguments))
            except (BrokenPipeError, ConnectionResetError):  # the command has ended: save, and stop
                self._is_heard = False
                os.kill(os.getpid(), signal.SIGTERM)

    def expect(self, configs: object) -> None:
        """The command has counted them."""

    def begin(self, epochs: Mapping[Config, int], batches: int) -> None:
        self._stepping = [*epochs]
        self._show("begin", dict(epochs), batches)

    def step(self, number: int) -> None:
        if time.monotonic() - self._sent > SECONDS_BETWEEN_STEPS:
            self._sent = time.monotonic()
            self._show("steps", dict.fromkeys(self._stepping, number))

    def epoch(self, config: Config, folder: Path, metrics: dict[str, Any]) -> None:
        self._show("epoch", config, self._folders[config][1].folder, metrics)

    def saved(self, config: Config) -> None:
        try:
            self._push(config)
        except StorageError as error:
            self.note(f"{name_of(config)}: {error}. The next checkpoint is pushed again")

    def finish(self, config: Config, result: dict[str, Any]) -> None:
        self._push(config)
        self._show("finish", config, result)

    def note(self, text: str) -> None:
        self._show("note", text)

    def _push(self, config: Config) -> None:
        if self._task.storage is not None:
            folder, given = self._folders[config]
            self._task.storage.push(folder, self._task.name_of_folder(given))


@contextmanager
def _folders(task: Task) -> Iterator[list[Job]]:
    """The jobs in the folders to train in: their own, or copies of what the storage has."""
    if task.storage is None:
        yield [*task.jobs]
        return
    with tempfile.TemporaryDirectory(prefix="bisam-") as scratch:
        jobs = [replace(job, folder=Path(scratch) / task.name_of_folder(job)) for job in task.jobs]
        for own, job in zip(jobs, task.jobs, strict=True):
            task.storage.fetch(task.name_of_folder(job), own.folder)
        yield jobs


_SOURCES: dict[str, Source] = {}


def _source(load: Load, name: str, *, log: Callable[[str], None]) -> Source:
    """The data set; the last one is kept for the next task of this worker."""
    if name not in _SOURCES:
        _SOURCES.clear()
        _SOURCES[name] = load(name, log=log)
    return _SOURCES[name]


def _check_shared(task: Task) -> None:
    """Raise ValueError if this worker does not see the folder that the command writes to."""
    if task.token is not None and not task.token.is_file():
        raise ValueError(
            f"the node {platform.node()} does not share {task.root} with this one: give a folder that all nodes "
            "see, or a storage such as --runs s3://bucket/runs"
        )


def described(error: BaseException) -> str:
    """An error in a line."""
    return f"{type(error).__name__}: {(str(error).strip() or 'no reason given').splitlines()[0]:.200}"
