"""Workers of a Ray cluster: one Ray task for each of ours. Ray schedules them, and starts lost ones again."""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from bisam.lab.workers.messages import Begun, Failed, Happening, Lost, Message
from bisam.lab.workers.task import Task, described, train

SECONDS_BETWEEN_LOOKS = 0.2
SECONDS_TO_CONNECT = 5.0


@dataclass(frozen=True)
class RayCluster:
    """The cluster at an address; empty is the one of this machine or of RAY_ADDRESS, or a new one if there is none."""

    address: str = ""
    gpus: float | None = None
    """Of each task; None is 1 where the cluster has GPUs."""
    retries: int = 2
    is_elsewhere = True

    def check(self) -> None:
        """Raise ValueError with the remedy if Ray is not installed, or nothing answers at the address."""
        imported()
        address = self.address or os.environ.get("RAY_ADDRESS", "")
        if address not in ("", "auto", "local"):
            _check_answers(address)

    @contextmanager
    def open(self) -> Iterator[None]:
        ray = imported()
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # of a cluster that begins here
        os.environ.setdefault("RAY_TQDM_PATCH_PRINT", "0")  # Ray would replace Python's print in this process, for good
        try:
            ray.init(self.address or None, log_to_driver=False, logging_level="ERROR", include_dashboard=False)
        except (ConnectionError, ValueError, RuntimeError) as error:
            where = self.address or os.environ.get("RAY_ADDRESS", "of this machine")
            raise ValueError(f"cannot use the Ray cluster {where}: {described(error)}") from None
        try:
            if self.gpus and not ray.cluster_resources().get("GPU"):
                raise ValueError("the Ray cluster has no GPU: use --device cpu, or add a node with one")
            yield
        finally:
            ray.shutdown()

    def run(self, tasks: Sequence[Task], stopping: Sequence[str]) -> Happening:
        ray = imported()
        from ray.util.queue import Queue
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        near = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        queue = Queue(actor_options={"num_cpus": 0, "scheduling_strategy": near})
        gpus = self.gpus
        if gpus is None:
            gpus = 1 if ray.cluster_resources().get("GPU") else 0
        remote = ray.remote(num_cpus=1, num_gpus=gpus, max_retries=self.retries, retry_exceptions=True)(_train)
        open_ = {
            remote.options(name=task.name).remote(task, number, queue): number for number, task in enumerate(tasks)
        }
        workers: dict[int, str] = {}
        cancelled = False
        try:
            while open_:
                if stopping and not cancelled:
                    cancelled = True
                    for reference in open_:
                        ray.cancel(reference, force=False)  # a KeyboardInterrupt, as of Ctrl-C
                ended, _ = ray.wait([*open_], num_returns=len(open_), timeout=SECONDS_BETWEEN_LOOKS)
                for number, message in _sent(queue):
                    if isinstance(message, Begun):
                        if number in workers:
                            yield number, Lost(workers[number], "was lost", again=True)
                        workers[number] = message.worker
                    yield number, message
                for reference in ended:
                    number = open_.pop(reference)
                    message = _outcome(ray, reference, workers.get(number, "not started"))
                    if not (cancelled and isinstance(message, Lost)):
                        yield number, message
        finally:
            for reference in open_:
                ray.cancel(reference, force=False)
            if open_:
                ray.wait([*open_], num_returns=len(open_))


def imported() -> Any:
    """The library; ValueError with the remedy where it is not installed."""
    try:
        import ray
    except ImportError:
        raise ValueError("--on ray needs the package ray: pip install 'bisam[ray]'") from None
    return ray


def _train(task: Task, number: int, queue: Any) -> Message:
    """In a process of the cluster."""
    ray = imported()
    queue.put((number, Begun(f"process {os.getpid()} on {platform.node()}")))
    device = torch.device("cuda", 0) if ray.get_gpu_ids() else torch.device("cpu")
    if device.type == "cuda" and not torch.cuda.is_available():
        where = f"Ray has a GPU on {platform.node()}, and torch finds none there"
        return Failed(f"{where}: install torch for CUDA, or use --device cpu")
    return train(task, device, lambda message: queue.put((number, message)))  # Stopped is raised: Ray starts it again


def _sent(queue: Any) -> list[tuple[int, Message]]:
    count = queue.qsize()
    return queue.get_nowait_batch(count) if count else []


def _outcome(ray: Any, reference: Any, worker: str) -> Message:
    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        return Lost(worker, f"raised {described(error.cause)}", again=False)
    except ray.exceptions.RayError as error:
        return Lost(worker, f"was lost ({described(error)})", again=False)


def _check_answers(address: str) -> None:
    """Raise ValueError if nothing listens there: Ray itself tries for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError(f"the address of a Ray cluster is HOST:PORT, as in --on ray=10.0.0.1:6379, got {address!r}")
    try:
        socket.create_connection((host.strip("[]"), int(port)), SECONDS_TO_CONNECT).close()
    except (OSError, OverflowError) as error:
        raise ValueError(
            f"no Ray cluster answers at {address} ({error}): start one with ray start --head, or give its address"
        ) from None
