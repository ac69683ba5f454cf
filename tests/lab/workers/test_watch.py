"""What the command shows of its workers, from the messages that they send."""

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from bisam.lab import records
from bisam.lab.recipes import find_recipe
from bisam.lab.training.loop import Job
from bisam.lab.training.progress import Progress
from bisam.lab.workers.messages import Begun, Done, Failed, InUse, Lost, Shown
from bisam.lab.workers.task import Task
from bisam.lab.workers.watch import WorkersLost, _watch

(SAM,) = find_recipe("demo/40%/sam").cells.values()
CONFIGS = [replace(SAM, seed=seed, epochs=10) for seed in range(20)]
METRICS = {"epoch": 4, "validation_accuracy": 50.0, "loss": 1.0, "samples_per_second": 10.0}
RESULT = {"status": "done", "epochs": 10, "best_epoch": 9, "test_accuracy": 90.0, "seconds": 1.0}


def task(root, *configs):
    jobs = tuple(Job(config, root / f"seed{config.seed}") for config in configs)
    return Task(jobs, root, load=None, checkpoint_seconds=1, here=Path.cwd())


def watched(root, *messages, height=40, lines=None):
    """The display after these messages, of a task for each run; `lines` gets what was printed."""
    console = Console(file=io.StringIO(), force_terminal=True, width=160, height=height, color_system=None)
    with Progress(console) as progress:
        progress.expect(CONFIGS)
        _watch(iter(messages), [task(root, config) for config in CONFIGS], progress)
        screen = Console(file=io.StringIO(), width=160)
        screen.print(*progress._bars.get_renderables())
    if lines is not None:
        lines += console.file.getvalue().splitlines()
    return screen.file.getvalue()


def begin(number, epoch=0):
    return number, Shown("begin", ({CONFIGS[number]: epoch}, 8))


def test_each_run_has_its_own_bar_whichever_worker_sends_its_messages(tmp_path):
    display = watched(
        tmp_path,
        begin(0),
        begin(1, epoch=2),
        (0, Shown("steps", ({CONFIGS[0]: 5},))),
        (1, Shown("epoch", (CONFIGS[1], tmp_path, METRICS))),
        (0, Shown("steps", ({CONFIGS[0]: 7},))),
    )
    (first,) = (line for line in display.splitlines() if line.startswith("SAM seed 0 "))
    (second,) = (line for line in display.splitlines() if line.startswith("SAM seed 1 "))
    assert " 7/80 " in first
    assert " 40/80 " in second
    assert "validation 50.00 %" in second
    assert "run 1 of 20" in display


def test_a_terminal_too_low_for_all_bars_keeps_the_line_about_all_runs(tmp_path):
    display = watched(tmp_path, *(begin(number) for number in range(20)), height=24)
    lines = display.splitlines()
    assert len(lines) <= 24
    assert sum(line.startswith("SAM seed") for line in lines) == 12
    assert "and 8 more" in display
    assert "run 1 of 20" in display


def test_a_result_counts_although_its_message_was_lost_with_the_worker(tmp_path, recorded, write_run):
    write_run(tmp_path / "seed0", recorded("demo/40%/sam", 0))
    lines = []
    messages = begin(0), (0, Lost("process 7", "was lost", again=True)), (0, Done())
    assert "run 2 of 20" in watched(tmp_path, *messages, lines=lines)
    message = "the worker (process 7) was lost; it starts again from its last checkpoint"
    assert sum(message in line for line in lines) == 1


def test_an_error_of_a_worker_is_raised_in_the_command(tmp_path):
    with pytest.raises(ValueError, match="no data"):
        watched(tmp_path, (0, Begun("w")), (3, Failed("no data")))


def test_runs_that_were_not_trained_are_listed_at_the_end_and_finished_ones_are_not(tmp_path):
    lost = Lost("process 1", "was lost", again=False)
    with pytest.raises(WorkersLost) as caught:
        watched(tmp_path, begin(0), (0, Shown("finish", (CONFIGS[0], RESULT))), (0, lost), begin(1), (1, lost))
    assert str(caught.value).startswith("1 of 20 runs have no result, because their workers were lost: SAM seed 1 ")


def test_runs_in_use_by_another_command_are_skipped_unless_all_runs_are(tmp_path):
    lines, in_use = [], InUse(records.RunInUse(tmp_path / "seed0", "1"))
    watched(tmp_path, (0, in_use), (1, Done()), lines=lines)
    assert sum("1 run is still in training in another process" in line for line in lines) == 1
    with pytest.raises(records.RunInUse):
        watched(tmp_path, *((number, in_use) for number in range(20)))
