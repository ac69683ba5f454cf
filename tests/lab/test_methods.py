"""The cost of a method: the passes that the lab counts are those that its training runs."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from bisam.lab import methods
from bisam.lab.config import Config
from bisam.lab.methods import FORWARD, METHODS, every_of, passes, passes_until
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
def test_the_axis_of_gradient_evaluations_counts_the_passes_that_were_run(method, fields):
    used = {name: value for name, value in fields.items() if name in METHODS[method].fields}
    optimizer = "adamw" if method == "adamw" else "sgd"
    config = replace(PLAIN, method=method, optimizer=optimizer, **used)
    metrics = [{"epoch": epoch, "loss": 1.0} for epoch in range(EPOCHS)]
    means = bands(points([Run(Record(None, config.as_dict(), metrics, None, None), config)]))
    # a perturbed step is spread over the `every` steps that follow it: at most one is not over yet
    one_step = (1 - 1 / every_of(config)) / BATCHES + 1e-4
    assert [row["gradients"] for row in means] == pytest.approx([*counted(config)], abs=one_step)


@pytest.mark.parametrize("gamma", [0.25, 0.75, 1.0])
def test_the_passes_of_esam_count_only_the_samples_that_it_selects(gamma):
    config = replace(PLAIN, method="esam", gamma=gamma)
    assert [passes_until(config, epochs) for epochs in range(1, EPOCHS + 1)] == pytest.approx([*counted(config)])


def test_a_forward_pass_counts_as_a_third_of_a_forward_and_backward_pass():
    steps = {method: passes(Config(method=method)) for method in ("esam", "ebisam-log", "ebisam-tanh", "ksam", "msam")}
    half = 1 + 1 / 3 + 1 / 2  # of the samples in the descent
    assert steps == pytest.approx({"esam": half, "ebisam-log": half, "ebisam-tanh": half, "ksam": 4 / 3, "msam": 1})


def test_steps_before_the_start_and_after_the_stop_count_as_one_pass():
    assert passes(Config(method="sam", start=0.75), 0.25, 0.5) == 1.0
    assert passes(Config(method="sam", stop=0.25), 0.25, 0.5) == 1.0
    assert passes(Config(method="sam", stop=0.25), 0.0, 0.5) == 1.5


def test_all_methods_except_the_base_optimizers_perturb():
    assert {name for name in METHODS if not methods.perturbs(name)} == {"sgd", "adamw"}


def test_an_unregistered_method_is_shown_by_its_name_and_counted_with_one_pass_per_step():
    other = Config(method="other")
    assert (methods.title_of("other"), methods.perturbs("other")) == ("other", True)
    assert (every_of(other), passes(other), every_of(replace(other, every=2))) == (1, 1.0, 2)
    assert methods.baseline_of("sam", ["other", "adamw"]) == "adamw"


def test_each_method_is_compared_with_its_baseline():
    assert {name: method.baseline for name, method in METHODS.items()} == {
        "sgd": None,
        "adamw": None,
        "sam": "sgd",
        "bisam-log": "sam",
        "bisam-tanh": "sam",
        "asam": None,
        "abisam-log": "asam",
        "abisam-tanh": "asam",
        "esam": "sam",
        "ebisam-log": "esam",
        "ebisam-tanh": "esam",
        "ksam": "sam",
        "looksam": "sam",
        "msam": "sgd",
        **dict.fromkeys(["fsam", "gsam", "rsam", "vasso", "wsam", "fishersam"], "sam"),
    }
    assert methods.baseline_of("msam", ["sgd", "sam", "msam"]) == "sgd"
    assert methods.baseline_of("msam", ["msam", "adamw"]) == "adamw"  # MSAM costs one pass, and perturbs


@pytest.mark.parametrize("method", ["sgd", "adamw", "sam"])
def test_the_optimizer_gets_every_setting_of_the_configuration(method):
    base = "adamw" if method == "adamw" else "sgd"
    config = Config(method=method, optimizer=base, lr=0.3, momentum=0.7, weight_decay=0.02, label_smoothing=0.2)
    made = methods.optimizer(nn.Linear(2, 2), replace(config, clip_norm=0.5), "global")
    (table,) = made.base.param_groups
    assert (table["lr"], table["weight_decay"], table.get("momentum", 0.7)) == (0.3, 0.02, 0.7)
    assert (made.criterion.descent.label_smoothing, made.clip_norm) == (0.2, 0.5)
    assert (made.autocast, made.sharpness) == (torch.bfloat16, "global")
    assert methods.optimizer(nn.Linear(2, 2), replace(config, precision="fp32")).autocast is None
    assert made.param_groups[0]["rho"] == (0.05 if method == "sam" else 0.0)
