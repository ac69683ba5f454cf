"""What does a step cost beside one written by hand?

Side by side in one run, on a net of 160 parameter tensors: two forward-backward passes and one update of the base
optimizer, written by hand; our step; the two-step SAM class written the usual way, with the usual switch that keeps
batch-norm statistics out of the second pass. They take turns, step by step, in random order, so that whatever else the
machine does falls on all of them; the result is the median over rounds of the ratio to the hand-written step.

    python benchmarks/bench_optimizer_overhead.py [--rounds 60] [--batch 32] [--device cuda]
"""

import argparse
import itertools
import random
import statistics
import time

import receipt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bisam import ASAM, SAM, BiSAM


class Net(nn.Module):
    """A plain convolutional net: 53 convolutions with batch norm and a linear layer, 160 parameter tensors."""

    def __init__(self, width: int = 16, depth: int = 53, classes: int = 10) -> None:
        super().__init__()
        channels = [3] + [width] * depth
        self.convolutions = nn.ModuleList(
            nn.Conv2d(a, b, 3, padding=1, bias=False) for a, b in itertools.pairwise(channels)
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(depth))
        self.head = nn.Linear(width, classes, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            y = F.relu(norm(convolution(x)))
            x = x + y if x.shape == y.shape else y
        return self.head(x.mean((2, 3)))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)


def by_hand(model, x, y):
    base = sgd(model)

    def step():
        for _ in range(2):
            base.zero_grad()
            F.cross_entropy(model(x), y).backward()
        base.step()

    return step


def ours(variant):
    def make(model, x, y):
        optimizer = variant(sgd(model), model)

        def closure():
            optimizer.zero_grad()
            loss = optimizer.criterion(model(x), y)
            loss.backward()
            return loss

        return lambda: optimizer.step(closure)

    return make


def usual_two_step_class(model, x, y):
    base, rho = sgd(model), 0.05
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]

    @torch.no_grad()
    def first_step():
        norm = torch.norm(torch.stack([p.grad.norm(p=2) for g in base.param_groups for p in g["params"]]), p=2)
        for group in base.param_groups:
            for p in group["params"]:
                base.state[p]["old"] = p.data.clone()
                p.add_(p.grad * (rho / (norm + 1e-12)).to(p))

    @torch.no_grad()
    def second_step():
        for group in base.param_groups:
            for p in group["params"]:
                p.data = base.state[p]["old"]
        base.step()

    def step():
        base.zero_grad()
        for norm in norms:
            norm.momentum = 0.1
        F.cross_entropy(model(x), y).backward()
        first_step()
        base.zero_grad()
        for norm in norms:
            norm.momentum = 0.0
        F.cross_entropy(model(x), y).backward()
        second_step()

    return step


CONTESTANTS = {
    "by hand": by_hand,
    "bisam.SAM": ours(SAM),
    "bisam.BiSAM": ours(BiSAM),
    "bisam.ASAM": ours(ASAM),
    "two-step class": usual_two_step_class,
}


def measure(batch: int, rounds: int, device: str) -> dict[str, dict[str, float]]:
    torch.manual_seed(0)
    x, y = torch.randn(batch, 3, 16, 16, device=device), torch.randint(10, (batch,), device=device)
    steps = {name: make(Net().to(device), x, y) for name, make in CONTESTANTS.items()}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for round_ in range(-3, rounds):  # three to warm up
        order = list(steps)
        random.shuffle(order)
        for name in order:
            start = time.perf_counter()
            steps[name]()
            if device != "cpu":
                torch.cuda.synchronize()
            if round_ >= 0:
                seconds[name].append(time.perf_counter() - start)
    result = {}
    for name, times in seconds.items():
        ratios = [a / b for a, b in zip(times, seconds["by hand"], strict=True)]
        low, high = median_interval(ratios)
        result[name] = {
            "milliseconds": 1e3 * statistics.median(times),
            "ratio": statistics.median(ratios),
            "low": low,
            "high": high,
        }
    return result


def median_interval(values: list[float], draws: int = 2000) -> tuple[float, float]:
    """95 % bootstrap interval of the median."""
    generator = random.Random(0)
    medians = sorted(statistics.median(generator.choices(values, k=len(values))) for _ in range(draws))
    return medians[int(0.025 * draws)], medians[int(0.975 * draws)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--save", metavar="NAME", help="write results/NAME.json")
    arguments = parser.parse_args()
    count = sum(1 for _ in Net().parameters())
    print(f"{count} parameter tensors, batch {arguments.batch}, {arguments.rounds} rounds, {arguments.device}")
    result = measure(arguments.batch, arguments.rounds, arguments.device)
    print(f"{'':16} {'ms':>8} {'ratio':>7}   95 % interval")
    for name, row in result.items():
        print(f"{name:16} {row['milliseconds']:8.2f} {row['ratio']:7.3f}   {row['low']:.3f} … {row['high']:.3f}")
    if arguments.save:
        print(
            "wrote",
            receipt.save(arguments.save, {"batch": arguments.batch, "rounds": arguments.rounds, "steps": result}),
        )


if __name__ == "__main__":
    main()
