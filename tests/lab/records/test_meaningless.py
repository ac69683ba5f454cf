"""Readable but invalid values in configurations, records and checkpoints."""

import json
from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from bisam.lab import records
from bisam.lab.cli import app
from bisam.lab.config import Config, rate, recorded
from bisam.lab.data.on_device import Batches
from bisam.lab.records import checkpoint
from bisam.lab.records.values import decoded, load_object

TRAIN = ["train", "demo/40%/sgd", "--set", "epochs=2", "--set", "batch=512", "--device", "cpu", "--runs"]


def bisam(*arguments):
    return CliRunner().invoke(app, [*map(str, arguments)], env={"COLUMNS": "300"})


# Configurations.

anything = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from([10**400, -(10**400), 2**64, "best", "fp32", "\x1b[2J", "a\0b", "\ud800"])
    | st.lists(st.integers(), max_size=2)
)


@given(st.sampled_from([field.name for field in fields(Config)]), anything)
def test_a_configuration_is_valid_or_is_refused_with_a_one_line_error(name, value):
    """Accepted values give finite learning rates and are restored from a record."""
    try:
        config = replace(Config(), **{name: value})
    except ValueError as error:
        config, message = None, str(error)
    if config is None:
        assert message.startswith((f"{name} must ", "unknown measure "))
        assert message.isprintable()
        return
    assert recorded(json.loads(json.dumps(config.as_dict()))) == config
    kind = type(getattr(Config(mu=1.0, micro_batch=1, epoch_steps=1, every=2, clip_norm=1.0), name))
    assert value is None or type(value) is kind or (type(value) is int and kind is float)
    assert 0 <= rate(config, config.epochs - 1) <= config.lr


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("epochs", True), ("epochs", 2.0), ("flip", 1), ("flip", "no"), ("lr", "0.1"), ("model", 56), ("seed", None)],
        *[("model", "a\0b"), ("model", "\ud800"), ("data", "a\nb"), ("mu", True), ("select", None)],
    ],
)
def test_configuration_values_of_the_wrong_type_are_refused(name, value):
    with pytest.raises(ValueError, match=f"^{name} must be (a whole number|a number|a printable text|true or false)"):
        Config(**{name: value})


def test_a_warm_up_that_is_longer_than_the_training_is_refused():
    assert rate(Config(epochs=2, warmup_epochs=2), 1) == 0.1
    with pytest.raises(ValueError, match="warmup_epochs must be at most epochs, got 3 of 2: lr is never reached"):
        Config(epochs=2, warmup_epochs=3)


def test_the_limits_of_a_seed_are_shown_with_all_digits():
    with pytest.raises(ValueError, match=f"seed must lie between 0 and 2147483648, got {2**64}"):
        Config(seed=2**64)


def test_minus_zero_is_the_same_configuration_as_zero():
    assert str(Config().with_changes({"rho": "-0.0"}).rho) == "0.0"


@pytest.mark.parametrize(
    ("options", "message"),
    [({"padding": 9}, "padding=9 leaves most crops of 8×8 black"), ({"cutout": 16}, "cutout=16 covers images of 8×8")],
)
def test_an_augmentation_that_leaves_black_images_is_refused(options, message):
    images, labels = torch.zeros(4, 1, 8, 8, dtype=torch.uint8), torch.zeros(4, dtype=torch.int64)
    common = {"batch": 2, "mean": [0.5], "std": [0.25], "device": "cpu", "seed": 0}
    Batches(images, labels, augment=True, padding=8, cutout=15, **common)
    Batches(images, labels, augment=False, **options, **common)
    with pytest.raises(ValueError, match=message):
        Batches(images, labels, augment=True, **options, **common)


# Records.


@pytest.mark.parametrize("text", ['{"a": 1, "a": 2}', '{"a": {"b": 1, "c": 1, "b": 1}}', '{"a": 1, "\\u0061": 1}'])
def test_a_json_object_with_a_duplicate_key_is_refused(text):
    with pytest.raises(ValueError, match=r"it has the key '[ab]' twice"):
        decoded(text.encode())


def test_a_result_with_two_statuses_is_reported_and_not_used(tmp_path, recorded, write_run):
    folder = write_run(tmp_path / "a", recorded("demo/40%/sam", trained=1))
    text = (folder / "result.json").read_text()
    (folder / "result.json").write_text(text.replace("{", '{"status": "diverged",', 1))
    record = records.read(folder)
    assert record.result is None
    assert record.problems == ["result.json: it is half-written or foreign (it has the key 'status' twice)"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("loss", "abc"), ("loss", None), ("loss", True), ("lr", [0.1]), ("alike", 2), ("seconds", -1.0)],
        *[("validation_accuracy", 101.0), ("validation_accuracy", "nan"), ("together", 0)],
        ("samples_per_second", "nan"),
    ],
)
def test_metrics_that_no_training_can_write_are_a_problem_of_the_record(name, value, tmp_path, recorded, write_run):
    record = recorded("demo/40%/sam", trained=2, epochs=2, receipt={"commit": "abc"})
    record.result["validation_accuracy"] = 51.0
    folder = write_run(tmp_path / "a", record)
    line, *rest = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join([json.dumps({**json.loads(line), name: value}) + "\n", *rest]))
    problems = records.verify(records.read(folder))
    assert [problem for problem in problems if problem.startswith(f"metrics.jsonl: {name} of epoch 0 is ")]


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", 10**400, 0, -3.5])
def test_a_loss_may_be_any_number_since_runs_diverge(value, tmp_path, recorded, write_run):
    folder = write_run(tmp_path / "a", recorded("demo/40%/sam", trained=1, epochs=1, receipt={"commit": "abc"}))
    (folder / "metrics.jsonl").write_text(json.dumps({"epoch": 0, "loss": value, "validation_accuracy": 55.5}) + "\n")
    assert records.verify(records.read(folder)) == []


# Checkpoints that are undamaged and have the right digest, but are not of a training.


def deep(levels):
    return '{"dict":[["x",' * levels + "1" + "]]}" * levels


@pytest.fixture(scope="module")
def unfinished(tmp_path_factory):
    """An unfinished run with a checkpoint: the state that it saved, its folder and the folder of runs."""
    root = tmp_path_factory.mktemp("begun")
    run = root / "demo" / "noise40-sgd-seed0+epochs=2+batch=512"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bisam.lab.training.loop._finish", _fail)
        assert bisam(*TRAIN, root).exit_code == 1
    return checkpoint.load(run / "checkpoints"), run, root


def _fail(*_):
    raise OSError("the disk is full")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: {}, "it is not a checkpoint of a training"),
        (lambda state: {**state, "epoch": True}, "it is not a checkpoint of a training"),
        (lambda state: {**state, "epoch": -1}, "it is not a checkpoint of a training"),
        (lambda state: {**state, "epoch": float("nan")}, "it is not a checkpoint of a training"),
        (lambda state: {**state, "batch": "0"}, "it is not a checkpoint of a training"),
        (lambda state: {**state, "config": []}, "it is not a checkpoint of a training"),
        (lambda state: {**state, "receipts": [3]}, "it is not a checkpoint of a training"),
        (lambda state: {name: state[name] for name in state if name != "checksum"}, "not a checkpoint of a training"),
        (lambda state: {**state, "epoch": 3}, "does not fit the run: the run has no epoch 3 with a batch 0"),
        (lambda state: {**state, "batch": 10**30}, "does not fit the run: the run has no epoch"),
        (lambda state: {**state, "training": {}}, "does not fit the run: 'model'"),
        (lambda state: {**state, "training": {**state["training"], "model": {}}}, "does not fit the run: Error"),
        (lambda state: {**state, "training": {**state["training"], "sums": 3}}, "does not fit the run: "),
    ],
)
def test_a_checkpoint_that_is_not_of_a_training_is_an_error_with_a_remedy(change, message, unfinished):
    loaded, run, root = unfinished
    for path in (run / "checkpoints").iterdir():
        path.unlink()
    checkpoint.save(run / "checkpoints", loaded.step, change(loaded.state))
    done = bisam(*TRAIN, root)
    assert done.exit_code == 1
    (line,) = done.stderr.splitlines()
    assert message in line
    assert line.endswith(f"emove {run / 'checkpoints'} to start over.")


@pytest.mark.parametrize("state", [deep(2000), "[]", "3", '{"dict": 3}', '{"int": "x"}'])
def test_a_checkpoint_with_an_undecodable_state_is_skipped(state, tmp_path):
    checkpoint.save(tmp_path, 1, {"x": 1})
    header, body = checkpoint.pack({}, {"format": "1", "step": "2", "state": state})
    (tmp_path / "checkpoint-000000002.safetensors").write_bytes(header + bytes(body))
    loaded = checkpoint.load(tmp_path)
    assert loaded.step == 1
    assert len(loaded.notes) == 1


def test_json_nested_too_deeply_is_refused(tmp_path):
    (tmp_path / "x.json").write_text('{"a":' * 100_000)
    with pytest.raises(ValueError, match="nested too deeply"):
        load_object(tmp_path / "x.json")
