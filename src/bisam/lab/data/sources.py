"""Sources of a run's batches: a data set in memory, or one that is streamed from disk."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from bisam.lab import spec
from bisam.lab.config import Config
from bisam.lab.data.batches import Batched, Loaders, Rounds
from bisam.lab.data.catalogue import find_dataset, is_registered
from bisam.lab.data.images import ImageSplits
from bisam.lab.data.labels import split, with_noise
from bisam.lab.data.loading import load
from bisam.lab.data.named import NAMED, deviation, locate
from bisam.lab.data.on_device import Batches
from bisam.lab.data.own import open_dataset
from bisam.lab.data.own_source import OwnData
from bisam.lab.data.preparation import Preparation
from bisam.lab.data.stream import Stream

__all__ = ["Batched", "InMemory", "Loaders", "OnDisk", "Source", "describe", "open_source", "own_data"]

EVALUATION_BATCH = {"memory": 2500, "disk": 250}
"""Samples of a batch. Few large batches of small images: launching the kernels of a small network takes longest."""


class Source(Protocol):
    """A data set, from which every run takes its own split, noise, order and augmentation."""

    classes: int
    checksum: str
    features: int | None
    """Numbers in a row; None for images and texts."""
    notes: Sequence[str]
    """Lines about what was assumed or left out, which the receipt of a run keeps."""

    def prepare(self) -> None:
        """Download or open files before the first run begins."""

    def loaders(self, config: Config, device: torch.device) -> Loaders: ...
    def described(self) -> list[str]: ...

    def preparation(self, config: Config) -> Preparation | None:
        """How new samples become inputs of a run's model; None for data sets of the lab, which have a test part."""


class InMemory:
    """A small data set. It lies on the device, where its images are cropped, flipped and normalised."""

    features: int | None = None
    notes: Sequence[str] = ()

    def __init__(self, data: ImageSplits) -> None:
        self._data = data
        self.classes, self.checksum = data.classes, data.checksum

    def prepare(self) -> None:
        """The images are in memory already."""

    def loaders(self, config: Config, device: torch.device) -> Loaders:
        data = self._data
        labels = with_noise(data.train.labels, config.noise, data.classes, seed=config.seed)
        validating = labels if config.validation_noise else data.train.labels
        train_rows, validation_rows = split(labels, config.validation, seed=config.seed)

        def batches(pixels: Tensor, labels: Tensor, *, train: bool) -> Batches:
            return Batches(
                pixels, labels, batch=config.batch if train else EVALUATION_BATCH["memory"], mean=data.mean,
                std=data.std, device=device, seed=config.seed, augment=train, padding=config.padding,
                flip=config.flip, cutout=config.cutout, cutout_probability=config.cutout_probability, drop_last=train,
            )  # fmt: skip

        pixels = data.train.pixels
        training = batches(pixels[train_rows], labels[train_rows], train=True)
        return Loaders(
            training if config.epoch_steps is None else Rounds(training, config.epoch_steps),
            batches(pixels[validation_rows], validating[validation_rows], train=False),
            batches(data.test.pixels, data.test.labels, train=False),
        )

    def described(self) -> list[str]:
        """Lines with its size, classes and checksum."""
        data = self._data
        lines = [
            f"{data.name}, {part}: {len(images)} images of {'×'.join(map(str, images.pixels.shape[1:]))}, "
            f"{data.classes} classes"
            for part, images in (("train", data.train), ("test", data.test))
        ]
        return [*lines, f"sha256 of the decoded contents: {data.checksum}"]

    def preparation(self, config: Config) -> None:
        return None


class OnDisk:
    """A large data set, decoded and augmented by worker processes as it is needed."""

    features: int | None = None
    notes: Sequence[str] = ()

    def __init__(self, name: str, folder: Path | None, *, partial: bool = False) -> None:
        self._name, self._folder, self._partial = name, folder, partial
        self.classes = find_dataset(name).classes
        self.checksum = self._fingerprint()

    def prepare(self) -> None:
        self.described()

    def loaders(self, config: Config, device: torch.device) -> Loaders:
        if config.noise or config.padding or config.cutout or not config.flip:
            raise ValueError(
                f"{self._name} is streamed with an augmentation of its own: label noise, padding, cutout and "
                "flip=false are for data sets in memory"
            )

        def stream(part: str, rows: Tensor | None, *, train: bool) -> Stream:
            return Stream(
                self._name, self._folder, part, batch=config.batch if train else EVALUATION_BATCH["disk"],
                device=device, seed=config.seed, augment=train, rows=rows, drop_last=train,
                partial=self._partial,
            )  # fmt: skip

        count = len(stream("train", None, train=False).samples)
        train_rows, validation_rows = split(range(count), config.validation, seed=config.seed)
        training = stream("train", train_rows, train=True)
        return Loaders(
            training if config.epoch_steps is None else Rounds(training, config.epoch_steps),
            stream("train", validation_rows, train=False),
            stream("test", None, train=False),
        )

    def described(self) -> list[str]:
        """Lines with its size, classes and checksum; opens every file and reads no image."""
        lines = []
        for part in ("train", "test"):
            stream = Stream(
                self._name, self._folder, part, batch=1, device="cpu", seed=0, augment=False, partial=self._partial
            )
            lines.append(f"{self._name}, {part}: {len(stream.samples)} images, {self.classes} classes")
        return [*lines, f"sha256 of the names and sizes of its files: {self.checksum}"]

    def preparation(self, config: Config) -> None:
        return None

    def _fingerprint(self) -> str:
        """sha256 over names and sizes of the files: the contents are too large to read twice."""
        digest = hashlib.sha256(b"" if self._folder is not None else f"hub {self._name}".encode())
        for path in sorted(Path(self._folder).rglob("*.parquet")) if self._folder is not None else []:
            digest.update(f"{path.name} {path.stat().st_size}\n".encode())
        return digest.hexdigest()


def open_source(name: str, *, log: Callable[[str], None], folder: Path | None = None, partial: bool = False) -> Source:
    """The data set of that name, from a folder or the hub: in memory, or streamed where it does not fit.

    A name that is not registered is one's own data: see `bisam.lab.data.own`.
    """
    if not is_registered(name):
        dataset = open_dataset(locate(name, folder))
        if (line := deviation(name, dataset)) is not None:
            log(line)
        return OwnData(dataset)
    if find_dataset(name).is_streamed:
        return OnDisk(name, folder, partial=partial)
    return InMemory(load(name, folder, log=log, partial=partial))


def own_data(name: str) -> OwnData:
    """One's own data by name: see `bisam.lab.data.own`. ValueError for a data set of the lab.

    A file or folder comes before a data set of the lab of the same name, and is recorded as ./NAME.
    """
    place, options = spec.parse_data(name)
    is_known = is_registered(place) or place in NAMED
    if is_known and Path(place).exists():
        return OwnData(open_dataset(spec.data_name(f"./{place}", options)))
    if is_registered(place):
        raise ValueError(f"{name} is a data set of the lab, which its recipes train on: see bisam list")
    return OwnData(open_dataset(locate(name)))


def describe(name: str, *, log: Callable[[str], None], folder: Path | None = None, partial: bool = False) -> list[str]:
    """Load and check a data set; lines with its size, classes and checksum."""
    return open_source(name, log=log, folder=folder, partial=partial).described()
