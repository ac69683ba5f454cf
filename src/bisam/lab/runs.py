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
from bisam.lab.train import SECONDS_BETWEEN_CHECKPOINTS, Job, train


def jobs_of(recipe: Recipe, seeds: Iterable[int], changes: Mapping[str, str], root: Path) -> list[Job]:
    """A job for each cell and seed. What was changed is in the name of the folder: it is not the recipe's run."""
    jobs = []
    for seed in seeds:
        for (row, _), config in recipe.cells.items():
            changed = replace(config, seed=seed).with_changes(changes)
            jobs.append(Job(changed, root / recipe.name / folder_name(row, changed, changes)))
    return jobs


def folder_name(row: str, config: Config, changes: Mapping[str, str]) -> str:
    """
    >>> folder_name("80%", Config(method="sam"), {"epochs": "3"})
    'noise80-sam-seed0+epochs=3'
    """
    name = f"noise{row.rstrip('%')}" if row.endswith("%") else row
    extra = "+".join(f"{key}={value}" for key, value in sorted(changes.items()) if key not in ("seed", "method"))
    return f"{name}-{config.method}-seed{config.seed}" + (f"+{extra}" if extra else "")


def is_done(job: Job) -> bool:
    return records.read(job.folder).result is not None


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
    for name, of_data in groupby(sorted(pending, key=lambda job: job.config.data), key=lambda job: job.config.data):
        source = load(name)
        for chunk in _chunks(list(of_data), together):
            train(chunk, source, device, progress, checkpoint_seconds=checkpoint_seconds)


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
