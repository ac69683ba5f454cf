"""What does a training of each setting of the recipe `frontier` cost, beside SGD's?

Each setting is a training of the lab: its model, batches, optimizer and captured step. They take turns in one process,
some steps at a time, and every ratio is of two times of one round. Late sharpness is not measured by itself: it is
SGD's steps and then SAM's, and both are here. Written after each model, so that what is done is kept.

    python benchmarks/bench_frontier.py [--models resnet32,vgg19bn] [--steps 40] [--rounds 7] [--device cuda]
        [--no-compile] [--seconds 140] [--save NAME]
    python benchmarks/bench_frontier.py --prepare --models vgg19bn    # compiles, for a cache that the first then reads
    python benchmarks/bench_frontier.py --count [--batch 16] [--save NAME]    # FLOPs of a step, on a CPU
"""

import argparse
import itertools
import random
import statistics
import time
import warnings
from dataclasses import replace

import receipt
import torch
from torch.utils.flop_counter import FlopCounterMode

from bisam.capture import capture_together
from bisam.capture.recording import Branch
from bisam.integrations.methods import CHOOSING
from bisam.lab.bench.steps import release
from bisam.lab.bench.timing import seconds_of
from bisam.lab.data import Images, ImageSplits
from bisam.lab.data.sources import InMemory
from bisam.lab.recipes import find_recipe
from bisam.lab.training.run import TrainingRun
from bisam.perturbation import Ball, RandomTensors

WARMUP = 20
"""Steps before those that are timed. LookSAM has two kinds of steps, each to be captured when it is seen again."""
PERIOD = 5
"""Steps after which LookSAM and `every=5` begin again: only whole periods are timed."""


def settings(model):
    """The cells of the frontier that have steps of their own: "sgd", "sam", "sam every5", ….

    Without label noise, which costs nothing; without late sharpness and other numbers of epochs, which are sums.
    """
    found = {}
    for (row, method), config in find_recipe("frontier").cells.items():
        setting = row.removeprefix(model).removeprefix("-")
        if config.model == model and setting in ("", "every5"):
            found[f"{method} {setting}".strip()] = config
    # those that choose samples last: they take two more compilations, of half of the batch and of a forward pass
    return dict(sorted(found.items(), key=lambda item: item[1].method in CHOOSING))


def random_images(count):
    draws = torch.Generator().manual_seed(0)

    def images(count):
        pixels = torch.randint(0, 256, (count, 3, 32, 32), dtype=torch.uint8, generator=draws)
        return Images(pixels, torch.randint(10, (count,), generator=draws))

    return InMemory(ImageSplits("random", images(count), images(1000), 10, (0.5,) * 3, (0.25,) * 3))


class FixedTensors(RandomTensors):
    """Every other tensor, in all steps, chosen on the host: what a graph saves that holds one choice of ESAM's."""

    def before_ascent(self, buckets, *, compiled, captured):
        self._captured = False
        owners = [param for bucket in buckets for param in bucket.owners if param.requires_grad]
        self._dropped = self._frozen = owners[::2]
        for param in self._frozen:
            param.requires_grad_(False)


class Steps:
    """The steps of one setting's training, one epoch after the other."""

    def __init__(self, config, source, device, perturbation=None):
        self.training = TrainingRun(config, source, device)
        if perturbation is not None:
            self.training.optimizer.perturbation = perturbation
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "a CUDA graph needs")
            self.step = capture_together(
                [self.training.optimizer],
                generators=[self.training.generator],
                after=lambda _: self.training.add_up(),
            )
        self.batches = itertools.chain.from_iterable(map(self.training.batches.epoch, itertools.count()))

    def __call__(self):
        self.step([next(self.batches)])


def measure(model, arguments, began):
    """Milliseconds per step of each setting, by round, and as ratios to SGD's of the same round."""
    device = torch.device(arguments.device)
    source = random_images(arguments.batch * 60)
    changes = {"compile": arguments.compile, "batch": arguments.batch}
    runs, setup = {}, {}
    wanted = {name: (replace(config, **changes), None) for name, config in settings(model).items()}
    esam = replace(wanted["esam"][0], compile=False)
    wanted["esam uncompiled"] = esam, None
    wanted["esam uncompiled, fixed tensors"] = esam, FixedTensors(Ball(esam.rho), esam.beta)
    for name, (config, perturbation) in wanted.items():
        if time.perf_counter() - began > arguments.seconds:
            print(f"{model} {name}: left out, {arguments.seconds:g} s are over", flush=True)
            continue
        start = time.perf_counter()
        runs[name] = Steps(config, source, device, perturbation)
        seconds_of(runs[name], WARMUP, device)
        setup[name] = round(time.perf_counter() - start, 2)
        print(
            f"{model} {name}: ready after {setup[name]:.1f} s, {runs[name].step.eager_because or 'captured'}",
            flush=True,
        )
    if arguments.prepare or "sgd" not in runs:
        return None
    order, times = random.Random(0), {name: [] for name in runs}
    for _ in range(arguments.rounds):
        for name in order.sample([*runs], len(runs)):
            times[name].append(1e3 * seconds_of(runs[name], arguments.steps, device))
    ratios = {name: [ours / sgd for ours, sgd in zip(times[name], times["sgd"], strict=True)] for name in times}
    return {
        "batch": arguments.batch,
        "precision": runs["sgd"].training.config.precision,
        "compiled": arguments.compile,
        "eager_because": {name: run.step.eager_because for name, run in runs.items()},
        "steps": arguments.steps,
        "rounds": arguments.rounds,
        "setup_s": setup,
        "ms": {name: round(statistics.median(of_name), 4) for name, of_name in times.items()},
        "ratio": {
            name: {
                "median": round(statistics.median(of_name), 4),
                "least": round(min(of_name), 4),
                "most": round(max(of_name), 4),
            }
            for name, of_name in ratios.items()
        },
    }


def counted(model, arguments):
    """FLOPs of a step of each setting, relative to SGD's; of ESAM also as a captured step has them."""
    source, device = random_images(arguments.batch * 60), torch.device("cpu")

    def flops(config, captured=False):
        training = TrainingRun(replace(config, batch=arguments.batch, precision="fp32"), source, device)
        branch = Branch(training.optimizer, None, None, None)
        batches = [*itertools.islice(training.batches.epoch(0), arguments.steps)]
        with FlopCounterMode(display=False) as counter:
            for batch in batches:
                branch.like_captured(batch) if captured else training.optimizer.minimize(*batch)
        return counter.get_total_flops() / len(batches)

    found = {name: flops(config) for name, config in settings(model).items()}
    esam = settings(model)["esam"]
    found["esam captured"] = flops(esam, captured=True)
    found["esam beta=1"] = flops(replace(esam, beta=1.0))
    found["esam gamma=1"] = flops(replace(esam, gamma=1.0))
    for name, value in found.items():
        print(f"{model} {name}: {value / found['sgd']:.4f}", flush=True)
    return {name: round(value / found["sgd"], 4) for name, value in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="resnet32,vgg19bn", help="with a comma between")
    parser.add_argument("--steps", type=int, default=40, help=f"of a round, a multiple of {PERIOD}")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--no-compile", dest="compile", action="store_false", help="leave the models as they are")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no further setting after these")
    parser.add_argument("--prepare", action="store_true", help="compile and capture, and measure nothing")
    parser.add_argument("--count", action="store_true", help="count FLOPs in place of time")
    parser.add_argument("--save", metavar="NAME", help="write results/NAME.json")
    arguments = parser.parse_args()
    if arguments.steps < 1 or arguments.steps % PERIOD:
        parser.error(f"--steps must be a multiple of {PERIOD}, the period of LookSAM, got {arguments.steps}")
    torch.backends.cudnn.benchmark = True  # as the loop of the lab has it
    began, result = time.perf_counter(), {}
    for model in arguments.models.split(","):
        found = counted(model, arguments) if arguments.count else measure(model, arguments, began)
        release(torch.device(arguments.device))
        if found is None:
            continue
        result[model] = found
        if arguments.save:
            extra = {"batch": arguments.batch, "steps": arguments.steps} if arguments.count else {}
            print("wrote", receipt.save(arguments.save, {**extra, "models": result}), flush=True)
        for name, ratio in found.get("ratio", {}).items():
            print(f"{model} {name}: {ratio['median']:.3f} × SGD ({ratio['least']:.3f} to {ratio['most']:.3f})")
    print(f"{time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
