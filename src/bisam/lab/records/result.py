"""The result of a run: what it must have to count."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bisam.lab.records.metrics import is_epoch

STATUSES = ("done", "diverged")


def fault_of(result: Mapping[str, Any]) -> str:
    """Why a result cannot be shown in a table, as text; empty if it can.

    >>> fault_of({}), fault_of({"status": "done"})
    ('its result has the status None', 'its result has no test accuracy')
    """
    status = result.get("status")
    if status not in STATUSES:
        return f"its result has the status {status!r:.60}"
    if status == "done" and not is_percent(result.get("test_accuracy")):
        return "its result has no test accuracy"
    return ""


def gap_in(result: Mapping[str, Any]) -> str:
    """Why a result does not show that a training has ended, as text: `fault_of`, or a number that it lacks.

    >>> gap_in({"status": "done", "test_accuracy": 90.0, "epochs": 2, "validation_accuracy": 55.5})
    'its result has no tested epoch'
    >>> gap_in({"status": "diverged", "epochs": 2})
    ''
    """
    if fault := fault_of(result):
        return fault
    epochs, best = result.get("epochs"), result.get("best_epoch")
    if not is_epoch(epochs):
        return "its result has no number of epochs"
    if result["status"] == "diverged":  # perhaps before there were weights to test
        return ""
    if not is_percent(result.get("validation_accuracy")):
        return "its result has no validation accuracy"
    return "" if is_epoch(best) and best < epochs else "its result has no tested epoch"


def is_percent(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= 100
