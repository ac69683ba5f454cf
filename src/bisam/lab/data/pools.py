"""Any samples of a data set, without augmentation: the data of diagnoses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from bisam.lab.config import Config
from bisam.lab.data.catalogue import find_dataset, is_registered
from bisam.lab.data.images import ImageSplits
from bisam.lab.data.labels import split, with_noise
from bisam.lab.data.loading import load
from bisam.lab.data.named import place_again
from bisam.lab.data.on_device import Batches
from bisam.lab.data.own import open_dataset
from bisam.lab.data.own_source import OwnData
from bisam.lab.data.sources import OnDisk
from bisam.lab.data.stream import Stream

BATCH = {"memory": 125, "disk": 32}
"""Batch size of the diagnoses: second derivatives take several times the memory of a training step."""

BATCH_OF_OWN = {"image": 32, "rows": 1000, "text": 32}
"""The same for one's own data, by kind."""

SampleBatches = list[tuple[Any, Tensor]]
"""Inputs and labels in batches, on the device."""


class Pool(Protocol):
    """A data set that returns any of its samples, without augmentation."""

    classes: int
    features: int | None
    """Numbers in a row; None for images and texts."""
    checksum: str
    count: int
    """Number of training samples, including those for validation."""
    scattered: bool
    """Whether random rows are as fast to read as neighbouring ones."""

    def rows(self, config: Config) -> Tensor:
        """Rows of the samples that a run was trained on."""
        ...

    def training(self, config: Config, rows: Tensor, device: torch.device) -> SampleBatches:
        """These samples, with the labels that the run was trained on."""
        ...

    def test(self, config: Config, most: int, device: torch.device) -> tuple[SampleBatches, bool]:
        """Test samples, at most `most` of a large data set, and whether these are all of them."""
        ...


class PoolInMemory:
    """A small data set."""

    scattered = True
    features: int | None = None

    def __init__(self, data: ImageSplits) -> None:
        self._data = data
        self.classes, self.checksum, self.count = data.classes, data.checksum, len(data.train)

    def rows(self, config: Config) -> Tensor:
        return split(range(self.count), config.validation, seed=config.seed)[0]

    def training(self, config: Config, rows: Tensor, device: torch.device) -> SampleBatches:
        images = self._data.train
        labels = with_noise(images.labels, config.noise, self.classes, seed=config.seed)
        return self._batches(images.pixels[rows], labels[rows], device)

    def test(self, config: Config, most: int, device: torch.device) -> tuple[SampleBatches, bool]:
        return self._batches(self._data.test.pixels, self._data.test.labels, device), True

    def _batches(self, pixels: Tensor, labels: Tensor, device: torch.device) -> SampleBatches:
        batches = Batches(
            pixels, labels, batch=BATCH["memory"], mean=self._data.mean, std=self._data.std, device=device, seed=0,
            augment=False, drop_last=False,
        )  # fmt: skip
        return list(batches.epoch(0))


class PoolOnDisk:
    """A large one, of which neighbours are taken: its files are read in large pieces, and have the classes mixed."""

    scattered = False
    features: int | None = None

    def __init__(self, name: str, folder: Path | None, *, partial: bool) -> None:
        self._name, self._folder, self._partial = name, folder, partial
        whole = OnDisk(name, folder, partial=partial)
        self.classes, self.checksum = whole.classes, whole.checksum
        self.count = len(self._stream("train", None, torch.device("cpu")).samples)

    def rows(self, config: Config) -> Tensor:
        return split(range(self.count), config.validation, seed=config.seed)[0]

    def training(self, config: Config, rows: Tensor, device: torch.device) -> SampleBatches:
        return list(self._stream("train", rows, device).epoch(0))

    def test(self, config: Config, most: int, device: torch.device) -> tuple[SampleBatches, bool]:
        count = len(self._stream("test", None, device).samples)
        rows = torch.arange(min(most, count))
        return list(self._stream("test", rows, device).epoch(0)), len(rows) == count

    def _stream(self, part: str, rows: Tensor | None, device: torch.device) -> Stream:
        return Stream(
            self._name, self._folder, part, batch=BATCH["disk"], device=device, seed=0, augment=False, rows=rows,
            drop_last=False, partial=self._partial,
        )  # fmt: skip


class PoolOfOwn:
    """One's own data: images, rows of numbers or texts."""

    scattered = True

    def __init__(self, source: OwnData) -> None:
        self._source, self._batch = source, BATCH_OF_OWN[source.dataset.kind]
        self.classes, self.features, self.checksum = source.classes, source.features, source.checksum
        self.count = len(source.dataset.train)

    def rows(self, config: Config) -> Tensor:
        return self._source.training_rows(config)

    def training(self, config: Config, rows: Tensor, device: torch.device) -> SampleBatches:
        return list(self._source.plain("train", rows, config, device, self._batch).epoch(0))

    def test(self, config: Config, most: int, device: torch.device) -> tuple[SampleBatches, bool]:
        rows = torch.arange(len(self._source.dataset.test))
        return list(self._source.plain("test", rows, config, device, self._batch).epoch(0)), True


def open_pool(
    name: str, partial: bool, *, folder: Path | None, log: Callable[[str], None], run_code: bool = False
) -> Pool:
    """The data set of that name, from a folder or the hub, as for a training.

    One's own data is read from the path in its name, or from `folder`. A Python file in the name is run only if
    `run_code`: the name may come from a record, and a record from anywhere.
    """
    if not is_registered(name):
        return PoolOfOwn(OwnData(open_dataset(place_again(name, folder, run_code=run_code))))
    if find_dataset(name).is_streamed:
        return PoolOnDisk(name, folder, partial=partial)
    return PoolInMemory(load(name, folder, log=log, partial=partial))
