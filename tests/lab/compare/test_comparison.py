"""Two runs side by side, through the command line, and what is measured at their weights."""

import json
import math
import re
import shutil
import statistics
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from typer.testing import CliRunner

import bisam
from bisam import diagnostics
from bisam.lab import records
from bisam.lab.cli import app
from bisam.lab.cli import compare as cli_compare
from bisam.lab.compare import comparison
from bisam.lab.compare import tables as comparison_tables
from bisam.lab.compare.comparison import Change, RunComparison, Side
from bisam.lab.compare.inspection import InspectionPlan, LossAndError, inspect
from bisam.lab.compare.page import explanation, write
from bisam.lab.compare.surroundings import looks
from bisam.lab.compare.trained import shared_rows, trained
from bisam.lab.config import Config
from bisam.lab.data import Batches, load, split, with_noise
from bisam.lab.data.pools import PoolOnDisk, open_pool
from bisam.lab.measures import MEASURES
from bisam.lab.models import build
from bisam.lab.report.charts import styles
from bisam.lab.tables.curves import CURVES

CPU = torch.device("cpu")
SMALL = InspectionPlan(samples=40, steps=3, draws=3, eigenvalues=2, signs=3, points=5, grid=3)
QUICK = ["--samples", "8", "--device", "cpu"]
OF_WEIGHTS = [
    "At the weights",
    "How far the loss rises",
    "Training error after the perturbation",
    "Curvature",
    "Along a",
]

digits = partial(open_pool, folder=None, log=print)


def run_bisam(*arguments):
    return CliRunner().invoke(app, [*map(str, arguments)], env={"COLUMNS": "200"})


def text_of(done):
    """The printed text without frames of tables and line breaks."""
    return " ".join(done.output.replace("│", " ").split())


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    """Two finished runs, as `bisam train` writes them."""
    root = tmp_path_factory.mktemp("runs")
    for method in ("sam", "sgd"):
        short = ["--set", "epochs=2", "--runs", root, "--device", "cpu"]
        done = run_bisam("train", f"demo/40%/{method}", *short)
        assert done.exit_code == 0, done.output
    return {path.parent.name.split("-")[1]: path.parent for path in root.rglob("config.json")}


@pytest.fixture
def runs(originals, tmp_path, monkeypatch):
    """Copies of the two runs that a test may change; the command inspects them with a small plan, to be quick."""
    monkeypatch.setattr(cli_compare, "InspectionPlan", lambda **given: replace(SMALL, **given))
    for method, folder in originals.items():
        shutil.copytree(folder, tmp_path / method)
    return SimpleNamespace(sam=tmp_path / "sam", sgd=tmp_path / "sgd")


@pytest.fixture(scope="module")
def compared(originals):
    return comparison.compare(originals["sam"], originals["sgd"], digits, CPU, SMALL)


@pytest.fixture(autouse=True)
def in_a_temporary_folder(tmp_path, monkeypatch):
    """The command writes its page into the current folder."""
    monkeypatch.chdir(tmp_path)


def edit(folder, name, **changes):
    """Change fields of a JSON file; None removes one."""
    path = folder / name
    content = json.loads(path.read_text())
    fields = content["config"] if name == "config.json" else content
    fields.update(changes)
    for key in [key for key, value in changes.items() if value is None]:
        del fields[key]
    path.write_text(json.dumps(content))


# The command.


def test_two_runs_are_shown_side_by_side(originals):
    done = run_bisam("compare", originals["sam"], originals["sgd"], *QUICK)
    assert done.exit_code == 0, done.output
    text = text_of(done)
    assert "method sam sgd" in text
    assert "epochs 2" not in text.split("Results")[0]  # equal in both runs, so not listed
    accuracies = [records.read(originals[name]).result["test_accuracy"] for name in ("sam", "sgd")]
    assert "test accuracy, per cent {:.2f} {:.2f}".format(*accuracies) in text
    errors = [records.read(originals[name]).metrics[-1]["error"] for name in ("sam", "sgd")]
    assert "training error at w {:.1%} {:.1%}".format(*errors).replace("%", " %") in text
    for title in OF_WEIGHTS:
        assert title in text
    assert f"sam: {originals['sam']}" in done.output
    assert "sgd: plane" in text  # progress


def test_the_page_contains_the_tables_the_curves_and_the_surfaces(originals, tmp_path):
    done = run_bisam("compare", originals["sam"], originals["sgd"], *QUICK, "--out", tmp_path / "new" / "page.html")
    assert done.exit_code == 0, done.output
    page = (tmp_path / "new" / "page.html").read_text()
    for title in [*OF_WEIGHTS, "Configuration: what differs", "Results", "sgd: loss on a plane", "random direction"]:
        assert title in page
    data = json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)[1])
    assert len(data["charts"]) == 1 + 2 + 2  # worst cases, loss and error on a line, planes
    (series,) = data["series"]
    assert [method["title"] for method in series["methods"]] == ["sam", "sgd"]
    others = {f"validation_{name}" for name in MEASURES} - {"validation_accuracy"}  # which these runs do not have
    assert [*series["methods"][0]["values"]] == [name for name in CURVES if name not in others]
    planes = [rows for rows in data["datasets"].values() if "a" in rows[0]]
    assert [len(rows) for rows in planes] == [15 * 15] * 2


def test_a_page_that_cannot_be_written_is_reported_as_an_error(originals, tmp_path):
    (tmp_path / "file").write_text("")
    done = run_bisam(
        "compare", originals["sam"], originals["sgd"], "--no-weights", "--out", tmp_path / "file" / "page.html"
    )
    assert done.exit_code == 1
    assert "Error: cannot write" in done.output


def test_the_requested_radius_is_used_for_both_runs(originals):
    done = run_bisam("compare", originals["sam"], originals["sgd"], *QUICK, "--rho", "0.5")
    text = text_of(done)
    assert "rises within ρ = 0.5 " in text
    sam, sgd = text.split("cross entropy, L2, 10 steps ")[1].split()[:2]
    assert float(sam) > 0.5
    assert float(sgd) > 0.5  # at the default of 0.05 both rise by less than 0.1


def test_the_default_radius_is_that_of_the_training_if_the_runs_share_one(runs):
    path = runs.sam / "config.json"
    for rho, shown in ((0.2, "0.2"), (0.07, "0.07")):
        config = json.loads(path.read_text())
        path.write_text(json.dumps({**config, "config": {**config["config"], "rho": rho}}))
        text = text_of(run_bisam("compare", runs.sam, runs.sgd, *QUICK))
        assert f"rises within ρ = {shown} " in text
        assert f"ρ of the training {shown} – " in text
    assert comparison.shared_rho([runs.sgd]) is None


def test_with_no_weights_the_runs_are_compared_without_reading_data(originals):
    done = run_bisam("compare", originals["sam"], originals["sgd"], "--no-weights", "--data", "nowhere")
    assert done.exit_code == 0, done.output
    assert "Last epoch of the training" in done.output
    for title in OF_WEIGHTS:
        assert title not in done.output


def test_brackets_in_the_name_of_a_folder_are_not_interpreted_as_markup(runs):
    odd = runs.sam.rename(runs.sam.with_name("[bold]sam :smile: [red]"))
    done = run_bisam("compare", odd, runs.sgd, "--no-weights")
    assert done.exit_code == 0, done.output
    assert f"[bold]sam :smile: [red]: {odd}" in done.output
    assert "┃ [bold]sam :smile: [red] ┃ sgd ┃" in " ".join(done.output.split())


# Refused arguments.


def a_folder_without_a_config(runs):
    shutil.rmtree(runs.sam)
    runs.sam.mkdir()
    return [runs.sam, runs.sgd], ["sam is not a run, it has no config.json"]


def a_missing_folder(runs):
    return [runs.sgd, runs.sam / "nowhere"], ["nowhere does not exist"]


def a_file(runs):
    return [runs.sam / "result.json", runs.sgd], ["result.json is a file", f"such as {runs.sam}"]


def a_folder_of_runs(runs):
    return [runs.sam.parent, runs.sgd], ["is not a run", f"such as {runs.sam}"]


def a_folder_of_tables(runs):
    moved = shutil.move(runs.sam, runs.sam.parent / "ledger" / "table" / "sam")
    return [runs.sam.parent / "ledger", runs.sgd], ["is not a run", f"such as {moved}"]


def the_same_run(runs):
    return [runs.sam, runs.sam.parent / "sgd" / ".." / "sam"], ["are the same run: give two"]


def a_half_written_config(runs):
    (runs.sgd / "config.json").write_text('{"format": 1, "con')
    return [runs.sam, runs.sgd], ["sgd cannot be compared: config.json: it is half-written"]


def an_empty_config(runs):
    (runs.sgd / "config.json").write_text('{"format": 1, "config": {}}')
    return [runs.sam, runs.sgd], ["sgd cannot be compared: its configuration is empty"]


def an_infinite_radius(runs):
    return [runs.sam, runs.sgd, "--rho", "inf"], ["rho must be non-negative and finite, got inf"]


def an_unknown_device(runs):
    return [runs.sam, runs.sgd, "--device", "tpu"], ["--device is auto, cpu or cuda, got 'tpu'"]


@pytest.mark.parametrize(
    "case",
    [
        a_folder_without_a_config, a_missing_folder, a_file, a_folder_of_runs, a_folder_of_tables, the_same_run,
        a_half_written_config, an_empty_config, an_infinite_radius, an_unknown_device,
    ],
    ids=lambda case: case.__name__,
)  # fmt: skip
def test_runs_and_options_that_cannot_be_compared_are_refused_with_an_error(case, runs):
    arguments, parts = case(runs)
    done = run_bisam("compare", *arguments)
    assert done.exit_code == 1
    assert isinstance(done.exception, SystemExit)
    assert done.output.startswith("Error: ")
    for part in parts:
        assert part in done.output


# Something is missing on one side: the rest is compared.


def missing_weights(sam):
    (sam / "best.safetensors").unlink()
    return "it has no best.safetensors: put that file back into its folder, or train it again"


def an_unfinished_run(sam):
    for name in ("best.safetensors", "result.json", "receipt.json"):
        (sam / name).unlink()
    return "it has no best.safetensors, which is written when a run is finished"


def a_diverged_run(sam):
    (sam / "best.safetensors").unlink()
    edit(sam, "result.json", status="diverged")
    return "it diverged and left no best.safetensors"


def damaged_weights(sam):
    path = sam / "best.safetensors"
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)
    return "its best.safetensors cannot be used: it is cut off or damaged: its digest is another one"


def weights_that_are_not_finite(sam):
    save(sam, {**load_file(sam / "best.safetensors"), "classifier.bias": torch.full((10,), math.nan)})
    return "its best.safetensors has values that are not finite"


def weights_without_a_finite_loss(sam):
    weights = load_file(sam / "best.safetensors")
    save(sam, {**weights, "classifier.weight": 1e38 * weights["classifier.weight"]})
    return "its training loss is "


def weights_of_another_architecture(sam):
    edit(sam, "config.json", model="resnet20")
    return "its weights are not those of resnet20: "


def an_unknown_model(sam):
    edit(sam, "config.json", model="digitsnet2")
    return "its model cannot be made: unknown model 'digitsnet2': the nearest names are digitsnet"


def a_model_from_a_file(sam):
    (sam / "net.py").write_text("raise SystemExit('this file was run')\n")
    edit(sam, "config.json", model=f"{sam / 'net.py'}:net")
    return f"its model is {sam / 'net.py'}:net, code that is not run because a record names it: allow it by"


def an_unknown_data_set(sam):
    edit(sam, "config.json", data="digit")
    return "its data cannot be loaded: there is no data set 'digit'. Did you mean digits?"


def different_data(sam):
    edit(sam, "receipt.json", data_checksum="0123456789abcdef")
    return "these are not the data that it was trained on: their sha256 is 511f05b04534… and its receipt has 0123"


def a_config_with_wrong_types(sam):
    edit(sam, "config.json", data=3)
    return "its configuration has values that this version does not support: 'data' is 3"


def a_config_out_of_range(sam):
    edit(sam, "config.json", validation=2.0)
    return "its configuration is not valid: validation must lie between"


def a_config_without_a_seed(sam):
    edit(sam, "config.json", seed=None)
    return "its configuration lacks seed"


def save(folder, weights):
    with records.RunFolder.open(folder, records.read(folder).config) as run:
        run.save_weights(weights)


@pytest.mark.parametrize(
    "case",
    [
        missing_weights, an_unfinished_run, a_diverged_run, damaged_weights, weights_that_are_not_finite,
        weights_without_a_finite_loss, weights_of_another_architecture, an_unknown_model, a_model_from_a_file,
        an_unknown_data_set, different_data, a_config_with_wrong_types, a_config_out_of_range, a_config_without_a_seed,
    ],
    ids=lambda case: case.__name__,
)  # fmt: skip
def test_if_weights_of_one_run_cannot_be_diagnosed_the_reason_is_shown_and_the_rest_is_compared(case, runs):
    reason = case(runs.sam)
    done = run_bisam("compare", runs.sam, runs.sgd, *QUICK)
    assert done.exit_code == 0, done.output
    assert f"sam: its weights are not diagnosed: {reason}" in done.output
    assert "sgd: its weights" not in done.output
    text = text_of(done)
    assert "training loss at w " in text  # the curves of both
    assert "parameters – 30,762" in text  # the weights of the other


def test_missing_data_are_shown_as_the_reason_why_weights_are_not_diagnosed(runs, tmp_path):
    (tmp_path / "empty").mkdir()
    edit(runs.sam, "config.json", data="cifar10")
    done = run_bisam("compare", runs.sam, runs.sgd, *QUICK, "--data", tmp_path / "empty")
    assert done.exit_code == 0, done.output
    assert "sam: its weights are not diagnosed: its data cannot be loaded: " in done.output
    assert "sgd: its weights are not diagnosed: its data cannot be loaded: digits is not read from files" in done.output


@pytest.mark.parametrize(("options", "expected"), [([], {True, False}), (["--partial-data"], {True})])
def test_partial_data_is_accepted_for_runs_trained_on_it_or_with_that_option(runs, monkeypatch, options, expected):
    edit(runs.sam, "config.json", partial_data=True)
    partial_values = set()

    def open_and_record(name, partial, **others):
        partial_values.add(partial)
        return open_pool(name, False, **others)

    monkeypatch.setattr(cli_compare, "open_pool", open_and_record)
    assert run_bisam("compare", runs.sam, runs.sgd, *QUICK, *options).exit_code == 0
    assert partial_values == expected


def out_of_memory():
    raise torch.OutOfMemoryError("CUDA out of memory")


def unreadable_files():
    raise OSError("Stale file handle")


class OutOfMemoryInAnEpoch:
    def __iter__(self):
        raise torch.OutOfMemoryError("CUDA out of memory")


def images_of_the_wrong_shape():
    return [(torch.zeros(4, 3, 8, 8), torch.zeros(4, dtype=torch.long))]


@pytest.mark.parametrize(
    ("training", "reason"),
    [
        (out_of_memory, "digitsnet does not fit into the memory of cpu: use --device cpu"),
        (OutOfMemoryInAnEpoch, "digitsnet does not fit into the memory of cpu: use --device cpu"),
        (unreadable_files, "Stale file handle"),
        (images_of_the_wrong_shape, "digitsnet does not accept the data, digits: "),
    ],
)
def test_a_failure_during_diagnosis_is_shown_as_the_reason_why_weights_are_not_diagnosed(runs, training, reason):
    def load_and_fail(name, partial):
        data = digits(name, partial)
        data.training = lambda *_: training()
        return data

    found = comparison.compare(runs.sam, runs.sgd, load_and_fail, CPU, SMALL)
    for side in found.sides:
        assert side.inspection is None
        assert side.missing.startswith(reason)


def test_code_that_a_record_names_is_run_only_if_that_is_allowed(runs, tmp_path):
    code = tmp_path / "model.py"
    code.write_text("raise SystemExit('it was run')")
    edit(runs.sam, "config.json", model=f"{code}:net")
    (runs.sam / "receipt.json").unlink()  # which has the digest of the configuration
    found = comparison.compare(runs.sam, runs.sgd, digits, CPU, SMALL)
    assert "code that is not run because a record names it" in found.a.missing
    found = comparison.compare(runs.sam, runs.sgd, digits, CPU, SMALL, run_code=True)
    assert "it was run" in found.a.missing


def test_without_a_receipt_a_note_says_that_the_data_are_not_verified(runs):
    (runs.sam / "receipt.json").unlink()
    done = run_bisam("compare", runs.sam, runs.sgd, *QUICK)
    assert "sam: it has no receipt with a checksum of its data" in done.output
    assert "sgd: it has no receipt" not in done.output
    assert "parameters 30,762 30,762" in text_of(done)


def test_weights_that_may_belong_to_another_run_are_reported(runs):
    shutil.copy(runs.sgd / "best.safetensors", runs.sam)
    done = run_bisam("compare", runs.sam, runs.sgd, *QUICK)
    assert "they may belong to another run" in done.output
    assert "sgd: its weights have" not in done.output


# Incomplete records.


def test_an_unfinished_run_is_shown_with_its_epochs_so_far(runs):
    an_unfinished_run(runs.sam)
    lines = (runs.sam / "metrics.jsonl").read_text().splitlines(keepends=True)
    (runs.sam / "metrics.jsonl").write_text(lines[0])
    text = text_of(run_bisam("compare", runs.sam, runs.sgd, "--no-weights"))
    assert "status not finished done" in text
    assert "epochs 1 of 2 2 of 2" in text
    assert "epoch 1 2 – learning rate" in text
    seconds = json.loads(lines[0])["seconds"]
    assert f"seconds {seconds:.1f} " in text


def test_half_written_records_are_reported_and_the_rest_is_shown(runs):
    with (runs.sam / "metrics.jsonl").open("a") as file:
        file.write('{"epoch": 2, "lo')
    (runs.sgd / "result.json").write_text('{"status"')
    done = run_bisam("compare", runs.sam, runs.sgd, "--no-weights")
    assert done.exit_code == 0, done.output
    assert "sam: metrics.jsonl: the last line is half-written." in done.output
    assert "sgd: result.json: it is half-written" in done.output
    assert "status done not finished" in text_of(done)
    assert "epoch 2 2 – learning rate" in text_of(done)


def test_a_diverged_run_is_shown_without_accuracies(runs):
    edit(runs.sam, "result.json", status="diverged", validation_accuracy=-1.0, test_accuracy=10.0)
    text = text_of(run_bisam("compare", runs.sam, runs.sgd, "--no-weights"))
    assert "validation accuracy, per cent – " in text
    assert "test accuracy, per cent – " in text


def test_a_run_marked_as_not_counted_is_shown_without_test_accuracy(runs):
    (runs.sam / "not-counted.txt").write_text("The wrong labels.")
    text = text_of(run_bisam("compare", runs.sam, runs.sgd, "--no-weights"))
    assert "status not counted done" in text
    assert "test accuracy, per cent – " in text


def test_the_throughput_is_shown_with_the_number_of_simultaneous_runs(runs):
    lines = (runs.sam / "metrics.jsonl").read_text().splitlines()
    last = {**json.loads(lines[-1]), "samples_per_second": 8726.4, "together": 6}
    (runs.sam / "metrics.jsonl").write_text("\n".join([*lines[:-1], json.dumps(last), ""]))
    text = text_of(run_bisam("compare", runs.sam, runs.sgd, "--no-weights"))
    assert "samples per second 8,726 " in text
    assert "runs at once, each at that rate 6 1" in text


def test_values_that_differ_only_in_the_last_digit_are_shown_with_all_digits():
    (found,) = comparison.changes({"seed": 0, "lr": 0.1234567}, {"seed": 0, "lr": 0.1234568})
    assert (found.a, found.b) == ("0.1234567", "0.1234568")


def test_invalid_numbers_in_records_are_shown_as_nan_or_inf_or_a_dash(runs):
    row = {"epoch": 2, "loss": "nan", "error": "nan", "flips": "inf", "lr": True, "ascent_norm": 10**400}
    with (runs.sam / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({**row, "validation_accuracy": "much"}) + "\n")
    edit(runs.sam, "result.json", test_accuracy="nan", best_epoch="last", seconds=10**400)
    done = run_bisam("compare", runs.sam, runs.sgd, *QUICK)
    assert done.exit_code == 0, done.output
    text = text_of(done)
    assert "test accuracy, per cent – " in text
    assert "tested epoch – 2" in text
    assert "seconds – " in text
    assert "training loss at w nan " in text
    assert "training error at w nan % " in text
    assert "flips per batch inf –" in text
    assert "learning rate – 0.025" in text
    assert "norm of the ascent's gradient" not in text
    assert "parameters 30,762 30,762" in text


def test_hardware_commit_torch_version_date_and_data_checksum_of_each_run_are_shown(tmp_path, recorded, write_run):
    receipt = {
        "cpu": "Xeon",
        "commit": "abc",
        "torch": "2.13",
        "date": "2026-11-18",
        "data_checksum": "0123456789abcdef",
    }
    made = write_run(tmp_path / "sam", recorded("demo/40%/sam", receipt=receipt))
    bare = write_run(tmp_path / "sgd", recorded("demo/40%/sgd"))
    found = comparison_tables.sheets(comparison.compare(made, bare, digits, CPU, None))
    assert [sheet.title for sheet in found if not sheet.rows] == []
    (results,) = (sheet for sheet in found if sheet.title == "Results")
    assert [row[:3] for row in results.rows][-5:] == [
        ["hardware", "Xeon", "–"], ["commit", "abc", "–"], ["torch", "2.13", "–"], ["date", "2026-11-18", "–"],
        ["data, sha256", "0123456789ab", "–"],
    ]  # fmt: skip


def test_fields_that_an_older_version_did_not_record_have_their_defaults_and_are_listed(runs):
    edit(runs.sam, "config.json", cutout=None, padding=None, flip=None)
    done = run_bisam("compare", runs.sam, runs.sgd, *QUICK)
    text = text_of(done).split("Results")[0]
    assert "sam: it does not record padding, flip, cutout." in text
    assert "padding 4, not recorded 0" in text
    assert "flip true, not recorded false" in text
    assert "cutout 0" not in text  # the default of both
    assert "parameters 30,762 30,762" in text_of(done)


def test_a_configuration_without_cutout_probability_is_read_as_cutout_of_every_image():
    """Versions without the field cut out a part of every image; the current default is a half of them."""
    old, new = {"cutout": 16}, {"cutout": 16, "cutout_probability": 0.5}
    assert comparison.changes(old, new) == [Change("cutout_probability", "1, not recorded", "0.5")]
    assert comparison.changes(old, {**new, "cutout_probability": 1.0}) == []
    assert comparison.changes({"cutout": 0}, {"cutout": 0, "cutout_probability": 0.5}) == []


def test_a_field_that_one_of_the_methods_does_not_use_is_not_listed_as_a_difference():
    sam, sgd = {"method": "sam", "rho": 0.07, "lr": 0.1}, {"method": "sgd", "rho": 0.1, "lr": 0.2}
    assert [change.name for change in comparison.changes(sam, sgd)] == ["method", "lr"]
    assert [change.name for change in comparison.changes(sam, {**sam, "rho": 0.1})] == ["rho"]


def test_unknown_fields_and_fields_without_a_default_are_differences_if_only_one_run_has_them(runs):
    edit(runs.sam, "config.json", novelty=[1], recipe=None)
    text = text_of(run_bisam("compare", runs.sam, runs.sgd, "--no-weights")).split("Results")[0]
    assert "novelty [1] not recorded" in text
    assert "recipe not recorded demo" in text


def test_equal_configurations_are_noted(runs):
    shutil.copy(runs.sam / "config.json", runs.sgd)
    done = run_bisam("compare", runs.sam, runs.sgd, "--no-weights")
    assert "Their configurations are the same." in done.output
    assert "what differs" not in done.output


# Which samples are used.


def test_both_runs_are_diagnosed_on_random_samples_that_both_were_trained_on(originals):
    sam, sgd = (trained(records.read(originals[name]), digits) for name in ("sam", "sgd"))
    sgd.config = replace(sgd.config, seed=1)
    rows = shared_rows([sam, sgd], 800)
    assert len(rows) == len(set(rows.tolist())) == 800
    for seed in (0, 1):
        _, validation = split(range(1197), 0.1, seed=seed)
        assert not set(rows.tolist()) & set(validation.tolist())
    assert rows[:100].tolist() == shared_rows([sam, sgd], 100).tolist()
    assert rows.tolist() != sorted(rows.tolist())  # from everywhere, not the first ones


def test_runs_that_share_few_samples_are_each_diagnosed_on_their_own_which_is_noted(runs):
    edit(runs.sam, "config.json", validation=0.9, seed=1)
    edit(runs.sgd, "config.json", validation=0.9)
    found = comparison.compare(runs.sam, runs.sgd, digits, CPU, SMALL)
    assert "They share few training samples, and each is diagnosed on its own." in found.notes
    assert found.a.inspection.samples == found.b.inspection.samples == 40


@pytest.mark.parametrize(
    ("changes", "note"),
    [
        ({"noise": 0.2}, "Their training labels differ"),
        ({"seed": 1}, "Their training labels differ"),
        ({"seed": 1, "noise": 0.0}, None),
        ({"lr": 1.0}, None),
    ],
)
def test_differing_training_labels_are_noted(runs, changes, note):
    edit(runs.sam, "config.json", **changes)
    if changes.get("noise") == 0.0:
        edit(runs.sgd, "config.json", noise=0.0)
    found = comparison.compare(runs.sam, runs.sgd, digits, CPU, SMALL)
    assert any(line.startswith("Their") for line in found.notes) == (note is not None)
    assert note is None or any(line.startswith(note) for line in found.notes)


def test_for_different_models_a_note_says_that_perturbation_lengths_are_not_comparable(recorded):
    def notes(*models):
        record = recorded("demo/40%/sam")
        sides = [Side(model, record, Config(model=model)) for model in models]
        return comparison._incomparable(RunComparison(*sides, []))

    assert notes("resnet20", "resnet56") == ["Their models differ: perturbations of one length are not comparable."]
    assert notes("resnet20", "resnet20") == []


def test_runs_trained_on_different_data_are_each_diagnosed_on_their_own_which_is_noted(runs):
    edit(runs.sam, "receipt.json", data_checksum="other")

    def load_two(name, partial, calls=iter((True, False))):  # noqa: B008
        data = digits(name, partial)
        data.checksum = "other" if next(calls) else data.checksum
        return data

    found = comparison.compare(runs.sam, runs.sgd, load_two, CPU, SMALL)
    assert "They were trained on different data, and each is diagnosed on its own." in found.notes
    assert found.a.inspection is not None


def test_samples_of_a_data_set_on_disk_are_selected_by_index_with_their_labels(tmp_path, hub_layout, register):
    dataset = register(hub_layout.dataset, size=None, samples={"train": 24, "test": 8})
    for part, count in dataset.samples.items():
        image = Image.fromarray(np.zeros((8, 8, 3), np.uint8))
        images = [hub_layout.encoded(image)] * count
        hub_layout.write_file(tmp_path / f"{part}-00000-of-00001.parquet", images, np.arange(count) % 4)
    data = PoolOnDisk("tiny", tmp_path, partial=False)
    assert data.count == 24
    samples = data.training(None, torch.tensor([3, 5, 6]), CPU)
    assert torch.cat([labels for _, labels in samples]).tolist() == [3, 1, 2]
    some, is_all = data.test(None, 5, CPU)
    assert (sum(len(labels) for _, labels in some), is_all) == (5, False)
    assert data.test(None, 8, CPU)[1]


# What is measured.


@pytest.fixture(scope="module")
def by_hand(originals):
    """The model of the SAM run and some of its training samples, loaded without the code under test."""
    data = load("digits")
    labels = with_noise(data.train.labels, 0.4, 10, seed=0)
    both = [trained(records.read(originals[name]), digits) for name in ("sam", "sgd")]
    rows = shared_rows(both, 40)
    model = build("digitsnet", 10)
    model.load_state_dict(load_file(originals["sam"] / "best.safetensors"))
    model.to(memory_format=torch.channels_last)

    def samples(count):
        pixels = data.train.pixels[rows[:count]]
        options = {"mean": data.mean, "std": data.std, "device": "cpu", "seed": 0, "augment": False}
        return next(iter(Batches(pixels, labels[rows[:count]], batch=count, **options).epoch(0)))

    return model, samples(40), samples(10)


def close(value):
    return pytest.approx(value, rel=1e-3, abs=1e-6)  # float32, summed over other batches


def test_an_inspection_plan_refuses_too_few_samples_or_steps():
    InspectionPlan(samples=1, steps=2)
    with pytest.raises(ValueError, match="samples must be a whole number, at least 1, got 0"):
        InspectionPlan(samples=0)
    with pytest.raises(ValueError, match="steps must be a whole number, at least 2, got 1"):
        InspectionPlan(steps=1)


def test_a_run_can_be_diagnosed_on_one_sample_but_not_on_none(originals):
    run = trained(records.read(originals["sam"]), digits)
    assert inspect(run, run.rows[:1], CPU, SMALL).samples == 1
    with pytest.raises(ValueError, match="there is no training sample to diagnose it on"):
        inspect(run, run.rows[:0], CPU, SMALL)


def test_worst_cases_and_averages_equal_those_of_the_diagnostics_functions(compared, by_hand):
    model, samples, _ = by_hand
    found = compared.a.inspection
    assert found.samples == 40
    expected = {
        "cross entropy, L2, 1 step": diagnostics.sharpness(model, samples, 0.05),
        "cross entropy, L2, 3 steps": diagnostics.sharpness(model, samples, 0.05, steps=3),
        "cross entropy, adaptive, 1 step": diagnostics.sharpness(model, samples, 0.05, adaptive=True),
        "cross entropy, adaptive, 3 steps": diagnostics.sharpness(model, samples, 0.05, adaptive=True, steps=3),
        "Q (−log), L2, 1 step": diagnostics.sharpness(model, samples, 0.05, ascent=bisam.LowerBound("log")),
        "Q (tanh), L2, 1 step": diagnostics.sharpness(model, samples, 0.05, ascent=bisam.LowerBound("tanh")),
    }
    assert [case.name for case in found.worst] == [*expected]
    for case in found.worst:
        reference = expected[case.name]
        assert case.found.value == close(reference.value)
        assert (case.found.perturbed_error, case.found.flips) == (reference.perturbed_error, reference.flips)
        assert case.found.bound == (None if reference.bound is None else close(reference.bound))
    assert found.train.loss == close(expected["cross entropy, L2, 1 step"].loss)
    assert found.train.error == expected["cross entropy, L2, 1 step"].error
    average = partial(diagnostics.average_sharpness, model, samples, 0.05, samples=3)
    assert tuple(found.average) == close(tuple(average()))
    assert tuple(found.adaptive_average) == close(tuple(average(adaptive=True)))


def test_curvature_and_surfaces_equal_those_of_the_diagnostics_functions(compared, by_hand):
    model, samples, few = by_hand
    found = compared.a.inspection
    assert found.few == 10
    assert found.eigenvalues == close(diagnostics.hessian_eigenvalues(model, few, 2, tolerance=1e-3))
    assert tuple(found.trace) == close(tuple(diagnostics.hessian_trace(model, few, samples=3)))
    line = diagnostics.surface(model, samples, points=5)
    assert found.line.coordinates == line.coordinates == [-1.0, -0.5, 0.0, 0.5, 1.0]
    assert found.line.losses == close(line.losses)
    assert found.line.errors == line.errors
    plane = diagnostics.surface(model, few, points=3, dimensions=2)
    for ours, theirs in zip(found.plane.losses, plane.losses, strict=True):
        assert ours == close(theirs)
    assert found.plane.errors == plane.errors


def test_the_test_error_agrees_with_the_recorded_test_accuracy(compared):
    for side in compared.sides:
        assert side.inspection.test_samples == 600
        assert 100 * (1 - side.inspection.test.error) == pytest.approx(side.record.result["test_accuracy"])
        assert side.inspection.notes == []
    assert compared.a.inspection.test.error != compared.b.inspection.test.error


def test_the_lower_bound_never_exceeds_the_error_after_the_perturbation(compared):
    bounds = [case.found for side in compared.sides for case in side.inspection.worst if case.found.bound is not None]
    assert len(bounds) == 4
    for found in bounds:
        assert found.bound <= found.perturbed_error


def test_an_inspection_leaves_the_model_unchanged_and_is_reproducible(originals, compared):
    run = trained(records.read(originals["sam"]), digits)
    before = {name: tensor.clone() for name, tensor in run.model.state_dict().items()}
    again = inspect(run, shared_rows([run], 40), CPU, SMALL)
    assert again == compared.a.inspection
    assert all(torch.equal(tensor, before[name]) for name, tensor in run.model.state_dict().items())


def test_progress_covers_every_stage_of_both_runs_and_reaches_each_total(originals):
    last = {}

    def progress(what, done, total):
        last[what] = (done, total)

    comparison.compare(originals["sam"], originals["sgd"], digits, CPU, SMALL, progress)
    stages = {"loss and error", "worst case", "average case", "eigenvalues", "trace", "line", "plane"}
    assert last.keys() == {f"{name}: {stage}" for name in ("sam", "sgd") for stage in stages}
    assert all(done == total for done, total in last.values())


def test_numbers_that_overflow_are_shown_as_nan(originals):
    plan = replace(SMALL, rho=1e13)
    found = comparison.compare(originals["sam"], originals["sgd"], digits, CPU, plan)
    (rises,) = (sheet for sheet in comparison_tables.sheets(found) if sheet.title.startswith("How far"))
    assert rises.rows[-2][:3] == ["average, L2", "nan ± nan", "nan ± nan"]


def test_eigenvalues_that_did_not_converge_are_noted(originals):
    run = trained(records.read(originals["sam"]), digits)
    found = inspect(run, shared_rows([run], 40), CPU, replace(SMALL, iterations=2))
    assert len(found.eigenvalues) == 2
    (note,) = found.notes
    assert note.startswith("the eigenvalues did not converge in 2 iterations")


# The column of differences, groups of seeds, and the warning about small training losses.


def test_the_last_column_shows_the_differences_of_numbers(compared):
    results = next(sheet for sheet in comparison_tables.sheets(compared) if sheet.title == "Results")
    assert results.head == ["", "sam", "sgd", "sgd − sam"]
    accuracies = [side.record.result["test_accuracy"] for side in compared.sides]
    lines = {line[0]: line[1:] for line in results.rows}
    expected = f"{accuracies[1] - accuracies[0]:+.2f}".replace("-", "−")
    assert lines["test accuracy, per cent"] == [*(f"{value:.2f}" for value in accuracies), expected]
    assert lines["status"] == ["done", "done", "–"]
    changed = next(sheet for sheet in comparison_tables.sheets(compared) if sheet.title.startswith("Configuration"))
    assert changed.head == ["", "sam", "sgd"]


@pytest.fixture
def seeds(tmp_path, recorded, write_run):
    """Records of two methods with three seeds each, in an unsorted order."""
    accuracies = {"sam": [90.0, 91.0, 93.0], "sgd": [88.0, 90.0, 90.0]}
    return [
        write_run(
            tmp_path / f"noise40-{method}-seed{seed}", recorded(f"demo/40%/{method}", seed, values[seed], trained=3)
        )
        for seed in (2, 0, 1)
        for method, values in accuracies.items()
    ]


def test_groups_of_runs_are_compared_in_pairs_of_equal_seed(seeds):
    done = run_bisam("compare", *seeds, "--no-weights")
    assert done.exit_code == 0, done.output
    found = comparison.compare(*comparison.groups(seeds), digits, CPU, None)
    assert [side.name for side in found.sides] == ["sam", "sgd"]
    assert [[one.seed for one in side.members] for side in found.sides] == [[0, 1, 2]] * 2
    results = next(sheet for sheet in comparison_tables.sheets(found) if sheet.title == "Results")
    line = next(line for line in results.rows if line[0].startswith("test accuracy"))
    gaps = [-2.0, -1.0, -3.0]
    half = 4.302653 * statistics.stdev(gaps) / 3**0.5  # Student's t with two degrees of freedom
    low, high = (f"{-2 + sign * half:+.2f}".replace("-", "−") for sign in (-1, 1))
    assert line[1:] == ["91.33 ± 1.53, n = 3", "89.33 ± 1.15, n = 3", f"−2.00\n{low} to {high}"]
    assert [change.name for change in found.changes] == ["method", "epochs"]  # and not the seed
    assert "91.33 ± 1.53, n = 3" in text_of(done)
    page = Path("compare.html").read_text()
    (series,) = json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])["series"]
    assert [(method["title"], method["n"]) for method in series["methods"]] == [("sam", 3), ("sgd", 3)]


def test_names_of_groups_omit_the_seed_of_their_first_run_and_names_of_two_single_runs_keep_it(seeds):
    sam2, _, sam0, sgd0, sam1, sgd1 = seeds

    def names(first, second):
        return [one.name for one in comparison.compare(first, second, digits, CPU, None).members]

    assert names([sam0, sam1], [sgd1]) == ["sam", "sam, seed 1", "sgd"]
    assert names([sam0], [sgd1, sgd0]) == ["sam", "sgd", "sgd, seed 1"]
    assert names(sam0, sgd1) == ["sam-seed0", "sgd-seed1"]
    assert names([sam0, sam1], [sam2]) == ["seed0", "seed0, seed 1", "seed2"]  # nothing else differs


def test_the_seed_is_a_difference_between_two_runs_but_not_if_one_side_is_a_group(seeds):
    sam2, _, sam0, sgd0, sam1, sgd1 = seeds

    def changed(first, second):
        found = comparison.compare(first, second, digits, CPU, None)
        assert ("Their configurations are the same." in found.notes) == (not found.changes)
        return [change.name for change in found.changes]

    assert changed(sam0, sam2) == ["seed"]
    assert changed([sam0, sam1], [sam2]) == []
    assert changed([sam1], [sgd0, sgd1]) == changed([sam1, sam2], [sgd0, sgd1]) == ["method", "epochs"]


def test_the_order_of_fields_in_a_configuration_does_not_affect_grouping(seeds):
    path = seeds[0] / "config.json"
    whole = json.loads(path.read_text())
    path.write_text(json.dumps({**whole, "config": dict(reversed(whole["config"].items()))}))
    assert [len(side) for side in comparison.groups(seeds)] == [3, 3]


def test_fields_that_an_older_version_did_not_record_are_grouped_by_their_defaults(seeds):
    edit(seeds[0], "config.json", start=None, every=None, flip=False)
    for folder in seeds[1:]:
        edit(folder, "config.json", flip=False)
    assert [len(side) for side in comparison.groups(seeds)] == [3, 3]
    edit(seeds[0], "config.json", flip=None)  # true, by default
    with pytest.raises(ValueError, match="the 6 runs have 3 configurations"):
        comparison.groups(seeds)


def test_runs_of_more_than_two_configurations_and_a_single_run_are_refused(seeds, tmp_path, recorded, write_run):
    other = write_run(tmp_path / "other", recorded("demo/40%/bisam-log"))
    done = run_bisam("compare", *seeds, other)
    assert done.exit_code == 1
    assert done.output.startswith("Error: the 7 runs have 3 configurations, apart from their seeds: give runs of two")
    done = run_bisam("compare", seeds[0])
    assert done.output.startswith("Error: give two runs to compare, or the seeds of two groups, got 1")


@pytest.mark.parametrize("compiled", [False, True])
def test_two_runs_with_the_same_seed_on_one_side_are_refused(seeds, compiled, tmp_path, recorded, write_run):
    """The same folder twice, or the same training compiled: only one of them would be counted."""
    again = seeds[0]
    if compiled:
        again = write_run(tmp_path / "compiled", recorded("demo/40%/sam", 2, 92.0, trained=3, compile=True))
    done = run_bisam("compare", *seeds, again, "--no-weights")
    assert done.exit_code == 1
    expected = f"Error: {seeds[0]} and {again} are runs of one side with the same seed, 2: give one of them"
    assert done.output.strip() == expected


def test_weights_of_every_seed_are_diagnosed(originals, tmp_path):
    for name in ("sam", "sgd"):
        for seed in (0, 1):
            shutil.copytree(originals[name], tmp_path / f"{name}-seed{seed}")
            edit(tmp_path / f"{name}-seed{seed}", "config.json", seed=seed)
    folders = [tmp_path / f"{name}-seed{seed}" for name in ("sam", "sgd") for seed in (0, 1)]
    found = comparison.compare(*comparison.groups(folders), digits, CPU, SMALL)
    assert all(one.inspection is not None for one in found.members)
    sheets = {sheet.title.split(" within ")[0]: sheet for sheet in comparison_tables.sheets(found)}
    weights, rises = sheets["At the weights"], sheets["How far the loss rises"]
    assert "After ±: a standard deviation over the runs of a group." in rises.notes[0]
    losses = [[one.inspection.train.loss for one in side.members] for side in found.sides]
    line = next(line for line in weights.rows if line[0] == "training loss")
    assert [cell.split(" ± ")[0] for cell in line[1:3]] == [f"{statistics.fmean(of_side):#.3g}" for of_side in losses]


def test_sides_have_the_colours_and_dashes_of_their_methods_in_a_report(compared):
    report = {style.title: (style.colour, style.dash) for style in styles(["sgd", "sam"])}
    assert [(look.colour, look.dash) for look in looks(compared)] == [report["SAM"], report["SGD"]]
    same = styles(["sam", "sam"], ["a", "b"])
    assert same[0].colour != same[1].colour
    assert same[0].dash != same[1].dash


def test_the_page_warns_that_at_a_training_loss_near_0_a_small_rise_is_no_flat_minimum(compared):
    def with_loss(side, loss):
        return replace(side, inspection=replace(side.inspection, train=LossAndError(loss, 0.0)))

    a, b = compared.sides
    near, far = with_loss(a, 0.01), with_loss(b, 1.0)
    warning = explanation(RunComparison(near, far, []))
    assert warning.startswith("A small rise is no flat minimum here: the training loss of sam is 0.01 at its weights")
    assert explanation(RunComparison(with_loss(a, 0.9), far, [])) == ""
    assert warning in write(RunComparison(near, far, []))
