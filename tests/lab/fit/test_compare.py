"""`bisam compare` of runs of `bisam fit`: their weights are diagnosed on the data of the user."""

import csv
import re
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from bisam.lab import fit, records, spec
from bisam.lab.cli import compare as cli_compare
from bisam.lab.compare.inspection import InspectionPlan, inspect
from bisam.lab.compare.trained import shared_rows, trained
from bisam.lab.config import recorded
from bisam.lab.data.pools import open_pool
from bisam.lab.data.sources import own_data
from bisam.lab.models import build

CPU = torch.device("cpu")
SMALL = InspectionPlan(samples=8, steps=2, draws=2, eigenvalues=1, iterations=2, signs=2, points=3, grid=3)
QUICK = ["--samples", 8, "--device", "cpu"]
SHORT = ["--methods", "sam", "--rho", 0.05, "--epochs", 1, "--batch", 8, "--seeds", "0", "--device", "cpu"]

NET = """
from torch import nn
def net(classes):
    return nn.Sequential(nn.Linear(30, 4), nn.ReLU(), nn.Linear(4, classes))
"""
CONV = """
from torch import nn
def net(classes):
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, classes))
"""
DATA = """
import torch
def data():
    x, y = torch.randn(60, 30, generator=torch.Generator().manual_seed(0)), torch.arange(60) % 2
    return (x[:40], y[:40]), (x[40:], y[40:])
"""


@pytest.fixture(autouse=True)
def coarse(tmp_path, monkeypatch):
    """The command runs in the test's folder, where it writes its page, and the diagnoses are quick."""
    monkeypatch.setattr(cli_compare, "InspectionPlan", lambda **given: replace(SMALL, **given))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def fitted(bisam, tmp_path):
    """The two runs of a short fit: the base optimizer's and SAM's."""

    def train(*arguments):
        done = bisam("fit", *arguments, *SHORT, "--runs", tmp_path / "runs")
        assert done.exit_code == 0, done.output
        found = {record.config["method"]: record for record in records.find_records(tmp_path / "runs")}
        return [found.pop("sam"), *found.values()]

    return train


def compared(bisam, runs, *options):
    done = bisam("compare", *(run.folder for run in runs), *QUICK, *options)
    assert done.exit_code == 0, done.output
    return " ".join(done.output.replace("│", " ").split())


def test_runs_on_images_are_diagnosed(bisam, fitted, images, tmp_path):
    (tmp_path / "conv.py").write_text(CONV)
    runs = fitted(images, "--set", "size=8", "--model", tmp_path / "conv.py:net")
    found = compared(bisam, runs, "--run-code")
    assert "not diagnosed" not in found
    errors = [f"{100 - run.result['test_accuracy']:.1f} %" for run in runs]
    assert f"test error {errors[0]} {errors[1]}" in found  # of all 6 images, at the size that they were trained in
    assert "they may belong to another run" not in found
    assert "eigenvalue 1" in found


@pytest.fixture
def small_bert(minilm, tmp_path):
    """A folder with the tokenizer of the MiniLM and a small network with random weights."""
    from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification

    tokenizer = AutoTokenizer.from_pretrained(spec.folder_or_name(spec.parse_model(minilm).name))
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    model = BertForSequenceClassification(BertConfig(vocab_size=len(tokenizer), **sizes))
    for part in (tokenizer, model):
        part.save_pretrained(tmp_path / "bert")
    return tmp_path / "bert"


def test_runs_on_texts_are_diagnosed_with_the_tokenizer_of_the_model(bisam, fitted, reviews, small_bert):
    runs = fitted(reviews, "--text", "review", "--label", "stars", "--model", f"transformers:{small_bert}")
    (small_bert / "model.safetensors").unlink()  # its weights are the run's
    found = compared(bisam, runs)
    assert "not diagnosed" not in found
    errors = [f"{100 - run.result['test_accuracy']:.1f} %" for run in runs]
    assert f"test error {errors[0]} {errors[1]}" in found
    assert "trace" in found


def test_runs_on_rows_are_diagnosed_on_training_samples_with_their_noisy_labels(fitted, breast_cancer):
    """Against the table read by hand: loss and error at the weights, with noisy labels."""
    run, _ = fitted(breast_cancer, "--set", "noise=0.4")
    loaded = trained(run, lambda name, _: open_pool(name, False, folder=None, log=print))
    assert loaded.is_verified
    rows = shared_rows([loaded], 100)
    samples = loaded.pool.training(recorded(run.config), rows, CPU)
    found = inspect(loaded, rows, CPU, SMALL)

    with breast_cancer.open() as file:
        table = list(csv.reader(file))[1:]
    known = {tuple(map(float, row[:-1])): row[-1] for row in table}
    x, noisy = (torch.cat(parts) for parts in zip(*samples, strict=True))
    classes = ["benign", "malignant"]
    clean = [
        classes.index(next(label for row, label in known.items() if torch.allclose(torch.tensor(row), one)))
        for one in x[:10]
    ]
    assert len(x) == 100
    assert clean != noisy[:10].tolist()  # of ten labels, 0.4 of which are another or the same class

    model = build("perceptron", 2, features=30)
    model.load_state_dict(load_file(run.folder / "best.safetensors"))
    logits = model.eval()(x)
    assert found.train.loss == pytest.approx(F.cross_entropy(logits, noisy).item(), rel=1e-6)
    assert found.train.error == pytest.approx((logits.argmax(1) != noisy).double().mean().item())
    assert found.test_samples == 113
    assert 100 * (1 - found.test.error) == pytest.approx(run.result["test_accuracy"])


def test_validation_samples_are_not_used_for_the_diagnosis(fitted, breast_cancer):
    run, _ = fitted(breast_cancer)
    config = recorded(run.config)
    pool = open_pool(config.data, False, folder=None, log=print)
    validated = torch.cat([x for x, _ in own_data(config.data).loaders(config, CPU).validation.epoch(0)])
    assert len(validated) + len(pool.rows(config)) == pool.count == 456
    diagnosed = torch.cat([x for x, _ in pool.training(config, pool.rows(config), CPU)])
    assert {*map(tuple, validated.tolist())}.isdisjoint(map(tuple, diagnosed.tolist()))


def test_missing_or_changed_data_are_reported_and_moved_data_can_be_named(bisam, fitted, breast_cancer, tmp_path):
    own = tmp_path / "own.csv"
    own.write_bytes(breast_cancer.read_bytes())
    runs = fitted(own)
    moved = own.rename(tmp_path / "moved.csv")
    assert f"its data cannot be loaded: {own} is not here: start from the folder" in compared(bisam, runs)
    assert "not diagnosed" not in compared(bisam, runs, "--data", moved)
    own.write_bytes(b"".join(breast_cancer.read_bytes().splitlines(keepends=True)[:-5]))
    assert "these are not the data that it was trained on" in compared(bisam, runs)


def test_code_named_in_records_is_run_only_with_the_run_code_option(bisam, fitted, tmp_path):
    net, data = tmp_path / "net.py", tmp_path / "own.py"
    net.write_text(NET)
    data.write_text(DATA)
    runs = fitted(f"{data}:data", "--model", f"{net}:net")
    for path in (net, data):
        path.write_text(f"raise SystemExit('it was run')\n{path.read_text()}")
    found = compared(bisam, runs)
    assert f"{data}:data is code, which is not run because a record names it: allow it by --run-code" in found
    assert "it was run" not in found
    assert "it was run" in compared(bisam, runs, "--run-code")
    for path in (net, data):
        path.write_text(re.sub("^raise.*\n", "", path.read_text()))
    found = compared(bisam, runs, "--data", f"{data}:data")
    assert f"its model is {net}:net, code that is not run" in found
    found = compared(bisam, runs, "--run-code")
    assert "not diagnosed" not in found
    assert "parameters 134 134" in found


def test_data_that_were_only_in_memory_are_reported_as_the_reason_for_no_diagnosis(bisam, tmp_path):
    x, y = torch.randn(60, 4), torch.arange(60) % 2
    fit(lambda: torch.nn.Linear(4, 2), (x, y), methods=["sam"], rho=0.05, seeds=1, epochs=1, runs="kept", quiet=True)
    assert "they were in the memory of a program" in compared(bisam, records.find_records(tmp_path / "kept"))
