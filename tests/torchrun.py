"""torchrun in a process of the fork server, whose own processes are forked too, by its option --start-method.

Importing takes longer than what a test trains, in each process and after each restart.
"""

from pathlib import Path

import bisam

import forked

DYING_NET = """
import os, signal
from pathlib import Path
from torch import nn

class Net(nn.Sequential):
    def forward(self, x):
        folder, marker = Path({folder!r}), Path({folder!r}, "killed")
        may_die = self.training and os.environ.get("RANK") == "1" and not marker.exists()
        if may_die and any(folder.rglob("checkpoint-*[1-9].safetensors")):
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(x)

def net(classes):
    return Net(nn.Flatten(), nn.Linear({inputs}, 16), nn.Tanh(), nn.Linear(16, classes))
"""
"""A file with a model whose second rank is killed, once, as soon as the folder has a checkpoint of some steps."""


def torchrun(count, *arguments, restarts=0, folder):
    """`torchrun --nproc-per-node count -m bisam arguments`, in a folder: a CompletedProcess with text."""
    options = ["--nproc-per-node", count, "--max-restarts", restarts, "--monitor-interval", 0.1]
    place = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--start-method", "fork"]
    script = ["--run-path", Path(bisam.__file__).with_name("__main__.py")]
    return forked.run("torch.distributed.run", *options, *place, *script, *arguments, folder=folder)
