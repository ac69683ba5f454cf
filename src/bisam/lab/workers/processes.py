"""Workers that are processes of this machine, one for each GPU."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait

import torch

from bisam.lab.training.loop import Stopped
from bisam.lab.workers.messages import Begun, Happening, Lost, Message, Shown
from bisam.lab.workers.task import Task, described, train

SECONDS_BETWEEN_LOOKS = 0.2
"""At signals, and at processes that have died."""


@dataclass(frozen=True)
class Processes:
    """Each of `workers` processes trains one task after the other; GPUs are shared out in turn."""

    workers: int
    gpus: int = 0
    """0 is training on the CPU."""
    retries: int = 2
    is_elsewhere = False

    @contextmanager
    def open(self) -> Iterator[None]:
        yield

    def run(self, tasks: Sequence[Task], stopping: Sequence[str]) -> Happening:
        waiting, lost = deque(range(len(tasks))), Counter[int]()
        free = deque(range(min(self.workers, len(tasks))))
        busy: list[_Worker] = []
        idle: list[_Worker] = []
        try:
            while busy or (waiting and not stopping):
                while waiting and not stopping and (idle or free):
                    worker = idle.pop() if idle else self._started(free.popleft())
                    busy.append(worker)
                    worker.give(waiting.popleft(), tasks)
                    yield worker.task, Begun(worker.name)
                if stopping:
                    for worker in busy:
                        worker.stop()
                wait([worker.connection for worker in busy], SECONDS_BETWEEN_LOOKS)
                for worker in [*busy]:
                    for message in worker.messages():
                        if isinstance(message, Shown):
                            yield worker.task, message
                            continue
                        busy.remove(worker)
                        if not isinstance(message, Lost):
                            idle.append(worker)
                            yield worker.task, message
                            break  # its end, if that is there too, is found when it gets a task
                        free.append(worker.number)
                        lost[worker.task] += 1
                        again = lost[worker.task] <= self.retries
                        if again:
                            waiting.appendleft(worker.task)
                        if not stopping:
                            yield worker.task, Lost(worker.name, message.reason, again)
                        break
        except KeyboardInterrupt:  # the third Ctrl-C
            for worker in busy:
                worker.process.kill()
            raise
        finally:
            for worker in busy:
                worker.stop()
            for worker in [*busy, *idle]:
                worker.connection.close()
            for worker in [*busy, *idle]:
                worker.process.join()

    def _started(self, number: int) -> _Worker:
        threads = torch.get_num_threads()
        if "OMP_NUM_THREADS" not in os.environ:
            threads = max(1, threads // self.workers)
        return _Worker(number, f"cuda:{number % self.gpus}" if self.gpus else "cpu", threads)


class _Worker:
    """A process, and what it has to do."""

    def __init__(self, number: int, device: str, threads: int) -> None:
        context = multiprocessing.get_context("spawn")  # a forked process cannot use CUDA
        self.number, self.task, self._is_stopping = number, -1, False
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(theirs, device, threads))
        self.process.start()
        theirs.close()  # so that its end is the end of the connection
        self.name = f"process {self.process.pid} on {device}"

    def give(self, number: int, tasks: Sequence[Task]) -> None:
        self.task = number
        with suppress(BrokenPipeError, ConnectionResetError):  # it has died: `messages` finds that
            self.connection.send(tasks[number])

    def stop(self) -> None:
        """Make it save its runs and end."""
        if not self._is_stopping:
            self._is_stopping = True
            self.process.terminate()

    def messages(self) -> Iterator[Message]:
        """What it has sent; last a Lost if it has ended."""
        is_alive = self.process.is_alive()  # before its last messages are read
        reason = ""
        try:
            while self.connection.poll():
                message = self.connection.recv()
                if isinstance(message, Lost):  # its last one
                    is_alive, reason = False, message.reason
                    break
                yield message
        except (EOFError, OSError, pickle.UnpicklingError):
            is_alive = False
        if not is_alive:
            self.process.join()
            self.connection.close()
            yield Lost(self.name, reason or _ending(self.process.exitcode), again=False)


def _ending(code: int | None) -> str:
    """
    >>> _ending(-9), _ending(1)
    ('was killed by SIGKILL, as a system does that runs out of memory', 'ended with code 1')
    """
    if code is None or code >= 0:
        return f"ended with code {code}"
    name = signal.Signals(-code).name
    return f"was killed by {name}" + (", as a system does that runs out of memory" if name == "SIGKILL" else "")


def _work(connection: Connection, device: str, threads: int) -> None:
    """The process: trains one task after the other, until the connection ends."""
    if hasattr(os, "setsid"):
        os.setsid()  # Ctrl-C is for the command, which then stops its workers
    torch.set_num_threads(threads)
    torch_device = torch.device(device)
    if torch_device.type == "cuda":
        torch.cuda.set_device(torch_device)
    while True:
        try:
            task = connection.recv()
        except EOFError:
            return
        with suppress(BrokenPipeError, ConnectionResetError):  # the command has ended, and so does this
            try:
                connection.send(train(task, torch_device, connection.send))
            except Stopped:
                return
            except Exception as error:  # of CUDA, for one, after which a process is of no more use
                connection.send(Lost("", f"raised {described(error)}", again=False))
                return
