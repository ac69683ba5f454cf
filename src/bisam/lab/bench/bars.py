"""The bars of speed and memory, and whether a result of `bisam bench` meets them."""

from __future__ import annotations

import operator
from functools import reduce
from typing import Any, NamedTuple

Result = dict[str, Any]
Entry = dict[str, Any]

BATCH = 128
"""Batch size of the bars of training steps."""


class Bar(NamedTuple):
    """A number of the result, found by its path, and the limit that it has to keep, give or take the tolerance."""

    name: str
    comparison: str
    limit: float
    path: tuple[str, ...]
    device: str = "cuda"
    tolerance: float = 0.0


_SMALL = ("128x10", "128x100", "512x1000")
_SPEED_UPS = {"resnet56": 9.0, "vgg19bn": 9.0, "wrn28-2": 9.0, "densenet121": 4.0, "wrn28-10": 4.0}

BARS = [
    *(Bar(f"Q ÷ cross entropy, {s}, device time", "≤", 1.0, ("loss", s, "device_ratio", "log")) for s in _SMALL),
    Bar("Q ÷ cross entropy, 8192x32000, device time", "≤", 0.5, ("loss", "8192x32000", "device_ratio", "log")),
    Bar("Q ÷ cross entropy, 128x100, CPU", "≤", 1.0, ("loss", "128x100", "eager_ratio", "log"), "cpu"),
    *(
        Bar(f"{name}: faster than the authors' code", "≥", limit, ("epoch", name, "speed_up_over_authors"))
        for name, limit in _SPEED_UPS.items()
    ),
    *(Bar(f"{name}: BiSAM ÷ SAM", "≤", 1.02, ("epoch", name, "ratio", "bisam-log/sam")) for name in _SPEED_UPS),
    *(Bar(f"{name}: BiSAM ÷ SGD", "≤", 2.05, ("epoch", name, "ratio", "bisam-log/sgd")) for name in _SPEED_UPS),
    Bar("six resnet56: ms per model and step", "≤", 4.5, ("together", "resnet56 x6", "ms_per_model_and_step")),
    Bar(
        "six resnet32: minutes of 200 epochs, extrapolated",
        "≤",
        15.0,
        ("together", "resnet32 x6", "extrapolated_minutes_of_200_epochs"),
    ),
    Bar(
        "wrn28-10: copies of the weights beyond SGD's peak",
        "≤",
        1.0,
        ("memory", "wrn28-10", "copies_beyond_sgd", "bisam-log"),
        tolerance=0.02,
    ),
]


def judged(result: Result) -> list[Entry]:
    """Every bar of this device with what was measured: met, missed, or None where nothing was."""
    return [_judged(bar, result) for bar in BARS if bar.device == result["device"]]


def _judged(bar: Bar, result: Result) -> Entry:
    measured = _found(result, bar.path)
    met = None
    if measured is not None:
        slack = bar.limit * bar.tolerance
        met = measured <= bar.limit + slack if bar.comparison == "≤" else measured >= bar.limit - slack
    return {
        "name": bar.name,
        "comparison": bar.comparison,
        "limit": bar.limit,
        "tolerance": bar.tolerance,
        "measured": measured,
        "met": met,
    }


def _found(result: Result, path: tuple[str, ...]) -> float | None:
    """The number there, if it was measured with the batch that the bars are set for."""
    section, name, *rest = path
    entry = result.get(section, {}).get(name, {})
    if entry.get("batch", BATCH) != BATCH or not entry:
        return None
    return reduce(operator.getitem, rest, entry)
