"""The search of ρ and the generated Python code have the schedule of the run."""

from dataclasses import replace

import pytest
import torch

import bisam
from bisam.lab import methods
from bisam.lab.config import Config, rate
from bisam.lab.data.batches import Rounds, TensorBatches
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
def test_the_search_of_rho_compresses_the_schedule_of_a_run_into_its_steps(name):
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = radius._scheduled(bisam.SAM(torch.optim.SGD([weight], lr=1.0)), SCHEDULES[name], 4)
    seen = [optimizer.param_groups[0]["lr"]]
    for _ in range(4):
        optimizer.step(lambda: weight.square().sum().backward())
        seen.append(optimizer.param_groups[0]["lr"])
    assert seen == pytest.approx(EXPECTED[name], abs=1e-6)


class Loader(list):
    """Three batches; runs the generated code with them and notes the batch and the learning rate of each step."""

    def __init__(self, config):
        super().__init__([(torch.ones(2, 4), torch.tensor([0, 1]))] * 3)
        self.rates, self.places = [], []
        self.names = {"model": torch.nn.Linear(4, 2), "loader": self}
        exec(lines(config), self.names)

    def __iter__(self):
        for place, batch in enumerate(super().__iter__()):
            self.rates.append(self.names["optimizer"].param_groups[0]["lr"])
            self.places.append(place)
            yield batch


RISING = {
    "a warm-up of all epochs": Config(epochs=8, warmup_epochs=8),
    "a warm-up of all steps": Config(epochs=8, schedule="linear", warmup=1.0),
}


@pytest.mark.parametrize("name", [*SCHEDULES, *RISING])
def test_the_generated_code_has_the_schedule_of_a_run(name):
    config = {**SCHEDULES, **RISING}[name]
    expected = [rate(config, epoch, batch, 3) for epoch in range(8) for batch in range(3)]
    assert Loader(config).rates == pytest.approx(expected)


@pytest.mark.parametrize("steps", [2, 5])
@pytest.mark.parametrize("name", SCHEDULES)
def test_the_generated_code_has_the_configured_steps_per_epoch(name, steps):
    """An epoch begins in the data where the one before it ended, as in the lab."""
    config = replace(SCHEDULES[name], epoch_steps=steps)
    loader = Loader(config)
    expected = [rate(config, epoch, batch, steps) for epoch in range(8) for batch in range(steps)]
    assert loader.rates == pytest.approx(expected)
    inner = TensorBatches(torch.zeros(3, 1), torch.arange(3), batch=1, device="cpu", seed=0)
    rounds = [int(y) for epoch in range(8) for _, y in Rounds(inner, steps).epoch(epoch)]
    assert loader.places == rounds


@pytest.mark.parametrize(("fields", "start"), [({}, 12), ({"epoch_steps": 5}, 20), ({"epochs": 1, "start": 0.9}, 2)])
def test_the_generated_code_starts_to_perturb_at_the_same_step_as_the_lab(fields, start):
    """Of three batches in an epoch; a short run perturbs in its last step at least."""
    config = replace(Config(method="sam", epochs=8, start=0.5), **fields)
    made = methods.optimizer(torch.nn.Linear(4, 2), config, steps=config.epochs * (config.epoch_steps or 3))
    assert Loader(config).names["optimizer"].start == made.start == start


@pytest.mark.parametrize(
    "fields", [{"stop": 0.3}, {"stop": 0.01}, {"start": 0.5, "stop": 0.75}, {"start": 0.9, "stop": 0.91}]
)
def test_the_generated_code_perturbs_in_the_same_steps_as_the_lab(fields):
    config = Config(method="sam", epochs=8, **fields)
    made, theirs = methods.optimizer(torch.nn.Linear(4, 2), config, steps=24), Loader(config).names["optimizer"]
    assert (theirs.start, theirs.stop) == (made.start, made.stop)
    assert made.stop > made.start


def test_the_generated_code_has_all_digits_of_the_settings():
    fields = {"lr": 0.012345678, "momentum": 0.87654321, "weight_decay": 1.2345678e-4, "rho": 0.0123456789}
    group = Loader(Config(method="sam", epochs=1, **fields)).names["optimizer"].param_groups[0]
    assert {name: group["initial_lr" if name == "lr" else name] for name in fields} == fields
