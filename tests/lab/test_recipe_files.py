"""Custom tables from a TOML or Python file: trained, resumed and reported as the paper's."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from bisam.lab import records
from bisam.lab.cli import app
from bisam.lab.recipe_files import find_recipe, is_file
from bisam.lab.tables.cells import collect

TOML = """
title = "Digits, clean and noisy"
methods = ["sgd", "sam"]
seeds = 2

[settings]
data = "digits"
model = "digitsnet"
epochs = 1
batch = 64
padding = 0
flip = false
precision = "fp32"
measures = ["accuracy", "macro_f1"]

[rows.clean]
[rows."noisy labels"]
noise = 0.4

[method.sgd]
epochs = 2
"""

PYTHON = """
from bisam.lab.config import Config
from bisam.lab.recipes import table

def recipe():
    def config(row, method):
        return Config(data="digits", model="digitsnet", epochs=1, noise=float(row), padding=0, precision="fp32")
    return table("any", "By noise", ["0.0", "0.2"], ["sgd", "sam"], config, seeds=2)
"""

NET = """
import torch

def net(classes):
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, classes))
"""


@pytest.fixture
def toml(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.toml").write_text(TOML)
    return "mine.toml"


def bisam(*arguments):
    return CliRunner().invoke(app, [*map(str, arguments)], env={"COLUMNS": "200"})


def test_a_toml_file_defines_a_table(toml):
    recipe = find_recipe(toml)
    assert (recipe.name, recipe.title, recipe.rows, recipe.seeds) == (
        "mine", "Digits, clean and noisy", ["clean", "noisy labels"], 2,
    )  # fmt: skip
    sgd, sam = recipe.cells["clean", "sgd"], recipe.cells["noisy labels", "sam"]
    assert (sgd.epochs, sgd.noise, sam.epochs, sam.noise) == (2, 0.0, 1, 0.4)
    assert (sam.title, sam.row, sam.recipe, sam.method) == (recipe.title, "noisy labels", "mine", "sam")
    assert [*find_recipe(f"{toml}/noisy labels/sam").cells] == [("noisy labels", "sam")]


def test_a_custom_table_is_trained_and_reported_from_its_records_alone(toml):
    trained = bisam("train", toml, "--seeds", 3, "--device", "cpu")
    assert trained.exit_code == 0, trained.output
    assert "noisy labels, macro F1" in trained.output
    Path(toml).unlink()
    (table,) = collect(records.find_records(Path("runs"))).tables
    assert (table.title, table.rows, table.recipe.methods) == (
        "Digits, clean and noisy", ["clean", "noisy labels"], ["sgd", "sam"],
    )  # fmt: skip
    assert [*table.measured("clean", "sam", "test_macro_f1")] == [3]
    reported = bisam("report", "runs")
    assert reported.exit_code == 0, reported.output
    assert "clean, accuracy: SAM − SGD" in reported.output
    assert "of no recipe" not in reported.output


def test_after_a_change_of_title_finished_runs_are_not_trained_again(toml):
    for title in ("Digits, clean and noisy", "Digits"):
        Path(toml).write_text(TOML.replace("Digits, clean and noisy", title))
        done = bisam("train", f"{toml}/clean", "--seeds", 1, "--device", "cpu")
        assert done.exit_code == 0, done.output
    assert "2 of 2 runs are done already" in done.output
    (table,) = collect(records.find_records(Path("runs"))).tables
    assert (table.changes, table.recipe.methods) == ("", ["sgd", "sam"])


def test_runs_recorded_under_different_titles_belong_to_one_table(toml):
    """A title does not affect a run: a seed trained under another title makes a second pair."""
    for title, seed in (("Digits, clean and noisy", 0), ("Digits", 1)):
        Path(toml).write_text(TOML.replace("Digits, clean and noisy", title))
        done = bisam("train", f"{toml}/clean", "--seeds", seed, "--device", "cpu")
        assert done.exit_code == 0, done.output
    (table,) = collect(records.find_records(Path("runs"))).tables
    assert ([*table.measured("clean", "sam")], table.changes) == ([0, 1], "")
    bisam("sweep", f"{toml}/clean/sam", "--over", "rho", "--values", "0.05,0.1", "--seeds", "0-1", "--device", "cpu")
    swept = bisam("sweep", f"{toml}/clean/sam", "--over", "rho", "--values", "0.05,0.1", "--seeds", "0-1")
    assert "at most half of the points have them" not in swept.output


def test_an_empty_title_and_a_byte_order_mark_are_accepted(toml):
    Path(toml).write_text(TOML.replace('"Digits, clean and noisy"', '""'), encoding="utf-8-sig")
    assert find_recipe(toml).title == "mine"


def test_two_different_files_with_the_same_table_name_are_refused(toml):
    for folder, noise in {"a": 0.2, "b": 0.4}.items():
        Path(folder).mkdir()
        Path(folder, toml).write_text(TOML.replace("noise = 0.4", f"noise = {noise}").replace("title =", "#"))
    done = bisam("train", f"a/{toml}", f"b/{toml}")
    assert done.exit_code == 1
    assert "two tables are called mine, and their noisy labels/sgd differ: rename one of the files" in done.stderr
    assert not Path("runs").exists()


def test_runs_with_settings_changed_on_the_command_line_form_a_separate_table(toml):
    for options in ([], ["--set", "lr=0.01"]):
        done = bisam("train", f"{toml}/clean/sam", "--device", "cpu", *options)
        assert done.exit_code == 0, done.output
    own, changed = collect(records.find_records(Path("runs"))).tables
    assert (own.changes, changed.changes) == ("", "lr=0.01")


def test_a_python_file_defines_a_table(tmp_path):
    (tmp_path / "by_noise.py").write_text(PYTHON)
    recipe = find_recipe(f"{tmp_path}/by_noise.py")
    assert (recipe.name, recipe.title, recipe.rows) == ("by_noise", "By noise", ["0.0", "0.2"])
    assert recipe.cells["0.2", "sam"].title == "By noise"


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("title =", "titel =", "has the unknown key 'titel': the nearest names are title"),
        ('"sam"]', '"sma"]', "unknown method 'sma': the nearest names are sam"),
        ("epochs = 1", "epoch = 1", "settings has 'epoch', which is no setting: the nearest names are epochs"),
        ("epochs = 1", 'epochs = "many"', "epochs is a whole number, got 'many'"),
        ("noise = 0.4", "noise = 4.0", "row noisy labels: noise must lie between 0 and 1, got 4.0"),
        ("[rows.clean]", "[rows.clean", "is not TOML"),
        ("seeds = 2", "seeds = 0", "seeds is how many there are"),
        ("seeds = 2", "seeds = true", "seeds is how many there are, such as 3, got True"),
        ("[method.sgd]\nepochs = 2\n", "", "method must be tables [method.NAME], got 3"),
        ('[rows."noisy labels"]', '[rows."80%"]\n[rows.noise80]', "'80%' and 'noise80' of mine would share the folder"),
        ('methods = ["sgd", "sam"]', "", "needs methods ="),
        ("[method.sgd]", "[method.gsam]", "has [method.gsam], which is not among its methods: add it"),
    ],
)
def test_a_faulty_file_is_refused_with_a_message_that_names_the_fault(before, after, message, toml):
    top = "method = 3\n" if "must be tables" in message else ""
    Path(toml).write_text(top + TOML.replace(before, after))
    done = bisam("train", toml)
    assert done.exit_code == 1
    assert message in done.stderr
    assert not Path("runs").exists()


def test_files_that_cannot_be_recipes_are_refused(tmp_path):
    (tmp_path / "cifar10.toml").write_text(TOML)
    with pytest.raises(ValueError, match="is a recipe of the lab"):
        find_recipe(str(tmp_path / "cifar10.toml"))
    (tmp_path / "no.py").write_text("recipe = 3\n")
    with pytest.raises(ValueError, match="needs a function recipe"):
        find_recipe(str(tmp_path / "no.py"))
    with pytest.raises(ValueError, match="is not a file"):
        find_recipe(str(tmp_path / "missing.toml"))
    assert not is_file("cifar10/resnet56/sam")


def test_runs_of_a_network_whose_code_has_changed_are_refused_and_existing_ones_reported(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    net = Path("net.py")
    net.write_text(NET)
    Path("own.toml").write_text(TOML.replace('"digitsnet"', '"net.py:net"').replace("batch = 64", "batch = 512"))
    command = ["reproduce", "own.toml/clean", "--device", "cpu", "--seeds"]
    assert bisam(*command, "0").exit_code == 0
    net.write_text("# a comment\n" + NET)
    assert bisam(*command, "0").exit_code == 0
    net.write_text(NET.replace("torch.nn.Flatten()", "torch.nn.Flatten(), torch.nn.Softsign()"))
    for other in (command, ["train", *command[1:]], ["sweep", "own.toml/clean/sam", "--over", "rho", *command[2:]]):
        refused = bisam(*other, "0-1")
        assert refused.exit_code == 1, refused.output
        assert "net.py has changed since the runs in runs/own/clean-sam-seed0 began" in refused.stderr
        assert "give another folder with --runs" in refused.stderr
    assert len(records.find_records(Path("runs"))) == 2
    assert bisam("train", *command[1:], "1", "--runs", "apart").exit_code == 0
    Path("apart/own/clean-sam-seed1").rename("runs/own/clean-sam-seed1")  # as if trained by an older version
    warning = "Not all of these runs were trained with the same net.py:net"
    assert warning in " ".join(bisam("report").output.split())
    verified = bisam("verify")
    assert verified.exit_code == 0, verified.output
    assert f"note: Digits, clean and noisy: {warning}: the digest of its code is" in verified.output
