"""Real processes, forked from a server whose imports they share.

Importing takes longer than most of what a test runs. The server is multiprocessing's; `context()` starts processes from
it, and `Process` runs a command in one as `python -m` or `python file.py` would.
"""

import atexit
import io
import multiprocessing as mp
import os
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from functools import cache
from multiprocessing import forkserver, reduction
from pathlib import Path

LIMIT = 1200
"""Seconds that a command may take: more than ten times what it takes on an idle machine. Limits end a hang."""

IMPORTED = [
    "bisam.lab.cli",
    "pydantic.type_adapter",  # typer's
    "sklearn.datasets",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.launcher.api",
]


@cache
def context():
    """The fork server's context. It has one thread: others would not survive a fork."""
    found = mp.get_context("forkserver")
    found.set_forkserver_preload(IMPORTED)
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        forkserver.ensure_running()
    finally:
        os.environ.pop("OMP_NUM_THREADS") if before is None else os.environ.update(OMP_NUM_THREADS=before)
    return found


class Process:
    """A running command, with the interface of subprocess.Popen; `stdout` and `stderr` are the text so far.

    The command is a path of a file, the name of a module such as bisam, or a function that can be imported; and its
    arguments. With a file for `stdout`, the process writes there.
    """

    def __init__(self, *command, folder=None, env=None, stdout=None):
        output = tempfile.mkdtemp(prefix="forked")
        weakref.finalize(self, shutil.rmtree, output)
        self._streams = [Path(output, name) for name in ("stdout", "stderr")]
        self.arguments = [*command] if callable(command[0]) else [*map(str, command)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}
        with self._streams[0].open("wb") as out, self._streams[1].open("wb") as err:
            streams = [_Handle(out if stdout is None else stdout), _Handle(err)]
            given = (self.arguments, str(folder or Path.cwd()), environment, streams)
            self._process = context().Process(target=_run, args=given)
            self._process.start()
        self.pid = self._process.pid

    @property
    def stdout(self):
        return self._streams[0].read_text(encoding="utf-8")

    @property
    def stderr(self):
        return self._streams[1].read_text(encoding="utf-8")

    @property
    def returncode(self):
        return self._process.exitcode

    def poll(self):
        return self._process.exitcode

    def wait(self):
        self._process.join(LIMIT)
        if self._process.exitcode is None:
            self.kill()
            raise TimeoutError(f"{self.arguments} ran for more than {LIMIT} seconds:\n{self.stdout}\n{self.stderr}")
        return self._process.exitcode

    def send_signal(self, number):
        os.kill(self.pid, number)

    def kill(self):
        if self._process.exitcode is None:
            self._process.kill()
        self._process.join()

    def until(self, condition):
        """Wait until the condition holds or the process has ended."""
        end = time.monotonic() + LIMIT
        while self.poll() is None and not condition() and time.monotonic() < end:
            time.sleep(0.02)
        return self


class _Handle:
    """An open file, for another process."""

    def __init__(self, file):
        self._number = file.fileno()

    def __reduce__(self):
        return _detached, (reduction.DupFd(self._number),)


def _detached(handle):
    return handle.detach()


def run(*command, **options):
    """What subprocess.run with captured text returns."""
    process = Process(*command, **options)
    code = process.wait()
    return subprocess.CompletedProcess(process.arguments, code, process.stdout, process.stderr)


def _run(command, folder, environment, streams):
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    for number, handle in enumerate(streams, start=1):
        os.dup2(handle, number)
        os.close(handle)
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(os.fdopen(number, "wb", closefd=False), encoding="utf-8", line_buffering=number == 2)
        for number in (1, 2)
    )
    signal.signal(signal.SIGINT, signal.default_int_handler)
    mp.set_start_method(None, force=True)  # the system's, not the server's
    try:
        if callable(command[0]):
            return command[0](*command[1:])
        sys.argv[:] = command
        if command[0].endswith(".py"):
            sys.path.insert(0, str(Path(command[0]).parent))
            runpy.run_path(command[0], run_name="__main__")
        else:
            runpy.run_module(command[0], run_name="__main__", alter_sys=True)
    finally:
        atexit._run_exitfuncs()
