"""One training as objects: what a checkpoint of it holds."""

import copy

import torch

from bisam.capture import capture_together
from bisam.lab.config import Config
from bisam.lab.data import DataSet, Images, load
from bisam.lab.progress import Progress
from bisam.lab.recipes import find
from bisam.lab.records import Run
from bisam.lab.sources import InMemory
from bisam.lab.train import Job, train
from bisam.lab.training import Training


def tiny_images():
    """Random images of CIFAR's shape."""
    draws = torch.Generator().manual_seed(0)

    def images(count):
        pixels = torch.randint(0, 256, (count, 3, 32, 32), dtype=torch.uint8, generator=draws)
        return Images(pixels, torch.randint(10, (count,), generator=draws))

    return InMemory(DataSet("tiny", images(40), images(10), 10, (0.5,) * 3, (0.25,) * 3))


def step_of(training):
    return capture_together([training.optimizer], generators=[training.generator], after=lambda _: training.add_up())


def test_a_training_with_dropout_goes_on_from_its_state_bit_for_bit(recwarn):
    config = Config(model="vgg19bn", batch=8, epochs=2, precision="fp32")
    one, other = (Training(config, tiny_images(), torch.device("cpu")) for _ in range(2))
    step, batches = step_of(one), [*one.batches.epoch(0)]
    for batch in batches[:2]:
        step([batch])
    other.load(copy.deepcopy(one.state()))  # as from a file
    other_step = step_of(other)
    for batch in batches[2:]:
        assert torch.equal(step([batch])[0], other_step([batch])[0])
    assert one.end_epoch(0, together=1)["loss"] == other.end_epoch(0, together=1)["loss"]
    for a, b in zip(one.model.state_dict().values(), other.model.state_dict().values(), strict=True):
        assert torch.equal(a, b)


def test_the_best_weights_are_those_of_the_highest_validation_accuracy(monkeypatch):
    training = Training(Config(model="resnet20", batch=8, epochs=9), tiny_images(), torch.device("cpu"))
    training.sums["steps"].fill_(1)
    accuracies = iter([50.0, 70.0, 60.0, 70.0])
    monkeypatch.setattr(training, "accuracy", lambda _: next(accuracies))
    for epoch in range(4):
        training.sums["steps"].fill_(1)
        with torch.no_grad():
            next(training.model.parameters()).fill_(epoch)
        training.end_epoch(epoch, together=1)
    assert (training.best.epoch, training.best.accuracy) == (1, 70.0)
    assert next(iter(training.best.weights.values())).unique().tolist() == [1.0]


def test_a_run_that_another_process_has_finished_meanwhile_is_left_alone(tmp_path):
    config = find("demo").cells["40%", "sam"]
    with Run.open(tmp_path, config.as_dict()) as run:
        run.metrics.append({"epoch": 0, "loss": 1.0})
        run.finish({"status": "done", "test_accuracy": 90.0})
    train([Job(config, tmp_path)], InMemory(load("digits")), torch.device("cpu"), Progress())
    with Run.open(tmp_path, config.as_dict()) as run:
        assert run.metrics.read() == [{"epoch": 0, "loss": 1.0}]
        assert run.result == {"status": "done", "test_accuracy": 90.0}
