"""What was measured on a GPU: the time of a step and the memory of a run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bisam.lab.config import Config
from bisam.lab.methods import METHODS
from bisam.lab.tables.costs import PLAIN_STEP_MS

BATCH = 128
"""Samples in the steps that were measured."""


@dataclass(frozen=True)
class Gpu:
    """Measurements of `bisam bench`, by model."""

    title: str
    plain_ms: Mapping[str, float]
    """Milliseconds of a captured plain step at batch 128."""
    peak_mib: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Peak memory of an eager step at batch 128, by model and method."""
    memory_gb: float | None = None
    """Its memory by its data sheet; None where it is not known."""
    together: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    """Milliseconds per model and step of several runs in one graph, by model and number of runs."""

    def measured_mib(self, config: Config) -> float | None:
        """The peak memory of a run, where a run of its model and batch was measured."""
        peaks = self.peak_mib.get(config.model, {})
        if config.batch != BATCH or config.micro_batch is not None:
            return None
        own = peaks.get(config.method)
        if own is None and config.method in METHODS and METHODS[config.method].perturbs:
            own = peaks.get("bisam-log")  # one copy of the weights more than SGD, as all that perturb
        return own

    def sharing(self, model: str) -> tuple[int, float] | None:
        """The largest number of runs in one graph that was measured, and the time of each as a part of that alone."""
        times = self.together.get(model, {})
        return (max(times), times[max(times)] / times[1]) if 1 in times and len(times) > 1 else None


# From benchmarks/results/bench_h200.json; resnet32 from frontier_h200.json (alone) and fused_h200.json (six at once).
# Tests compare.
H200 = Gpu(
    "H200",
    PLAIN_STEP_MS,
    peak_mib={"wrn28-10": {"sgd": 1498.88, "sam": 1638.8, "bisam-log": 1638.8}},
    memory_gb=141,
    together={
        "resnet32": {1: 2.7814, 6: 1.1292},
        "resnet56": {1: 4.5157, 2: 2.9281, 4: 2.162, 6: 1.9108},
    },
)

GPUS = {"h200": H200}


def find_gpu(name: str) -> Gpu:
    """The GPU of that name, or the one that a file of `bisam bench` was measured on."""
    if name.lower() in GPUS:
        return GPUS[name.lower()]
    path = Path(name)
    if not path.suffix and not path.exists():
        raise ValueError(
            f"steps were measured on {', '.join(GPUS)} only, got {name!r}: run bisam bench --out bench.json on that "
            "GPU, and use --gpu bench.json"
        )
    return _of_bench(path)


def _of_bench(path: Path) -> Gpu:
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
        gpu = result["receipt"]["gpu"]
        epochs = {name: entry for name, entry in result.get("epoch", {}).items() if entry["batch"] == BATCH}
        steps = {name: float(entry["ms"]["sgd"]) for name, entry in epochs.items()}
        peaks = {name: entry["peak_mib"] for name, entry in result.get("memory", {}).items()}
        together = _together(result.get("together", {}))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not a result of bisam bench: {type(error).__name__}: {error}") from None
    if not gpu:
        raise ValueError(f"{path} was measured on a CPU: run bisam bench on the GPU that you plan for")
    if not steps:
        raise ValueError(f"{path} has no steps of {BATCH} images: run bisam bench --only epoch --batch {BATCH}")
    return Gpu(str(gpu).removeprefix("NVIDIA "), steps, peaks, together=together)


def _together(entries: Mapping[str, Any]) -> dict[str, dict[int, float]]:
    found: dict[str, dict[int, float]] = {}
    for entry in entries.values():
        found.setdefault(entry["model"], {})[int(entry["count"])] = float(entry["ms_per_model_and_step"])
    return found
