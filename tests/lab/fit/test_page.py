"""docs/your-data.md: its output is that of records in this repository, and its snippets run."""

import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from bisam.lab import records
from bisam.lab.recipe_files import read
from bisam.lab.tables import cells
from bisam.lab.tables.answer import answer

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "your-data.md").read_text()
RUNS = ROOT / "benchmarks" / "results" / "your_data"


def snippets(language):
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def answered(seeds):
    (table,) = cells.collect(records.find_records(RUNS)).tables
    table = replace(
        table,
        runs={cell: {seed: run for seed, run in runs.items() if seed in seeds} for cell, runs in table.runs.items()},
    )
    return answer(table)


def test_the_records_of_the_page_are_complete_and_verified():
    found = records.find_records(RUNS)
    assert len(found) == 30
    assert [problem for record in found for problem in records.verify(record)] == []


@pytest.mark.parametrize("seeds", [range(3), range(10)])
def test_the_answers_on_the_page_agree_with_the_records(seeds):
    assert answered(seeds).sentence in " ".join(PAGE.split())


def test_the_table_on_the_page_agrees_with_the_records():
    shown = " ".join(re.findall(r"│(.*)", PAGE))
    for row in answered(range(3)).sheet.rows:
        for cell in row:
            assert all(word in shown for word in cell.split()), cell


def test_the_results_of_single_runs_on_the_page_agree_with_the_records():
    lines = re.findall(r"^    (SGD|SAM) seed (\d) perceptron  test accuracy (\S+) %, .*?macro F1 (\S+) %", PAGE, re.M)
    assert len(lines) == 2
    for method, seed, accuracy, macro_f1 in lines:
        result = records.read(RUNS / "cancer-perceptron" / f"perceptron-{method.lower()}-seed{seed}").result
        assert (f"{result['test_accuracy']:.2f}", f"{result['test_macro_f1']:.2f}") == (accuracy, macro_f1)


def test_the_python_snippets_of_the_page_run(bisam, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rows, prediction, notebook = snippets("python")
    exec(rows, {})
    assert (tmp_path / "cancer.csv").read_text().count("malignant") == 212
    options = ["--epochs", 10, "--rho", 0.05, "--seeds", 0, "--device", "cpu", "--name", "cancer-perceptron"]
    done = bisam("fit", "cancer.csv", *options)
    assert done.exit_code == 0, done.output
    names = {}
    exec(prediction, names)
    labels = [line.endswith(",malignant") for line in (tmp_path / "cancer.csv").read_text().splitlines()[1:]]
    right = [(name == "malignant") == label for name, label in zip(names["diagnoses"], labels, strict=True)]
    assert sum(right) > 0.9 * len(right)  # with the classes exchanged it would be below 0.1
    assert names["probabilities"].shape == (569, 2)
    exec(notebook, {})
    assert "BiSAM (-log)" in capsys.readouterr().out


def test_the_toml_snippet_of_the_page_is_a_valid_recipe(tmp_path):
    (content,) = snippets("toml")
    (tmp_path / "my.toml").write_text(content)
    recipe = read(tmp_path / "my.toml")
    assert (recipe.rows, recipe.cells["noisy", "sgd"].epochs) == (["clean", "noisy"], 60)


def test_every_option_on_the_page_exists(bisam):
    known = "".join(bisam(command, "--help").output for command in ("fit", "predict", "train", "reproduce", "report"))
    commands = re.findall(r"^    (?:\$ )?(bisam .*)$", PAGE, re.M)
    options = {word for line in commands for word in shlex.split(line, comments=True) if word.startswith("--")}
    options |= set(re.findall(r"`(--[a-z-]+)", PAGE))
    assert options
    assert all(option in known for option in options), options
