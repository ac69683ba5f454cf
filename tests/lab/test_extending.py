"""The lab's part of docs/extending.md: its snippets register entries, train and report."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bisam.lab import records
from bisam.lab.cli import app
from bisam.lab.data import DATA_SETS
from bisam.lab.methods import METHODS
from bisam.lab.models import MODELS
from bisam.lab.recipes import RECIPES
from bisam.lab.tables.cells import collect

PAGE = Path(__file__).parents[2] / "docs" / "extending.md"
REGISTERED = [(DATA_SETS, "stripes"), (MODELS, "linear8"), (METHODS, "gbisam"), (RECIPES, "stripes")]


def snippets():
    lab = PAGE.read_text().split("\n## The lab\n")[1].split("\n## ")[0]
    return re.findall(r"```python\n(.*?)```", lab, re.DOTALL)


@pytest.fixture
def run_snippets(tmp_path, monkeypatch):
    """Runs all snippets in an empty folder, and removes their entries from the registries afterwards."""
    monkeypatch.chdir(tmp_path)
    names = {}
    try:
        for code in snippets():
            exec(code, names)
        yield tmp_path
    finally:
        for registry, name in REGISTERED:
            registry.pop(name, None)


def test_the_snippets_register_and_train_a_data_set_a_model_a_method_and_a_table(run_snippets, capsys):
    assert all(name in registry for registry, name in REGISTERED)
    found = collect(records.find_records(run_snippets / "runs"))
    (table,) = found.tables
    assert (table.title, table.recipe.methods, found.others, found.unreadable) == (
        "Stripes", ["sgd", "gsam", "gbisam"], [], [],
    )  # fmt: skip
    assert [*table.measured("linear8", "gbisam")] == [0, 1]
    assert {run.config.data for run in found.runs} == {"stripes"}
    assert len({run.record.receipt["data_checksum"] for run in found.runs}) == 1
    page = (run_snippets / "runs" / "report.html").read_text()
    for text in ("Stripes", "G-BiSAM (-log)", "G-BiSAM (-log) − GSAM"):
        assert text in page
    listed = CliRunner().invoke(app, ["list"])
    assert listed.exit_code == 0
    assert "Stripes" in listed.output


def test_runs_of_a_table_that_is_no_longer_registered_are_listed_as_such(run_snippets):
    for registry, name in REGISTERED:
        del registry[name]
    done = CliRunner().invoke(app, ["report", "runs"])
    assert done.exit_code == 0, done.output
    assert done.output.count("no table is called 'stripes' here") == 6
    refused = CliRunner().invoke(app, ["train", "stripes"])
    assert refused.exit_code == 1
    assert "unknown recipe 'stripes'" in refused.output


def test_a_report_can_load_the_file_that_registers_a_table(run_snippets):
    for registry, name in REGISTERED:
        del registry[name]
    *registering, _ = snippets()
    Path("own.py").write_text("\n".join(registering))
    done = CliRunner().invoke(app, ["report", "runs", "--load", "own.py"], env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    assert "linear8: G-BiSAM (-log) − GSAM" in done.output
    assert "no table is called" not in done.output


def test_the_source_files_named_in_the_page_exist():
    for name in re.findall(r"`(src/bisam/lab/[^`]+)`", PAGE.read_text()):
        assert (PAGE.parents[1] / name).is_file(), name
