"""Wall time of contestants that take turns, so that their ratios are of one and the same time."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(work: Callable[[], Any], count: int, device: torch.device) -> float:
    """Mean seconds of `count` calls, until the device is done."""
    synchronise(device)
    start = time.perf_counter()
    for _ in range(count):
        work()
    synchronise(device)
    return (time.perf_counter() - start) / count


def take_turns(contestants: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """Each contestant measures itself once a round, in random order; the median of its rounds.

    >>> take_turns({"one": lambda: 1.0, "two": lambda: 2.0}, rounds=3)
    {'one': 1.0, 'two': 2.0}
    """
    order = random.Random(0)
    found: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name in order.sample(list(contestants), len(contestants)):
            found[name].append(contestants[name]())
    return {name: statistics.median(values) for name, values in found.items()}
