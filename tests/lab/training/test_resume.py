"""A run resumes only with its own data, configuration and code, and with the metrics before its checkpoint."""

import signal
from dataclasses import replace

import pytest
import torch
from torch import nn

from bisam.lab.config import Config
from bisam.lab.records import ConfigMismatch, RunFolder, checkpoint
from bisam.lab.training.loop import Job, Stopped, signals, train
from bisam.lab.training.progress import Progress
from tiny import tiny_images

CONFIG = Config(model="tiny", method="sgd", batch=8, epochs=3, precision="fp32")
NET = """
from torch import nn

def net(classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, classes))
"""


def build(config, source):
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 10))


class AfterOneEpoch(Progress):
    """Requests a stop after one epoch, as a signal does."""

    def __init__(self):
        super().__init__()
        self.stopping = []

    def epoch(self, config, folder, metrics):
        self.stopping.append("SIGTERM")


@pytest.fixture
def job(tmp_path):
    """A run that was stopped after its first epoch."""
    found, progress = Job(CONFIG, tmp_path / "run"), AfterOneEpoch()
    with pytest.raises(Stopped, match="in epoch 2"):
        train([found], tiny_images(), torch.device("cpu"), progress, progress.stopping, build=build)
    return found


def epochs_of(job):
    with RunFolder.open(job.folder, job.config.as_dict()) as run:
        return [row["epoch"] for row in run.metrics]


def test_a_line_of_metrics_after_the_checkpoint_is_written_again(job):
    with RunFolder.open(job.folder, job.config.as_dict()) as run:
        run.metrics.append({"epoch": 1, "loss": 0.0})  # killed before the next checkpoint
    train([job], tiny_images(), torch.device("cpu"), Progress(), build=build)
    assert epochs_of(job) == [0, 1, 2]


def test_a_run_is_not_resumed_with_other_data(job):
    other = tiny_images()
    other.checksum = "0" * 64
    with pytest.raises(ConfigMismatch, match=r"data: '\w+' there, '0+' now"):
        train([job], other, torch.device("cpu"), Progress(), build=build)
    assert epochs_of(job) == [0]
    train([job], tiny_images(), torch.device("cpu"), Progress(), build=build)
    assert epochs_of(job) == [0, 1, 2]


def test_a_checkpoint_of_another_configuration_is_refused_with_the_field_that_differs(job):
    loaded = checkpoint.load(job.folder / "checkpoints")
    changed = {**loaded.state, "config": {**loaded.state["config"], "lr": 0.07}}
    checkpoint.save(job.folder / "checkpoints", loaded.step, changed)
    with pytest.raises(ConfigMismatch, match=r"lr: 0.07 there, 0.1 now"):
        train([job], tiny_images(), torch.device("cpu"), Progress(), build=build)
    assert epochs_of(job) == [0]


def test_the_third_signal_stops_at_once_and_the_handlers_are_restored():
    before = signal.getsignal(signal.SIGINT)
    with signals() as names:
        for _ in range(2):
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert names == ["SIGINT"] * 3
    assert signal.getsignal(signal.SIGINT) is before


def test_a_run_is_not_resumed_if_the_code_of_its_network_has_changed(tmp_path):
    net, progress = tmp_path / "net.py", AfterOneEpoch()
    net.write_text(NET)
    job = Job(replace(CONFIG, model=f"{net}:net"), tmp_path / "runs" / "run")
    with pytest.raises(Stopped, match="in epoch 2"):
        train([job], tiny_images(), torch.device("cpu"), progress, progress.stopping)
    net.write_text(NET.replace("Flatten()", "Flatten(), nn.Softsign()"))
    with pytest.raises(ValueError, match=r"net\.py has changed since the runs in .*run began"):
        train([job], tiny_images(), torch.device("cpu"), Progress())
    assert epochs_of(job) == [0]
    net.write_text(NET)
    train([job], tiny_images(), torch.device("cpu"), Progress())
    assert epochs_of(job) == [0, 1, 2]
