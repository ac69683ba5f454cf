"""Images that are read from disk as they are needed: decoded, cropped and scaled in worker processes."""

from __future__ import annotations

import math
import os
import random
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from bisam.lab.data import hub, parquet
from bisam.lab.data.catalogue import find_dataset
from bisam.lab.data.dataset import DataSet
from bisam.lab.data.images import DataError
from bisam.lab.data.on_device import Normalization
from bisam.lab.data.randomness import generator, mixed
from bisam.lab.data.shards import WHOLE

SIZE = 224
AREA = (0.08, 1.0)
ASPECT = (3 / 4, 4 / 3)
ATTEMPTS = 10

Key = tuple[int, Sequence[int]]
"""The key of a batch: its epoch and its rows of the split."""


class Stream:
    """Batches of a data set in Parquet files, with the interface of `Batches`.

    With `augment`, a random part of each image, 8 to 100 % of its area and of an aspect ratio of 3/4 to 4/3 (Szegedy et
    al. 2015), is scaled to `size` and mirrored with probability ½. Without, the shorter side is scaled to 8/7 · `size`,
    256 for 224, and the centre is cut out.

    Row groups come in random order, and the samples of `mixing` of them at a time are shuffled among each other, so
    that a batch reads few. That presumes files in which the classes are mixed already, as the hub's are. Order and
    augmentation depend on seed, epoch and row only, not on the number of workers.

    `rows` restricts it to a part of the samples, such as one side of `split`. With `partial`, the folder may hold fewer
    samples than the data set has.
    """

    def __init__(
        self,
        name: str,
        folder: str | os.PathLike[str] | None = None,
        split: str = "train",
        *,
        batch: int,
        device: torch.device | str,
        seed: int,
        augment: bool,
        rows: Tensor | None = None,
        size: int = SIZE,
        shuffle: bool | None = None,
        drop_last: bool = True,
        dtype: torch.dtype = torch.float32,
        channels_last: bool = True,
        workers: int | None = None,
        mixing: int = 16,
        partial: bool = False,
    ) -> None:
        dataset = find_dataset(name, partial=partial)
        if dataset.hub is None:
            raise ValueError(f"{dataset.name} has no files to stream: use load({dataset.name!r}) and Batches")
        if split not in dataset.files:
            raise ValueError(f"split must be {' or '.join(dataset.files)}, got {split!r}")
        if batch < 1 or mixing < 1:
            raise ValueError(f"batch and mixing must be positive, got {batch} and {mixing}")
        files = hub.download(dataset, split) if folder is None else parquet.files_of(Path(folder), dataset, split)
        self.samples = StreamedSamples(files, dataset, split, seed=seed, augment=augment, size=size)
        self.rows = torch.arange(len(self.samples)) if rows is None else rows.cpu().sort().values
        if len(self.rows) and not 0 <= int(self.rows[0]) <= int(self.rows[-1]) < len(self.samples):
            raise ValueError(
                f"rows must be in 0 … {len(self.samples) - 1}, got {int(self.rows[0])} … {int(self.rows[-1])}"
            )
        self.device = torch.device(device)
        self.shard = WHOLE
        self.batch, self.seed, self.drop_last, self.mixing = batch, seed, drop_last, mixing
        self.shuffle = augment if shuffle is None else shuffle
        self.workers = min(8, os.cpu_count() or 1) if workers is None else workers
        self._normalize = Normalization(
            dataset.mean, dataset.std, device=self.device, dtype=dtype, channels_last=channels_last
        )

    def __len__(self) -> int:
        count = len(self.rows)
        return count // self.batch if self.drop_last else -(-count // self.batch)

    def epoch(self, number: int, *, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches of that epoch, from batch `start` on, each what it would be in a whole epoch."""
        if not 0 <= start <= len(self):
            raise ValueError(f"start must be in 0 … {len(self)}, the number of batches, got {start}")
        return self._batches(number, start)

    def _batches(self, number: int, start: int) -> Iterator[tuple[Tensor, Tensor]]:
        order = self.order(number).tolist()
        ends = [(at * self.batch, min((at + 1) * self.batch, len(order))) for at in range(start, len(self))]
        keys = [(number, order[self.shard.rows(*end)]) for end in ends]
        loader: DataLoader[tuple[Tensor, Tensor] | DataError] = DataLoader(
            self.samples,
            batch_size=None,  # an item is a whole batch already
            sampler=keys,
            num_workers=self.workers,
            pin_memory=self.device.type == "cuda",
            generator=torch.Generator(),  # else it would take a number from torch's global one
        )
        for found in loader:
            if isinstance(found, DataError):
                raise found
            pixels, labels = (tensor.to(self.device, non_blocking=True) for tensor in found)
            yield self._normalize(pixels), labels

    def order(self, number: int) -> Tensor:
        """The rows in the order of that epoch."""
        if not self.shuffle or not len(self.rows):
            return self.rows
        draws = generator("stream", self.seed, number)
        edges = torch.searchsorted(self.rows, torch.tensor(self.samples.first[1:-1]))
        groups = self.rows.tensor_split(edges)
        shuffled = [groups[group] for group in torch.randperm(len(groups), generator=draws).tolist()]
        mixed_groups = [torch.cat(shuffled[at : at + self.mixing]) for at in range(0, len(groups), self.mixing)]
        return torch.cat([rows[torch.randperm(len(rows), generator=draws)] for rows in mixed_groups])


class StreamedSamples(Dataset[tuple[Tensor, Tensor] | DataError]):
    """A split on disk. Item (epoch, rows) has their pixels, uint8 (B, size, size, 3), and labels.

    Every process opens the files for itself, when it needs them, and reads each row group of an item once. A file that
    is wrong makes its error the item: raised in a worker, it would come with a traceback and keep the others waiting.
    """

    def __init__(
        self, files: Sequence[Path], dataset: DataSet, split: str, *, seed: int, augment: bool, size: int = SIZE
    ) -> None:
        self._files, self._facts = list(files), dataset
        self._seed, self._augment, self._size = seed, augment, size
        shards = [parquet.ParquetShard(path, dataset) for path in files]
        parquet.check_count(shards, dataset, split)
        self._groups = [(file, group) for file, shard in enumerate(shards) for group in range(len(shard.groups))]
        self.first = [0, *accumulate(count for shard in shards for count in shard.groups)]
        self._shards: dict[int, parquet.ParquetShard] = {}

    def __len__(self) -> int:
        return self.first[-1]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_shards": {}}

    def __getitem__(self, key: Key) -> tuple[Tensor, Tensor] | DataError:
        try:
            return self.read(*key)
        except DataError as error:
            return error

    def read(self, epoch: int, rows: Sequence[int]) -> tuple[Tensor, Tensor]:
        pixels = np.empty((len(rows), self._size, self._size, 3), dtype=np.uint8)
        labels = np.empty(len(rows), dtype=np.int64)
        by_row = sorted(range(len(rows)), key=rows.__getitem__)
        for number, members in groupby(by_row, key=lambda at: bisect_right(self.first, rows[at]) - 1):
            places = list(members)
            file, group = self._groups[number]
            wanted = [rows[at] - self.first[number] for at in places]
            for at, (_, image, label) in zip(places, self._shard(file).samples(group, wanted), strict=True):
                pixels[at], labels[at] = np.asarray(self._view(image, epoch, rows[at])), label
        return torch.from_numpy(pixels), torch.from_numpy(labels)

    def _shard(self, file: int) -> parquet.ParquetShard:
        if file not in self._shards:
            self._shards[file] = parquet.ParquetShard(self._files[file], self._facts)
        return self._shards[file]

    def _view(self, image: Image.Image, epoch: int, row: int) -> Image.Image:
        if not self._augment:
            return centre(image, self._size)
        return random_part(image, self._size, random.Random(mixed("view", self._seed, epoch, row)))


def random_part(image: Image.Image, size: int, draws: random.Random) -> Image.Image:
    """A random part of the image, scaled to a square of that size, mirrored or not."""
    part = image.crop(random_box(*image.size, draws)).resize((size, size), Image.Resampling.BILINEAR)
    return part.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if draws.random() < 0.5 else part


def random_box(width: int, height: int, draws: random.Random) -> tuple[int, int, int, int]:
    """Left, top, right and bottom of a part: its area uniform, its aspect ratio log-uniform, its place uniform.

    After ten that do not fit, the largest part at the centre whose aspect ratio is allowed.
    """
    for _ in range(ATTEMPTS):
        area = width * height * _between(*AREA, draws)
        aspect = math.exp(_between(math.log(ASPECT[0]), math.log(ASPECT[1]), draws))
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            left, top = int(draws.random() * (width - w + 1)), int(draws.random() * (height - h + 1))
            return left, top, left + w, top + h
    w, h = min(width, round(height * ASPECT[1])), min(height, round(width / ASPECT[0]))
    left, top = (width - w) // 2, (height - h) // 2
    return left, top, left + w, top + h


def centre(image: Image.Image, size: int) -> Image.Image:
    """The centre of the image, scaled so that the shorter side is 8/7 of the size."""
    width, height = image.size
    shorter, target = min(width, height), size * 8 // 7
    width, height = width * target // shorter, height * target // shorter
    left, top = round((width - size) / 2), round((height - size) / 2)
    return image.resize((width, height), Image.Resampling.BILINEAR).crop((left, top, left + size, top + size))


def _between(low: float, high: float, draws: random.Random) -> float:
    return low + (high - low) * draws.random()
