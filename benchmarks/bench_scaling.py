"""What a step costs over several processes: its time, and the bytes that each process sends.

Plain SGD under DistributedDataParallel (written by hand) beside `bisam.BiSAM` with per-rank and with global
perturbation, and the same under FSDP2, over gloo on this machine. Weak scaling keeps the batch of a process, strong
scaling that of all. Bytes are counted twice: at the collectives and at the sockets (`traffic.py`). Methods take turns.
Then a model of 8 to 512 GPUs (`scaling_model.py`).

    python benchmarks/bench_scaling.py [--rounds 20] [--processes 1,2,4] [--save NAME]
"""

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path

import receipt
import scaling_model
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
import traffic
from nets import ConvNet, perceptron
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import bisam

NETS = {
    "perceptron 1024×4": (partial(perceptron, 1024, 4), (64,)),
    "convolutions 32×10": (partial(ConvNet, 32, 10), (3, 16, 16)),
}
BATCH = {"weak": lambda processes: 32, "strong": lambda processes: 64 // processes}
MODELS = {"wrn28-10": (10, 32), "resnet50": (1000, 224)}
"""Classes and side of the images of the modelled networks."""


def make(method, build):
    """A step of that method on a new network."""
    torch.manual_seed(0)
    net = build()
    if method.startswith("fsdp"):
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in (m for m in net.modules() if isinstance(m, (torch.nn.Linear, torch.nn.Conv2d))):
            fully_shard(layer, mesh=mesh)
        model = fully_shard(net, mesh=mesh)
    else:
        model = DistributedDataParallel(net)
    base = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    if method.endswith("sgd"):
        return partial(plain, model, base)
    return bisam.BiSAM(base, model, sharpness="local" if method == "local" else "global").minimize


def plain(model, base, x, y):
    base.zero_grad()
    F.cross_entropy(model(x), y).backward()
    base.step()


def measure(name, kind, rounds):
    """On one rank: milliseconds of a step, the slowest rank's, and bytes that this rank sends in one."""
    build, shape = NETS[name]
    ranks = dist.get_world_size()
    batch = BATCH[kind](ranks)
    torch.manual_seed(dist.get_rank())
    x, y = torch.randn(batch, *shape), torch.randint(10, (batch,))
    steps = {method: make(method, build) for method in ("sgd", "local", "global")}
    if kind == "weak" and ranks > 1:
        steps |= {method: make(method, build) for method in ("fsdp sgd", "fsdp global")}
    times = {method: [] for method in steps}
    order = random.Random(0)  # the same on every rank
    for number in range(-2, rounds):
        for method in order.sample([*steps], len(steps)):
            dist.barrier()
            start = time.perf_counter()
            steps[method](x, y)
            dist.barrier()
            if number >= 0:
                times[method].append(1e3 * (time.perf_counter() - start))
    entry = {"net": name, "scaling": kind, "processes": ranks, "batch of a process": batch, "methods": {}}
    for method, step in steps.items():
        dist.barrier()
        before = traffic.on_the_wire()
        with traffic.Collectives() as counted:
            step(x, y)
        dist.barrier()
        entry["methods"][method] = {
            "ms": statistics.median(times[method]),
            "collectives": dict(counted.calls),
            "bytes": dict(counted.bytes),
            "sent in a ring": counted.sent(ranks),
            "sent by sockets": traffic.on_the_wire() - before,
        }
    return entry


def work(rank, ranks, folder, rounds):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous-{ranks}", rank=rank, world_size=ranks)
    entries = [measure(name, kind, rounds) for name in NETS for kind in BATCH]
    Path(folder, f"{ranks}-{rank}.json").write_text(json.dumps(entries))
    dist.destroy_process_group()


def over_processes(ranks, rounds):
    """The entries of rank 0, with the bytes as means over the ranks."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, (ranks, folder, rounds), nprocs=ranks)
        of_ranks = [json.loads(Path(folder, f"{ranks}-{rank}.json").read_text()) for rank in range(ranks)]
    for entries in zip(*of_ranks, strict=True):
        for method, row in entries[0]["methods"].items():
            row["sent by sockets"] = statistics.fmean(e["methods"][method]["sent by sockets"] for e in entries)
    return of_ranks[0]


def modelled():
    """Rates from the measured plain step of WRN-28-10 on an H200 and data sheets."""
    works = {model: scaling_model.count(model, *shape) for model, shape in MODELS.items()}
    measured = json.loads((receipt.RESULTS / "bench_h200.json").read_text())["epoch"]["wrn28-10"]
    reached = works["wrn28-10"].flops_per_image * measured["batch"] / (measured["ms"]["sgd"] / 1e3)
    rates = scaling_model.Rates(flops=reached)
    return {"rates": asdict(rates), "models": {m: scaling_model.table(w, rates) for m, w in works.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--processes", default="1,2,4")
    parser.add_argument("--save", metavar="NAME", help="write results/NAME.json")
    arguments = parser.parse_args()
    rows = []
    for ranks in map(int, arguments.processes.split(",")):
        for row in over_processes(ranks, arguments.rounds):
            rows.append(row)
            for method, found in row["methods"].items():
                sent = f"{found['sent in a ring']:12,.0f} {found['sent by sockets']:12,.0f}"
                print(
                    f"{row['net']:20} {row['scaling']:6} {ranks} {method:12} {found['ms']:8.2f} ms {sent}", flush=True
                )
    result = {"rounds": arguments.rounds, "cores": os.cpu_count(), "table": rows, "model": modelled()}
    if arguments.save:
        print("wrote", receipt.save(arguments.save, result))


if __name__ == "__main__":
    main()
