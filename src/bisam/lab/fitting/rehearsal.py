"""A few steps before the training: what a step costs, and whether the batch fits into memory."""

from __future__ import annotations

import gc
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bisam.lab.config import Config
from bisam.lab.data.sources import Batched, Source
from bisam.lab.methods import passes
from bisam.lab.training.loop import numerics, steps_of
from bisam.lab.training.ranks import ALONE, Ranks
from bisam.lab.training.run import BuildModel, TrainingRun

Clock = Callable[[], float]

LEAST_STEPS, MOST_STEPS, SECONDS = 4, 30, 2.0
"""Steps of a rehearsal: within these seconds, but not fewer or more. The first third of them is not counted."""

RECORDED = 6
"""More steps at least where they are captured on a GPU: the first ones run eagerly, and one is recorded."""

STRETCHES, MOST_SCATTER = 5, 0.5
"""Parts of the timed steps whose means are compared, and the largest scatter that is reported."""

BATCHES = 3
"""Batches that are evaluated, after one that is not timed. They stand for the others."""


@dataclass(frozen=True)
class Cost:
    """Seconds of a step, of a validation, and of what is done once in a run; and the steps of an epoch."""

    step: float
    validation: float
    steps: int
    once: float = 0.0
    """To build the model, and to test it."""
    searched_step: float | None = None
    """A step of the search of ρ, which is not captured as a graph; None: as much as one of the training."""
    scatter: float = 0.0
    """By which part of it a step may take less or more."""

    def of(self, epochs: int) -> float:
        return self.once + epochs * (self.steps * self.step + self.validation)

    def of_search(self, steps: int) -> float:
        """One training of the search."""
        return steps * (self.step if self.searched_step is None else self.searched_step) + self.validation

    def scaled(self, factor: float) -> Cost:
        searched = None if self.searched_step is None else factor * self.searched_step
        return replace(
            self, step=factor * self.step, searched_step=searched, validation=factor * self.validation,
            once=factor * self.once,
        )  # fmt: skip


def rehearse(
    config: Config,
    source: Source,
    device: torch.device,
    build: BuildModel,
    ranks: Ranks = ALONE,
    clock: Clock = time.monotonic,
) -> Cost:
    """Measure what this configuration costs. ValueError with a batch that fits where its own does not."""
    try:
        with numerics(config):
            return ranks.of_first(_measured(config, source, device, build, ranks, clock))
    except ValueError as error:
        if "more than 1 value per channel" not in str(error):
            raise
        raise ValueError(
            f"the batch norm of {config.model} needs two samples or more in each pass, got too few of a batch of "
            f"{config.batch}: give {_batch(2 * config.batch)}"
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
            "inputs, such as --set size=64 or --set length=64 (from Python, size=64)"
        )
    raise ValueError(
        f"a batch of {config.batch} does not fit into {where}, and one of {fitting} does: give {_batch(fitting)}"
    )


def _batch(size: int) -> str:
    """
    >>> _batch(8)
    '--batch 8 (from Python, batch=8)'
    """
    return f"--batch {size} (from Python, batch={size})"


def is_out_of_memory(error: RuntimeError) -> bool:
    text = str(error)
    return isinstance(error, torch.OutOfMemoryError) or "allocate memory" in text or "not enough memory" in text


def _measured(
    config: Config,
    source: Source,
    device: torch.device,
    build: BuildModel,
    ranks: Ranks = ALONE,
    clock: Clock = time.monotonic,
) -> Cost:
    """The same steps as in the training, and the same evaluations, without the first ones, which are slower."""
    source.loaders(config, device)  # decoded or tokenized for all runs
    timer = _Timer(clock, device)
    perturbing = replace(config, start=0.0, stop=1.0, every=1)  # what it needs once it perturbs
    training = TrainingRun(perturbing, source, device, build, ranks)
    built = timer.seconds()
    part = passes(config) / passes(perturbing)  # steps that do not perturb cost less
    eager = _timed(training, lambda batch: _eager_step(training, batch), timer, LEAST_STEPS)
    captured = steps_of([training], _ignore)
    times = eager
    if captured.eager_because is None:
        times = _timed(training, lambda batch: captured([batch]), timer, LEAST_STEPS + RECORDED)
    step, scatter = _typical(times)
    training.measured(_First(training.validation, 1), "validation")
    validation, test = (_evaluation(training, batches, timer) for batches in (training.validation, training.test))
    return Cost(
        part * step,
        validation,
        len(training.batches),
        once=built + (1 if config.select == "last" else 2) * test,  # the chosen weights, and the last ones
        searched_step=part * _typical(eager)[0],
        scatter=scatter,
    )


def _typical(times: Sequence[float]) -> tuple[float, float]:
    """The median of the means of a few stretches, and their scatter: half of the distance of the quartiles, as a part.

    One slow step changes it little, as it should where something is made ready; many do, as on a busy machine.

    >>> _typical([1.0, 1.0, 50.0, 1.0, 1.0]), _typical([1.0, 3.0] * 10)
    ((1.0, 0.0), (2.0, 0.0))
    """
    size = -(-len(times) // STRETCHES)
    means = [statistics.fmean(times[start : start + size]) for start in range(0, len(times), size)]
    middle = statistics.median(means)
    if len(means) < 2 or middle <= 0:
        return middle, 0.0
    low, _, high = statistics.quantiles(means, n=4, method="inclusive")
    return middle, min((high - low) / 2 / middle, MOST_SCATTER)


class _Timer:
    """Seconds since it was read last, when the device has done its work."""

    def __init__(self, clock: Clock, device: torch.device) -> None:
        self._clock, self._device = clock, device
        self._last = clock()

    def seconds(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        before, self._last = self._last, self._clock()
        return self._last - before


def _timed(training: TrainingRun, step: Callable[[Any], Any], timer: _Timer, least: int) -> Sequence[float]:
    """Seconds of each step with the loading of its batch. The first third is left out: it is slower."""
    times: list[float] = []
    timer.seconds()
    for batch in itertools.chain.from_iterable(map(training.batches.epoch, itertools.count())):
        step(batch)
        times.append(timer.seconds())
        more = len(times) < least or (sum(times) < SECONDS and len(times) < MOST_STEPS)
        if not training.ranks.of_first(more):  # all ranks do as many steps
            break
    return times[len(times) // 3 :]


def _eager_step(training: TrainingRun, batch: tuple[Any, Tensor]) -> None:
    training.optimizer.minimize(*batch)
    training.add_up()


def _evaluation(training: TrainingRun, batches: Batched, timer: _Timer) -> float:
    """Seconds for all batches, from the first few; the last one is half a batch, on average."""
    few = _First(batches, min(BATCHES, len(batches)))
    timer.seconds()
    training.measured(few, "validation")
    each = timer.seconds() / len(few)
    return each * len(few) if len(few) == len(batches) else each * (len(batches) - 0.5)


def _ignore(note: str) -> None:
    """The training prints why it does not capture."""


class _First:
    """The first batches alone."""

    def __init__(self, batches: Batched, count: int) -> None:
        self._batches, self._count = batches, count
        self.shard = batches.shard

    def __len__(self) -> int:
        return self._count

    def epoch(self, number: int, *, start: int = 0) -> Iterator[tuple[Any, Tensor]]:
        return itertools.islice(self._batches.epoch(number), start, self._count)


def _fitting(config: Config, source: Source, device: torch.device, build: BuildModel) -> int | None:
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
