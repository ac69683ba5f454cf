"""torchrun whose processes are forked, by its option --start-method: they share what a server has imported once.

Importing takes longer than what a test trains, in each process and after each restart.
"""

import atexit
import importlib
import json
import os
import selectors
import signal
import subprocess
import sys
import traceback
from pathlib import Path

LIMIT = 600
"""Seconds that a command may take: more than ten times what it takes on an idle machine. Limits end a hang."""

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

_server: subprocess.Popen | None = None


def torchrun(count, *arguments, restarts=0, folder):
    """`torchrun --nproc-per-node count -m bisam arguments`, in a folder: a CompletedProcess with text."""
    global _server
    if _server is None:
        _server = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        atexit.register(_close)
    options = ["--nproc-per-node", str(count), "--max-restarts", str(restarts), "--monitor-interval", "0.1"]
    request = {"folder": str(folder), "options": options, "arguments": [*map(str, arguments)]}
    _server.stdin.write(json.dumps(request) + "\n")
    _server.stdin.flush()
    with selectors.DefaultSelector() as selector:
        selector.register(_server.stdout, selectors.EVENT_READ)
        answer = _server.stdout.readline() if selector.select(LIMIT) else ""
    if not answer:
        _close()
        raise RuntimeError(f"torchrun gave no answer within {LIMIT} seconds, or its server has ended")
    out, err = (Path(folder, name).read_text() for name in ("torchrun.out", "torchrun.err"))
    return subprocess.CompletedProcess(arguments, int(answer), out, err)


def _close():
    global _server
    if _server is not None:
        os.killpg(_server.pid, signal.SIGKILL)
        _server.wait()
        _server.stdin.close()
        _server.stdout.close()
    _server = None


def _serve():
    for name in (
        "bisam.lab.cli",
        "sklearn.datasets",
        "torch._dynamo",
        "torch.distributed.fsdp",
        "torch.distributed.run",
    ):
        importlib.import_module(name)
    for line in sys.stdin:
        request = json.loads(line)
        process = os.fork()
        if process == 0:
            os._exit(_run(**request))
        _, status = os.waitpid(process, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def _run(folder, options, arguments):
    from torch.distributed.run import main

    import bisam

    os.chdir(folder)
    for name, number, mode in (("/dev/null", 0, "r"), ("torchrun.out", 1, "w"), ("torchrun.err", 2, "w")):
        with Path(name).open(mode) as file:
            os.dup2(file.fileno(), number)
    place = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    command = ["--run-path", str(Path(bisam.__file__).with_name("__main__.py")), *arguments]
    try:
        main([*options, *place, "--start-method", "fork", *command])
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


if __name__ == "__main__":
    _serve()
