"""Options that choose a backend: where runs train, and what is refused before anything is written."""

import socket
import sys

import pytest
import torch
from typer.testing import CliRunner

from bisam.lab.cli import app
from bisam.lab.workers.backends import backend_of, gpus_of_task
from bisam.lab.workers.on_ray import RayCluster
from bisam.lab.workers.processes import Processes

COMMANDS = {
    "reproduce": ["reproduce", "demo/40%/sgd"],
    "sweep": ["sweep", "demo/40%/sam", "--over", "rho"],
    "fit": ["fit", "rows.csv"],
}


def refused(command, *options, folder, monkeypatch, **environment):
    """Runs the command, which must fail with a one-line error; returns that line."""
    monkeypatch.chdir(folder)
    (folder / "rows.csv").write_text("a,label\n1,x\n2,y\n")
    done = CliRunner().invoke(app, [*COMMANDS[command], *options], env={"COLUMNS": "300", **environment})
    assert done.exit_code == 1, done.output
    (line,) = done.stderr.splitlines()
    assert [path.name for path in folder.iterdir()] == ["rows.csv"]
    return line.removeprefix("Error: ")


@pytest.fixture(scope="module")
def silent():
    """An address at which nothing listens."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # bound and not listening: connections are refused
        yield f"127.0.0.1:{held.getsockname()[1]}"


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--on", "slurm"], "--on is local, ray or ray=ADDRESS, got 'slurm'"),
        (["--on", "local=4"], "--on is local, ray or ray=ADDRESS, got 'local=4'"),
        (["--workers", "0"], "--workers must be at least 1, got 0: leave it out to train in this process"),
        (["--workers", "2", "--retries", "-1"], "--retries must be at least 0, got -1"),
        (
            ["--workers", "2", "--gpus-per-run", "1"],
            "--gpus-per-run is for --on ray: with --on local several --workers",
        ),
        (["--workers", "2", "--device", "cuda"], "torch finds no CUDA device here: use --device cpu"),
        (["--on", "ray", "--workers", "2"], "Ray decides how many runs train at once: remove --workers 2"),
        (
            ["--on", "ray", "--gpus-per-run", "3"],
            "--gpus-per-run is a part of a GPU such as 0.25, or 1, got 3: for one",
        ),
        (["--on", "ray", "--gpus-per-run", "1.5"], "--gpus-per-run is a part of a GPU such as 0.25, or 1, got 1.5"),
        (["--on", "ray", "--gpus-per-run", "0"], "--gpus-per-run is a part of a GPU such as 0.25, or 1, got 0"),
        (["--on", "ray", "--gpus-per-run", "nan"], "--gpus-per-run is a part of a GPU such as 0.25, or 1, got nan"),
        (["--on", "ray", "--gpus-per-run", "0.5", "--device", "cpu"], "--gpus-per-run is for GPUs: remove it, or "),
        (
            ["--on", "ray", "--gpus-per-run", "0.5", "--together", "4"],
            "--together 4 trains on one GPU, and 4 runs with --gpus-per-run 0.5 each are more: give 0.25",
        ),
    ],
)
def test_invalid_backend_options_are_refused_with_a_one_line_error(command, options, message, tmp_path, monkeypatch):
    if "cuda" in options and torch.cuda.is_available():
        pytest.skip("there is a CUDA device here")
    assert refused(command, *options, folder=tmp_path, monkeypatch=monkeypatch).startswith(message)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("option", [["--on", "ray"], ["--on", "local"], ["--workers", "2"], ["--runs", "file:///x"]])
def test_backend_options_are_refused_under_torchrun(command, option, tmp_path, monkeypatch):
    line = refused(command, *option, folder=tmp_path, monkeypatch=monkeypatch, RANK="0", WORLD_SIZE="1")
    assert line.startswith(f"torchrun has started this process for one training: remove {option[0]}")


@pytest.mark.parametrize("command", COMMANDS)
def test_without_ray_the_error_names_the_extra(command, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    line = refused(command, "--on", "ray", folder=tmp_path, monkeypatch=monkeypatch)
    assert line == "--on ray needs the package ray: pip install 'bisam[ray]'"


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("nowhere", "the address of a Ray cluster is HOST:PORT, as in --on ray=10.0.0.1:6379, got 'nowhere'"),
        ("127.0.0.1:99999999", "no Ray cluster answers at 127.0.0.1:99999999"),
        ("silent", "no Ray cluster answers at"),
        ("ray://silent", "no Ray cluster answers at ray://"),
    ],
)
def test_a_cluster_that_does_not_answer_is_a_one_line_error(command, address, message, silent, tmp_path, monkeypatch):
    pytest.importorskip("ray", reason="ray has no wheel for this system")
    address = address.replace("silent", silent)
    line = refused(command, "--on", f"ray={address}", folder=tmp_path, monkeypatch=monkeypatch)
    assert line.startswith(message)
    assert ("start one with ray start --head, or give its address" in line) == message.startswith("no Ray")


def chosen(on="", **options):
    defaults = {"workers": None, "gpus_per_run": None, "retries": 2, "device": "auto", "together": 1, "stored": False}
    return backend_of(on, **{**defaults, **options})


@pytest.mark.parametrize(
    ("gpus", "options", "expected"),
    [
        (0, {}, None),
        (1, {}, None),
        (1, {"on": "local"}, None),
        (2, {}, Processes(2, 2)),
        (2, {"device": "cpu"}, None),
        (2, {"workers": 4, "retries": 0}, Processes(4, 2, 0)),
        (2, {"workers": 3, "device": "cpu"}, Processes(3, 0)),
        (0, {"workers": 1}, Processes(1, 0)),
        (1, {"stored": True}, Processes(1, 1)),
    ],
)
def test_several_gpus_get_a_process_each_and_one_gpu_trains_in_this_process(gpus, options, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert chosen(**options) == expected


@pytest.mark.parametrize(
    ("options", "gpus"),
    [
        ({}, None),
        ({"device": "cuda"}, 1),
        ({"device": "cpu"}, 0),
        ({"together": 4}, None),
        ({"gpus_per_run": 0.25}, 0.25),
        ({"gpus_per_run": 0.25, "together": 4}, 1),
        ({"gpus_per_run": 1 / 3, "together": 3}, 1),
        ({"gpus_per_run": 1}, 1),
    ],
)
def test_a_task_of_a_cluster_has_the_requested_fraction_of_a_gpu_for_each_of_its_runs(options, gpus, monkeypatch):
    pytest.importorskip("ray", reason="ray has no wheel for this system")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert chosen("ray", **options) == RayCluster("", gpus, 2)


def test_equal_fractions_of_a_gpu_add_up_to_exactly_one():
    assert all(gpus_of_task(1 / count, count, "auto") == 1 for count in range(1, 65))
