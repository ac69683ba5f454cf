"""Time and memory of training steps, alone and several at once, on random images on the device."""

from __future__ import annotations

import gc
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

import bisam
from bisam.lab.bench.loss import looped
from bisam.lab.bench.timing import seconds_of, synchronise, take_turns
from bisam.lab.models import build
from bisam.lab.models.compiling import compile_model
from bisam.lab.tables.published import table

Wrap = Callable[..., bisam.SharpnessAware]
"""Wraps a base optimizer and its model."""

WRAPPERS: dict[str, Wrap] = {
    "sgd": partial(bisam.SAM, rho=0.0),
    "sam": bisam.SAM,
    "bisam-log": bisam.BiSAM,
    "bisam-tanh": partial(bisam.BiSAM, phi="tanh"),
}

# Models whose captured step is faster when they are compiled: the outcome of measuring on an H200.
COMPILED = {"resnet32", "resnet56", "vgg19bn", "wrn28-2", "wrn28-10"}

# Milliseconds per BiSAM (−log) step of the authors' public code, float32 and eager, batch 128, on an NVIDIA H200 with
# torch 2.11: from benchmarks/results/authors_h200.json, which describes the measurement.
AUTHORS_MS = {"resnet56": 80.84, "vgg19bn": 43.49, "wrn28-2": 60.93, "densenet121": 149.62, "wrn28-10": 107.30}
AUTHORS_GPU, AUTHORS_BATCH = "H200", 128

IMAGES = 45_000
"""Training images of an epoch in the paper: CIFAR without the validation images."""

EPOCHS = 200
"""Epochs of a run in the paper."""

CAPTURE_WARMUP = 3
WARMUP = 5
"""Steps that run between the first captured one and those that are timed."""


def epoch(
    name: str, *, device: torch.device, batch: int, compiled: bool, loop: bool, steps: int, rounds: int
) -> dict[str, Any]:
    """Milliseconds per step of each method, seconds per epoch, and both beside the paper's and its code's."""
    x, y = random_batch(batch, device)
    runs: dict[str, Callable[[], Any]] = {}
    setup, eager_because = {}, None
    for method in WRAPPERS:
        began = time.perf_counter()
        with no_warning_without_gpu():
            step = bisam.capture(training(name, WRAPPERS[method], device, compiled=compiled), warmup=CAPTURE_WARMUP)
        runs[method] = partial(step, x, y)
        setup[method] = _started(runs[method], began, device)
        eager_because = eager_because or step.eager_because
    if device.type == "cuda":  # elsewhere every step is eager
        runs["eager"] = partial(training(name, bisam.BiSAM, device).minimize, x, y)
    if loop:
        by_loop = training(name, partial(bisam.SAM, ascent=looped), device, fast=False)
        runs["loop"] = partial(by_loop.minimize, x.contiguous(), y)
    ms = _milliseconds(runs, device, steps, rounds)
    per_epoch = math.ceil(IMAGES / batch)
    return {
        "batch": batch,
        "precision": "bf16 autocast" if device.type == "cuda" else "float32",
        "compiled": compiled,
        "eager_because": eager_because,
        "steps": steps,
        "rounds": rounds,
        "ms": {method: round(value, 4) for method, value in ms.items()},
        "setup_s": setup,
        "steps_of_epoch": per_epoch,
        "seconds_of_epoch": {method: round(value * per_epoch / 1e3, 3) for method, value in ms.items()},
        "ratio": {
            f"{method}/{other}": round(ms[method] / ms[other], 4)
            for method in ("bisam-log", "bisam-tanh")
            for other in ("sam", "sgd")
        },
        "paper": _paper(name),
        "speed_up_over_authors": _speed_up(name, batch, ms["bisam-log"], device),
    }


def together(
    name: str, count: int, *, device: torch.device, batch: int, compiled: bool, steps: int, rounds: int
) -> dict[str, Any]:
    """Milliseconds per model and step of `count` BiSAM (−log) runs in one graph."""
    began = time.perf_counter()
    optimizers = [training(name, bisam.BiSAM, device, compiled=compiled) for _ in range(count)]
    with no_warning_without_gpu():
        step = bisam.capture_together(optimizers, warmup=CAPTURE_WARMUP)
    run = partial(step, [random_batch(batch, device, seed) for seed in range(count)])
    setup = _started(run, began, device)
    ms = _milliseconds({"all": run}, device, steps, rounds)["all"]
    return {
        "model": name,
        "count": count,
        "batch": batch,
        "compiled": compiled,
        "eager_because": step.eager_because,
        "steps": steps,
        "rounds": rounds,
        "ms_per_model_and_step": round(ms / count, 4),
        "setup_s": setup,
        "extrapolated_minutes_of_200_epochs": round(ms * EPOCHS * math.ceil(IMAGES / batch) / 6e4, 2),
    }


def memory(name: str, *, device: torch.device, batch: int) -> dict[str, Any]:
    """Peak memory of an eager step that is not the first, beyond what was allocated before there was a model."""
    x, y = random_batch(batch, device)
    _peak(name, bisam.BiSAM, x, y)  # not measured: it allocates the libraries' workspaces
    peaks = {method: _peak(name, WRAPPERS[method], x, y) for method in ("sgd", "sam", "bisam-log")}
    weights = sum(p.nbytes for p in build(name, 10).parameters())
    return {
        "batch": batch,
        "weights_mib": round(weights / 2**20, 2),
        "peak_mib": {method: round(peak / 2**20, 2) for method, peak in peaks.items()},
        "peak_copies": {method: round(peak / weights, 4) for method, peak in peaks.items()},
        "copies_beyond_sgd": {m: round((peaks[m] - peaks["sgd"]) / weights, 4) for m in ("sam", "bisam-log")},
    }


def training(
    name: str, method: Wrap, device: torch.device, *, compiled: bool = False, fast: bool = True
) -> bisam.SharpnessAware:
    """A new model and its optimizer; `fast` is with bf16 and channels_last, on a GPU."""
    model = build(name, 10).to(device)
    fast = fast and device.type == "cuda"
    if fast:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if compiled:
        compile_model(model, device, bf16=fast)
    base = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)
    return method(base, model, autocast=torch.bfloat16 if fast else None)


@contextmanager
def no_warning_without_gpu() -> Iterator[None]:
    """Without the warning: the result has `eager_because`."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "a CUDA graph needs")
        yield


def random_batch(count: int, device: torch.device, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(count, 3, 32, 32, generator=generator), torch.randint(10, (count,), generator=generator)
    layout = torch.channels_last if device.type == "cuda" else torch.contiguous_format
    return x.to(device, memory_format=layout), y.to(device)


def release(device: torch.device) -> None:
    """Give back what a training held: its graphs, compiled code and memory."""
    gc.collect()
    if device.type == "cuda":
        torch.compiler.reset()
        torch.cuda.empty_cache()


def _started(run: Callable[[], Any], began: float, device: torch.device) -> float:
    """Seconds until the first captured step is done; the steps before it are eager."""
    for _ in range(CAPTURE_WARMUP + 1 if device.type == "cuda" else 1):
        run()
    synchronise(device)
    return round(time.perf_counter() - began, 2)


def _milliseconds(
    runs: Mapping[str, Callable[[], Any]], device: torch.device, steps: int, rounds: int
) -> dict[str, float]:
    """Per step, after a warm-up of each."""
    for run in runs.values():
        seconds_of(run, min(WARMUP, steps), device)
    seconds = take_turns({name: partial(seconds_of, run, steps, device) for name, run in runs.items()}, rounds)
    return {name: 1e3 * s for name, s in seconds.items()}


def _peak(name: str, method: Wrap, x: Tensor, y: Tensor) -> int:
    release(x.device)
    before = torch.cuda.memory_allocated()
    optimizer = training(name, method, x.device)
    optimizer.minimize(x, y)  # creates the base optimizer's state
    torch.cuda.reset_peak_memory_stats()
    optimizer.minimize(x, y)
    return torch.cuda.max_memory_allocated() - before


def _paper(name: str) -> dict[str, Any] | None:
    published = table("tab:time_cifar10")
    if name not in published.cells:
        return None
    seconds = {method: cell.mean for method, cell in published.cells[name].items()}
    return {
        "hardware": published.hardware,
        "seconds_of_epoch": seconds,
        "ratio": round(seconds["bisam"] / seconds["sam"], 4),
    }


def _speed_up(name: str, batch: int, ms: float, device: torch.device) -> float | None:
    """Over the authors' code, on the GPU and batch that it was measured with."""
    if name not in AUTHORS_MS or device.type != "cuda" or batch != AUTHORS_BATCH:
        return None
    return round(AUTHORS_MS[name] / ms, 3) if AUTHORS_GPU in torch.cuda.get_device_name(device) else None
