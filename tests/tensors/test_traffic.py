"""Bytes that a step of two processes sends: with per-rank perturbation those of plain SGD, with a global one twice."""

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import bisam

import ranks

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import traffic

sys.path.pop(0)

NETS = {
    "without buffers": lambda: nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 256), nn.Linear(256, 10)),
    "batch norm": lambda: nn.Sequential(
        nn.Linear(64, 512), nn.BatchNorm1d(512), nn.Linear(512, 256), nn.Linear(256, 10)
    ),
}
CONTROL = 4096
"""Bytes that gloo sends beside the tensors, in a step and the barrier after it."""


def plain(model, base, x, y):
    base.zero_grad()
    F.cross_entropy(model(x), y).backward()
    base.step()


def traffic_of(net, sharpness, accumulate):
    """Calls and bytes of collectives in a step, and the bytes that have left this process; None is plain SGD."""
    torch.manual_seed(0)
    model = DistributedDataParallel(NETS[net](), bucket_cap_mb=0.1)  # several buckets
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = None if sharpness is None else bisam.BiSAM(base, model, sharpness=sharpness)
    x, y = (ranks.mine(t) for t in (torch.randn(32, 64), torch.randint(10, (32,))))

    def step():
        return plain(model, base, x, y) if optimizer is None else optimizer.minimize(x, y, accumulate=accumulate)

    for _ in range(2):  # the first steps have other buckets
        step()
    dist.barrier()
    before = traffic.on_the_wire()
    with traffic.Collectives() as counted:
        step()
    dist.barrier()
    return dict(counted.calls), dict(counted.bytes), traffic.on_the_wire() - before, counted.sent(ranks.RANKS)


def count(net, sharpness, accumulate=1):
    return ranks.run(traffic_of, net, sharpness, accumulate)


@pytest.mark.parametrize("net", NETS)
def test_per_rank_perturbation_sends_what_plain_sgd_sends_and_global_perturbation_twice_that(net):
    for sgd, local, everywhere in zip(count(net, None), count(net, "local"), count(net, "global"), strict=True):
        assert sgd[0]["allreduce_"] > 1
        assert ("broadcast_" in sgd[0]) == (net == "batch norm")
        assert local[:2] == sgd[:2]
        assert everywhere[1] == {name: 2 * size for name, size in sgd[1].items()}
        assert local[2] <= sgd[2] + CONTROL
        assert everywhere[2] <= 2 * sgd[2] + CONTROL


def test_accumulated_gradients_are_sent_once_for_a_pass():
    (_, sgd, sgd_wire, _), _ = count("without buffers", None)
    (_, local, local_wire, _), _ = count("without buffers", "local", accumulate=2)
    assert local == sgd
    assert local_wire <= sgd_wire + CONTROL


def test_the_bytes_on_the_wire_are_those_of_the_collectives_times_the_factor_of_a_ring():
    for _, sizes, on_wire, in_a_ring in count("without buffers", "global"):
        assert in_a_ring == sizes["allreduce_"]  # 2 (n − 1) / n of two ranks
        assert abs(on_wire - in_a_ring) <= CONTROL


def test_a_collective_without_a_rule_for_its_bytes_is_refused():
    counted = traffic.Collectives()
    counted.bytes["alltoall_"] = 8
    with pytest.raises(ValueError, match="no rule for the bytes of alltoall_"):
        counted.sent(2)
