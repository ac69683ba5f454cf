"""Several runs at once: who steps with whom, and that each comes to what it comes to alone."""

import json

import pytest
import torch

from bisam.lab.config import Config, rate
from bisam.lab.data import DataSet, Images
from bisam.lab.progress import Progress
from bisam.lab.records import RunFolder, read
from bisam.lab.sources import InMemory
from bisam.lab.train import Job, Stopped, train

BATCHES = 4
"""Of an epoch."""


def tiny_images():
    draws = torch.Generator().manual_seed(0)

    def images(count):
        pixels = torch.randint(0, 256, (count, 3, 32, 32), dtype=torch.uint8, generator=draws)
        return Images(pixels, torch.randint(10, (count,), generator=draws))

    return InMemory(DataSet("tiny", images(40), images(10), 10, (0.5,) * 3, (0.25,) * 3))


def job(folder, epochs, seed=0, method="sam", **fields):
    return Job(Config(model="resnet20", method=method, batch=8, epochs=epochs, seed=seed, **fields), folder)


class Asking(Progress):
    """Has somebody ask to stop after so many steps, or as soon as a run is finished."""

    def __init__(self, steps=None, *, at_finish=False):
        super().__init__()
        self.stopping, self._left, self._at_finish = [], steps, at_finish

    def step(self, number):
        if self._left is not None:
            self._left -= 1
            self.stopping += ["SIGTERM"] * (self._left == 0)

    def finish(self, config, result):
        super().finish(config, result)
        self.stopping += ["SIGTERM"] * self._at_finish


def do(jobs, together=None, progress=None):
    progress = progress or Asking()
    train(jobs, tiny_images(), torch.device("cpu"), progress, progress.stopping, together=together)


def crews(folder):
    """How many stepped together in each epoch."""
    return [row["together"] for row in read(folder).metrics]


def outcome(folder):
    """All but the times, and who was there."""
    record = read(folder)
    metrics = [{name: row[name] for name in row if name not in TIMES} for row in record.metrics]
    return metrics, {name: value for name, value in record.result.items() if name != "seconds"}


TIMES = ("seconds", "samples_per_second", "together")


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """What a run comes to by itself, by its job."""
    known = {}

    def found(one):
        if one.config not in known:
            folder = tmp_path_factory.mktemp("alone")
            do([Job(one.config, folder)])
            known[one.config] = outcome(folder)
        return known[one.config]

    return found


def test_runs_of_different_lengths_step_together_until_the_shorter_ends(tmp_path, alone):
    short, long = job(tmp_path / "sam", 2), job(tmp_path / "sgd", 4, method="sgd")
    do([short, long])
    assert crews(short.folder) == [2, 2]
    assert crews(long.folder) == [2, 2, 1, 1]
    assert [row["lr"] for row in read(long.folder).metrics] == [rate(long.config, epoch) for epoch in range(4)]
    for one in (short, long):
        assert outcome(one.folder) == alone(one)


def test_a_run_that_ends_makes_room_for_the_next(tmp_path, alone):
    jobs = [job(tmp_path / str(seed), epochs, seed) for seed, epochs in enumerate([1, 3, 2])]
    do(jobs, together=2)
    assert [crews(one.folder) for one in jobs] == [[2], [2, 2, 2], [2, 2]]
    for one in jobs:
        assert outcome(one.folder) == alone(one)


def test_one_at_a_time_is_one_after_the_other(tmp_path):
    jobs = [job(tmp_path / str(seed), 1, seed) for seed in range(2)]
    do(jobs, together=1)
    assert [crews(one.folder) for one in jobs] == [[1], [1]]


def test_who_was_stopped_within_an_epoch_comes_to_its_end_first(tmp_path, alone):
    stopped, fresh = job(tmp_path / "stopped", 3), job(tmp_path / "fresh", 2, seed=1)
    with pytest.raises(Stopped, match="by SIGTERM in epoch 2: "):
        do([stopped], progress=Asking(BATCHES + 2))
    do([fresh, stopped])
    assert crews(stopped.folder) == [1, 1, 2]
    assert crews(fresh.folder) == [2, 1]
    for one in (stopped, fresh):
        assert outcome(one.folder) == alone(one)


def test_all_that_are_under_way_are_saved_wherever_they_are(tmp_path, alone):
    jobs = [job(tmp_path / str(seed), 3, seed) for seed in range(2)]
    with pytest.raises(Stopped):
        do(jobs[:1], progress=Asking(BATCHES + 2))
    with pytest.raises(Stopped):
        do(jobs, progress=Asking(1))  # while the second waits for the first
    with pytest.raises(Stopped, match="in epoch 3: "):
        do(jobs, progress=Asking(3))
    do(jobs)
    assert crews(jobs[0].folder) == [1, 1, 2]
    assert crews(jobs[1].folder) == [2, 1, 1]
    for one in jobs:
        assert outcome(one.folder) == alone(one)


def test_asked_to_stop_when_a_run_is_finished_the_next_is_not_begun(tmp_path):
    jobs = [job(tmp_path / str(seed), 1, seed) for seed in range(2)]
    with pytest.raises(Stopped, match="stopped by SIGTERM between two runs: the same command goes on from there"):
        do(jobs, together=1, progress=Asking(at_finish=True))
    assert read(jobs[0].folder).result["status"] == "done"
    assert not jobs[1].folder.exists()


def test_asked_to_stop_when_all_is_finished_nothing_is_left_to_go_on_with(tmp_path):
    do([job(tmp_path, 1)], progress=Asking(at_finish=True))
    assert read(tmp_path).result["status"] == "done"


def test_a_run_that_diverges_leaves_the_others_alone_and_makes_room(tmp_path, alone):
    wild = job(tmp_path / "wild", 9, seed=7, lr=1000, weight_decay=1)
    others = [job(tmp_path / str(seed), 3 - seed, seed) for seed in range(2)]
    do([wild, *others], together=2)
    assert read(wild.folder).result["status"] == "diverged"
    assert read(wild.folder).result["epochs"] == len(crews(wild.folder)) == 2
    assert [crews(one.folder) for one in others] == [[2, 2, 2], [2, 1]]
    for one in others:
        assert outcome(one.folder) == alone(one)


def test_stopped_within_the_epoch_that_it_diverges_in_a_run_ends_as_if_it_were_not(tmp_path, alone):
    wild = job(tmp_path, 9, seed=7, lr=1000, weight_decay=1)
    with pytest.raises(Stopped, match="in epoch 2: "):
        do([wild], progress=Asking(2 * BATCHES - 1))
    do([wild])
    assert outcome(wild.folder) == alone(wild)


def test_the_folder_of_a_run_that_has_ended_is_free_while_others_go_on(tmp_path):
    short, long = job(tmp_path / "short", 1), job(tmp_path / "long", 2, seed=1)
    opened = []

    class Opening(Asking):
        def epoch(self, config, folder, metrics):
            if metrics["epoch"] == 1:
                RunFolder.open(short.folder, short.config.as_dict()).close()
                opened.append(json.loads((short.folder / "result.json").read_text())["status"])

    do([short, long], progress=Opening())
    assert opened == ["done"]
