"""Trackers of curves: TensorBoard, Weights & Biases, trackio. Each is imported when it is used."""

from __future__ import annotations

import hashlib
import importlib
from pathlib import Path
from typing import Any

from bisam.lab.config import Config
from bisam.lab.training.progress import Tracker

SERVICES = ("wandb", "trackio")


def trackers(root: Path, *, tensorboard: bool, service: str | None, together: int) -> list[Tracker]:
    """The trackers that were chosen; ValueError if one is not installed."""
    wanted: list[Tracker] = []
    if tensorboard:
        wanted.append(TensorBoard(root))
    if service is not None:
        if service not in SERVICES:
            raise ValueError(f"curves can be sent to {' or '.join(SERVICES)}, got {service!r}")
        if together > 1:
            raise ValueError(
                f"{service} takes the curves of one run at a time: remove --track, or --together, --workers and --on"
            )
        wanted.append(Service(service))
    return wanted


class TensorBoard:
    """A folder `tensorboard` beside the runs, with a sub-folder for each."""

    def __init__(self, root: Path) -> None:
        try:
            self._module = importlib.import_module("torch.utils.tensorboard")
        except ImportError:
            raise ValueError("--tensorboard needs the package tensorboard: pip install tensorboard") from None
        self._root = root / "tensorboard"
        self._writers: dict[str, Any] = {}

    def log(self, folder: Path, config: Config, metrics: dict[str, Any]) -> None:
        name = f"{folder.parent.name}/{folder.name}"
        if name not in self._writers:
            # a resumed run has written some of its epochs before
            self._writers[name] = self._module.SummaryWriter(str(self._root / name), purge_step=metrics["epoch"])
        for key, value in metrics.items():
            if key != "epoch":
                self._writers[name].add_scalar(key, value, metrics["epoch"])

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()


class Service:
    """wandb, or trackio, which has the same calls. One run at a time is open there."""

    def __init__(self, name: str) -> None:
        try:
            self._module = importlib.import_module(name)
        except ImportError:
            raise ValueError(f"--track {name} needs the package {name}: pip install {name}") from None
        self._open: str | None = None

    def log(self, folder: Path, config: Config, metrics: dict[str, Any]) -> None:
        name, place = f"{folder.parent.name}-{folder.name}", str(folder.resolve())
        if self._open != place:  # runs of the same name in another folder are others
            self.close()
            same = {"id": hashlib.sha256(place.encode()).hexdigest()[:16]} if self._module.__name__ == "wandb" else {}
            self._module.init(project="bisam", name=name, config=config.as_dict(), resume="allow", **same)
            self._open = place
        self._module.log(metrics, step=metrics["epoch"])

    def close(self) -> None:
        if self._open is not None:
            self._module.finish()
            self._open = None
