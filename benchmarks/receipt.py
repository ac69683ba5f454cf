"""A benchmark's result as a file beside it, with its receipt."""

from pathlib import Path
from typing import Any

from bisam.lab.records import receipt as lab

RESULTS = Path(__file__).parent / "results"


def save(name: str, result: dict[str, Any]) -> Path:
    """Write results/NAME.json whole or not at all."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    lab.save(path, {"receipt": lab.receipt(), **result})
    return path
