"""mSAM: do micro-batches run faster one after the other, or as one batched computation?

`bisam.BiSAM(base, model, micro_batch=m)` against the same with `vectorize=True`. Both take the same steps (checked
here); the ratio is batched time over the loop's, taking turns in one run. Memory is the peak of a step in copies of the
weights, on CUDA.

    python benchmarks/bench_micro_batches.py [--rounds 20] [--device cuda] [--save NAME]
"""

import argparse
import random
import statistics
import time

import receipt
import torch
from nets import ConvNet, Transformer, perceptron
from torch import nn

import bisam


class ConvNetWithoutBuffers(ConvNet):
    """Batch norm writes statistics in place, which vmap cannot: group norm in its place."""

    def __init__(self) -> None:
        super().__init__(width=32, depth=10)
        self.norms = nn.ModuleList(nn.GroupNorm(4, 32) for _ in self.norms)


CASES = {
    "perceptron 64×3": (lambda: perceptron(64, 3), (64,)),
    "perceptron 1024×4": (lambda: perceptron(1024, 4), (64,)),
    "transformer 128×4": (Transformer, (64,)),
    "convolutions 32×10": (ConvNetWithoutBuffers, (3, 16, 16)),
}
SIZES = [(128, 32), (512, 128)]


def measure(case, batch, m, rounds, device):
    make, shape = CASES[case]
    contestants = {}
    x, y = torch.randn(batch, *shape, device=device), torch.randint(10, (batch,), device=device)
    for name in ("loop", "batched"):
        torch.manual_seed(0)
        model = make().to(device)
        base = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = bisam.BiSAM(base, model, micro_batch=m, vectorize=name == "batched")
        contestants[name] = (model, lambda optimizer=optimizer: optimizer.minimize(x, y))
    times = {name: [] for name in contestants}
    for number in range(-2, rounds):
        for name in random.sample(list(contestants), 2):
            _synchronise(device)
            start = time.perf_counter()
            contestants[name][1]()
            _synchronise(device)
            if number >= 0:
                times[name].append(time.perf_counter() - start)
        if number == -2:
            for a, b in zip(*(model.parameters() for model, _ in contestants.values()), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
    row = {"case": case, "batch": batch, "micro_batch": m}
    for name, (model, step) in contestants.items():
        row[f"{name} ms"] = 1e3 * statistics.median(times[name])
        row[f"{name} memory"] = _peak(model, step) if device != "cpu" else None
    return {**row, "ratio": row["batched ms"] / row["loop ms"]}


def _peak(model, step):
    for p in model.parameters():
        p.grad = None
    torch.cuda.reset_peak_memory_stats()
    start = torch.cuda.memory_allocated()
    step()
    return (torch.cuda.max_memory_allocated() - start) / sum(p.nbytes for p in model.parameters())


def _synchronise(device):
    if device != "cpu":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--save", metavar="NAME", help="write results/NAME.json")
    arguments = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    rows = []
    for case in CASES:
        for batch, m in SIZES:
            row = measure(case, batch, m, arguments.rounds, arguments.device)
            rows.append(row)
            print(" ".join(f"{k} {v:.3f}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()), flush=True)
    if arguments.save:
        print("wrote", receipt.save(arguments.save, {"rounds": arguments.rounds, "table": rows}))


if __name__ == "__main__":
    main()
