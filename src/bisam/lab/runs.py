"""From a recipe to its runs: which folders they have, which are done, which are trained together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from bisam.lab import records
from bisam.lab.config import Config
from bisam.lab.progress import Progress
from bisam.lab.recipes import Recipe
from bisam.lab.sources import Source
from bisam.lab.train import SECONDS_BETWEEN_CHECKPOINTS, Job, Stopped, signals, train


def jobs_of(recipe: Recipe, seeds: Iterable[int], changes: Mapping[str, str], root: Path) -> list[Job]:
    """A job for each cell and seed. What was changed is in the name of the folder: it is not the recipe's run."""
    for name, remedy in {"seed": "--seeds", "method": "table/row/method", "recipe": "another recipe"}.items():
        if name in changes:
            raise ValueError(f"{name} is part of what a run is called: use {remedy} instead of --set {name}=")
    jobs = []
    for seed in seeds:
        for (row, _), config in recipe.cells.items():
            own = replace(config, seed=seed)
            changed = own.with_changes(changes)
            jobs.append(Job(changed, root / recipe.name / folder_name(row, own, changed)))
    return jobs


def folder_name(row: str, own: Config, changed: Config) -> str:
    """
    >>> folder_name("80%", Config(method="sam"), Config(method="sam", epochs=3))
    'noise80-sam-seed0+epochs=3'
    """
    name = f"noise{row.rstrip('%')}" if row.endswith("%") else row
    before, now = own.as_dict(), changed.as_dict()
    extra = "".join(f"+{key}={value}" for key, value in now.items() if value != before[key])
    return f"{name}-{own.method}-seed{own.seed}{extra}"


def is_done(job: Job) -> bool:
    """Whether the folder has the result of this very run."""
    record = records.read(job.folder)
    if record.result is None:
        return False
    found = records.differences(record.config, job.config.as_dict())
    if found:
        raise records.ConfigMismatch(job.folder, found)
    return True


def run(
    jobs: Sequence[Job],
    load: Callable[[str], Source],
    device: torch.device,
    progress: Progress,
    *,
    together: int = 1,
    checkpoint_seconds: float = SECONDS_BETWEEN_CHECKPOINTS,
) -> None:
    """Train what is not done, `together` runs at a time where they have the same length."""
    pending = [job for job in jobs if not is_done(job)]
    if len(pending) < len(jobs):
        progress.note(f"{len(jobs) - len(pending)} of {len(jobs)} runs are done already")
    with signals() as stopping:
        for name, of_data in groupby(sorted(pending, key=lambda job: job.config.data), key=lambda job: job.config.data):
            source = load(name)
            for chunk in _chunks(list(of_data), together):
                if stopping:
                    raise Stopped(f"stopped by {stopping[0]} between two runs: the same command goes on from there")
                train(chunk, source, device, progress, stopping, checkpoint_seconds=checkpoint_seconds)


def _chunks(jobs: list[Job], size: int) -> list[list[Job]]:
    """Jobs that can step together: as many epochs, and batches as large, with the same numerics."""

    def alike(job: Job) -> tuple[Any, ...]:
        config = job.config
        return (config.epochs, config.batch, config.validation, config.deterministic)

    chunks: list[list[Job]] = []
    order = {id(job): index for index, job in enumerate(jobs)}
    for _, group in groupby(sorted(jobs, key=lambda job: (*alike(job), order[id(job)])), key=alike):
        members = list(group)
        chunks += [members[start : start + size] for start in range(0, len(members), size)]
    return sorted(chunks, key=lambda chunk: order[id(chunk[0])])
