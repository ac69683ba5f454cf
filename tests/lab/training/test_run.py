"""A single training: resuming from its state, its best weights, receipts, times and accuracies."""

import copy
import io
import json
from contextlib import nullcontext

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from torch import nn

from bisam.capture import capture_together
from bisam.lab.config import Config
from bisam.lab.data import load
from bisam.lab.data.sources import InMemory
from bisam.lab.recipes import find_recipe
from bisam.lab.records import RecordError, RunFolder, checkpoint, read
from bisam.lab.training.loop import Job, Stopped, train
from bisam.lab.training.progress import Progress
from bisam.lab.training.run import TrainingRun
from tiny import BATCHES, NET, StopRequesting, net, tiny_images


def step_of(training):
    return capture_together([training.optimizer], generators=[training.generator], after=lambda _: training.add_up())


def test_a_training_with_dropout_resumes_from_its_state_bit_for_bit(recwarn):
    config = Config(model=f"{NET}_with_dropout", batch=8, epochs=2, precision="fp32")
    one, other = (TrainingRun(config, tiny_images(), torch.device("cpu")) for _ in range(2))
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


def test_a_training_resumes_from_a_file_that_does_not_keep_the_layout_of_tensors(device, tmp_path, recwarn):
    config = Config(model=NET, method="sgd", batch=8, epochs=2)
    one, other = (TrainingRun(config, tiny_images(), torch.device(device)) for _ in range(2))
    batches = [*one.batches.epoch(0)]
    step_of(one)([batches[0]])
    checkpoint.save(tmp_path, 1, one.state())
    other.load(checkpoint.load(tmp_path).state)
    step_of(other)([batches[1]])  # on CUDA a fused update, which refuses any other layout
    step_of(one)([batches[1]])
    for (_, a), (_, b) in zip(one.optimizer.state.items(), other.optimizer.state.items(), strict=True):
        torch.testing.assert_close(a["momentum_buffer"], b["momentum_buffer"])


def test_a_training_from_another_kind_of_device_resumes_with_new_random_numbers():
    config = Config(model=NET, method="sgd", batch=8, epochs=2)
    one, other = (TrainingRun(config, tiny_images(), torch.device("cpu")) for _ in range(2))
    state = one.state()
    assert other.load(state) == ""
    of_cuda = {**state, "generator": torch.zeros(16, dtype=torch.uint8)}  # a GPU's has seed and offset only
    fresh = other.generator.get_state()
    assert "another kind of device" in other.load(of_cuda)
    assert torch.equal(other.generator.get_state(), fresh)


def test_the_best_weights_are_those_of_the_highest_validation_accuracy(monkeypatch):
    training = TrainingRun(Config(model=NET, batch=8, epochs=9), tiny_images(), torch.device("cpu"))
    training.sums["steps"].fill_(1)
    accuracies = iter([50.0, 70.0, 60.0, 70.0])
    monkeypatch.setattr(training, "measured", lambda *_: {"validation_accuracy": next(accuracies)})
    for epoch in range(4):
        training.sums["steps"].fill_(1)
        with torch.no_grad():
            next(training.model.parameters()).fill_(epoch)
        training.end_epoch(epoch, together=1)
    assert (training.best.epoch, training.best.accuracy) == (1, 70.0)
    assert next(iter(training.best.weights.values())).unique().tolist() == [1.0]


def test_a_run_that_another_process_has_finished_meanwhile_is_skipped(tmp_path):
    config = find_recipe("demo").cells["40%", "sam"]
    result = {"status": "done", "epochs": 1, "best_epoch": 0, "validation_accuracy": 50.0, "test_accuracy": 90.0}
    with RunFolder.open(tmp_path, config.as_dict()) as run:
        run.metrics.append({"epoch": 0, "loss": 1.0})
        run.finish(result)
    train([Job(config, tmp_path)], InMemory(load("digits")), torch.device("cpu"), Progress())
    with RunFolder.open(tmp_path, config.as_dict()) as run:
        assert run.metrics.read() == [{"epoch": 0, "loss": 1.0}]
        assert run.result == result


def test_an_invalid_result_is_not_taken_for_a_finished_run(tmp_path):
    job = Job(Config(model=NET, method="sgd", batch=8, epochs=1), tmp_path)
    with RunFolder.open(tmp_path, job.config.as_dict()) as run:
        run.finish({"status": "running"})
    with pytest.raises(RecordError, match="its result has the status 'running'"):
        train([job], tiny_images(), torch.device("cpu"), Progress())


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    job = Job(Config(model=NET, method="sgd", batch=8, epochs=3), tmp_path_factory.mktemp("undisturbed"))
    train([job], tiny_images(), torch.device("cpu"), Progress())
    return job


@pytest.fixture
def stopped(uninterrupted, tmp_path):
    """The same run with two checkpoints, which need one line of metrics and two."""
    job = Job(uninterrupted.config, tmp_path / "run")
    for steps in (BATCHES + 2, BATCHES):
        progress = StopRequesting(steps)
        with pytest.raises(Stopped):
            train([job], tiny_images(), torch.device("cpu"), progress, progress.stopping)
    return job


def output_of_resuming(job):
    console = Console(file=io.StringIO(), width=80)
    with Progress(console) as progress:
        train([job], tiny_images(), torch.device("cpu"), progress)
    return console.file.getvalue()


def test_a_run_from_another_kind_of_device_resumes_with_a_note(stopped):
    loaded = checkpoint.load(stopped.folder / "checkpoints")
    loaded.state["training"]["generator"] = torch.zeros(16, dtype=torch.uint8)  # as a GPU's
    checkpoint.save(stopped.folder / "checkpoints", loaded.step, loaded.state)
    notes = " ".join(output_of_resuming(stopped).split())
    assert "run resumes at epoch 3, batch 3; it was trained on another kind of device: on cpu dropout" in notes


def losses(job):
    return [row["loss"] for row in read(job.folder).metrics]


@pytest.mark.parametrize("kept", [0, 20])
def test_with_truncated_metrics_a_run_resumes_from_a_checkpoint_that_has_all_its_lines(kept, stopped, uninterrupted):
    path = stopped.folder / "metrics.jsonl"
    first, second = path.read_text().splitlines(keepends=True)
    path.write_text(first + second[:kept])
    notes = output_of_resuming(stopped)
    assert ("run: metrics.jsonl: the last line was half-written and is removed (20 bytes)" in notes) == bool(kept)
    lost = "metrics.jsonl lacks 1 of the lines of epochs 0 to 1, the first is that of epoch 1"
    assert f"run: checkpoint-000000010.safetensors is skipped: {lost}" in notes
    assert "run resumes at epoch 2, batch 3" in notes
    assert losses(stopped) == losses(uninterrupted)
    assert read(stopped.folder).problems == []
    ours, theirs = (load_file(one.folder / "best.safetensors") for one in (stopped, uninterrupted))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_missing_metrics_are_reported_on_resuming_and_remain_a_problem_of_the_record(stopped, uninterrupted):
    (stopped.folder / "metrics.jsonl").unlink()
    notes = output_of_resuming(stopped)
    lost = "metrics.jsonl lacks 2 of the lines of epochs 0 to 1, the first is that of epoch 0"
    assert f"run: checkpoint-000000010.safetensors is used although {lost}" in notes
    assert "run resumes at epoch 3, batch 3" in notes
    assert losses(stopped) == losses(uninterrupted)[2:]
    found = ["metrics.jsonl: it lacks 2 of the lines of epochs 0 to 2, the first is that of epoch 0"]
    assert read(stopped.folder).problems == found


def test_an_unfinished_run_of_an_older_version_is_resumed(stopped, uninterrupted):
    """Its configurations have neither β nor γ."""
    path = stopped.folder / "config.json"
    whole = json.loads(path.read_text())
    loaded = checkpoint.load(stopped.folder / "checkpoints")
    for config in (whole["config"], loaded.state["config"]):
        del config["beta"], config["gamma"]
    path.write_text(json.dumps(whole))
    checkpoint.save(stopped.folder / "checkpoints", loaded.step, loaded.state)
    assert "run resumes at epoch 3, batch 3" in output_of_resuming(stopped)
    assert losses(stopped) == losses(uninterrupted)


def rank_of_label(logits, label):
    """How many classes have a larger logit, counted one by one."""
    return sum(other > logits[label] for other in logits)


def test_the_receipt_lists_all_versions_that_trained_the_run(tmp_path, monkeypatch, recwarn):
    job = Job(Config(model=NET, method="sgd", batch=8, epochs=1), tmp_path / "run")
    for commit in ("first", "first", "second", "third"):
        monkeypatch.setenv("BISAM_COMMIT", commit)
        progress = StopRequesting(None if commit == "third" else 1)
        with nullcontext() if commit == "third" else pytest.raises(Stopped):
            train([job], tiny_images(), torch.device("cpu"), progress, progress.stopping)
    receipt = json.loads((job.folder / "receipt.json").read_text())
    assert (receipt["commit"], receipt["kernels"]) == ("third", "torch")
    assert [part["commit"] for part in receipt["earlier"]] == ["first", "second"]
    assert {part["torch"] for part in receipt["earlier"]} == {torch.__version__}
    assert read(job.folder).commits == "first, second, third"
    assert read(job.folder).hardware == (receipt["gpu"] or receipt["cpu"])


def test_a_receipt_has_the_commit_with_which_the_process_started(tmp_path, monkeypatch, recwarn):
    class Committing(Progress):
        def epoch(self, *arguments):
            monkeypatch.setenv("BISAM_COMMIT", "committed meanwhile")
            super().epoch(*arguments)

    monkeypatch.setenv("BISAM_COMMIT", "begun with")
    job = Job(Config(model=NET, method="sgd", batch=8, epochs=1), tmp_path / "run")
    with Committing() as progress:
        train([job], tiny_images(), torch.device("cpu"), progress)
    assert json.loads((job.folder / "receipt.json").read_text())["commit"] == "begun with"


def test_a_checkpoint_without_a_version_is_recorded_as_an_unknown_one(tmp_path, monkeypatch, recwarn):
    job = Job(Config(model=NET, method="sgd", batch=8, epochs=1), tmp_path / "run")
    progress = StopRequesting(1)
    with pytest.raises(Stopped):
        train([job], tiny_images(), torch.device("cpu"), progress, progress.stopping)
    loaded = checkpoint.load(job.folder / "checkpoints")
    del loaded.state["receipts"]
    checkpoint.save(job.folder / "checkpoints", loaded.step, loaded.state)
    monkeypatch.setenv("BISAM_COMMIT", "second")
    with Progress() as progress:
        train([job], tiny_images(), torch.device("cpu"), progress)
    assert read(job.folder).commits == "unknown, second"


def test_the_best_weights_are_tested_by_top1_and_top5_accuracy():
    config = Config(model=NET, batch=8, epochs=1, precision="fp32")
    training = TrainingRun(config, tiny_images(classes=100, tested=300), torch.device("cpu"))
    training.best.weights = {name: tensor.clone() for name, tensor in training.model.state_dict().items()}
    training.model.eval()
    with torch.no_grad():
        logits = [row for x, _ in training.test.epoch(0) for row in training.model(x).tolist()]
        next(training.model.parameters()).zero_()  # these are the last weights, which are not the best
    labels = [label for _, y in training.test.epoch(0) for label in y.tolist()]
    ranks = [rank_of_label(row, label) for row, label in zip(logits, labels, strict=True)]
    first, five = (100 * sum(rank < top for rank in ranks) / len(ranks) for top in (1, 5))
    assert 0 < first < five < 20
    assert training.test_accuracies() == {"test_accuracy": first, "test_top5_accuracy": five}
    last = training.accuracies(training.test, [1, 5])
    assert last != [first, five]
    assert training.last_test_accuracies() == {"test_accuracy": last[0], "test_top5_accuracy": last[1]}
    next(training.model.parameters()).data.fill_(float("nan"))
    assert training.last_test_accuracies() == {}


def test_the_seconds_of_epochs_are_recorded_separately_and_add_up():
    training = TrainingRun(Config(model=NET, batch=8, epochs=2), tiny_images(), torch.device("cpu"))
    found = []
    for epoch, seconds in enumerate((2.0, 3.0)):
        training.epoch_seconds += seconds
        training.sums["steps"].fill_(6)
        found.append(training.end_epoch(epoch, together=1))
    assert [metrics["seconds"] for metrics in found] == [2.0, 3.0]
    assert [metrics["samples_per_second"] for metrics in found] == [6 * 8 / 2.0, 6 * 8 / 3.0]
    assert (training.seconds, training.epoch_seconds) == (5.0, 0.0)


def test_the_seconds_of_a_run_are_summed_over_its_processes(tmp_path, monkeypatch, recwarn):
    now = 0.0

    class Slow(StopRequesting):
        """Each step takes a second."""

        def step(self, number):
            nonlocal now
            now += 1
            super().step(number)

    monkeypatch.setattr("bisam.lab.training.loop.time.monotonic", lambda: now)
    job = Job(Config(model=NET, method="sgd", batch=8, epochs=3), tmp_path / "run")
    for steps in (BATCHES + 2, 1, None):  # two stops within the second epoch
        progress = Slow(steps)
        with nullcontext() if steps is None else pytest.raises(Stopped):
            train([job], tiny_images(), torch.device("cpu"), progress, progress.stopping)
        now += 100  # passes until the command is repeated
    record = read(job.folder)
    assert [row["seconds"] for row in record.metrics] == [BATCHES] * 3
    assert record.result["seconds"] == record.receipt["seconds"] == 3 * BATCHES


@pytest.mark.parametrize(("fields", "other"), [({}, ""), ({"measures": "mcc"}, "validation_mcc")])
def test_after_resuming_the_best_epoch_is_replaced_only_by_a_better_one(fields, other, monkeypatch):
    config = Config(model=NET, batch=8, epochs=9, **fields)
    one, resumed = (TrainingRun(config, tiny_images(), torch.device("cpu")) for _ in range(2))
    scores = iter([70.0, 60.0, 80.0])

    def measured(*_):
        score = next(scores)
        return {"validation_accuracy": 50.0, other: score} if other else {"validation_accuracy": score}

    for training in (one, resumed):
        monkeypatch.setattr(training, "measured", measured)
    one.end_epoch(0, together=1)
    resumed.load(one.state())
    found = []
    for epoch in (1, 2):
        resumed.end_epoch(epoch, together=1)
        found.append((resumed.best.epoch, resumed.best.score))
    assert found == [(0, 70.0), (2, 80.0)]


@pytest.mark.parametrize("select", ["best", "last"])
def test_weights_that_are_not_finite_are_never_the_best(select):
    training = TrainingRun(Config(model=NET, batch=8, select=select), tiny_images(), torch.device("cpu"))
    training.best.score = -1.0  # less than any accuracy
    next(training.model.parameters()).data.fill_(float("nan"))
    training.end_epoch(0, together=1)
    assert training.best.weights is None


def test_weights_are_drawn_from_the_seed_alone():
    def weights(seed, method):
        torch.rand(1)  # by other code, before the run is created
        training = TrainingRun(Config(model=NET, batch=8, seed=seed, method=method), tiny_images(), torch.device("cpu"))
        return torch.cat([weight.flatten() for weight in training.model.parameters()])

    with torch.random.fork_rng():
        torch.manual_seed(3)
        expected = torch.cat([weight.flatten() for weight in net(10).parameters()])
    assert all(torch.equal(weights(3, method), expected) for method in ("sgd", "sam", "bisam-log"))
    assert not torch.equal(weights(4, "sam"), expected)


def test_an_epoch_may_have_one_batch_but_not_none():
    assert len(TrainingRun(Config(model=NET, batch=36), tiny_images(), torch.device("cpu")).batches) == 1
    with pytest.raises(ValueError, match="a batch of 37 is larger than the training data: set a smaller batch"):
        TrainingRun(Config(model=NET, batch=37), tiny_images(), torch.device("cpu"))


def test_dropout_is_drawn_from_the_seed():
    for seed in (0, 3):
        training = TrainingRun(Config(model=NET, batch=8, seed=seed), tiny_images(), torch.device("cpu"))
        assert training.generator.initial_seed() == seed


@pytest.mark.parametrize("deterministic", [True, False])
def test_cudnn_follows_the_configuration_only_while_a_run_trains(deterministic, tmp_path, recwarn):
    cudnn, seen = torch.backends.cudnn, []

    class Watching(Progress):
        def step(self, number):
            seen.append((cudnn.deterministic, cudnn.benchmark))

    before = cudnn.deterministic, cudnn.benchmark
    config = Config(model=NET, method="sgd", batch=8, epochs=1, deterministic=deterministic)
    train([Job(config, tmp_path)], tiny_images(), torch.device("cpu"), Watching())
    assert {*seen} == {(deterministic, not deterministic)}
    assert (cudnn.deterministic, cudnn.benchmark) == before


@pytest.mark.parametrize(("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_samples_are_evaluated_in_the_precision_of_the_training(precision, dtype):
    training = TrainingRun(Config(model=NET, batch=8, precision=precision), tiny_images(), torch.device("cpu"))
    seen = []
    training.model.register_forward_hook(lambda module, inputs, output: seen.append((module.training, output.dtype)))
    training.measured(training.validation, "validation")
    training.last_test_accuracies()
    assert set(seen) == {(False, dtype)}
    assert training.model.training


def test_a_run_has_diverged_if_any_weight_is_not_finite():
    training = TrainingRun(Config(model=NET, batch=8), tiny_images(), torch.device("cpu"))
    whole = nn.Parameter(torch.arange(3), requires_grad=False)  # as in quantized models
    waves = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    training.model.extend([nn.ParameterList([whole, waves, nn.Parameter(torch.zeros(0, 4))])])
    assert not training.diverged
    waves.data[1] = complex(0, float("inf"))
    assert training.diverged
    training.model = nn.ParameterList([torch.zeros(0, 4)])  # as on a rank without a shard of a small model
    assert not training.diverged


@pytest.mark.parametrize(("compiled", "kernels"), [(False, "torch"), (True, "bisam")])
def test_a_run_records_the_kernels_that_train_it(compiled, kernels, monkeypatch):
    monkeypatch.setattr("bisam.lab.training.run.compile_model", lambda *_, **__: "bisam")  # as on a GPU
    config = Config(model=NET, batch=8, compile=compiled)
    assert TrainingRun(config, tiny_images(), torch.device("cpu")).kernels == kernels


@pytest.mark.parametrize(("select", "last"), [("best", 92.0), ("last", 91.0)])
def test_the_last_weights_are_tested_too_but_no_weights_twice(select, last, tmp_path, monkeypatch, recwarn):
    validated, tested = iter([50.0, 40.0]), iter([91.0, 92.0, 93.0])

    def measured(training, batches, part, tops=(1,)):
        return {f"{part}_accuracy": next(tested if part == "test" else validated)}

    monkeypatch.setattr(TrainingRun, "measured", measured)
    job = Job(Config(model=NET, method="sgd", batch=8, epochs=2, select=select), tmp_path / "run")
    with Progress() as progress:
        train([job], tiny_images(), torch.device("cpu"), progress)
    result = read(job.folder).result
    assert (result["test_accuracy"], result["last_test_accuracy"]) == (91.0, last)
    assert next(tested) == last + 1


def test_equal_logits_predict_the_first_classes_and_nan_logits_count_as_wrong():
    training = TrainingRun(Config(model=NET, batch=8), tiny_images(classes=100, tested=300), torch.device("cpu"))
    weight, bias = [*training.model.parameters()][-2:]
    with torch.no_grad():
        weight.zero_()
        bias.zero_()
    labels = torch.cat([y for _, y in training.test.epoch(0)])
    shares = [100 * count / len(labels) for count in labels.bincount(minlength=100).tolist()]
    assert training.accuracies(training.test, [1, 5]) == pytest.approx([shares[0], sum(shares[:5])])
    for part in (bias[:1], bias):
        torch.nn.init.constant_(part, float("nan"))
        assert training.accuracies(training.test, [1, 5]) == [0.0, 0.0]


@pytest.mark.parametrize(("classes", "has_top5"), [(99, False), (100, True)])
def test_a_result_has_top5_accuracy_from_a_hundred_classes_on(classes, has_top5, tmp_path):
    config = Config(model=NET, batch=8, epochs=1)
    train([Job(config, tmp_path)], tiny_images(classes), torch.device("cpu"), Progress())
    result = json.loads((tmp_path / "result.json").read_text())
    assert ("test_top5_accuracy" in result) == has_top5
    assert 0 <= result["test_accuracy"] <= result.get("test_top5_accuracy", 100)


def test_a_fraction_that_leaves_no_sample_to_validate_on_is_refused():
    with pytest.raises(ValueError, match=r"validation=0\.001 leaves no sample to validate on: set a larger fraction"):
        TrainingRun(Config(model=NET, batch=8, validation=0.001), tiny_images(), torch.device("cpu"))
