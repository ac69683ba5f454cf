"""Time of the ascent's loss, forward and backward, against cross entropy."""

from __future__ import annotations

import importlib
import statistics
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import bisam
from bisam.lab.bench.timing import seconds_of, take_turns
from bisam.lab.tables.published import table
from bisam.objectives import GAMMA, log_phi

Loss = Callable[[Tensor, Tensor], Tensor]

SIZES = {"cpu": [(128, 10), (128, 100), (512, 1000)], "cuda": [(128, 10), (128, 100), (512, 1000), (8192, 32000)]}
PAPER_SIZE = (128, 100)
PAPER_REPETITIONS = 10_000
REPLAYS = 50


def measure(rows: int, classes: int, *, device: torch.device, rounds: int, full: bool) -> dict[str, Any]:
    """Microseconds of each contestant; at the paper's size also seconds for its number of repetitions.

    `full` has as many repetitions there as the paper, except for the loop, whose seconds are extrapolated.
    """
    generator = torch.Generator(device).manual_seed(0)
    z = torch.randn(rows, classes, generator=generator, device=device, requires_grad=True)
    y = torch.randint(classes, (rows,), generator=generator, device=device)
    losses, is_papers = contestants(), (rows, classes) == PAPER_SIZE
    on_device = graph_seconds(losses, z, y, 20 if rows * classes < 1e7 else 2) if device.type == "cuda" else None
    if is_papers:
        losses["loop_log"] = looped
    eager, calls = eager_seconds(losses, z, y, rounds, PAPER_REPETITIONS // rounds if full and is_papers else None)
    entry = {
        "dtype": "float32",
        "rounds": rounds,
        "calls": calls,
        "eager_us": _microseconds(eager),
        "eager_ratio": _ratios(eager),
        "device_us": on_device and _microseconds(on_device),
        "device_ratio": on_device and _ratios(on_device),
    }
    if is_papers:
        entry |= {
            "seconds_of_10k": _seconds_of_10k(eager),
            "tensorflow_seconds_of_10k": tensorflow_seconds(z, y, rounds),
            "paper_seconds_of_10k": {
                framework: {loss: cell.mean for loss, cell in row.items()}
                for framework, row in table("tab:pytorch_tensorflow").cells.items()
            },
        }
    return entry


def contestants() -> dict[str, Loss]:
    log, tanh = bisam.LowerBound("log"), bisam.LowerBound("tanh")
    return {
        "cross_entropy": F.cross_entropy,
        "log": log,
        "tanh": tanh,
        "plain_log": log.plain,
        "plain_tanh": tanh.plain,
    }


def looped(logits: Tensor, labels: Tensor) -> Tensor:
    """Q (−log, μ = 1) in the form of the authors' public code: the margins of one sample after the other, in place.

    >>> z, y = torch.randn(5, 3), torch.tensor([0, 1, 2, 1, 0])
    >>> torch.testing.assert_close(looped(z, y), bisam.lower_bound(z, y))
    """
    margins = logits.clone()
    for sample in range(len(labels)):
        margins[sample] -= logits[sample, labels[sample]]
    return torch.logsumexp(log_phi(margins), 1).mean()


def eager_seconds(
    losses: Mapping[str, Loss], z: Tensor, y: Tensor, rounds: int, count: int | None
) -> tuple[dict[str, float], dict[str, int]]:
    """Wall time of one forward and backward, and how many were timed: `count` a round, else 20 ms; one of the loop."""
    timers, calls = {}, {}
    for name, loss in losses.items():
        work = partial(_forward_backward, loss, z, y)
        seconds_of(work, 1, z.device)  # kernels are compiled in the first call
        fitting = max(1, min(1000, int(0.02 / seconds_of(work, 3, z.device))))
        each = 1 if loss is looped else count or fitting
        timers[name] = partial(seconds_of, work, each, z.device)
        calls[name] = each * rounds
    return take_turns(timers, rounds), calls


def graph_seconds(losses: Mapping[str, Loss], z: Tensor, y: Tensor, count: int) -> dict[str, float]:
    """Device time of one forward and backward: of a CUDA graph that holds `count`, where no launch is waited for."""
    graphs = {name: _captured(partial(_forward_backward, loss, z, y), count) for name, loss in losses.items()}
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in losses}
    for graph in graphs.values():
        graph.replay()
    for _ in range(REPLAYS):  # all of them queued, one contestant after the other
        for name, graph in graphs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record()
            graph.replay()
            end.record()
            events[name].append((start, end))
    torch.cuda.synchronize()
    return {
        name: statistics.median(start.elapsed_time(end) for start, end in pairs) / 1e3 / count
        for name, pairs in events.items()
    }


def tensorflow_seconds(z: Tensor, y: Tensor, rounds: int, count: int = 100) -> dict[str, Any] | None:
    """Seconds for the paper's repetitions in TensorFlow, extrapolated; None where it cannot be imported."""
    try:
        tf: Any = importlib.import_module("tensorflow")
    except Exception:  # of whatever kind: an installation that is broken is none
        return None
    for gpu in tf.config.list_physical_devices("GPU"):
        tf.config.experimental.set_memory_growth(gpu, True)  # its default is to take all there is
    with tf.device("/GPU:0" if z.device.type == "cuda" else "/CPU:0"):
        logits, labels = tf.constant(z.detach().cpu().numpy()), tf.constant(y.cpu().numpy())

    def cross_entropy() -> Any:
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits))

    def q() -> Any:
        margins = logits - tf.gather(logits, labels, axis=1, batch_dims=1)[:, None]
        return tf.reduce_mean(tf.reduce_logsumexp(1 - tf.math.softplus(GAMMA - margins), axis=1))

    def timer(loss: Callable[[], Any]) -> Callable[[], float]:
        @tf.function  # type: ignore[untyped-decorator]
        def gradient() -> Any:
            with tf.GradientTape() as tape:
                tape.watch(logits)
                value = loss()
            return tape.gradient(value, logits)

        def repeat() -> None:
            for _ in range(count):
                found = gradient()
            found.numpy()  # waits for the device

        repeat()
        return lambda: seconds_of(repeat, 1, torch.device("cpu")) / count

    found = take_turns({"cross_entropy": timer(cross_entropy), "q": timer(q)}, rounds)
    return {"version": tf.__version__, **_seconds_of_10k(found)}


def _forward_backward(loss: Loss, z: Tensor, y: Tensor) -> None:
    torch.autograd.grad(loss(z, y), z)


def _captured(work: Callable[[], Any], count: int) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            work()
    return graph


def _microseconds(seconds: Mapping[str, float]) -> dict[str, float]:
    return {name: round(1e6 * s, 3) for name, s in seconds.items()}


def _seconds_of_10k(seconds: Mapping[str, float]) -> dict[str, float]:
    return {name: round(PAPER_REPETITIONS * s, 3) for name, s in seconds.items()}


def _ratios(seconds: Mapping[str, float]) -> dict[str, float]:
    return {name: round(s / seconds["cross_entropy"], 4) for name, s in seconds.items() if name != "cross_entropy"}
