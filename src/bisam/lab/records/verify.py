"""Whether the record of a run is whole and agrees with itself."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from bisam.lab.config import Config, recorded
from bisam.lab.measures import MEASURES, title_of
from bisam.lab.records.checkpoint import is_whole
from bisam.lab.records.digests import listed, mismatches
from bisam.lab.records.layout import CONFIG, METRICS, RECEIPT, RESULT, WEIGHTS
from bisam.lab.records.record import Record
from bisam.lab.records.result import gap_in


def verify(record: Record) -> list[str]:
    """A line for each problem of a record, without its weights: see `weights_problems`."""
    problems = [*record.problems]
    try:
        config = recorded(record.config)
    except ValueError as error:
        return [*problems, f"{CONFIG}: {error}"] if record.config else problems
    if record.result is None:
        return problems
    if record.receipt is None and not any(problem.startswith(RECEIPT) for problem in problems):
        problems.append(f"{RECEIPT}: it is missing")
    fault = gap_in(record.result)
    problems += _strange_rows(record)
    return [*problems, *([f"{RESULT}: {fault}"] if fault else _disagreements(record, record.result, config))]


def weights_problems(record: Record) -> list[str]:
    """What is wrong with the weights of a finished run.

    Missing ones are a problem where the receipt lists them. Those of older versions have a digest of their own.
    """
    if record.result is None:
        return []
    if WEIGHTS in listed(record.receipt):
        return mismatches(record.folder, record.receipt, [WEIGHTS])
    return copy_problems(record.folder)


def copy_problems(folder: Path) -> list[str]:
    """What is wrong with the weights of the best run that a fit keeps in its own folder, beside its runs."""
    path = folder / WEIGHTS
    return [f"{WEIGHTS}: it is damaged"] if path.exists() and not is_whole(path) else []


def lacks_weights(record: Record) -> bool:
    """Whether the run has been tested and its weights are not in its folder."""
    return (record.result or {}).get("status") == "done" and not (record.folder / WEIGHTS).exists()


def _strange_rows(record: Record) -> list[str]:
    """A line for the first value of the metrics that no training writes: text, or a number out of its range."""
    for row in record.metrics:
        for name, value in row.items():
            least, most = _LIMITS.get(name, (-math.inf, math.inf))
            is_number = isinstance(value, (int, float)) and isinstance(value, bool) == (name == "alike")
            is_nan = value != value and name not in _LIMITS
            if not is_number or not (is_nan or least <= value <= most):
                return [f"{METRICS}: {name} of epoch {row['epoch']} is {value!r:.60}"]
    return []


_LIMITS = {
    **{f"validation_{name}": (measure.lowest, 100) for name, measure in MEASURES.items()},
    "seconds": (0, math.inf),
    "samples_per_second": (0, math.inf),
    "together": (1, math.inf),
    "alike": (False, True),
}
"""The least and the largest value of the numbers that have them; the others may be NaN in a run that diverged."""


def _disagreements(record: Record, result: dict[str, Any], config: Config) -> list[str]:
    """Where the result is not that of the metrics and the configuration."""
    problems = []
    name = f"validation_{config.primary}"
    measure = f"validation {title_of(name)}"
    epochs, best, value = result["epochs"], result.get("best_epoch"), result.get(name)
    if result["status"] == "done" and epochs != config.epochs:
        problems.append(f"{RESULT}: it is of {epochs} epochs, and the configuration has {config.epochs}")
    if len(record.metrics) > epochs:
        problems.append(f"{METRICS}: it has {len(record.metrics)} lines, and the result is of {epochs} epochs")
    found = {row["epoch"]: row.get(name) for row in record.metrics}
    if best not in found:  # lines that are missing are a problem of their own; a diverged run may have no best epoch
        return problems
    if found[best] != value:
        problems.append(f"{RESULT}: its {measure} is {value}, and that of epoch {best} is {found[best]}")
    if result["status"] == "done":
        numbers = [number for number in found.values() if isinstance(number, (int, float))]
        wanted = max(numbers, default=None) if config.select == "best" else found[max(found)]
        if wanted != value:
            problems.append(f"{RESULT}: its {measure} is {value}, and the {config.select} one is {wanted}")
    return problems
