"""Training options for data of the user: selecting measures, linear schedules, epochs of steps, AdamW, clipping."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from bisam.lab import methods
from bisam.lab.config import Config, rate
from bisam.lab.data.own import from_parts
from bisam.lab.data.own_source import OwnData
from bisam.lab.records import read, verify
from bisam.lab.training.loop import Job, Stopped, train
from bisam.lab.training.progress import Progress
from bisam.lab.training.run import TrainingRun
from tiny import StopRequesting

CPU = torch.device("cpu")
CONFIG = Config(
    data="rows", model="perceptron", method="sam", optimizer="adamw", schedule="linear", warmup=0.3, epochs=3,
    epoch_steps=5, batch=16, lr=1e-3, clip_norm=0.1, measures="mcc,macro_f1", precision="fp32",
)  # fmt: skip


@pytest.fixture
def rows():
    draws = torch.Generator().manual_seed(0)
    x, y = torch.randn(120, 4, generator=draws), torch.arange(120) % 3
    x[torch.arange(120), y] += 1
    return OwnData(from_parts("rows", {"train": (x, y)}, "rows"))


def test_the_first_measure_selects_the_best_epoch_and_is_verified(rows, tmp_path, monkeypatch):
    values = iter([(90.0, 10.0, 1.0), (80.0, 30.0, 2.0), (70.0, 20.0, 3.0)])
    names = ("validation_accuracy", "validation_mcc", "validation_macro_f1")
    own = TrainingRun.measured

    def measured(self, batches, part, *rest):
        return dict(zip(names, next(values), strict=True)) if part == "validation" else own(self, batches, part, *rest)

    monkeypatch.setattr(TrainingRun, "measured", measured)
    train([Job(CONFIG, tmp_path)], rows, CPU, Progress())
    record = read(tmp_path)
    assert record.result["best_epoch"] == 1
    assert [record.result[name] for name in names] == [80.0, 30.0, 2.0]
    assert {"test_accuracy", "test_mcc", "test_macro_f1"} <= {*record.result}
    assert [row["validation_mcc"] for row in record.metrics] == [10.0, 30.0, 20.0]
    assert verify(record) == []
    record.result["validation_mcc"] = 10.0
    assert any("validation Matthews correlation is 10.0" in problem for problem in verify(record))
    record.metrics[0]["validation_macro_f1"] = -1.0
    assert any("validation_macro_f1 of epoch 0 is -1.0" in problem for problem in verify(record))


def test_the_learning_rate_of_a_linear_schedule_changes_at_every_step(rows, monkeypatch):
    seen = []
    monkeypatch.setattr(TrainingRun, "_set_rate", lambda _, value: seen.append(value))
    training = TrainingRun(CONFIG, rows, CPU)
    for epoch in range(CONFIG.epochs):
        for batch in range(len(training.batches)):
            training.begin_step(epoch, batch)
    assert len(training.batches) == 5
    # of 15 steps the first four rise
    expected = [*(1e-3 * step / 4 for step in (1, 2, 3, 4)), *(1e-3 * (15 - step) / 11 for step in range(4, 15))]
    assert seen == pytest.approx(expected)


@pytest.mark.parametrize("fields", [{}, {"schedule": "cosine"}, {"schedule": "cosine", "warmup_epochs": 2}], ids=str)
def test_the_training_loop_sets_the_learning_rate_before_each_step(fields, rows, tmp_path, monkeypatch):
    config, rates = replace(CONFIG, **fields), []
    own = torch.optim.AdamW.step

    def step(self, *arguments, **options):
        rates.append(float(self.param_groups[0]["lr"]))
        return own(self, *arguments, **options)

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    progress = StopRequesting(7)
    with pytest.raises(Stopped):
        train([Job(config, tmp_path)], rows, CPU, progress, progress.stopping)
    train([Job(config, tmp_path)], rows, CPU, Progress())  # resumes within the second epoch
    expected = [rate(config, step // 5, step % 5, 5) for step in range(15)]
    assert rates == pytest.approx(expected)
    assert len({*expected}) >= 2
    assert [row["lr"] for row in read(tmp_path).metrics] == pytest.approx([expected[0], expected[5], expected[10]])


@pytest.mark.parametrize("steps", [2, 7])
def test_an_interrupted_and_resumed_run_equals_an_uninterrupted_one(steps, rows, tmp_path):
    whole, cut = Job(CONFIG, tmp_path / "whole"), Job(CONFIG, tmp_path / "cut")
    train([whole], rows, CPU, Progress())
    progress = StopRequesting(steps)
    with pytest.raises(Stopped):
        train([cut], rows, CPU, progress, progress.stopping)
    train([cut], rows, CPU, Progress())
    one, other = read(whole.folder), read(cut.folder)
    assert {**one.result, "seconds": 0} == {**other.result, "seconds": 0}
    assert [row["loss"] for row in one.metrics] == [row["loss"] for row in other.metrics]
    assert one.receipt["sha256"]["best.safetensors"] == other.receipt["sha256"]["best.safetensors"]


def test_adamw_with_gradient_clipping_equals_that_of_torch():
    torch.manual_seed(0)
    model, other = nn.Linear(6, 4), nn.Linear(6, 4)
    other.load_state_dict(model.state_dict())
    x, y = torch.randn(8, 6), torch.arange(8) % 4
    config = Config(method="adamw", optimizer="adamw", lr=0.1, weight_decay=0.2, clip_norm=0.05, label_smoothing=0.0,
                    precision="fp32")  # fmt: skip
    methods.optimizer(model, config).minimize(x, y)
    base = torch.optim.AdamW(other.parameters(), lr=0.1, weight_decay=0.2)
    nn.functional.cross_entropy(other(x), y).backward()
    nn.utils.clip_grad_norm_(other.parameters(), 0.05)
    base.step()
    torch.testing.assert_close(model.weight, other.weight, rtol=0, atol=1e-7)


def test_a_base_optimizer_that_contradicts_the_method_is_refused():
    with pytest.raises(ValueError, match="use the method sgd, or set optimizer=adamw"):
        methods.optimizer(nn.Linear(2, 2), Config(method="adamw"))
