"""What a method costs: the passes that the lab counts for it are those that its training runs."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from bisam.lab.config import Config
from bisam.lab.methods import FORWARD, METHODS, every_of, passes_until
from bisam.lab.records import Record
from bisam.lab.tables.cells import Run
from bisam.lab.tables.curves import bands, points
from bisam.lab.training.run import TrainingRun
from tiny import BATCHES, tiny_images

EPOCHS, BATCH = 4, 8
PLAIN = Config(model="flat", epochs=EPOCHS, batch=BATCH, precision="fp32", rho=0.01)


def counted(config):
    """Passes over the training data up to the end of each epoch, by the samples that went forward and back."""
    forward, backward = [], []

    def count(_, inputs, logits):
        forward.append(len(logits))
        if logits.requires_grad:
            logits.register_hook(lambda gradient: backward.append(len(gradient)))

    def flat(config, source):
        model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 10))
        model.register_forward_hook(count)
        return model

    training = TrainingRun(config, tiny_images(), torch.device("cpu"), flat)
    forward.clear()  # one sample is run to see whether the model fits the data
    for epoch in range(EPOCHS):
        training.begin_epoch(epoch)
        for x, y in training.batches.epoch(epoch):
            training.optimizer.minimize(x, y)
        yield (FORWARD * sum(forward) + (1 - FORWARD) * sum(backward)) / (BATCHES * BATCH)


@pytest.mark.parametrize("fields", [{}, {"start": 0.5}, {"every": 2}, {"start": 0.25, "every": 3}], ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_the_axis_of_gradient_evaluations_is_that_of_the_passes_which_were_run(method, fields):
    used = {name: value for name, value in fields.items() if name in METHODS[method].fields}
    optimizer = "adamw" if method == "adamw" else "sgd"
    config = replace(PLAIN, method=method, optimizer=optimizer, **used)
    metrics = [{"epoch": epoch, "loss": 1.0} for epoch in range(EPOCHS)]
    means = bands(points([Run(Record(None, config.as_dict(), metrics, None, None), config)]))
    # a perturbed step is spread over the `every` steps that follow it: at most one is not over yet
    one_step = (1 - 1 / every_of(config)) / BATCHES + 1e-4
    assert [row["gradients"] for row in means] == pytest.approx([*counted(config)], abs=one_step)


@pytest.mark.parametrize("gamma", [0.25, 0.75, 1.0])
def test_the_samples_that_esam_chooses_count(gamma):
    config = replace(PLAIN, method="esam", gamma=gamma)
    assert [passes_until(config, epochs) for epochs in range(1, EPOCHS + 1)] == pytest.approx([*counted(config)])
