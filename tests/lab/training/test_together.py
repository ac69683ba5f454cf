"""Several runs at once: which of them step together, and that each has the same result as alone."""

import gc
import io
import json
import re
import signal
import weakref
from contextlib import ExitStack, nullcontext
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from bisam.lab.config import Config, rate
from bisam.lab.data.sources import InMemory
from bisam.lab.records import RecordError, RunFolder, RunInUse, checkpoint, read
from bisam.lab.training import jobs as runs
from bisam.lab.training import loop as lab
from bisam.lab.training.loop import Job, Stopped, train
from bisam.lab.training.progress import Progress
from tiny import BATCHES, NET, StopRequesting, tiny_images


def job(folder, epochs, seed=0, method="sam", **fields):
    return Job(Config(model=NET, method=method, batch=8, epochs=epochs, seed=seed, **fields), folder)


def do(jobs, together=None, progress=None):
    progress = progress or StopRequesting()
    return train(jobs, tiny_images(), torch.device("cpu"), progress, progress.stopping, together=together)


def counts_together(folder):
    """How many runs stepped together in each epoch."""
    return [row["together"] for row in read(folder).metrics]


def outcome(folder):
    """The record but for times and for the runs that it stepped together with."""
    record = read(folder)
    metrics = [{name: row[name] for name in row if name not in TIMES} for row in record.metrics]
    return metrics, {name: value for name, value in record.result.items() if name != "seconds"}


TIMES = ("seconds", "samples_per_second", "together", "alike")


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The outcome of a run that is trained alone, as a function of its job."""
    outcomes = {}

    def found(one):
        if one.config not in outcomes:
            folder = tmp_path_factory.mktemp("alone")
            do([Job(one.config, folder)])
            outcomes[one.config] = outcome(folder)
        return outcomes[one.config]

    return found


def test_runs_of_different_lengths_step_together_until_the_shorter_ends(tmp_path, alone):
    short, long = job(tmp_path / "sam", 2), job(tmp_path / "sgd", 4, method="sgd")
    do([short, long])
    assert counts_together(short.folder) == [2, 2]
    assert counts_together(long.folder) == [2, 2, 1, 1]
    assert [row["lr"] for row in read(long.folder).metrics] == [rate(long.config, epoch) for epoch in range(4)]
    for one in (short, long):
        assert outcome(one.folder) == alone(one)


def test_when_a_run_ends_the_next_joins_the_others(tmp_path, alone):
    jobs = [job(tmp_path / str(seed), epochs, seed) for seed, epochs in enumerate([1, 3, 2])]
    do(jobs, together=2)
    assert [counts_together(one.folder) for one in jobs] == [[2], [2, 2, 2], [2, 2]]
    for one in jobs:
        assert outcome(one.folder) == alone(one)


def test_with_together_1_runs_train_one_after_the_other(tmp_path):
    jobs = [job(tmp_path / str(seed), 1, seed) for seed in range(2)]
    do(jobs, together=1)
    assert [counts_together(one.folder) for one in jobs] == [[1], [1]]


def test_a_run_stopped_within_an_epoch_first_finishes_that_epoch_alone(tmp_path, alone):
    stopped, fresh = job(tmp_path / "stopped", 3), job(tmp_path / "fresh", 2, seed=1)
    with pytest.raises(Stopped, match="by SIGTERM in epoch 2: "):
        do([stopped], progress=StopRequesting(BATCHES + 2))
    do([fresh, stopped])
    assert counts_together(stopped.folder) == [1, 1, 2]
    assert counts_together(fresh.folder) == [2, 1]
    for one in (stopped, fresh):
        assert outcome(one.folder) == alone(one)


def test_a_stop_saves_all_unfinished_runs_even_those_that_wait_for_another(tmp_path, alone):
    ahead, behind = (job(tmp_path / str(seed), 3, seed) for seed in range(2))
    for one, steps in ((ahead, BATCHES + 2), (behind, 1)):
        with pytest.raises(Stopped):
            do([one], progress=StopRequesting(steps))
    with pytest.raises(Stopped, match="in epoch 3: "):
        do([ahead, behind], progress=StopRequesting(2 + 1))  # two to the end of the epoch, and one while it waits
    assert point(ahead) == (2, 0)
    assert point(behind) == (0, 2)
    do([ahead, behind])
    assert counts_together(ahead.folder) == [1, 1, 2]
    for one in (ahead, behind):
        assert outcome(one.folder) == alone(one)


def point(one):
    """The epoch and the batch of its checkpoint."""
    state = checkpoint.load(one.folder / "checkpoints").state
    return state["epoch"], state["batch"]


def test_a_run_in_use_by_another_process_is_skipped(tmp_path, alone):
    short, long, locked = (job(tmp_path / str(seed), epochs, seed) for seed, epochs in enumerate([1, 3, 1]))
    with RunFolder.open(locked.folder, locked.config.as_dict()):
        (error,) = do([short, long, locked], together=2)
    assert isinstance(error, RunInUse)
    assert read(locked.folder).result is None
    for one in (short, long):
        assert outcome(one.folder) == alone(one)
    do([short, long, locked], together=2)
    for one in (short, long, locked):
        assert outcome(one.folder) == alone(one)


def test_runs_in_use_by_other_processes_are_noted_and_are_an_error_if_no_other_run_is_left(tmp_path, capsys):
    mine, theirs = job(tmp_path / "mine", 1), job(tmp_path / "theirs", 1, seed=1)
    with RunFolder.open(theirs.folder, theirs.config.as_dict()):
        for jobs in ([mine, theirs], [theirs]):
            refused = nullcontext() if mine in jobs else pytest.raises(RunInUse, match="theirs is in use by process")
            with refused:
                runs.run(jobs, lambda name: tiny_images(), torch.device("cpu"), Progress())
    assert read(mine.folder).result["status"] == "done"
    assert read(theirs.folder).result is None
    assert capsys.readouterr().out.count("1 run is still in training in another process: run the same command") == 1


def test_runs_finished_meanwhile_by_another_process_are_distinguished_from_skipped_ones(tmp_path, capsys):
    """The two kinds are distinguished by what the folders contain at the end."""
    mine, ended, theirs = (job(tmp_path / name, 1, seed) for seed, name in enumerate(["mine", "ended", "theirs"]))
    with ExitStack() as open_:
        held = [open_.enter_context(RunFolder.open(one.folder, one.config.as_dict())) for one in (ended, theirs)]

        class Ending(Progress):
            def finish(self, config, result):
                super().finish(config, result)
                held[0].finish(result)

        runs.run([ended, theirs, mine], lambda name: tiny_images(), torch.device("cpu"), Ending())
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "another process" in line)
    again = "run the same command again for the complete table"
    assert line == f"1 run was trained by another process, 1 run is still in training there: {again}"


def test_a_run_with_metrics_but_no_checkpoint_reports_that_it_starts_over(tmp_path, alone, capsys):
    one = job(tmp_path / "run", 2)
    with RunFolder.open(one.folder, one.config.as_dict()) as run:
        for epoch in range(3):
            run.metrics.append({"epoch": epoch})
    do([one])
    printed = capsys.readouterr().out
    assert "run has no checkpoint and starts over; it had 3 lines of metrics\n" in printed
    assert outcome(one.folder) == alone(one)
    do([job(tmp_path / "fresh", 1)])
    assert "starts over" not in capsys.readouterr().out


def test_a_failing_tracker_is_reported_once_and_dropped_while_training_continues(tmp_path, alone, capsys):
    class Failing:
        def log(self, folder, config, metrics):
            raise ConnectionError("no [route] to host")

        def close(self):
            raise AssertionError("it was left")

    class FailingInTheEnd:
        def __init__(self):
            self.epochs = []

        def log(self, folder, config, metrics):
            self.epochs.append(metrics["epoch"])

        def close(self):
            raise RuntimeError("not sent")

    one, other = job(tmp_path / "run", 2), FailingInTheEnd()
    with StopRequesting() as progress:
        progress.trackers += [Failing(), other]
        do([one], progress=progress)
    assert other.epochs == [0, 1]
    assert outcome(one.folder) == alone(one)
    assert [line for line in capsys.readouterr().out.splitlines() if "failed" in line] == [
        "Failing failed and gets no more curves (ConnectionError: no [route] to host). Training continues",
        "FailingInTheEnd failed and gets no more curves (RuntimeError: not sent). Training continues",
    ]


def test_a_result_that_cannot_be_written_does_not_affect_the_other_runs(tmp_path, alone):
    short, long = job(tmp_path / "short", 1), job(tmp_path / "long", 2, seed=1)
    own = RunFolder.finish

    def finish(run, result, receipt):
        if run.folder == short.folder:
            raise RecordError("no space is left")
        own(run, result, receipt)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunFolder, "finish", finish)
        with pytest.raises(RecordError, match="no space is left"):
            do([short, long])
    assert (point(short), point(long)) == ((1, 0), (1, 0))
    do([short, long])
    for one in (short, long):
        assert outcome(one.folder) == alone(one)


def test_the_memory_of_a_run_is_released_when_it_ends(tmp_path, monkeypatch):
    alive, seen = [], []

    class Watched(lab.TrainingRun):
        def __init__(self, config, *rest):
            gc.collect()
            seen.append([one().config.seed for one in alive if one() is not None])
            super().__init__(config, *rest)
            alive.append(weakref.ref(self))

    monkeypatch.setattr(lab, "TrainingRun", Watched)
    do([job(tmp_path / str(seed), 1 + (seed == 0), seed) for seed in range(4)], together=2)
    assert seen == [[], [0], [0], []]


def test_steps_are_prepared_only_when_the_set_of_runs_that_step_together_changes(tmp_path, monkeypatch):
    prepared = []
    own = lab.steps_of
    monkeypatch.setattr(lab, "steps_of", lambda stepping, note: prepared.append(len(stepping)) or own(stepping, note))
    do([job(tmp_path / "short", 2), job(tmp_path / "long", 4, seed=1)])
    assert prepared == [2, 1]


def test_only_runs_with_the_same_data_split_and_numerics_step_together(tmp_path):
    fields = {"a": {}, "b": {"validation": 0.2}, "c": {}, "d": {"deterministic": True}}
    jobs = [job(tmp_path / name, 1, seed, **of_job) for seed, (name, of_job) in enumerate(fields.items())]
    runs.run(jobs, lambda name: tiny_images(), torch.device("cpu"), Progress(), together=4)
    assert [counts_together(one.folder) for one in jobs] == [[2], [1], [2], [1]]


def test_all_runs_are_counted_from_the_start_and_saved_as_often_as_configured(tmp_path):
    saved, console = [], Console(file=io.StringIO(), width=200)

    class Watched(Progress):
        def saved(self, config):
            saved.append(config.seed)

    jobs = [job(tmp_path / str(seed), 2, seed) for seed in range(2)]
    with Watched(console) as progress:
        runs.run(jobs, lambda name: tiny_images(), torch.device("cpu"), progress, checkpoint_seconds=0)
    assert {0, 1} == {*saved}
    lines = [line for line in console.file.getvalue().splitlines() if "epoch" not in line]
    assert [line.split(",")[0] for line in lines] == ["run 2 of 2"]  # and none at the end, when no run is left


@pytest.mark.parametrize(("seconds", "saved"), [(1, 3), (0, 11)])
def test_saving_takes_at_most_a_twentieth_of_the_time_unless_configured_for_every_epoch(
    seconds, saved, tmp_path, monkeypatch
):
    now, seen = [0.0], []

    class Slow(Progress):
        def epoch(self, config, folder, metrics):
            now[0] += 10

        def saved(self, config):
            seen.append(now[0])
            now[0] += 2  # as for a large model: the next one is due after 40 seconds

    monkeypatch.setattr(lab, "time", SimpleNamespace(monotonic=lambda: now[0]))
    with Slow() as progress:
        train([job(tmp_path / "a", 12)], tiny_images(), torch.device("cpu"), progress, checkpoint_seconds=seconds)
    assert len(seen) == saved


def test_metrics_record_whether_all_runs_of_a_step_cost_the_same(tmp_path):
    sgd, sam, bisam = job(tmp_path / "a", 2, method="sgd"), job(tmp_path / "b", 1), job(tmp_path / "c", 1, seed=1)
    do([sgd, sam])
    do([bisam, job(tmp_path / "d", 1, method="bisam-log")])
    assert [row["alike"] for row in read(sgd.folder).metrics] == [False, True]
    assert [row["alike"] for row in read(bisam.folder).metrics] == [True]


def test_a_stop_requested_at_any_moment_saves_a_checkpoint(tmp_path):
    """`stopping` is true from its n-th evaluation on."""

    class Counted(list):
        evaluations = 0

        def __bool__(self):
            self.evaluations += 1
            return self.evaluations >= self.limit

    for limit in range(1, 2 * (BATCHES + 1) + 1):  # once before each epoch, and after each batch
        one, stopping = job(tmp_path / str(limit), 2), Counted(["SIGTERM"])
        stopping.limit = limit
        with pytest.raises(Stopped):
            train([one], tiny_images(), torch.device("cpu"), Progress(), stopping)
        rows = read(one.folder).metrics
        assert not rows or point(one) >= (len(rows), 0)


def test_bars_appear_and_disappear_with_the_runs(tmp_path):
    shown = []

    class Watched(Progress):
        def epoch(self, *arguments):
            super().epoch(*arguments)
            shown.append(sorted((task.description[4:10], task.completed, task.total) for task in self._bars.tasks))

    console = Console(file=io.StringIO(), force_terminal=True)
    with Watched(console) as progress:
        train(
            [job(tmp_path / str(seed), 1 + (seed == 0), seed) for seed in range(3)],
            tiny_images(), torch.device("cpu"), progress, together=2,
        )  # fmt: skip
        assert not progress._bars.tasks
    assert shown[1] == [("seed 0", 4, 8), ("seed 1", 4, 4)]
    assert shown[3] == [("seed 0", 8, 8), ("seed 2", 4, 4)]


@pytest.mark.parametrize("width", [60, 80, 100])
def test_in_a_narrow_terminal_texts_are_truncated_while_bar_count_and_time_remain(width, tmp_path):
    shown, own = Console(file=io.StringIO(), width=width), Config(noise=0.4)
    metrics = {"loss": 1.0, "validation_accuracy": 90.0, "flips": 1.5, "samples_per_second": 1e4}
    with Progress(Console(file=io.StringIO(), force_terminal=True, width=width), label="[b] {}".format) as progress:
        progress.begin({own: 99}, 352)
        progress.epoch(own, tmp_path, {"epoch": 99, **metrics})
        shown.print(progress._bars.get_renderable())
    (line,) = shown.file.getvalue().splitlines()
    assert len(line) <= width
    assert re.fullmatch(r"\[b\] Conf.*… ━{5,}\S* +35200/70400 -:--:-- validation 9.*…", line)


def test_after_a_stop_request_no_further_run_begins(tmp_path):
    jobs = [job(tmp_path / str(seed), 1, seed) for seed in range(2)]
    with pytest.raises(Stopped, match="stopped by SIGTERM between two runs: the same command resumes there"):
        do(jobs, together=1, progress=StopRequesting(at_finish=True))
    assert read(jobs[0].folder).result["status"] == "done"
    assert not jobs[1].folder.exists()


def test_a_stop_request_after_the_last_run_is_ignored(tmp_path):
    do([job(tmp_path, 1)], progress=StopRequesting(at_finish=True))
    assert read(tmp_path).result["status"] == "done"


def test_a_diverging_run_does_not_affect_the_others_and_the_next_joins(tmp_path, alone):
    wild = job(tmp_path / "wild", 9, seed=7, lr=1000, weight_decay=1)
    others = [job(tmp_path / str(seed), 3 - seed, seed) for seed in range(2)]
    do([wild, *others], together=2)
    assert read(wild.folder).result["status"] == "diverged"
    assert read(wild.folder).result["epochs"] == len(counts_together(wild.folder)) == 2
    assert [counts_together(one.folder) for one in others] == [[2, 2, 2], [2, 1]]
    for one in others:
        assert outcome(one.folder) == alone(one)


def test_a_run_stopped_within_the_epoch_in_which_it_diverges_ends_as_if_not_stopped(tmp_path, alone):
    wild = job(tmp_path, 9, seed=7, lr=1000, weight_decay=1)
    with pytest.raises(Stopped, match="in epoch 2: "):
        do([wild], progress=StopRequesting(2 * BATCHES - 1))
    do([wild])
    assert outcome(wild.folder) == alone(wild)


def test_the_folder_of_a_finished_run_is_not_locked_while_others_continue(tmp_path):
    short, long = job(tmp_path / "short", 1), job(tmp_path / "long", 2, seed=1)
    opened = []

    class Opening(StopRequesting):
        def epoch(self, config, folder, metrics):
            if metrics["epoch"] == 1:
                RunFolder.open(short.folder, short.config.as_dict()).close()
                opened.append(json.loads((short.folder / "result.json").read_text())["status"])

    do([short, long], progress=Opening())
    assert opened == ["done"]


def test_data_are_prepared_while_ctrl_c_still_ends_the_command(tmp_path):
    seen = []

    class Slow(InMemory):
        def prepare(self):
            seen.append(signal.getsignal(signal.SIGINT))

    source = Slow(tiny_images()._data)
    runs.run([job(tmp_path, epochs=1)], lambda name: source, torch.device("cpu"), Progress())
    assert seen == [signal.getsignal(signal.SIGINT)]
