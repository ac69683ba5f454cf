"""A few steps before the training: what a step costs, and whether the batch fits into memory."""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bisam.lab.config import Config
from bisam.lab.data.sources import Batched, Source
from bisam.lab.training.ranks import ALONE, Ranks
from bisam.lab.training.run import Build, TrainingRun

STEPS = 3
"""Steps that are timed, after one that is not."""


@dataclass(frozen=True)
class Cost:
    """Seconds of a step and of a validation, and steps of an epoch."""

    step: float
    validation: float
    steps: int

    def of(self, epochs: int) -> float:
        return epochs * (self.steps * self.step + self.validation)


def rehearse(config: Config, source: Source, device: torch.device, build: Build, ranks: Ranks = ALONE) -> Cost:
    """Measure a step of this configuration. ValueError with a batch that fits where its own does not."""
    try:
        return ranks.of_first(_measured(config, source, device, build, ranks))
    except ValueError as error:
        if "more than 1 value per channel" not in str(error):
            raise
        raise ValueError(
            f"the batch norm of {config.model} needs two samples or more in a batch, got {config.batch}: give --batch 2"
        ) from error
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
    if not ranks.is_alone:  # others may wait in the middle of a step: nothing more can be tried together
        raise ValueError(
            f"a batch of {config.batch} does not fit into the memory of {ranks.count} ranks: give --batch "
            f"{ranks.half(config.batch)} or more ranks, and for a large model --shard"
        )
    fitting = _fitting(config, source, device, build)
    where = "the GPU" if device.type == "cuda" else "memory"
    if fitting is None:
        raise ValueError(
            f"a batch of {config.batch} does not fit into {where}, nor does one sample: use a smaller model or smaller "
            "inputs, such as --set size=64 or --set length=64"
        )
    raise ValueError(
        f"a batch of {config.batch} does not fit into {where}, and one of {fitting} does: give --batch {fitting}"
    )


def is_out_of_memory(error: RuntimeError) -> bool:
    text = str(error)
    return isinstance(error, torch.OutOfMemoryError) or "allocate memory" in text or "not enough memory" in text


def _measured(config: Config, source: Source, device: torch.device, build: Build, ranks: Ranks = ALONE) -> Cost:
    perturbing = replace(config, start=0.0)  # what it needs once it perturbs
    training = TrainingRun(perturbing, source, device, build, ranks)
    batches = training.batches.epoch(0)
    times = []
    for x, y in itertools.islice(batches, STEPS + 1):
        began = time.monotonic()
        training.optimizer.minimize(x, y)
        _wait(device)
        times.append(time.monotonic() - began)
    began = time.monotonic()
    training.measured(_First(training.validation), "validation")
    _wait(device)
    validation = len(training.validation) * (time.monotonic() - began)
    timed = times[1:] or times  # the first one is slower
    return Cost(sum(timed) / len(timed), validation, len(training.batches))


class _First:
    """The first batch alone: it stands for the others."""

    def __init__(self, batches: Batched) -> None:
        self._batches = batches
        self.shard = batches.shard

    def __len__(self) -> int:
        return 1

    def epoch(self, number: int, *, start: int = 0) -> Iterator[tuple[Any, Tensor]]:
        return itertools.islice(self._batches.epoch(number), start, 1)


def _fitting(config: Config, source: Source, device: torch.device, build: Build) -> int | None:
    """The largest half, quarter, … of the batch that fits."""
    batch = config.batch
    while batch > 1:
        batch //= 2
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        try:
            _measured(replace(config, batch=batch), source, device, build)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
        else:
            return batch
    return None


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
