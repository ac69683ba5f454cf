"""Processes that share a table, with workers that are killed and a command that is stopped."""

import multiprocessing
from types import SimpleNamespace

import pytest

from bisam.lab import records
from bisam.lab.workers.messages import Begun, Done, Lost
from bisam.lab.workers.processes import Processes


def finished_seeds(root):
    return sorted(record.config["seed"] for record in records.find_records(root) if record.result is not None)


def test_a_table_with_a_killed_worker_and_a_ctrl_c_ends_with_the_same_bits(
    command, network, expected, of_table, tmp_path
):
    others = multiprocessing.active_children()  # of other tests
    network.arm("kill", seed=0)
    network.arm("stop", seed=3, after=[tmp_path / "demo" / f"noise40-sam-seed{seed}*" for seed in (0, 1, 2)])
    done = command("reproduce", "--workers", "2", "--runs", tmp_path)
    assert network.armed() == [], done.output
    assert set(multiprocessing.active_children()) <= set(others)

    lines = done.output.splitlines()
    (killed,) = (line for line in lines if "SIGKILL" in line)
    assert killed.startswith("SAM seed 0 ")
    assert killed.endswith("; it starts again from its last checkpoint")
    (resumed,) = (line for line in lines if "resumes at epoch" in line)
    assert resumed.startswith("noise40-sam-seed0+")
    assert resumed.endswith(" resumes at epoch 2, batch 1")
    assert done.exit_code == 130
    assert "stopped by SIGINT: the same command resumes there" in done.output
    assert finished_seeds(tmp_path) == [0, 1, 2]
    (seed3,) = (record.folder for record in records.find_records(tmp_path) if record.result is None)
    assert [*(seed3 / records.CHECKPOINTS).iterdir()]

    done = command("reproduce", "--runs", tmp_path)  # in this process
    assert done.exit_code == 0, done.output
    assert "3 of 4 runs are done already" in done.output
    assert f"{seed3.name} resumes at epoch 2, batch 4" in done.output
    assert of_table(tmp_path) == expected["reproduce"]


@pytest.mark.usefixtures("forked_workers")
def test_a_run_whose_workers_are_lost_is_reported_and_the_others_are_trained(
    command, network, expected, of_table, tmp_path
):
    network.arm("raise", seed=3)
    done = command("reproduce", "--workers", "1", "--retries", "0", "--runs", tmp_path)
    assert done.exit_code == 1
    (lost,) = (line for line in done.output.splitlines() if " raised " in line and "the worker" in line)
    assert lost.startswith("SAM seed 3 ")
    assert lost.endswith(" raised RuntimeError: no memory, say; it is not tried again")
    (error,) = done.stderr.splitlines()
    assert error.startswith("Error: 1 of 4 runs have no result, because their workers were lost: SAM seed 3 ")
    assert error.endswith("The others are trained; the same command resumes these")
    assert finished_seeds(tmp_path) == [0, 1, 2]

    assert command("reproduce", "--runs", tmp_path).exit_code == 0
    assert of_table(tmp_path) == expected["reproduce"]


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize("retries", [0, 1])
def test_a_task_that_loses_its_worker_is_repeated_as_often_as_retries_allows(retries):
    happened = Processes(1, retries=retries).run(["not a task, so the worker raises"], [])
    lost = [message for _, message in happened if isinstance(message, Lost)]
    assert [one.again for one in lost] == [True] * retries + [False]


def test_a_worker_that_dies_right_after_its_last_message_has_done_its_task(monkeypatch):
    """Its death may be detected together with that message, which cannot be forced with a real process."""

    def started(self, number):
        def messages():
            yield Done()
            yield Lost("w", "was killed by SIGKILL", again=False)

        def give(task, tasks):
            worker.task = task

        ours, theirs = multiprocessing.Pipe()
        process = SimpleNamespace(join=lambda: theirs.close())
        worker = SimpleNamespace(
            number=number, name="w", task=-1, connection=ours, process=process, give=give, stop=lambda: None,
            messages=messages,
        )  # fmt: skip
        return worker

    monkeypatch.setattr(Processes, "_started", started)
    found = [*Processes(1).run(["first", "second"], [])]
    assert found == [(0, Begun("w")), (0, Done()), (1, Begun("w")), (1, Done())]
