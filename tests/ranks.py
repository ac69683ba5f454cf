"""Two real processes, joined by gloo, which run one function after the other."""

import atexit
import importlib
import os
import pickle
import signal
import tempfile
import traceback
from contextlib import contextmanager, suppress
from multiprocessing import connection

import torch
import torch.distributed as dist

import forked

RANKS = 2
LIMIT, GRACE = 600, 60
"""Seconds that a function may take, and that the other rank may still run after one has failed: it may wait for ever.

Limits end a hang. Both are more than ten times what it takes on an idle machine."""


class _Pool:
    """Ranks that serve the functions of a module until one of them fails: starting takes longer than most functions.

    A host imports the module and forks the ranks, which share what it has imported.
    """

    def __init__(self, module: str) -> None:
        self.module, self._folder = module, tempfile.TemporaryDirectory()
        pairs = [forked.context().Pipe() for _ in range(RANKS)]
        self._pipes, theirs = [ours for ours, _ in pairs], [pipe for _, pipe in pairs]
        self._host = forked.context().Process(target=_host, args=(module, self._folder.name, theirs))
        self._host.start()
        for pipe in theirs:
            pipe.close()

    def run(self, function, args) -> list:
        for pipe in self._pipes:
            pipe.send_bytes(pickle.dumps((function, args)))
        answers: dict[int, tuple] = {}
        while len(answers) < RANKS:
            failed = any(text for text, _ in answers.values())
            waited_for = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in answers}
            ready = connection.wait(waited_for, GRACE if failed else LIMIT)
            for pipe in ready or waited_for:
                answers[waited_for[pipe]] = self._answer(waited_for[pipe]) if ready else ("no answer", None)
        failures = [f"rank {rank}: {text}" for rank, (text, _) in sorted(answers.items()) if text]
        if failures:
            raise RuntimeError("\n".join(failures))
        return [answers[rank][1] for rank in range(RANKS)]

    def _answer(self, rank: int) -> tuple:
        try:
            return pickle.loads(self._pipes[rank].recv_bytes())
        except EOFError:
            self._host.join(GRACE)
            return f"it ended with exit code {self._host.exitcode}", None

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        with suppress(ProcessLookupError):  # it may not have a group of its own yet
            os.killpg(self._host.pid, signal.SIGKILL)
        self._host.kill()
        self._host.join()
        self._folder.cleanup()


_pool: _Pool | None = None


def run(function, *args) -> list:
    """What function(*args) returns on each rank. It must be importable: it runs in other processes."""
    global _pool
    if _pool is None or _pool.module != function.__module__:
        _close()
        _pool = _Pool(function.__module__)
    try:
        return _pool.run(function, args)
    except BaseException:
        _close()
        raise


@atexit.register
def _close() -> None:
    global _pool
    if _pool is not None:
        _pool.close()
    _pool = None


def _host(module: str, folder: str, pipes: list) -> None:
    """Fork the ranks, and end as soon as one of them does, in the same way."""
    os.setsid()  # a group of their own, to be killed together
    importlib.import_module(module)
    for rank, pipe in enumerate(pipes):
        if os.fork() == 0:
            try:
                for other in pipes[:rank] + pipes[rank + 1 :]:
                    other.close()
                _serve(rank, folder, pipe)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
    for pipe in pipes:
        pipe.close()
    code = os.waitstatus_to_exitcode(os.wait()[1])
    if code < 0:
        os.kill(os.getpid(), -code)
    os._exit(code)


def _serve(rank: int, folder: str, pipe) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=RANKS)
    while True:
        try:
            function, args = pickle.loads(pipe.recv_bytes())
        except EOFError:  # the test has ended
            os._exit(0)
        try:
            answer = "", function(*args)
            dist.barrier()  # all have ended it before the next one begins
        except BaseException:
            answer = traceback.format_exc(), None
        pipe.send_bytes(pickle.dumps(answer))


@contextmanager
def launched():
    """The environment that a launcher such as torchrun gives to frameworks."""
    rank = str(dist.get_rank())
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": str(RANKS), "MASTER_ADDR": "localhost"}
    before = {name: os.environ.get(name) for name in (*names, "LOCAL_WORLD_SIZE", "MASTER_PORT")}
    os.environ.update(names)
    try:
        yield int(rank)
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})


def mine(whole: torch.Tensor) -> torch.Tensor:
    """This rank's part of a batch."""
    return whole.chunk(RANKS)[dist.get_rank()]
