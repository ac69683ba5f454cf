"""Damage that leaves every file readable is detected by digests, and by numbers that must agree."""

import hashlib
import json
import math
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bisam.lab import records
from bisam.lab.cli import app
from bisam.lab.records.verify import verify

LEDGER = Path(__file__).parents[3] / "results"
TRAIN = ["train", "demo/40%/sgd", "--set", "epochs=3", "--device", "cpu", "--runs"]


def bisam(*arguments):
    return CliRunner().invoke(app, [*map(str, arguments)], env={"COLUMNS": "300"})


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    root = tmp_path_factory.mktemp("trained")
    done = bisam(*TRAIN, root)
    assert done.exit_code == 0, done.output
    return root


@pytest.fixture
def run(trained, tmp_path):
    """A copy of a finished run, in its recipe's folder."""
    shutil.copytree(trained / "demo", tmp_path / "demo")
    (folder,) = (tmp_path / "demo").iterdir()
    return folder


def flip(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def replace_in(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def change_a_digit(path):
    """Of the loss of the first epoch: nothing but the digest depends on it."""
    first, *rest = path.read_text().splitlines(keepends=True)
    row = json.loads(first)
    path.write_text("".join([json.dumps({**row, "loss": row["loss"] + 1e-9}) + "\n", *rest]))


def test_a_receipt_has_the_digest_of_each_file(run):
    digests = json.loads((run / "receipt.json").read_text())["sha256"]
    assert sorted(digests) == ["best.safetensors", "config.json", "metrics.jsonl", "result.json"]
    for name, digest in digests.items():
        assert digest == hashlib.sha256((run / name).read_bytes()).hexdigest()


def test_an_undamaged_run_verifies_without_problems(run):
    done = bisam("verify", run)
    assert (done.exit_code, done.output) == (0, "1 run, 0 problems\n")


CHANGED = "it was changed, its sha256 is not the one in receipt.json"
DAMAGE = {
    "metrics.jsonl": (change_a_digit, CHANGED),
    "result.json": (lambda path: replace_in(path, '"seconds": ', '"seconds": 1'), CHANGED),
    "config.json": (lambda path: replace_in(path, '"format": 1', '"format":  1'), CHANGED),
    "best.safetensors": (flip, CHANGED),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_changed_file_is_reported_by_verify_report_and_train(name, run, tmp_path):
    damage, message = DAMAGE[name]
    damage(run / name)
    verified, shown, trained = bisam("verify", tmp_path), bisam("report", tmp_path), bisam(*TRAIN, tmp_path)
    assert (verified.exit_code, shown.exit_code, trained.exit_code) == (1, 0, 0)
    for done in (verified, shown, trained):
        assert f"{name}: {message}" in done.output
    assert message in (tmp_path / "report.html").read_text()


def test_missing_weights_are_reported_unless_they_were_omitted_on_purpose(run, tmp_path):
    (run / "best.safetensors").unlink()
    done = bisam("verify", tmp_path)
    assert done.exit_code == 1
    assert f"{run}: best.safetensors: it is missing, and receipt.json lists it" in done.output
    done = bisam("verify", tmp_path, "--without-weights")
    assert (done.exit_code, done.output) == (0, "note: weights not kept, 1 of 1 runs\n1 run, 0 problems\n")
    note = f"1 finished run has lost the best.safetensors in the receipt: {run}"
    assert note in bisam("report", tmp_path).output
    done = bisam("report", tmp_path, "--without-weights")
    assert done.exit_code == 0
    assert note not in done.output
    assert "best.safetensors" not in (tmp_path / "report.html").read_text()
    assert "best.safetensors: it is missing" in bisam(*TRAIN, tmp_path).output


def test_the_runs_of_the_ledger_verify_without_problems():
    done = bisam("verify", LEDGER, "--without-weights")
    assert done.exit_code == 0, done.output
    assert done.output.splitlines()[-1].endswith(" runs, 0 problems")


def forget_digests(run):
    receipt = json.loads((run / "receipt.json").read_text())
    del receipt["sha256"]
    (run / "receipt.json").write_text(json.dumps(receipt))


def rewrite(run, **changes):
    result = json.loads((run / "result.json").read_text())
    (run / "result.json").write_text(json.dumps({**result, **changes}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda run: None, ""),
        (lambda run: rewrite(run, validation_accuracy=1.0), "its validation accuracy is 1.0, and that of epoch 2 is"),
        (lambda run: rewrite(run, best_epoch=0, epochs=2), "it is of 2 epochs, and the configuration has 3"),
        (lambda run: rewrite(run, status="running"), "result.json: its result has the status 'running'"),
        (lambda run: rewrite(run, epochs=10**90), "metrics.jsonl: it lacks"),
        (lambda run: (run / "receipt.json").unlink(), "receipt.json: it is missing"),
        (lambda run: (run / "config.json").unlink(), "config.json: it is missing"),
        (lambda run: replace_in(run / "config.json", '"epochs": 3', '"epochs": "3"'), "config.json: its configuration"),
        (lambda run: os.truncate(run / "metrics.jsonl", 30), "metrics.jsonl: the last line is half-written"),
        (lambda run: flip(run / "best.safetensors"), "best.safetensors: it is damaged"),
    ],
)
def test_without_digests_numbers_that_do_not_agree_are_reported(damage, message, run, tmp_path):
    forget_digests(run)
    damage(run)
    done = bisam("verify", tmp_path)
    assert done.exit_code == bool(message)
    assert message in done.output


def test_an_unfinished_run_is_a_note_and_not_a_problem(run, tmp_path):
    (run / "result.json").unlink()
    change_a_digit(run / "metrics.jsonl")
    done = bisam("verify", tmp_path)
    assert (done.exit_code, done.output) == (0, "note: not finished, 1 of 1 runs\n1 run, 0 problems\n")


def test_damaged_weights_in_the_folder_of_a_fit_are_reported(run, tmp_path):
    kept = shutil.copy(run / "best.safetensors", tmp_path / "demo")
    assert bisam("verify", tmp_path).output == "1 run, 0 problems\n"
    flip(Path(kept))
    done = bisam("verify", tmp_path)
    assert done.exit_code == 1
    assert done.output == f"{tmp_path / 'demo'}: best.safetensors: it is damaged\n1 run, 1 problem\n"


def test_a_model_folder_of_another_program_is_a_note_and_not_a_problem(run, tmp_path):
    model = tmp_path / "models" / "bert"
    model.mkdir(parents=True)
    (model / "config.json").write_text('{"model_type": "bert"}')
    alone, beside = bisam("verify", model.parent), bisam("verify", tmp_path)
    assert alone.exit_code == 1
    assert f"has no runs; 1 folder has a config.json of another program: {model}" in alone.stderr.replace("\n", "")
    assert (beside.exit_code, beside.output.count("note: 1 folder has a config.json of another program")) == (0, 1)
    assert beside.output.endswith("1 run, 0 problems\n")


def test_a_folder_without_runs_is_refused(tmp_path):
    done = bisam("verify", tmp_path)
    assert done.exit_code == 1
    assert "has no runs" in done.stderr


def test_invalid_digests_in_a_receipt_do_not_raise(tmp_path, recorded, write_run):
    for number, listed in enumerate([3, [], {"../x": "0"}, {"metrics.jsonl": None}]):
        write_run(tmp_path / str(number), recorded("demo/40%/sam", number, receipt={"sha256": listed}))
    problems = [len(record.problems) for record in records.find_records(tmp_path)]
    assert problems == [0, 0, 0, 1]


@pytest.fixture
def made(recorded):
    """Makes a record of three epochs whose validation accuracies are 50, 51 and 52."""

    def record(select="last", trained=3, metrics=None, **result):
        whole = {"epochs": 3, "best_epoch": 2, "validation_accuracy": 52.0, **result}
        found = recorded(
            "demo/40%/sam", trained=trained, result=whole, receipt={"commit": "abc"}, epochs=3, select=select
        )
        return replace(found, metrics=[{**row, **(metrics or {})} for row in found.metrics])

    return record


@pytest.mark.parametrize("select", ["last", "best"])
def test_the_result_must_be_that_of_the_selected_epoch(select, made):
    assert verify(made(select)) == []
    found = verify(made(select, best_epoch=1, validation_accuracy=51.0))
    assert found == [f"result.json: its validation accuracy is 51.0, and the {select} one is 52.0"]
    assert verify(made(select, status="diverged", best_epoch=1, validation_accuracy=51.0, epochs=3)) == []
    falling = made(select, validation_accuracy=52.0, best_epoch=0)
    falling = replace(falling, metrics=[{**row, "validation_accuracy": 52.0 - row["epoch"]} for row in falling.metrics])
    assert verify(falling) == (
        [] if select == "best" else ["result.json: its validation accuracy is 52.0, and the last one is 50.0"]
    )


def test_a_tested_epoch_outside_the_training_is_reported(made):
    assert verify(made(best_epoch=3)) == ["result.json: its result has no tested epoch"]


def test_more_lines_than_epochs_are_reported(made):
    found = verify(made(status="diverged", trained=4))
    assert found == ["metrics.jsonl: it has 4 lines, and the result is of 3 epochs"]


def test_the_value_of_the_selecting_measure_is_verified(recorded):
    own = {"epochs": 3, "measures": "mcc", "receipt": {"commit": "abc"}, "trained": 3}
    result = {"epochs": 3, "best_epoch": 2, "validation_accuracy": 1.0, "validation_mcc": -7.0, "test_mcc": 0.0}
    found = recorded("demo/40%/sam", result=result, **own)
    found = replace(found, metrics=[{**row, "validation_mcc": -5.0 - row["epoch"]} for row in found.metrics])
    assert verify(found) == []
    other = replace(found, result={**found.result, "validation_mcc": -6.0})
    assert verify(other)[0] == "result.json: its validation Matthews correlation is -6.0, and that of epoch 2 is -7.0"


@pytest.mark.parametrize(
    ("name", "value", "is_strange"),
    [
        ("seconds", -1.0, True), ("seconds", 0.0, False), ("samples_per_second", math.inf, False),
        ("validation_macro_f1", 100.5, True), ("validation_mcc", -100.0, False), ("validation_mcc", -101.0, True),
        ("validation_balanced_accuracy", math.nan, True), ("loss", math.nan, False), ("loss", "low", True),
        ("loss", True, True), ("alike", True, False), ("alike", 1, True), ("together", 0, True),
    ],
)  # fmt: skip
def test_a_metric_that_no_training_can_write_is_reported(name, value, is_strange, made):
    found = verify(made(metrics={name: value}))
    assert found == ([f"metrics.jsonl: {name} of epoch 0 is {value!r}"] if is_strange else [])
