"""What does a step cost beside one written by hand?

Side by side in one run, on a net of 160 parameter tensors: two forward-backward passes and one update of the base
optimizer, written by hand; our step; the two-step SAM class written the usual way, with the usual switch that keeps
batch-norm statistics out of the second pass.

Two figures for each. *Ratio* is wall time over the hand-written step's: contestants take turns, a few steps each, in
random order, and are built anew for each repeat, because where a net happens to lie in memory makes it faster
or slower; the median over repeats has a bootstrap interval. *Outside the passes* is the time that a step spends on
anything but its two forward-backward passes, as a share of the hand-written step: it resolves what the ratio cannot on
a busy machine.

    python benchmarks/bench_optimizer_overhead.py [--repeats 10] [--rounds 3] [--batch 32] [--device cuda]
"""

import argparse
import random
import statistics
import time

import receipt
import torch
import torch.nn.functional as F
from nets import ConvNet
from torch import Tensor, nn

from bisam import ASAM, SAM, BiSAM

BLOCK = 3


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)


class Pass:
    """One forward-backward, timed."""

    def __init__(self, model: nn.Module, x: Tensor, y: Tensor) -> None:
        self.model, self.x, self.y, self.seconds = model, x, y, 0.0

    def __call__(self, criterion=F.cross_entropy) -> Tensor:
        start = time.perf_counter()
        loss = criterion(self.model(self.x), self.y)
        loss.backward()
        self.seconds += time.perf_counter() - start
        return loss


def by_hand(run: Pass):
    base = sgd(run.model)

    def step():
        for _ in range(2):
            base.zero_grad()
            run()
        base.step()

    return step


def ours(variant):
    def make(run: Pass):
        optimizer = variant(sgd(run.model), run.model)

        def closure():
            optimizer.zero_grad()
            return run(optimizer.criterion)

        return lambda: optimizer.step(closure)

    return make


def usual_two_step_class(run: Pass):
    base, rho = sgd(run.model), 0.05
    norms = [m for m in run.model.modules() if isinstance(m, nn.BatchNorm2d)]

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
        run()
        first_step()
        base.zero_grad()
        for norm in norms:
            norm.momentum = 0.0
        run()
        second_step()

    return step


CONTESTANTS = {
    "by hand": by_hand,
    "bisam.SAM": ours(SAM),
    "bisam.BiSAM": ours(BiSAM),
    "bisam.ASAM": ours(ASAM),
    "two-step class": usual_two_step_class,
}


def measure_once(batch: int, rounds: int, device: str) -> dict[str, tuple[float, float]]:
    """For each contestant, built anew: median seconds of a step, and of what it does outside its passes."""
    x, y = torch.randn(batch, 3, 16, 16, device=device), torch.randint(10, (batch,), device=device)
    names = random.sample(list(CONTESTANTS), len(CONTESTANTS))
    passes = {name: Pass(ConvNet().to(device), x, y) for name in names}
    steps = {name: CONTESTANTS[name](passes[name]) for name in names}
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for _ in range(rounds):
        for name in random.sample(names, len(names)):
            for number in range(-1, BLOCK):  # the first finds memory as another left it
                passes[name].seconds = 0.0
                start = time.perf_counter()
                steps[name]()
                if device != "cpu":
                    torch.cuda.synchronize()
                whole = time.perf_counter() - start
                if number >= 0:
                    seconds[name].append((whole, whole - passes[name].seconds))
    return {name: tuple(statistics.median(column) for column in zip(*seconds[name], strict=True)) for name in names}


def measure(batch: int, repeats: int, rounds: int, device: str) -> dict[str, dict[str, float]]:
    torch.manual_seed(0)
    random.seed(0)
    runs = [measure_once(batch, rounds, device) for _ in range(repeats)]
    result = {}
    for name in CONTESTANTS:
        ratios = [run[name][0] / run["by hand"][0] for run in runs]
        low, high = median_interval(ratios)
        result[name] = {
            "milliseconds": 1e3 * statistics.median(run[name][0] for run in runs),
            "ratio": statistics.median(ratios),
            "low": low,
            "high": high,
            "outside the passes": statistics.median(run[name][1] / run["by hand"][0] for run in runs),
        }
    return result


def median_interval(values: list[float], draws: int = 2000) -> tuple[float, float]:
    """95 % bootstrap interval of the median."""
    generator = random.Random(0)
    medians = sorted(statistics.median(generator.choices(values, k=len(values))) for _ in range(draws))
    return medians[int(0.025 * draws)], medians[int(0.975 * draws)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--save", metavar="NAME", help="write results/NAME.json")
    arguments = parser.parse_args()
    count = sum(1 for _ in ConvNet().parameters())
    print(f"{count} parameter tensors, batch {arguments.batch}, {arguments.device}")
    result = measure(arguments.batch, arguments.repeats, arguments.rounds, arguments.device)
    print(f"{'':16} {'ms':>8} {'ratio':>7}   {'95 % interval':15}   outside the passes")
    for name, row in result.items():
        interval = f"{row['low']:.3f} … {row['high']:.3f}"
        outside = f"{100 * row['outside the passes']:.1f} %"
        print(f"{name:16} {row['milliseconds']:8.2f} {row['ratio']:7.3f}   {interval:15}   {outside}")
    if arguments.save:
        settings = {"batch": arguments.batch, "repeats": arguments.repeats, "rounds": arguments.rounds}
        print("wrote", receipt.save(arguments.save, {**settings, "steps": result}))


if __name__ == "__main__":
    main()
