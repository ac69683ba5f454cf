"""Several ResNets in one CUDA graph: by their modules, by torch.compile, or by Triton kernels of their own?

A BiSAM (−log) step on batches of 128 random images, in bfloat16, of `--count` trainings at a time: milliseconds for
each of them, taking turns in one run; how many kernels a step launches, and how long they are busy. Beside it the
distance of each one's gradients from those in float64.

    python benchmarks/bench_fused.py [--models resnet32,resnet56] [--kinds modules,compiled,fused] [--save NAME]
"""

import argparse
import copy
from functools import partial

import receipt
import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

import bisam
from bisam.lab.bench.steps import random_batch, release
from bisam.lab.bench.timing import seconds_of, take_turns
from bisam.lab.models import build

BATCH = 128
DEVICE = torch.device("cuda", 0)


def prepared(model, kind):
    if kind == "fused":
        model.fuse()
    elif kind == "compiled":
        model.compile(dynamic=False)
    return model


def network(name, seed=0):
    torch.manual_seed(seed)
    return build(name, 10).to(DEVICE, memory_format=torch.channels_last)


def training(name, kind, seed):
    model = prepared(network(name, seed), kind)
    base = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)
    return bisam.BiSAM(base, model, autocast=torch.bfloat16)


def together(name, kind, count):
    step = bisam.capture_together([training(name, kind, seed) for seed in range(count)])
    run = partial(step, [random_batch(BATCH, DEVICE, seed) for seed in range(count)])
    for _ in range(8):  # the first ones are eager
        run()
    assert step.eager_because is None, step.eager_because
    return run


def kernels_of(run, count):
    """Kernels of a step of each training, and milliseconds in which they are busy."""
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        run()
        torch.cuda.synchronize()
    durations = [event.device_time_total for event in seen.events() if event.device_time_total > 0]
    return {"kernels": len(durations) / count, "kernel_ms": sum(durations) / 1e3 / count}


def distance_from_float64(name, kind):
    """Of the gradients of a pass, relative to their length: the mean of all parameters."""
    model = prepared(network(name), kind)
    exact = copy.deepcopy(network(name)).double()
    x, y = random_batch(BATCH, DEVICE)
    with torch.autocast("cuda", torch.bfloat16):
        F.cross_entropy(model(x), y).backward()
    F.cross_entropy(exact(x.double()), y).backward()
    pairs = zip(model.parameters(), exact.parameters(), strict=True)
    return torch.stack([(p.grad.double() - q.grad).norm() / q.grad.norm() for p, q in pairs]).mean().item()


def measure(name, kinds, count, steps, rounds):
    runs = {kind: together(name, kind, count) for kind in kinds}
    seconds = take_turns({kind: partial(seconds_of, run, steps, DEVICE) for kind, run in runs.items()}, rounds)
    found = {
        kind: {
            "ms_per_model_and_step": round(1e3 * seconds[kind] / count, 4),
            **{key: round(value, 4) for key, value in kernels_of(run, count).items()},
            "distance_from_float64": round(distance_from_float64(name, kind), 4),
        }
        for kind, run in runs.items()
    }
    return {"model": name, "count": count, "batch": BATCH, "steps": steps, "rounds": rounds, "kinds": found}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="resnet32,resnet56")
    parser.add_argument("--kinds", default="modules,compiled,fused")
    parser.add_argument("--count", type=int, default=6)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--save", metavar="NAME", help="write results/NAME.json")
    args = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    rows = []
    for name in args.models.split(","):
        rows.append(measure(name, args.kinds.split(","), args.count, args.steps, args.rounds))
        for kind, found in rows[-1]["kinds"].items():
            print(
                f"{args.count} {name}, {kind}: {found['ms_per_model_and_step']:.3f} ms for each, "
                f"{found['kernels']:.0f} kernels, {found['kernel_ms']:.2f} ms of kernels, gradients "
                f"{found['distance_from_float64']:.3f} from float64",
                flush=True,
            )
        release(DEVICE)
        if args.save:
            receipt.save(args.save, {"rows": rows})


if __name__ == "__main__":
    main()
