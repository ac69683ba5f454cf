"""A table of four runs, trained in this process once; and a network that kills its worker, or stops the command.

Training on a CPU gives the same bits in every process, so wherever the runs train, their records must be the same.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from bisam.lab import records
from bisam.lab.cli import app
from bisam.lab.workers import processes

import forked

os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # Ray stays on 127.0.0.1; read when it is imported
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

NET = """
import json, os, signal, time
from pathlib import Path
import torch

HERE, PASS = Path(__file__).parent, 13

class Net(torch.nn.Sequential):
    def __init__(self):
        super().__init__(torch.nn.Flatten(), torch.nn.Linear(64, 10))
        self.seed, self.passes = torch.initial_seed(), 0

    def forward(self, x):
        self.passes += self.training
        if self.training and self.passes >= PASS:
            self.act()
        return super().forward(x)

    def act(self):
        for path in sorted(HERE.glob(f"*-{self.seed}-*.json")):
            kind, order = path.name.split("-")[0], json.loads(path.read_text())
            if os.getpid() == order["command"]:
                continue
            wait(lambda: all([*Path("/").glob(file)] for file in order["after"]))
            path.unlink()
            if kind == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if kind == "raise":
                raise RuntimeError("no memory, say")
            came = []
            for number in (signal.SIGINT, signal.SIGTERM):
                wait_for(number, came)
            os.kill(order["command"], signal.SIGINT)
            wait(lambda: came)

def wait(condition):
    end = time.monotonic() + 600  # where what is tested does not happen, the test ends
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError("waited for ten minutes")
        time.sleep(0.02)

def wait_for(number, came):
    before = signal.getsignal(number)

    def handle(*arguments):
        came.append(number)
        before(*arguments)

    signal.signal(number, handle)

def net():
    return Net()
"""
SEEDS = (0, 1, 2, 3)
TRAINING = ["--set", "epochs=6", "--set", "batch=256", "--checkpoint-seconds", "0", "--device", "cpu"]


@pytest.fixture(scope="session")
def network(tmp_path_factory):
    """The network's file, and `arm(kind, seed)`: the worker of that seed kills itself, raises, or stops the command.

    In its thirteenth pass, which is in the third of the four steps of the second epoch: a worker that is killed there
    has the checkpoint of the first epoch, and one that is stopped saves after that step. With `after`, it waits first
    until the runs of these folders have ended.
    """
    folder = tmp_path_factory.mktemp("network")
    (folder / "net.py").write_text(NET)

    def arm(kind, seed, times=1, after=()):
        files = [str(folder / "result.json").lstrip("/") for folder in after]
        for number in range(times):
            order = json.dumps({"command": os.getpid(), "after": files})
            (folder / f"{kind}-{seed}-{number}.json").write_text(order)

    def armed():
        return sorted(path.name for path in folder.glob("*.json"))

    return SimpleNamespace(name=f"{folder / 'net.py'}:net", arm=arm, armed=armed)


@pytest.fixture(scope="session")
def command(network):
    """Runs a command in this process; workers are others."""

    def run(name, *options):
        arguments = [name, "demo/40%/sam", *(["--model", network.name] if name == "reproduce" else []), *TRAINING]
        if name == "sweep":
            arguments += ["--set", f"model={network.name}", "--over", "lr", "--values", "0.05,0.1", "--seeds", "0"]
        else:
            arguments += ["--seeds", ",".join(map(str, SEEDS))]
        return CliRunner().invoke(app, [*arguments, *map(str, options)], env={"COLUMNS": "250"})

    return run


@pytest.fixture
def forked_workers(monkeypatch):
    """Workers forked from a server that has imported everything. The test of killed workers starts them as users do."""
    monkeypatch.setattr(processes, "multiprocessing", SimpleNamespace(get_context=lambda _: forked.context()))


OF_THE_PLACE = ("seconds", "samples_per_second", "together", "alike")


def outcomes(root):
    """What must not depend on where a run is trained, by the name of the run: all but times and places."""
    found = {}
    for record in records.find_records(Path(root)):
        assert records.verify(record) + records.weights_problems(record) == []
        assert [*record.folder.glob(f"{records.CHECKPOINTS}/*")] == []
        rows = [*record.metrics, record.result]
        assert [row["epoch"] for row in record.metrics] == [*range(6)]
        timeless = [{k: v for k, v in row.items() if k not in OF_THE_PLACE} for row in rows]
        name = f"{record.folder.parent.name}/{record.folder.name}"
        assert name not in found
        found[name] = json.dumps(timeless), (record.folder / records.WEIGHTS).read_bytes()
    return found


@pytest.fixture(scope="session")
def of_table():
    return outcomes


@pytest.fixture(scope="session")
def expected(command, tmp_path_factory):
    """The records of training in this process, by the command."""
    found = {}
    for name in ("reproduce", "sweep"):
        root = tmp_path_factory.mktemp("here") / name
        done = command(name, "--runs", root)
        assert done.exit_code == 0, done.output
        found[name] = outcomes(root)
    return found


CLUSTER = """
import ctypes, os, subprocess, sys, tempfile
from ray.cluster_utils import Cluster

hidden, temporary = sys.argv[1:]
os.makedirs(os.path.join(tempfile.gettempdir(), "ray"), exist_ok=True)  # where Ray notes the address, and expects one
node = {"num_cpus": 1, "object_store_memory": 80 * 2**20}
head = {**node, "num_gpus": 1, "include_dashboard": False, "temp_dir": temporary}
cluster = Cluster(initialize_head=True, head_node_args=head)
own_mounts = 0x00020000
is_hidden = ctypes.CDLL(None).unshare(own_mounts) == 0 and all(
    subprocess.run(["mount", *arguments, hidden]).returncode == 0
    for arguments in (["--bind", hidden], ["--make-private"], ["-t", "tmpfs", "none"])
)
cluster.add_node(**node)
print(cluster.address, int(is_hidden), flush=True)
sys.stdin.read()
cluster.shutdown()
"""


@pytest.fixture(scope="session")
def cluster(tmp_path_factory):
    """A Ray cluster of two nodes with a CPU each, the first with a fake GPU; a folder that the second cannot see."""
    pytest.importorskip("ray", reason="ray has no wheel for this system")
    hidden = tmp_path_factory.mktemp("hidden")
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as short:  # sockets have short paths
        process = subprocess.Popen(
            [sys.executable, "-c", CLUSTER, hidden, short],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            line = process.stdout.readline()
            assert line, process.stderr.read()
            address, is_hidden = line.split()
            yield SimpleNamespace(on=f"ray={address}", hidden=hidden if is_hidden == "1" else None)
        finally:
            process.communicate()
