"""Late sharpness in the lab: plain steps, then perturbed ones from `start` on; and perturbations in some steps only."""

import copy
import itertools
import json
from dataclasses import replace

import pytest
import torch
from torch import nn

from bisam.integrations.methods import VARIANTS
from bisam.lab import methods
from bisam.lab.config import Config
from bisam.lab.fitting import rehearsal
from bisam.lab.records import checkpoint, read
from bisam.lab.training.loop import Job, Stopped, train
from bisam.lab.training.overall import Overall
from bisam.lab.training.run import TrainingRun
from tiny import BATCHES, StopRequesting, tiny_images

CPU = torch.device("cpu")
EPOCHS = 3
LATE = Config(model="small", method="sam", batch=8, epochs=EPOCHS, start=0.5, rho=0.5, precision="fp32")
"""Six of its twelve steps are plain: the first one that perturbs is in the middle of an epoch."""


def small(config, source):
    """A net with batch norm, whose statistics depend on which pass is the last."""
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 10))


def do(jobs, stop_after=None):
    progress = StopRequesting(stop_after)
    train(jobs, tiny_images(), CPU, progress, progress.stopping, build=small)


def outcome(folder):
    """The record but for times and for the runs that it stepped together with."""
    record = read(folder)
    times = ("seconds", "samples_per_second", "together", "alike")
    metrics = [{name: row[name] for name in row if name not in times} for row in record.metrics]
    return metrics, {name: value for name, value in record.result.items() if name != "seconds"}


def stepped(training, epochs):
    """The weights after each step of these epochs, trained without the loop."""
    for epoch in epochs:
        training.begin_epoch(epoch)
        for x, y in training.batches.epoch(epoch):
            training.optimizer.minimize(x, y)
            training.add_up()
            yield [tensor.clone() for tensor in training.model.state_dict().values()]


@pytest.mark.parametrize("method", ["sam", "bisam-log", "esam", "looksam", "msam"])
def test_late_sharpness_equals_plain_training_followed_by_perturbed_training(method):
    late = TrainingRun(replace(LATE, method=method), tiny_images(), CPU, small)
    found = [*stepped(late, range(EPOCHS))]
    plain = TrainingRun(replace(LATE, method="sgd"), tiny_images(), CPU, small)
    first = [*itertools.islice(stepped(plain, range(EPOCHS)), 6)]
    perturbed = TrainingRun(replace(LATE, method=method, start=0.0), tiny_images(), CPU, small)
    perturbed.model.load_state_dict(plain.model.state_dict())
    perturbed.optimizer.base.load_state_dict(copy.deepcopy(plain.optimizer.base.state_dict()))
    for group in perturbed.optimizer.param_groups:
        group["rho"] = LATE.rho  # the loaded state of SGD has 0
    last = []
    for epoch, begin in ((1, 2), (2, 0)):
        perturbed.begin_epoch(epoch)
        for x, y in perturbed.batches.epoch(epoch, start=begin):
            perturbed.optimizer.minimize(x, y)
            last.append([tensor.clone() for tensor in perturbed.model.state_dict().values()])
    for ours, theirs in zip(found, [*first, *last], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("fields", [{}, {"method": "looksam", "every": 2, "start": 0.3}, {"method": "ebisam-log"}])
def test_a_run_stopped_before_at_or_after_its_first_perturbed_step_resumes_bit_for_bit(fields, tmp_path):
    config = replace(LATE, **fields)
    do([Job(config, tmp_path / "whole")])
    for stop in (3, 6, 7, BATCHES * 2 + 1):
        one = Job(config, tmp_path / str(stop))
        with pytest.raises(Stopped):
            do([one], stop)
        do([one])
        assert outcome(one.folder) == outcome(tmp_path / "whole"), stop


def test_runs_with_different_starts_have_the_same_results_together_as_alone(tmp_path):
    fields = [{"start": 0.5}, {"start": 0.75, "every": 2}, {"method": "sgd"}, {"method": "msam"}]
    configs = [replace(LATE, **changes) for changes in fields]
    jobs = [Job(config, tmp_path / f"together{number}") for number, config in enumerate(configs)]
    do(jobs)
    for number, config in enumerate(configs):
        do([Job(config, tmp_path / f"alone{number}")])
        assert outcome(tmp_path / f"together{number}") == outcome(tmp_path / f"alone{number}")
    assert [row["alike"] for row in read(jobs[0].folder).metrics] == [True, False, False]
    same = [Job(replace(LATE, seed=seed), tmp_path / f"seed{seed}") for seed in (0, 1)]
    do([*same, Job(replace(LATE, method="sgd", epochs=1), tmp_path / "sgd")])
    assert [row["alike"] for row in read(same[0].folder).metrics] == [True] * EPOCHS  # a plain step costs as SGD's


def test_metrics_are_means_over_the_steps_that_measure_them():
    late = TrainingRun(LATE, tiny_images(), CPU, small)
    measured = []
    for epoch in range(EPOCHS):
        late.begin_epoch(epoch)
        perturbed = []
        for x, y in late.batches.epoch(epoch):
            late.optimizer.minimize(x, y)
            late.add_up()
            telemetry = late.optimizer.telemetry
            perturbed += [] if telemetry.perturbed_loss is None else [telemetry.perturbed_loss.item()]
        measured.append((late.end_epoch(epoch, together=1), perturbed))
    assert [len(perturbed) for _, perturbed in measured] == [0, 2, 4]
    (plain, _), *others = measured
    assert plain["loss"] > 0
    assert not {"perturbed_loss", "perturbed_error", "flips", "ascent_norm"} & plain.keys()
    for metrics, perturbed in others:
        assert metrics["perturbed_loss"] == pytest.approx(sum(perturbed) / len(perturbed), rel=1e-6)


def test_a_method_without_a_pass_at_the_weights_records_no_loss_there(tmp_path):
    do([Job(replace(LATE, method="msam", start=0.0), tmp_path)])
    row = read(tmp_path).metrics[-1]
    assert {"perturbed_loss", "perturbed_error", "ascent_norm"} <= row.keys()
    assert not {"loss", "error", "flips"} & row.keys()


def test_a_checkpoint_of_an_older_version_without_counts_of_perturbed_steps_is_resumed(tmp_path):
    config = replace(LATE, start=0.0)
    do([Job(config, tmp_path / "whole")])
    one = Job(config, tmp_path / "older")
    with pytest.raises(Stopped):
        do([one], BATCHES + 2)
    loaded = checkpoint.load(one.folder / "checkpoints")
    for name in ("steps_at_weights", "steps_perturbed"):
        del loaded.state["training"]["sums"][name]
    for name in ("every", "start"):
        del loaded.state["config"][name]
    checkpoint.save(one.folder / "checkpoints", loaded.step, loaded.state)
    do([one])
    assert outcome(one.folder) == outcome(tmp_path / "whole")


def test_the_time_left_counts_one_pass_for_plain_steps():
    now = 0.0
    overall = Overall(lambda: now)
    late, other = (Config(method="sam", epochs=10, start=0.5, seed=seed) for seed in (0, 1))
    overall.expect([late, other])
    overall.begin({late: 0})
    now = 5.0
    overall.epoch(late, 5)  # five passes are done; ten are left of this run, and fifteen of the other
    assert overall.line == "run 1 of 2, 0:25 left"


def test_every_method_of_the_lab_is_a_variant_of_the_same_name():
    assert {*methods.METHODS} - {*methods.BASES} <= {*VARIANTS}


def test_a_start_is_refused_without_the_length_of_the_training():
    with pytest.raises(ValueError, match=r"start=0\.5 is a part of the training: give the number of its steps"):
        methods.optimizer(nn.Linear(2, 2), LATE)


@pytest.mark.parametrize(("start", "steps", "first"), [(0.5, 12, 6), (0.95, 10, 9), (0.999, 4, 3), (0.9, 1, 0)])
def test_a_short_run_perturbs_at_least_in_its_last_step(start, steps, first):
    assert methods.optimizer(nn.Linear(2, 2), replace(LATE, start=start), steps=steps).start == first


@pytest.mark.parametrize(
    ("start", "stop", "steps", "window"),
    [(0.0, 0.5, 12, (0, 6)), (0.5, 0.75, 12, (6, 9)), (0.0, 0.01, 10, (0, 1)), (0.9, 0.95, 10, (9, 10))],
)
def test_a_run_perturbs_from_its_start_to_its_stop_and_in_at_least_one_step(start, stop, steps, window):
    made = methods.optimizer(nn.Linear(2, 2), replace(LATE, start=start, stop=stop), steps=steps)
    assert (made.start, made.stop) == window
    assert methods.optimizer(nn.Linear(2, 2), replace(LATE, start=0.0), steps=steps).stop is None


def test_a_stop_needs_the_length_of_the_training_and_comes_after_the_start():
    with pytest.raises(ValueError, match=r"stop=0\.5 is a part of the training: give the number of its steps"):
        methods.optimizer(nn.Linear(2, 2), replace(LATE, start=0.0, stop=0.5))
    with pytest.raises(ValueError, match=r"stop must be above start, got 0\.5 and 0\.5"):
        replace(LATE, stop=0.5)


def test_a_run_with_a_stop_measures_the_perturbation_only_before_it(tmp_path):
    early = replace(LATE, start=0.0, stop=0.5)
    do([Job(early, tmp_path)])
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert ["perturbed_loss" in line for line in lines] == [True, True, False]
    assert methods.passes(early) == 1.5


def test_the_rehearsal_of_a_late_run_measures_perturbed_steps(monkeypatch):
    rehearsed = []
    own = rehearsal.TrainingRun
    monkeypatch.setattr(rehearsal, "TrainingRun", lambda *given: rehearsed.append(own(*given)) or rehearsed[-1])
    rehearsal.rehearse(LATE, tiny_images(), CPU, small)
    assert rehearsed[0].optimizer.telemetry.perturbed_loss is not None
