"""ρ, chosen on validation data by short trainings: `bisam.tuning.find_rho` with the settings of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

import bisam
from bisam.lab import methods
from bisam.lab.config import Config, rate
from bisam.lab.data.shards import Shard
from bisam.lab.data.sources import Batched, Source
from bisam.lab.training.ranks import ALONE, Ranks
from bisam.lab.training.run import BuildModel
from bisam.tuning import RhoSweep, find_rho


def search(
    config: Config,
    source: Source,
    device: torch.device,
    build: BuildModel,
    *,
    rhos: tuple[float, ...],
    steps: int,
    repeats: int,
    progress: Callable[[int, int], None] | None = None,
    ranks: Ranks = ALONE,
) -> RhoSweep:
    """Train `steps` steps with each ρ, with the whole schedule in them, and compare on validation data.

    Each of several ranks trains on its part of a batch and validates on all samples.
    """
    loaders = source.loaders(config, device)
    loaders.train.shard = Shard(ranks.rank, ranks.count)

    def model() -> nn.Module:
        return build(config, source).to(device=device, memory_format=torch.channels_last)  # type: ignore[call-overload]

    def optimizer(model: nn.Module, rho: float) -> bisam.SharpnessAware:
        own = replace(config, rho=rho)
        made = methods.optimizer(ranks.wrapped(model), own, ranks.sharpness(config), steps=steps)
        return _scheduled(made, config, steps)

    return find_rho(
        model, optimizer, _Shuffled(loaders.train), list(loaders.validation.epoch(0)), rhos=rhos, steps=steps,
        repeats=repeats, seed=config.seed, progress=progress,
    )  # fmt: skip


class _Shuffled:
    """Epochs of a run in random order: find_rho sets torch's random numbers, so that every ρ gets the same ones."""

    def __init__(self, batches: Batched) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[tuple[Any, Tensor]]:
        return self._batches.epoch(int(torch.randint(2**31, ())))

    def __len__(self) -> int:
        return len(self._batches)


def _scheduled(optimizer: bisam.SharpnessAware, config: Config, steps: int) -> bisam.SharpnessAware:
    """The schedule of the configuration, shortened to these steps."""
    short, done = _shortened(config, steps), 0

    def set_rate() -> None:
        for group in optimizer.param_groups:
            group["lr"] = rate(short, done) if done < steps else 0.0

    def after(*_: Any) -> None:
        nonlocal done
        done += 1
        set_rate()

    set_rate()
    optimizer.register_step_post_hook(after)
    return optimizer


def _shortened(config: Config, steps: int) -> Config:
    """The same schedule, with a step in the place of an epoch."""
    rising = round(config.warmup_epochs / config.epochs * steps)
    return replace(config, epochs=steps, warmup_epochs=rising)
