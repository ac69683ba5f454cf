"""A Ray cluster of two nodes on this machine, with workers that are killed and a command that is stopped."""

import builtins
import shutil
from pathlib import Path

import pytest

from bisam.lab import records


@pytest.fixture(autouse=True)
def print_is_restored():
    """By default Ray replaces `print` in this process for its bars; what refers to it cannot be pickled then."""
    before = builtins.print
    yield
    assert builtins.print is before


def test_on_ray_a_table_with_killed_workers_and_a_ctrl_c_ends_with_the_same_bits(
    command, cluster, network, expected, of_table, tmp_path
):
    network.arm("kill", seed=0)
    network.arm("raise", seed=1)
    network.arm("stop", seed=3, after=[tmp_path / "demo" / f"noise40-sam-seed{seed}*" for seed in (0, 1, 2)])
    done = command("reproduce", "--on", cluster.on, "--runs", tmp_path)
    assert network.armed() == [], done.output
    assert done.exit_code == 130, done.output
    lines = done.output.splitlines()
    lost = [line for line in lines if "was lost; it starts again from its last checkpoint" in line]
    assert sorted(line[:10] for line in lost) == ["SAM seed 0", "SAM seed 1"]
    resumed = [line for line in lines if "resumes at epoch" in line]
    assert sorted(line.split("+")[0] for line in resumed) == ["noise40-sam-seed0", "noise40-sam-seed1"]
    (seed3,) = (record.folder for record in records.find_records(tmp_path) if record.config["seed"] == 3)
    assert [*(seed3 / records.CHECKPOINTS).iterdir()]
    assert [path.name for path in tmp_path.iterdir()] == ["demo"]

    done = command("reproduce", "--runs", tmp_path)  # in this process
    assert done.exit_code == 0, done.output
    assert f"{seed3.name} resumes at epoch 2, batch 4" in done.output
    assert of_table(tmp_path) == expected["reproduce"]


def test_runs_of_a_storage_are_resumed_from_it_and_gathered_in_one_place(
    command, cluster, network, expected, of_table, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    storage = (tmp_path / "bucket").as_uri()
    network.arm("kill", seed=0)
    done = command("sweep", "--on", cluster.on, "--together", "2", "--runs", storage)
    assert network.armed() == []
    assert done.exit_code == 0, done.output
    assert done.output.count("it starts again from its last checkpoint") == 1
    assert done.output.count("resumes at epoch") == 2  # both runs of the task
    (mirror,) = Path("runs").iterdir()
    assert f"the records of {storage} are gathered in {mirror}" in done.output
    assert of_table(mirror) == of_table(tmp_path / "bucket") == expected["sweep"]

    shutil.rmtree("runs")
    again = command("sweep", "--on", cluster.on, "--runs", storage)  # as on another machine
    assert again.exit_code == 0, again.output
    assert "2 of 2 runs are done already" in again.output
    assert of_table(mirror) == expected["sweep"]


def test_a_folder_that_a_node_cannot_access_is_refused_with_a_remedy(command, cluster):
    if cluster.hidden is None:
        pytest.skip("this system does not let a process mount file systems of its own")
    done = command("reproduce", "--on", cluster.on, "--runs", cluster.hidden / "runs", "--seeds", "0,1")
    assert done.exit_code == 1
    (line,) = done.stderr.splitlines()
    assert f"does not share {cluster.hidden / 'runs'} with this one: give a folder that all nodes see" in line
    assert "--runs s3://bucket/runs" in line


def test_a_fraction_of_a_gpu_is_reserved_and_a_gpu_unknown_to_torch_is_a_one_line_error(command, cluster, tmp_path):
    done = command(
        "reproduce",
        "--on",
        cluster.on,
        "--gpus-per-run",
        "0.25",
        "--device",
        "auto",
        "--runs",
        tmp_path,
        "--seeds",
        "0",
    )
    assert done.exit_code == 1
    (line,) = done.stderr.splitlines()
    assert "and torch finds none there: install torch for CUDA, or use --device cpu" in line
