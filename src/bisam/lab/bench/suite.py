"""The paper's two timing tables measured here, and the other bars of speed and memory.

A run is a list of units: a size of the loss, a model, a number of trainings at once. After each of them the result is
written, so an interrupted run keeps its results, and a resumed one adds to them.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bisam.lab.bench import loss as bench_loss
from bisam.lab.bench import steps as bench_steps
from bisam.lab.bench.bars import Entry, Result, judged
from bisam.lab.bench.steps import COMPILED
from bisam.lab.files import UnreadableError, new_draft, read_file
from bisam.lab.records.receipt import receipt, save

SECTIONS = {
    "loss": "the ascent's loss, forward and backward",
    "epoch": "a training step of each method",
    "together": "several trainings at once",
    "memory": "peak memory of a step",
}
CUDA_ONLY = ("together", "memory")
MODELS = {"cuda": ("densenet121", "resnet56", "vgg19bn", "wrn28-2", "wrn28-10"), "cpu": ("resnet20",)}
BATCH = {"cuda": 128, "cpu": 16}
TOGETHER = (("resnet56", 1), ("resnet56", 2), ("resnet56", 4), ("resnet56", 6), ("resnet32", 6))
MEMORY = "wrn28-10"
LARGEST_RESULT = 16 * 2**20
"""Bytes of an earlier result that is read and added to."""


class RefusedError(ValueError):
    """An option that leaves nothing to measure, or no place for the result."""

    def __init__(self, option: str, message: str) -> None:
        super().__init__(message)
        self.option = option


class Unit(NamedTuple):
    """One measurement, and a line about its result."""

    section: str
    name: str
    measure: Callable[[], Entry]
    summarize: Callable[[Entry], str]


@dataclass(frozen=True)
class BenchmarkPlan:
    """The measurements, and how thorough they are. `compiling` is "auto", "always" or "never"."""

    device: torch.device
    sections: tuple[str, ...] = tuple(SECTIONS)
    models: tuple[str, ...] = ()
    batch: int | None = None
    compiling: str = "auto"
    loop: bool = False
    quick: bool = False

    def units(self) -> list[Unit]:
        """Measurements in the order of the sections; those that need a GPU only where there is one."""
        of_section = {"loss": self._loss, "epoch": self._epoch, "together": self._together, "memory": self._memory}
        return [unit for name in SECTIONS if name in self.sections and self.can(name) for unit in of_section[name]()]

    def can(self, section: str) -> bool:
        return self.device.type == "cuda" or section not in CUDA_ONLY

    def compiles(self, model: str) -> bool:
        if self.compiling == "auto":
            return self.device.type == "cuda" and model in COMPILED
        return self.compiling == "always"

    def _loss(self) -> list[Unit]:
        rounds = 5 if self.quick else 20
        measure = partial(bench_loss.measure, device=self.device, rounds=rounds, full=not self.quick)
        sizes = bench_loss.SIZES[self.device.type]
        return [Unit("loss", f"{n}x{k}", partial(measure, n, k), _summarize_loss) for n, k in sizes]

    def _epoch(self) -> list[Unit]:
        return [
            Unit("epoch", name, partial(bench_steps.epoch, name, loop=self.loop, **self._steps(name)), _summarize_epoch)
            for name in self.models or MODELS[self.device.type]
        ]

    def _together(self) -> list[Unit]:
        measure = bench_steps.together
        return [
            Unit("together", f"{name} x{n}", partial(measure, name, n, **self._steps(name)), _summarize_together)
            for name, n in TOGETHER
        ]

    def _memory(self) -> list[Unit]:
        measure = partial(bench_steps.memory, MEMORY, device=self.device, batch=self._batch())
        return [Unit("memory", MEMORY, measure, _summarize_memory)]

    def _steps(self, model: str) -> dict[str, Any]:
        many = 40 if self.device.type == "cuda" else 5
        return {
            "device": self.device,
            "batch": self._batch(),
            "compiled": self.compiles(model),
            "steps": many // 2 if self.quick else many,
            "rounds": 2 if self.quick else 3,
        }

    def _batch(self) -> int:
        return self.batch or BATCH[self.device.type]


def print_line(line: str) -> None:
    print(line, flush=True)


def run(
    plan: BenchmarkPlan,
    out: Path,
    log: Callable[[str], None] = print_line,
    track: Callable[[list[Unit]], Iterable[Unit]] = iter,
) -> Result:
    """Measure what is planned, log a line for each, and keep `out` up to date. Returns the whole result."""
    check_writable(out)
    units = plan.units()
    if not units:
        raise RefusedError("--only", f"no section runs without a CUDA device, got {', '.join(plan.sections)}")
    result = begin(plan.device, out, log)
    for section in plan.sections:
        if not plan.can(section):
            log(f"{section}: skipped, it needs a CUDA device")
    torch.backends.cudnn.benchmark = True
    for number, unit in enumerate(track(units), start=1):
        log(f"[{number}/{len(units)}] {unit.section} {unit.name} …")
        began = time.perf_counter()
        entry = unit.measure()
        bench_steps.release(plan.device)
        entry["quick"] = plan.quick
        result.setdefault(unit.section, {})[unit.name] = entry
        result["bars"] = judged(result)
        save(out, result)
        log(f"    {unit.summarize(entry)} ({time.perf_counter() - began:.0f} s)")
    return result


def begin(device: torch.device, out: Path, log: Callable[[str], None]) -> Result:
    """A new result, or what `out` has of the same commit on the same device, which is added to."""
    new: Result = {"receipt": receipt(), "device": device.type}
    if not out.exists():
        return new
    old = read(out)
    if _origin(old) != _origin(new) or new["receipt"]["commit"] == "unknown":
        log(f"{out} has another commit, torch or machine ({old['receipt']['commit']}): it is replaced")
        return new
    kept = {section: old[section] for section in SECTIONS if section in old}
    log(f"{out} has the same commit and machine: entries that are not measured now are kept")
    return {**new, **kept}


def read(path: Path) -> Result:
    """A result that an earlier run wrote."""
    try:
        found = json.loads(read_file(path, LARGEST_RESULT))
        _origin(found)
    except (UnreadableError, ValueError, KeyError, TypeError, AttributeError):
        raise RefusedError("--out", f"{path} exists and is not a result of `bisam bench`: give another file") from None
    return found


def check_writable(path: Path) -> None:
    """Raise RefusedError before measuring if `path` cannot be written."""
    if path.is_dir():
        raise RefusedError("--out", f"{path} is a folder: give a file in it")
    try:
        handle, draft = new_draft(Path(os.path.realpath(path)))
        os.close(handle)
        draft.unlink()
    except OSError as error:
        raise RefusedError("--out", f"{path} cannot be written: {error.strerror}") from None


def _origin(result: Result) -> tuple[Any, ...]:
    """What two results must share to be combined."""
    device, receipt_of = result["device"], result["receipt"]
    return device, receipt_of["commit"], receipt_of["torch"], receipt_of["gpu" if device == "cuda" else "cpu"]


# A line about each unit.


def _summarize_loss(entry: Entry) -> str:
    kind = "device" if entry["device_us"] else "eager"
    times, ratios = entry[f"{kind}_us"], entry[f"{kind}_ratio"]
    return (
        f"{kind}: cross entropy {times['cross_entropy']:.1f} µs, Q {times['log']:.1f} µs, ratio {ratios['log']:.3f} "
        f"(tanh {ratios['tanh']:.3f}, plain {ratios['plain_log']:.3f})"
    )


def _summarize_epoch(entry: Entry) -> str:
    times = ", ".join(f"{method} {ms:.2f}" for method, ms in entry["ms"].items())
    return f"ms per step: {times}; BiSAM ÷ SAM {entry['ratio']['bisam-log/sam']:.3f}"


def _summarize_together(entry: Entry) -> str:
    return f"{entry['ms_per_model_and_step']:.2f} ms per model and step"


def _summarize_memory(entry: Entry) -> str:
    return f"BiSAM's peak is {entry['copies_beyond_sgd']['bisam-log']:.2f} copies of the weights beyond SGD's"
