"""A model of the time of a step on many GPUs: counted FLOPs and bytes over stated rates. Nothing here is measured.

A pass takes T = FLOPs / rate, of which the backward pass is two thirds. Its gradients, B bytes, are averaged over
M nodes of 8 GPUs in three stages: reduce-scatter inside of the node, all-reduce of an eighth between nodes, all-gather
inside of the node,

    C = 2 · 7/8 · B / nvlink + 2 · (M − 1)/M · (B / 8) / network + latency · 2 · (log2 8 + log2 M),

while the backward pass runs: max(0, C − 2/3 T) is left to wait for. With n GPUs a step takes

    SGD                       T + max(0, C − 2/3 T)
    per-rank perturbation    2 T + max(0, C − 2/3 T)     the first pass sends nothing
    global perturbation    2 (T + max(0, C − 2/3 T))
"""

import math
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from bisam.lab.models import build

NODE = 8
"""GPUs of a node."""


@dataclass(frozen=True)
class Rates:
    """Per GPU: FLOP/s that training reaches, bytes per second in one direction, and seconds of a hop."""

    flops: float
    nvlink: float = 450e9
    network: float = 50e9
    latency: float = 10e-6


@dataclass(frozen=True)
class Work:
    """One pass: FLOPs of forward and backward for one image, and the bytes of all gradients."""

    model: str
    flops_per_image: float
    gradient_bytes: int


def count(model: str, classes: int, side: int) -> Work:
    """By torch's own counter, on tensors without storage."""
    with torch.device("meta"):
        net, x, y = build(model, classes), torch.empty(2, 3, side, side), torch.empty(2, dtype=torch.long)
        with FlopCounterMode(display=False) as counter:
            F.cross_entropy(net(x), y).backward()
    return Work(model, counter.get_total_flops() / 2, sum(p.grad.nbytes for p in net.parameters()))


def averaging(gradient_bytes: float, gpus: int, rates: Rates) -> float:
    """Seconds to average the gradients of all GPUs, while nothing else runs.

    >>> rates = Rates(flops=1e15, nvlink=8e9, network=1e9, latency=0.0)
    >>> averaging(8e9, 8, rates), averaging(8e9, 16, rates)  # 7/8 s twice; and an eighth of 8 GB, by half, twice
    (1.75, 2.75)
    """
    inside, nodes = min(gpus, NODE), max(1, gpus // NODE)
    local = 2 * (inside - 1) / inside * gradient_bytes / rates.nvlink
    between = 2 * (nodes - 1) / nodes * (gradient_bytes / inside) / rates.network
    return local + between + rates.latency * 2 * (math.log2(inside) + math.log2(nodes))


def step(work: Work, images: float, gpus: int, rates: Rates) -> dict[str, float]:
    """Seconds of a step with `images` on each GPU, by method."""
    compute = work.flops_per_image * images / rates.flops
    waiting = max(0.0, averaging(work.gradient_bytes, gpus, rates) - 2 / 3 * compute) if gpus > 1 else 0.0
    return {"sgd": compute + waiting, "local": 2 * compute + waiting, "global": 2 * (compute + waiting)}


def table(work: Work, rates: Rates, gpus=(8, 16, 32, 64, 128, 256, 512), weak=128, strong=4096) -> dict:
    """Milliseconds of a step: `weak` images on each GPU, and `strong` images on all of them."""

    def rows(images):
        return [{"gpus": n, "images": images(n), "ms": {k: 1e3 * s for k, s in step(work, images(n), n, rates).items()}}
                for n in gpus]  # fmt: skip

    return {"work": asdict(work), "weak": rows(lambda n: weak), "strong": rows(lambda n: strong / n)}
