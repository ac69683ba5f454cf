"""Invalid commands: each ends with a one-line error before anything is trained or written."""

from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from bisam.lab.cli import app
from bisam.lab.cli.options import MOST_SEEDS, changes_of, numbers
from bisam.lab.training.progress import Progress

import forked

SGD = ["train", "demo/40%/sgd", "--device", "cpu", "--runs", "runs"]
SAM = ["sweep", "demo/40%/sam", "--device", "cpu", "--runs", "runs", "--over"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*SGD, "--seeds", "0-"], "seeds are numbers such as 0,1,2 or 0-5, got '0-'"),
        ([*SGD, "--seeds", "5-2,1"], "no seeds in 5-2: the smaller number comes first, as in 2-5"),
        ([*SGD, "--seeds", "0-99999999999"], "0-99999999999 has 100,000,000,000 seeds: give 10,000 at most"),
        ([*SGD, "--seeds", "9" * 5000], "seeds are numbers such as 0,1,2 or 0-5, got '99999"),
        ([*SGD, "--seeds", "٣"], "seeds are numbers such as 0,1,2 or 0-5, got '٣'"),
        ([*SGD, "--seeds", str(2**64 - 1)], f"seed must lie between 0 and 2147483648, got {2**64 - 1}"),
        ([*SGD, "--seeds", "-1"], "seeds are numbers such as"),
        ([*SGD, "--set", "epochs=1", "--set", "epochs=2"], "--set has epochs twice: give one value"),
        ([*SGD, "--set", "weight-decay=1", "--set", "weight_decay=2"], "--set has weight_decay twice: give one value"),
        (
            [*SGD, "--model", "perceptron", "--set", "model=resnet20"],
            "--model perceptron and --set model=resnet20 set the same field: remove one",
        ),
        ([*SGD, "--set", "epochs=2", "--set", "warmup_epochs=3"], "warmup_epochs must be at most epochs, got 3 of 2"),
        ([*SGD, "--set", "epochs=" + "9" * 5000], "epochs is a whole number, got '9999"),
        ([*SGD, "--set", "epochs=nan"], "epochs is a whole number, got 'nan'"),
        ([*SGD, "--set", "lr=nan"], "lr must lie between 0 and 1000, got nan"),
        ([*SGD, "--set", "model=a\0b"], "model must be a printable text, got 'a\\x00b'"),
        ([*SGD, "--set", "model=\ud800"], "model must be a printable text, got '\\ud800'"),
        ([*SGD, "--set", "padding=64"], "padding=64 leaves most crops of 8×8 black: set 8 at most"),
        ([*SGD, "--set", "cutout=512"], "cutout=512 covers images of 8×8 wherever it is: set less than 16"),
        ([*SAM, "rho", "--values", "nan,1"], "rho must lie between 0 and 1000, got nan"),
        ([*SAM, "warmup_epochs", "--values", "0,99"], "warmup_epochs must be at most epochs, got 99 of 30"),
        (["train", "dеmo"], "unknown recipe 'dеmo': the nearest names are demo"),  # with a Cyrillic е
    ],
)
def test_an_invalid_value_is_refused_with_a_one_line_error(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, arguments, env={"COLUMNS": "300"})
    assert done.exit_code == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"Error: {message}")
    assert len(line) < 200
    assert not [*tmp_path.rglob("*.*")]


@pytest.mark.parametrize(
    "arguments", [["train", "demo", "--runs", ""], ["verify", ""], ["report", ""], ["data", "cifar10", "--data", ""]]
)
def test_an_empty_path_is_refused_and_not_taken_for_the_current_folder(arguments, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 2
    assert "a folder has a name, got an empty text: write . for the current one" in done.stderr
    assert not [*tmp_path.iterdir()]


@given(st.lists(st.tuples(st.integers(0, 2**31), st.integers(0, 50)), min_size=1, max_size=4))
def test_lists_and_ranges_of_seeds_are_expanded_in_the_given_order_without_duplicates(ranges):
    text = ",".join(f"{first}-{first + more}" if more else str(first) for first, more in ranges)
    assert numbers(text) == [*dict.fromkeys(n for first, more in ranges for n in range(first, first + more + 1))]


@given(st.text("0123456789-, ٣²_.e", max_size=12))
def test_any_text_is_parsed_as_seeds_or_refused_with_a_one_line_error(text):
    try:
        found = numbers(text)
    except ValueError as error:
        found, message = None, str(error)
    if found is None:
        assert "\n" not in message
        return
    assert 0 < len(found) <= MOST_SEEDS * 12
    assert all(str(seed) in text or "-" in text or "0" in text for seed in found)


def test_set_options_are_parsed_into_fields_and_values():
    assert changes_of(["epochs=1", "lr = 2"]) == {"epochs": "1", "lr": "2"}


# A full disk: the standard output of training is often a file.


@pytest.fixture
def full_disk():
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    with suppress(OSError), Path("/dev/full").open("w") as file:  # closing it may raise again
        yield file


def test_a_log_line_that_cannot_be_written_does_not_stop_training(full_disk):
    Progress(Console(file=full_disk)).note("epoch 1")


@pytest.mark.parametrize("arguments", [["list"], ["data", "digits"]])
def test_output_that_cannot_be_written_is_a_one_line_error(arguments, full_disk):
    done = forked.run("bisam", *arguments, stdout=full_disk)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("Error: cannot write the output: No space left on device.")
