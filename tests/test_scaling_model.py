"""The model of many GPUs computes what docs/scaling.md states."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import scaling_model
from scaling_model import Rates, Work

sys.path.pop(0)

RATES = Rates(flops=1e12, nvlink=8e9, network=1e9, latency=0.0)
WORK = Work("net", flops_per_image=1e9, gradient_bytes=8_000_000)


def test_averaging_sends_gradients_within_nodes_and_an_eighth_of_them_between_nodes():
    inside = 2 * 7 / 8 * 8e6 / 8e9
    assert scaling_model.averaging(8e6, 8, RATES) == pytest.approx(inside)
    assert scaling_model.averaging(8e6, 32, RATES) == pytest.approx(inside + 2 * 3 / 4 * 1e6 / 1e9)
    hops = Rates(flops=1e12, nvlink=8e9, network=1e9, latency=1e-3)
    assert scaling_model.averaging(0, 32, hops) == pytest.approx(1e-3 * 2 * (3 + 2))


@pytest.mark.parametrize(("images", "waits"), [(128, 0.0), (1, 1.75e-3 - 2 / 3 * 1e-3)])
def test_communication_not_hidden_by_the_backward_pass_adds_time_once_for_each_averaging(images, waits):
    compute = images * 1e9 / 1e12
    found = scaling_model.step(WORK, images, 8, RATES)
    assert found["sgd"] == pytest.approx(compute + waits)
    assert found["local"] == pytest.approx(2 * compute + waits)
    assert found["global"] == pytest.approx(2 * compute + 2 * waits)


def test_flops_and_gradient_bytes_are_those_of_the_network():
    work = scaling_model.count("resnet20", 10, 32)
    forward = 2 * 40.55e6  # multiplications and additions of its convolutions and of its linear layer
    assert work.flops_per_image == pytest.approx(3 * forward, rel=0.02)  # without the gradient of the images
    assert work.gradient_bytes == 4 * 269_722
