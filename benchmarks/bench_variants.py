"""What does a step of each variant cost, beside a step of SGD?

Three figures for each variant and objective: floating-point operations of forward and backward passes, counted by
torch (`torch.utils.flop_counter`), as a mean over steps; wall time, taking turns; on CUDA, the peak memory beyond a
plain step's, in copies of the weights.

    python benchmarks/bench_variants.py [--steps 20] [--batch 64] [--width 16] [--device cuda] [--save NAME]
    python benchmarks/bench_variants.py --only VaSSO FisherSAM --flops    # count, and measure nothing
"""

import argparse
import random
import statistics
import time

import receipt
import torch
import torch.nn.functional as F
from nets import ConvNet, perceptron
from torch.utils.flop_counter import FlopCounterMode

import bisam

Q = bisam.LowerBound()
VARIANTS = {
    "SGD": lambda base, model: bisam.SAM(base, model, rho=0.0),
    "SAM": bisam.SAM,
    "BiSAM": bisam.BiSAM,
    "ASAM": bisam.ASAM,
    "ABiSAM": bisam.ABiSAM,
    "ESAM": bisam.ESAM,
    "EBiSAM": bisam.EBiSAM,
    "KSAM": bisam.KSAM,
    "KSAM · Q": lambda base, model: bisam.KSAM(base, model, ascent=Q),
    "RSAM": bisam.RSAM,
    "RSAM · Q": lambda base, model: bisam.RSAM(base, model, ascent=Q),
    "GSAM": bisam.GSAM,
    "GSAM · Q": lambda base, model: bisam.GSAM(base, model, ascent=Q),
    "LookSAM": bisam.LookSAM,
    "LookSAM · Q": lambda base, model: bisam.LookSAM(base, model, ascent=Q),
    "FriendlySAM": bisam.FriendlySAM,
    "FriendlySAM · Q": lambda base, model: bisam.FriendlySAM(base, model, ascent=Q),
    "VaSSO": bisam.VaSSO,
    "VaSSO · Q": lambda base, model: bisam.VaSSO(base, model, ascent=Q),
    "FisherSAM": bisam.FisherSAM,
    "FisherSAM · Q": lambda base, model: bisam.FisherSAM(base, model, ascent=Q),
    "WSAM": bisam.WSAM,
    "WSAM · Q": lambda base, model: bisam.WSAM(base, model, ascent=Q),
    "MSAM": bisam.MSAM,
    "mSAM": lambda base, model: bisam.SAM(base, model, micro_batch=16),
    "mSAM · Q": lambda base, model: bisam.BiSAM(base, model, micro_batch=16),
    "every=5": lambda base, model: bisam.SAM(base, model, every=5),
    "every=5 · Q": lambda base, model: bisam.BiSAM(base, model, every=5),
}


def build(name, model):
    return VARIANTS[name](torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), model)


def flops(name, x, y, steps, device):
    optimizer = build(name, ConvNet(depth=20).to(device))
    with FlopCounterMode(display=False) as counter:
        for _ in range(steps):
            optimizer.minimize(x, y)
    return counter.get_total_flops() / steps


def seconds(names, x, y, steps, device, width):
    """Median seconds of a step of each variant. LookSAM and the like take five steps for one figure, their period."""
    optimizers = {name: build(name, ConvNet(width, depth=20).to(device)) for name in names}
    times = {name: [] for name in names}
    for number in range(-1, max(steps // 5, 3)):
        for name in random.sample(names, len(names)):
            _synchronise(device)
            start = time.perf_counter()
            for _ in range(5):
                optimizers[name].minimize(x, y)
            _synchronise(device)
            if number >= 0:
                times[name].append((time.perf_counter() - start) / 5)
    return {name: statistics.median(column) for name, column in times.items()}


def extra_memory(name, device):
    """Peak memory of a step beyond that of plain training, in copies of the weights, measured once state exists."""
    model = perceptron(4096, 3).to(device)
    x, y = torch.randn(64, 64, device=device), torch.randint(10, (64,), device=device)
    optimizer = build(name, model)

    def plain():
        optimizer.base.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.base.step()

    def peak(step):
        optimizer.zero_grad()
        torch.cuda.reset_peak_memory_stats()
        step()
        return torch.cuda.max_memory_allocated()

    plain()
    base = peak(plain)
    weights = sum(p.nbytes for p in model.parameters())
    return (max(peak(lambda: optimizer.minimize(x, y)) for _ in range(6)) - base) / weights


def _synchronise(device):
    if device != "cpu":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20, help="a multiple of 5, the period of some variants")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--width", type=int, default=16, help="of the net whose steps are timed")
    parser.add_argument("--image", type=int, default=16, help="height and width of its inputs")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", nargs="+", choices=VARIANTS, default=list(VARIANTS), help="these, beside SGD")
    parser.add_argument("--flops", action="store_true", help="count operations, measure neither time nor memory")
    parser.add_argument("--save", metavar="NAME", help="write results/NAME.json")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    device = arguments.device
    x = torch.randn(arguments.batch, 3, arguments.image, arguments.image, device=device)
    y = torch.randint(10, (arguments.batch,), device=device)
    sgd = flops("SGD", x, y, 1, device)
    names = list(dict.fromkeys(("SGD", *arguments.only)))
    wall = {} if arguments.flops else seconds(names, x, y, arguments.steps, device, arguments.width)
    table = []
    print(f"{'':16} {'FLOPs':>7} {'wall':>7} {'memory':>7}   relative to SGD; memory in copies of the weights")
    for name in names:
        row = {
            "variant": name,
            "flops": flops(name, x, y, arguments.steps, device) / sgd,
            "wall": wall[name] / wall["SGD"] if wall else None,
            "memory": extra_memory(name, device) if device != "cpu" and not arguments.flops else None,
        }
        table.append(row)
        measured = ["–" if row[key] is None else f"{row[key]:.3f}" for key in ("wall", "memory")]
        print(f"{name:16} {row['flops']:7.3f} {measured[0]:>7} {measured[1]:>7}", flush=True)
    if arguments.save:
        settings = {name: getattr(arguments, name) for name in ("batch", "steps", "width", "image", "device")}
        settings["SGD milliseconds"] = 1e3 * wall["SGD"] if wall else None
        print("wrote", receipt.save(arguments.save, {**settings, "table": table}))


if __name__ == "__main__":
    main()
