"""Curves of training: the numbers of each run by epoch, and the mean of each method with the range of its runs."""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

from bisam.lab.config import Config
from bisam.lab.measures import MEASURES
from bisam.lab.methods import passes_until, title_of
from bisam.lab.tables.cells import Run, number

Rows = list[dict[str, Any]]

CURVES = {
    "loss": "training loss at w",
    **{f"validation_{name}": f"validation {measure.title}, per cent" for name, measure in MEASURES.items()},
    "flips": "flips per batch, right to wrong",
    "surrogate_gap": "surrogate gap, L(w + ε) − L(w)",
    "lr": "learning rate",
}
"""Titles of the curves, by their names in the rows."""

AXES = ("gradients", "seconds")
"""What curves are drawn over, beside the epoch: gradient evaluations, in passes over the training data, and time."""

MOST_POINTS = 20_000
"""Points of all runs of a page: more make it slow, and are finer than a screen."""

LARGEST_EPOCH = 2**53
"""Larger whole numbers are none to a browser, and the library that draws refuses them."""

OUTLIER = 10.0
"""A diverged run is not drawn beyond this multiple of the largest value of the others."""


def stride(runs: Iterable[Run]) -> int:
    """Every how many epochs a point is drawn, so that a page stays light.

    >>> stride([])
    1
    """
    return max(1, math.ceil(sum(len(run.record.metrics) for run in runs) / MOST_POINTS))


def points(runs: Sequence[Run], every: int = 1) -> Rows:
    """Rows of numbers by run and epoch; the first and the last epoch are always among them.

    `whole` marks the epochs that all runs of a method have, but for those that diverged: only there is a mean the mean
    of the same runs.
    """
    rows: Rows = []
    for run in runs:
        rows += points_of(run.record.metrics, run.config, label(run), title_of(run.config.method), every)
    diverged = {label(run) for run in runs if run.status == "diverged"}
    _drop_outliers(rows, diverged)
    return mark_whole(rows, diverged)


def points_of(
    metrics: Sequence[Mapping[str, Any]], config: Config | None, run: str, method: str, every: int = 1
) -> Rows:
    """Rows of one run, under these names of run and method. Without a configuration they have no `gradients`."""
    passed = _seconds_passed(metrics)
    rows: Rows = []
    for place, epoch in enumerate(metrics):
        if (place % every == 0 or place == len(metrics) - 1) and epoch["epoch"] < LARGEST_EPOCH:
            seconds = {} if passed[place] is None else {"seconds": passed[place]}
            known = numbers(epoch)
            passes = {} if config is None else {"gradients": rounded(passes_until(config, known["epoch"]))}
            rows.append({"run": run, "method": method, **known, **passes, **seconds})
    return rows


def mark_whole(rows: Rows, diverged: Container[str] = ()) -> Rows:
    """Mark the epochs that all runs of a method have, without those that diverged."""
    sound = [row for row in rows if row["run"] not in diverged]
    present = Counter((row["method"], row["epoch"]) for row in sound)
    counts = Counter(method for method, _ in {(row["method"], row["run"]) for row in sound})
    for row in sound:
        if present[row["method"], row["epoch"]] == counts[row["method"]]:
            row["whole"] = 1
    return rows


def _seconds_passed(metrics: Sequence[Mapping[str, Any]]) -> list[float | None]:
    """Seconds of training up to the end of each epoch, divided by the runs that shared the device; None: not known."""
    passed: list[float | None] = []
    total: float | None = 0.0
    for row in metrics:
        seconds, together = number(row.get("seconds")), number(row.get("together")) or 1.0
        total = None if total is None or seconds is None else total + seconds / max(1.0, together)
        passed.append(rounded(total))
    return passed


def bands(rows: Rows) -> Rows:
    """For each method and each `whole` epoch: the mean of its runs, and their smallest and largest value.

    A row has `n`, `gradients` and `seconds` (means) and of each curve `loss`, `loss_low` and `loss_high`.
    """
    grouped: dict[tuple[str, int], Rows] = defaultdict(list)
    for row in rows:
        if "whole" in row:
            grouped[row["method"], row["epoch"]].append(row)
    found = []
    for (method, epoch), members in grouped.items():
        made: dict[str, Any] = {"method": method, "epoch": epoch, "n": len(members)}
        for name in (*AXES, *CURVES):
            values = [row[name] for row in members if name in row]
            if len(values) == len(members):
                made[name] = rounded(statistics.fmean(values))
                if name in CURVES:
                    made |= {f"{name}_low": min(values), f"{name}_high": max(values)}
        found.append(made)
    return sorted(found, key=lambda row: row["epoch"])


def label(run: Run) -> str:
    return f"{title_of(run.config.method)}, seed {run.config.seed}"


def names_of(rows: Rows) -> list[str]:
    """The curves that have data."""
    return [name for name in CURVES if any(name in row for row in rows)]


def numbers(epoch: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a line of metrics that charts show: the epoch, counted from 1, and the `CURVES` that it has."""
    loss, perturbed = number(epoch.get("loss")), number(epoch.get("perturbed_loss"))
    gap = None if loss is None or perturbed is None else perturbed - loss
    values = {name: rounded(value) for name, value in {**epoch, "surrogate_gap": gap}.items() if name in CURVES}
    return {"epoch": epoch["epoch"] + 1, **{name: value for name, value in values.items() if value is not None}}


def rounded(value: Any) -> float | None:
    """Five digits, as many as a chart can show; None for what is not a number."""
    found = number(value)
    return None if found is None else float(f"{found:.5g}")


def _drop_outliers(rows: Rows, diverged: Container[str]) -> None:
    """Remove values of diverged runs far beyond the others, which would flatten all other curves."""
    for name in CURVES:
        sizes = [abs(row[name]) for row in rows if name in row and row["run"] not in diverged]
        for row in rows:
            if sizes and row["run"] in diverged and abs(row.get(name, 0.0)) > OUTLIER * max(sizes):
                del row[name]
