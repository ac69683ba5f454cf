"""The progress of all runs of a command, and the time left."""

import io
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
from rich.console import Console

from bisam.lab.config import Config
from bisam.lab.training import progress as progress_module
from bisam.lab.training.overall import Overall
from bisam.lab.training.progress import ROWS_BELOW_BARS, Progress

SAM, SAM_AGAIN = (Config(method="sam", seed=seed, epochs=10) for seed in range(2))
SGD = Config(method="sgd", epochs=20)
METRICS = {"loss": 1.0, "validation_accuracy": 90.0, "flips": 1.5, "samples_per_second": 1e4}


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def test_the_line_about_all_runs_has_the_number_of_the_run_and_the_time_left():
    clock = Clock()
    overall = Overall(clock)
    overall.expect([SAM, SAM_AGAIN, SGD])
    assert overall.line == "run 1 of 3"  # nothing is measured yet
    overall.begin({SAM: 0})
    clock.now = 30.0
    overall.epoch(SAM, 5)
    # an epoch of SAM is two passes: 10 passes in 30 s, and 10 + 20 + 20 are left
    assert overall.line == "run 1 of 3, 2:30 left"
    overall.finish(SAM, "SAM", 90.0)
    assert overall.line.startswith("run 2 of 3")


def test_epochs_trained_before_an_interruption_are_not_counted_as_fast_ones():
    clock = Clock()
    overall = Overall(clock)
    overall.expect([SAM, SAM_AGAIN])
    overall.begin({SAM: 8})
    clock.now = 10.0
    overall.epoch(SAM, 9)
    assert overall.line == "run 1 of 2, 1:50 left"


def test_epochs_trained_again_after_a_lost_worker_are_not_counted_as_slow_ones():
    clock = Clock()
    overall = Overall(clock)
    overall.expect([SAM, SAM_AGAIN])
    overall.begin({SAM: 0})
    for epochs in (1, 2):
        clock.now += 10.0
        overall.epoch(SAM, epochs)
    overall.begin({SAM: 1})  # by another worker, from the last checkpoint
    clock.now += 10.0
    overall.epoch(SAM, 2)
    assert overall.line == "run 1 of 2, 3:00 left"  # 18 epochs of 10 s


def test_the_time_left_follows_the_recent_pace_and_counts_down_within_an_epoch():
    clock = Clock()
    overall = Overall(clock)
    overall.expect([SAM, SAM_AGAIN])
    overall.begin({SAM: 0})
    for epoch in range(1, 11):
        clock.now += 60.0 if epoch <= 5 else 6.0  # slow at first: compiled, or beside another program
        overall.epoch(SAM, epoch)
    assert overall.line == "run 2 of 2, 1:00 left"  # ten more at the pace of the last five
    clock.now += 4.0
    assert overall.line == "run 2 of 2, 0:56 left"
    clock.now += 100.0
    assert overall.line == "run 2 of 2, 0:00 left"


def test_epochs_that_a_diverged_run_did_not_train_are_not_counted_as_fast_ones():
    clock = Clock()
    overall = Overall(clock)
    overall.expect([SAM, SAM_AGAIN])
    overall.begin({SAM: 0})
    clock.now = 10.0
    overall.epoch(SAM, 1)
    overall.finish(SAM, "SAM", None)
    overall.begin({SAM_AGAIN: 0})
    clock.now = 20.0
    overall.epoch(SAM_AGAIN, 1)
    assert overall.line == "run 2 of 2, 1:30 left"


def test_a_single_run_has_no_line_about_all_runs():
    overall = Overall()
    overall.expect([SAM])
    assert overall.line == ""


def drawn(progress, width):
    shown = Console(file=io.StringIO(), width=width)
    shown.print(progress._bars.get_renderable())
    return shown.file.getvalue()


def test_eighty_columns_show_the_run_its_validation_value_the_results_and_the_time_left(tmp_path):
    with Progress(Console(file=io.StringIO(), force_terminal=True, width=80)) as progress:
        progress.expect([SAM, SAM_AGAIN, SGD])
        progress.begin({SAM: 0, SAM_AGAIN: 0}, 352)
        progress.epoch(SAM, tmp_path, {"epoch": 4, **METRICS})
        for config, accuracy in ((SAM, 91.0), (SAM_AGAIN, 93.0)):
            progress.finish(config, {"status": "done", "best_epoch": 3, "test_accuracy": accuracy, "seconds": 70})
        progress.begin({SGD: 0}, 352)
        progress.epoch(SGD, tmp_path, {"epoch": 4, **METRICS})
        bar, head, results, line = drawn(progress, 80).splitlines()
    assert re.match(r"SGD seed 0 .*1760/7040 .* validation 90.00 %", bar)
    assert head.split() == ["finished", "test", "accuracy"]
    assert results.split() == ["SAM", "resnet56", "92.00", "±", "1.41", "n", "=", "2"]
    assert re.fullmatch(r"run 3 of 3, \d+:\d\d left", line)


@pytest.fixture
def clock(monkeypatch):
    """The time that a Progress reads."""
    made = Clock()
    made.now = 1000.0
    monkeypatch.setattr(progress_module, "time", SimpleNamespace(monotonic=made))
    return made


def test_bars_follow_the_batches_of_each_run_and_the_terminal_is_restored(clock):
    console = Console(file=io.StringIO(), force_terminal=True, width=80)

    def completed():
        return [task.completed for task in progress._bars.tasks]

    with Progress(console) as progress:
        progress.begin({SAM: 1, SAM_AGAIN: 0}, 4)
        assert completed() == [4, 0]
        for later, batch, shown in ((0.0, 1, 1), (0.09, 2, 1), (0.09, 3, 3)):  # at most ten times a second
            clock.now += later
            progress.step(batch)
            assert completed() == [4 + shown, shown]
        progress.begin({SGD: 2}, 8)
        progress.steps({SGD: 5, replace(SGD, seed=9): 1})  # the second run has no bar yet
        assert completed() == [4 + 3, 3, 16 + 5]
        progress.finish(replace(SGD, seed=9), {"status": "diverged", "epochs": 3, "seconds": 70})
        assert len(completed()) == 3
    hidden, shown = (console.file.getvalue().find(code) for code in ("\x1b[?25l", "\x1b[?25h"))
    assert 0 <= hidden < shown  # the cursor


def test_a_low_terminal_shows_the_bars_that_fit_and_the_number_of_the_others():
    console = Console(file=io.StringIO(), force_terminal=True, width=80, height=ROWS_BELOW_BARS + 2)
    configs = [replace(SAM, seed=seed) for seed in range(5)]
    with Progress(console) as progress:
        progress.begin(dict.fromkeys(configs[:2], 0), 4)
        assert len(drawn(progress, 80).splitlines()) == 2 + 1  # the last line is about all runs
        progress.begin(dict.fromkeys(configs, 0), 4)
        first, second, more, line = drawn(progress, 80).splitlines()
    assert [first.split()[2], second.split()[2], more, line] == ["0", "1", "and 3 more", "run 1 of 5"]
    assert "SAM seed 0" in console.file.getvalue()  # the bars are on the console that was given
    lowest = Progress(Console(file=io.StringIO(), force_terminal=True, width=80, height=3))
    with lowest:
        lowest.begin(dict.fromkeys(configs, 0), 4)
        assert drawn(lowest, 80).splitlines()[1] == "and 4 more"


def test_a_diverged_run_has_no_result_in_the_table(tmp_path):
    with Progress(Console(file=io.StringIO(), force_terminal=True, width=80)) as progress:
        progress.expect([SAM, SGD])
        progress.begin({SAM: 0}, 4)
        progress.finish(SAM, {"status": "diverged", "epochs": 3, "seconds": 70})
        assert progress.overall.table("x") is None
        assert progress.overall.line.startswith("run 2 of 2")


def test_without_a_terminal_there_is_a_line_every_ten_seconds_and_one_of_the_last_epoch(clock, tmp_path):
    console, own = Console(file=io.StringIO(), width=80), replace(SAM, epochs=5)
    with Progress(console) as progress:
        progress.begin({own: 0}, 4)
        for epoch, later in enumerate((0, 5, 5, 1, 1)):
            clock.now += later
            progress.epoch(own, tmp_path, {"epoch": epoch, **METRICS})
        progress.finish(own, {"status": "done", "best_epoch": 3, "test_accuracy": 91.0, "seconds": 70})
    first, *lines = console.file.getvalue().splitlines()
    assert first == "SAM seed 0 resnet56  begins: 5 epochs of 4 steps"
    assert [re.search(r"epoch (\d)/5  validation 90.00 %  loss 1.000", line)[1] for line in lines[:-1]] == list("145")
    assert lines[-1].endswith("test accuracy 91.00 %, of epoch 4, 1 min 10 s")  # and none about all of one run


def test_without_a_terminal_a_long_epoch_has_a_line_each_minute_with_its_step_and_the_time_left(clock):
    console = Console(file=io.StringIO(), width=80)
    with Progress(console) as progress:
        progress.overall = Overall(clock)
        progress.expect([SAM, SAM_AGAIN])
        progress.begin({SAM: 0}, 100)
        for step in range(1, 31):
            clock.now += 5.0
            progress.step(step)
    begins, *lines = console.file.getvalue().splitlines()
    assert begins.endswith("begins: 10 epochs of 100 steps")
    assert lines == [
        "SAM seed 0 resnet56  epoch 1/10, step 13/100  run 1 of 2, 2:45:35 left",  # 2000 steps of 5 s
        "SAM seed 0 resnet56  epoch 1/10, step 26/100  run 1 of 2, 2:44:30 left",
    ]


def test_without_a_terminal_runs_that_end_at_the_same_time_get_one_line_about_all_runs(clock, tmp_path):
    third = replace(SAM, seed=2)
    console = Console(file=io.StringIO(), width=80)
    with Progress(console) as progress:
        progress.overall = Overall(clock)
        progress.expect([SAM, SAM_AGAIN, third])
        for stepping in ([SAM, SAM_AGAIN], [third]):
            progress.begin(dict.fromkeys(stepping, 0), 4)
            for epoch in range(10):
                clock.now += 1.0
                for config in stepping:
                    progress.epoch(config, tmp_path, {"epoch": epoch, **METRICS})
            for config in stepping:
                progress.finish(config, {"status": "done", "best_epoch": 3, "test_accuracy": 91.0, "seconds": 70})
    lines = [line for line in console.file.getvalue().splitlines() if line.startswith("run ")]
    assert len(lines) == 1  # and none at the end, when no run is left
    assert re.fullmatch(r"run 3 of 3, 0:0\d left", lines[0])


def test_without_a_terminal_the_line_about_all_runs_follows_each_result():
    console = Console(file=io.StringIO(), width=80)
    with Progress(console) as progress:
        progress.expect([SAM, SGD])
        progress.begin({SAM: 0}, 4)
        progress.finish(SAM, {"status": "done", "best_epoch": 3, "test_accuracy": 91.0, "seconds": 70})
    assert re.search(r"test accuracy 91.00 %.*\nrun 2 of 2", console.file.getvalue())
