"""The announced time is the time that a training takes, by a clock that the model and the data advance."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from bisam.lab.config import Config
from bisam.lab.data.sources import Loaders
from bisam.lab.fitting.budget import StudySize, duration, seconds
from bisam.lab.fitting.rehearsal import Cost, _typical, is_out_of_memory, rehearse
from bisam.lab.training.loop import Job, train
from bisam.lab.training.progress import Progress
from bisam.lab.training.ranks import Ranks
from tiny import tiny_images

CPU = torch.device("cpu")
CONFIG = Config(model="slow", method="sam", batch=8, epochs=5, rho=0.01, precision="fp32")
COLD = 40.0
"""Seconds of the first pass in training, and of the first in evaluation: kernels are loaded, algorithms chosen."""


class Clock:
    now = 0.0

    def __call__(self):
        return self.now

    def build(self, config, source):
        """Building takes 3 seconds; 0.1 seconds for a sample forward, 0.2 back."""
        self.now += 3.0
        return Slow(self)

    def source(self, cold=True):
        """Loading takes 0.5 seconds a batch; without `cold`, all is loaded already."""
        self.cold = {True, False} if cold else set()
        return LoadedSlowly(self)


class Slow(nn.Module):
    def __init__(self, clock):
        super().__init__()
        self.clock, self.layer = clock, nn.Linear(3 * 32 * 32, 10)

    def forward(self, x):
        self.clock.now += 0.1 * len(x)
        if len(x) > 1 and self.training in self.clock.cold:
            self.clock.cold.remove(self.training)
            self.clock.now += COLD
        logits = self.layer(x.flatten(1))
        if logits.requires_grad:
            logits.register_hook(self._back)
        return logits

    def _back(self, gradient):
        self.clock.now += 0.2 * len(gradient)


class LoadedSlowly:
    features = None

    def __init__(self, clock):
        self._clock, self._images = clock, tiny_images(tested=30)
        self.classes, self.checksum = self._images.classes, self._images.checksum
        self.notes = self._images.notes

    def loaders(self, config, device):
        parts = self._images.loaders(config, device)
        return Loaders(Waiting(parts.train, self._clock), parts.validation, parts.test)

    def preparation(self, config):
        return None


class Waiting:
    def __init__(self, batches, clock):
        self._batches, self._clock = batches, clock
        self.shard = batches.shard

    def __len__(self):
        return len(self._batches)

    def epoch(self, number, *, start=0):
        for batch in self._batches.epoch(number, start=start):
            self._clock.now += 0.5
            yield batch


def announced(config):
    clock = Clock()
    return rehearse(config, clock.source(), CPU, clock.build, clock=clock).of(config.epochs)


def taken(config, folder):
    """The time of the training loop after a rehearsal, in which everything that is loaded once has been loaded."""
    clock = Clock()
    train([Job(config, folder)], clock.source(cold=False), CPU, Progress(), build=clock.build)
    return clock.now


@pytest.mark.parametrize(
    "fields",
    [
        {"method": "sgd"},
        {},
        {"start": 0.75},
        {"every": 4},
        {"method": "looksam"},
        {"method": "esam"},
        {"select": "last"},
    ],
    ids=str,
)
def test_the_announced_time_agrees_with_that_of_the_training(fields, tmp_path):
    config = replace(CONFIG, **fields)
    # steps that do not perturb load a batch too, which the estimate does not count separately: it is not exact
    assert announced(config) == pytest.approx(taken(config, tmp_path), rel=0.1)


def test_a_validation_of_many_batches_is_measured_by_its_first_ones(monkeypatch):
    monkeypatch.setattr("bisam.lab.data.sources.EVALUATION_BATCH", {"memory": 2})
    clock = Clock()
    config = replace(CONFIG, validation=0.3)  # 12 samples, and 30 of the test: 0.2 seconds a batch
    found = rehearse(config, clock.source(), CPU, clock.build, clock=clock)
    assert found.validation == pytest.approx(0.2 * 5.5)
    assert found.scatter == pytest.approx(0)  # the first step, which is cold, does not count
    assert found.searched_step == found.step  # because nothing is captured on a CPU
    # one sample is run to see whether the model fits; the weights of two epochs are tested
    assert found.once == pytest.approx(3.1 + 2 * 0.2 * 14.5)


def test_the_estimate_adds_up_epochs_validations_and_the_steps_of_the_search():
    cost = Cost(step=1.0, validation=2.0, steps=10, once=5.0, searched_step=3.0)
    # two seeds of ten epochs; 20 steps of the search for each of six trainings
    assert seconds(StudySize(10, 2, 3, 2), {"sam": cost}, {"sam": cost}) == 2 * (5 + 10 * 12) + 6 * (20 * 3 + 2)


@pytest.mark.parametrize(
    ("step", "scatter", "words"),
    [
        (0.003, 0.5, "1 second"),
        (0.1, 0.05, "30 seconds"),
        (0.1, 0.3, "21 to 39 seconds"),
        (2.0, 0.5, "5 to 15 minutes"),
    ],
)
def test_an_uncertain_time_is_given_as_a_range(step, scatter, words):
    assert duration(StudySize(10, 3, 0, 0), {"sam": Cost(step, 0.0, 10, scatter=scatter)}, {}) == words


@pytest.mark.parametrize(
    ("times", "typical"),
    [
        ([2.0], (2.0, 0.0)),
        ([0.0] * 9, (0.0, 0.0)),
        ([1.0, 2.0, 3.0, 4.0, 5.0], (3.0, 1 / 3)),  # quartiles 2 and 4
        ([1.0, 1.0, 2.0, 9.0, 9.0], (2.0, 0.5)),  # the most that is reported
        ([1.0, 3.0, 2.0, 6.0, 3.0, 9.0, 4.0, 12.0, 5.0, 15.0], (6.0, 1 / 3)),  # means of two
    ],
)
def test_a_typical_step_is_the_median_with_the_scatter_of_the_quartiles(times, typical):
    assert _typical(times) == pytest.approx(typical)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"), True),
        (RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
    ],
)
def test_out_of_memory_errors_are_distinguished_from_other_errors(error, expected):
    assert is_out_of_memory(error) == expected


def filling(config, source):
    """A model too large for any memory, which the real allocator refuses."""
    torch.empty(2**46, dtype=torch.uint8)


def test_a_model_too_large_for_memory_is_refused_with_a_remedy():
    with pytest.raises(ValueError, match="a batch of 2 does not fit into memory, nor does one sample: use a smaller"):
        rehearse(replace(CONFIG, batch=2), tiny_images(), CPU, filling)
    with pytest.raises(ValueError, match="8 does not fit into the memory of 2 ranks: give --batch 4 or more ranks"):
        rehearse(CONFIG, tiny_images(), CPU, filling, Ranks(0, 2))


def test_other_errors_of_the_model_are_not_taken_for_a_lack_of_memory():
    def failing(config, source):
        failing.batches.append(config.batch)
        if config.batch < 8:
            raise RuntimeError("of a smaller batch")
        torch.empty(2**46, dtype=torch.uint8)

    failing.batches = []
    with pytest.raises(RuntimeError, match="of a smaller batch"):
        rehearse(CONFIG, tiny_images(), CPU, failing)
    assert failing.batches == [8, 4]
    with pytest.raises(RuntimeError, match="of a smaller batch"):
        rehearse(replace(CONFIG, batch=4), tiny_images(), CPU, failing)
    assert failing.batches == [8, 4, 4]  # nothing smaller is tried
