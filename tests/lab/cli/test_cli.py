"""The command line: bench, list, help, version, and what commands import."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bisam.lab.recipes import RECIPES

import forked


def python(code, *arguments):
    """Run code in a new interpreter, which has imported nothing yet."""
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, encoding="utf-8", timeout=1200)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench")
    options = ["--device", "cpu", "--quick", "--batch", "2", "--models", "resnet20", "--loop"]
    return forked.run("bisam", "bench", *options, folder=folder), folder / "bench.json"


def test_bench_runs_on_a_cpu_and_reports_the_skipped_cuda_sections(run):
    done, _ = run
    assert done.returncode == 0, done.stderr
    assert "together: skipped, it needs a CUDA device" in done.stdout
    assert "memory: skipped, it needs a CUDA device" in done.stdout
    for words in ("[4/4] epoch resnet20", "Q (−log), loop over samples", "extrapolated", "Seconds per epoch", "Bars"):
        assert words in done.stdout
    assert done.stdout.splitlines()[-1] == "wrote bench.json"


def test_bench_prints_each_bar_with_its_measured_value_and_whether_it_is_met(run):
    done, path = run
    bars = json.loads(path.read_text())["bars"]
    assert bars
    for bar in bars:
        (line,) = (line for line in done.stdout.splitlines() if bar["name"] in line)
        assert f"{bar['measured']:.3f}" in line
        assert ("met" if bar["met"] else "missed") in line


def test_the_bench_result_records_measurements_device_and_software_versions(run):
    result = json.loads(run[1].read_text())
    assert set(result) == {"receipt", "device", "loss", "epoch", "bars"}
    assert result["device"] == "cpu"
    versions = {"commit", "bisam", "torch", "triton", "python", "cuda", "driver"}
    assert set(result["receipt"]) == versions | {"date", "platform", "cpu", "threads", "gpu"}

    losses = {"cross_entropy", "log", "tanh", "plain_log", "plain_tanh"}
    assert set(result["loss"]) == {"128x10", "128x100", "512x1000"}
    for size, entry in result["loss"].items():
        contestants = losses | ({"loop_log"} if size == "128x100" else set())
        assert set(entry["eager_us"]) == set(entry["calls"]) == contestants
        assert set(entry["eager_ratio"]) == contestants - {"cross_entropy"}
        assert entry["device_us"] is None
        assert all(microseconds > 0 for microseconds in entry["eager_us"].values())
    paper = result["loss"]["128x100"]["paper_seconds_of_10k"]
    assert paper == {"pytorch": {"cross_entropy": 2.4, "q": 3.96}, "tensorflow": {"cross_entropy": 3.25, "q": 2.34}}
    assert "tensorflow_seconds_of_10k" in result["loss"]["128x100"]

    (entry,) = result["epoch"].values()
    assert set(entry["ms"]) == set(entry["seconds_of_epoch"]) == {"sgd", "sam", "bisam-log", "bisam-tanh", "loop"}
    assert entry["batch"] == 2
    assert entry["steps_of_epoch"] == 22_500
    assert entry["seconds_of_epoch"]["sam"] == pytest.approx(entry["ms"]["sam"] * 22.5, rel=1e-4)
    assert entry["ratio"]["bisam-log/sam"] == pytest.approx(entry["ms"]["bisam-log"] / entry["ms"]["sam"], rel=1e-3)
    assert entry["quick"]
    assert "CUDA" in entry["eager_because"]
    assert entry["paper"] is None
    assert entry["speed_up_over_authors"] is None


def test_bench_help_shows_the_defaults(invoke):
    done = invoke("bench", "--help")
    assert done.exit_code == 0
    text = " ".join(done.stdout.split())
    for default in ("loss,epoch,together,memory", "resnet20 on a CPU", "128; 16 on a CPU", "auto", "bench.json"):
        assert default in text


@pytest.mark.parametrize(
    ("option", "default"),
    [("device", "auto"), ("together", "1"), ("workers", "one for each GPU"), ("retries", "2"), ("perturb", "rank")],
)
@pytest.mark.parametrize("command", ["fit", "reproduce", "sweep"])
def test_fit_reproduce_and_sweep_have_the_same_defaults_for_shared_options(command, option, default, invoke):
    text = " ".join(invoke(command, "--help").stdout.split())
    found = re.search(rf"--{option} (?:(?! --\w).)*?\[default: \(?([^\];]*)", text)
    assert found
    assert found.group(1).rstrip(")") == default


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--models", "resnet20,ResNet-56"], ["--models", "'ResNet-56'", "resnet56"]),
        (["--models", "digitsnet"], ["--models", "digitsnet does not accept images of 3×32×32"]),
        (["--only", "loss,epochs"], ["--only", "'epochs'", "epoch", "together", "memory"]),
        (["--device", "cpu", "--only", "memory"], ["--only", "no section runs without a CUDA device, got memory"]),
        (["--out", "nowhere/bench.json"], ["--out", "cannot be written", "No such file or directory"]),
        (["--out", "."], ["--out", "is a folder"]),
        (["--out", "notes.json"], ["--out", "not a result of `bisam bench`"]),
    ],
)
def test_invalid_bench_options_are_refused_before_anything_is_measured(options, words, invoke, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("notes.json").write_text('{"mine": 1}')
    done = invoke("bench", *options)
    assert done.exit_code == 2
    assert "[1/" not in done.output
    for word in words:
        assert word in done.output
    assert [path.name for path in tmp_path.iterdir()] == ["notes.json"]


@pytest.fixture
def invoke():
    """Runs a command in this process, without the seconds that a new one takes to import torch."""
    from typer.testing import CliRunner

    from bisam.lab.cli import app

    return lambda *arguments: CliRunner().invoke(app, arguments)


def test_without_the_lab_extra_a_one_line_error_names_the_package_to_install():
    code = (
        "import os, sys; from bisam.__main__ import main\n"
        "for missing in sys.argv[1:]:\n"
        "    if os.fork() == 0:\n"
        "        sys.modules[missing] = None\n"
        "        main()\n"
        "    print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)\n"
    )
    done = python(code, "typer", "rich")
    assert done.stdout.splitlines() == ["1", "1"]
    assert done.stderr.splitlines() == [
        f"the command line needs {missing}, which is not installed: pip install 'bisam[lab]'"
        for missing in ("typer", "rich")
    ]


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("bisam.lab.cli", ["altair", "vl_convert", "scipy.stats", "sklearn", "datasets"]),  # training needs none
        (
            "bisam.lab.report.report, bisam.lab.compare.page",
            ["bisam.lab.training.loop", "bisam.lab.training.run", "bisam.lab.training.jobs"],
        ),
    ],
    ids=["drawing", "training"],
)
def test_training_imports_no_plotting_libraries_and_reports_import_no_training_code(module, absent):
    code = f"import sys, {module}; print([name for name in {absent} if name in sys.modules])"
    done = python(code)
    assert done.stdout == "[]\n", done.stderr


@pytest.mark.parametrize(("columns", "width"), [(None, 120), ("100", 100), ("140", 140)])
def test_without_a_terminal_output_is_120_columns_wide_unless_columns_is_set(columns, width, invoke, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)
    done = invoke("list")
    assert done.exit_code == 0
    assert width - 15 < max(map(len, done.stdout.splitlines())) <= width


def test_help_and_list_fit_into_80_columns_without_truncation(invoke, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for arguments in (["--help"], ["list"]):
        done = invoke(*arguments)
        assert done.exit_code == 0
        assert max(map(len, done.stdout.splitlines())) <= 80
        assert "..." not in done.stdout.replace("[ARGS]...", "")
        assert "…" not in done.stdout


def test_list_states_the_machine_that_each_duration_refers_to(invoke):
    lines = invoke("list").stdout
    assert "2 min" in next(line for line in lines.splitlines() if line.startswith("demo "))
    assert "7 h" in next(line for line in lines.splitlines() if line.startswith("label_noise "))
    assert "Hours are of one H200" in " ".join(lines.split())
    assert "4 cells × 3 seeds; 2 min, two CPU cores" in invoke("list", "demo").stdout
    assert "20 cells × 6 seeds; 7 h, one H200" in invoke("list", "label_noise").stdout


@pytest.mark.parametrize("columns", ["80", "200"])
def test_list_prints_one_line_for_each_recipe(columns, invoke, monkeypatch):
    monkeypatch.setenv("COLUMNS", columns)
    table, _ = invoke("list").stdout.split("\n\n")
    head, *lines = table.splitlines()
    assert head.split() == ["recipe", "size", "time", "title"]
    for line, (name, make) in zip(lines, RECIPES.items(), strict=True):
        recipe = make()
        is_whole = len(recipe.cells) == len(recipe.rows) * len(recipe.methods)
        size = f"{len(recipe.rows)}×{len(recipe.methods)}×{recipe.seeds}"
        assert line.split()[:2] == [name, size if is_whole else f"≤{size}"]
        assert recipe.title in line


@pytest.mark.parametrize("columns", ["40", "80"])
@pytest.mark.parametrize("name", ["frontier_digits", "frontier", "glue"])
def test_list_of_one_recipe_prints_all_its_cells_and_breaks_no_name_across_lines(name, columns, invoke, monkeypatch):
    monkeypatch.setenv("COLUMNS", columns)
    done = invoke("list", name)
    assert done.exit_code == 0
    recipe, cells = RECIPES[name](), set()
    for block in done.stdout.split("\n\n")[1:]:
        methods, rows = block.split("rows ")
        cells |= {(row, method) for row in rows.split() for method in methods.split()[1:]}
    assert cells == {*recipe.cells}


def test_list_accepts_a_part_of_a_recipe_or_a_file_and_suggests_a_name_for_a_misspelt_one(invoke, tmp_path):
    assert "1 cell × 6 seeds" in invoke("list", "label_noise/80%/sam").stdout
    own = tmp_path / "my.toml"
    own.write_text('title = "Mine"\nmethods = ["sgd", "sam"]\n[settings]\ndata = "digits"\n[rows.clean]\n')
    assert "Mine" in invoke("list", str(own)).stdout
    wrong = invoke("list", "frontire")
    assert wrong.exit_code == 1
    assert "frontier" in wrong.stderr


def test_the_version_is_printed_without_importing_torch(invoke):
    code = "import sys, bisam_command as c; sys.argv = ['bisam', '--version']; c.main(); print('torch' in sys.modules)"
    version, loaded = python(code).stdout.splitlines()
    assert loaded == "False"
    assert invoke("--version").stdout.splitlines() == [version]
    assert version.startswith("bisam 0.")


def test_a_terminal_shows_a_loading_message_before_torch_is_imported():
    code = (
        "import sys, bisam_command as c\n"
        "sys.stderr.isatty = lambda: True\n"
        "class Watch:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'torch': sys.stderr.write('|torch|')\n"
        "sys.meta_path.insert(0, Watch())\n"
        "sys.argv = ['bisam', '--help']\n"
        "c.main()\n"
    )
    done = python(code)
    assert done.stderr.startswith("loading torch …")
    assert done.stderr.index("loading torch") < done.stderr.index("|torch|")
    assert "Usage: bisam" in done.stdout
