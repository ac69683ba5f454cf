"""The search of ρ has the schedule of the run."""

import pytest
import torch

import bisam
from bisam.lab.config import Config, rate
from bisam.lab.fitting import radius
from bisam.lab.fitting.code import lines

SCHEDULES = {
    "cosine": Config(epochs=8),
    "cosine after a warm-up": Config(epochs=8, warmup_epochs=2),
    "linear": Config(epochs=8, schedule="linear", warmup=0.25),
}


EXPECTED = {  # lr = 0.1, in 4 steps for 8 epochs, and after the last
    "cosine": [0.1, 0.085355, 0.05, 0.014645, 0],
    "cosine after a warm-up": [0.1, 0.1, 0.075, 0.025, 0],
    "linear": [0.1, 0.1, 0.066667, 0.033333, 0],
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_search_has_the_schedule_of_a_run_in_its_steps(name):
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = radius._scheduled(bisam.SAM(torch.optim.SGD([weight], lr=1.0)), SCHEDULES[name], 4)
    seen = [optimizer.param_groups[0]["lr"]]
    for _ in range(4):
        optimizer.step(lambda: weight.square().sum().backward())
        seen.append(optimizer.param_groups[0]["lr"])
    assert seen == pytest.approx(EXPECTED[name], abs=1e-6)


class Loader(list):
    """Three batches, and the learning rate of the step on each."""

    def __init__(self):
        super().__init__([(torch.ones(2, 4), torch.tensor([0, 1]))] * 3)
        self.rates = []

    def __iter__(self):
        for batch in super().__iter__():
            self.rates.append(self.names["optimizer"].param_groups[0]["lr"])
            yield batch


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_lines_of_python_have_the_schedule_of_a_run(name):
    config, loader = SCHEDULES[name], Loader()
    loader.names = {"model": torch.nn.Linear(4, 2), "loader": loader}
    exec(lines(config), loader.names)
    expected = [rate(config, epoch, batch, 3) for epoch in range(8) for batch in range(3)]
    assert loader.rates == pytest.approx(expected)
