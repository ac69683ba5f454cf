"""From options to the workers that train runs."""

from __future__ import annotations

import torch

from bisam.lab.training.ranks import environment
from bisam.lab.workers.on_ray import RayCluster
from bisam.lab.workers.processes import Processes


def backend_of(
    on: str, *, workers: int | None, gpus_per_run: float | None, retries: int, device: str, together: int, stored: bool
) -> Processes | RayCluster | None:
    """The workers that the options name; None is this process, as it is for one GPU or CPU.

    `stored` is whether the runs are kept in a storage, which a worker fetches them from.
    """
    kind, _, address = on.partition("=")
    if kind not in ("", "local", "ray") or (address and kind != "ray"):
        raise ValueError(f"--on is local, ray or ray=ADDRESS, got {on!r}")
    if environment() is not None:
        given = [name for name, value in {"--on": on, "--workers": workers, "--runs URL": stored}.items() if value]
        if given:
            raise ValueError(f"torchrun has started this process for one training: remove {given[0]}, or torchrun")
        return None
    if workers is not None and workers < 1:
        raise ValueError(f"--workers must be at least 1, got {workers}: leave it out to train in this process")
    if retries < 0:
        raise ValueError(f"--retries must be at least 0, got {retries}: 0 does not start a lost worker again")
    if kind == "ray":
        if workers is not None:
            raise ValueError(f"Ray decides how many runs train at once: remove --workers {workers}")
        cluster = RayCluster(address, gpus_of_task(gpus_per_run, together, device), retries)
        cluster.check()
        return cluster
    if gpus_per_run is not None:
        raise ValueError("--gpus-per-run is for --on ray: with --on local several --workers share a GPU")
    gpus = torch.cuda.device_count() if device in ("auto", "cuda") and torch.cuda.is_available() else 0
    count = workers if workers is not None else max(gpus, 1)
    if count == 1 and workers is None and not stored:
        return None
    if device == "cuda" and not gpus:
        raise ValueError("torch finds no CUDA device here: use --device cpu")
    return Processes(count, gpus, retries)


def gpus_of_task(gpus_per_run: float | None, together: int, device: str) -> float | None:
    """The GPUs of `together` runs; None is one, where there are GPUs.

    >>> gpus_of_task(0.25, 2, "auto"), gpus_of_task(None, 2, "cuda"), gpus_of_task(None, 1, "cpu")
    (0.5, 1.0, 0.0)
    """
    if gpus_per_run is None:
        return {"cpu": 0.0, "cuda": 1.0}.get(device)
    if device == "cpu":
        raise ValueError("--gpus-per-run is for GPUs: remove it, or --device cpu")
    if not 0 < gpus_per_run <= 1:
        raise ValueError(
            f"--gpus-per-run is a part of a GPU such as 0.25, or 1, got {gpus_per_run:g}: for one training on several "
            "GPUs use torchrun"
        )
    if gpus_per_run * together > 1 + 1e-6:
        raise ValueError(
            f"--together {together} trains on one GPU, and {together} runs with --gpus-per-run {gpus_per_run:g} each "
            f"are more: give {1 / together:.4g}"
        )
    return round(min(gpus_per_run * together, 1.0), 4)
