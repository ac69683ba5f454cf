"""Images that are read from disk as they are needed: decoded, cropped and scaled in worker processes."""

from __future__ import annotations

import math
import os
import random
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import accumulate, groupby
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from bisam.lab.data import hub, parquet
from bisam.lab.data.images import Facts, known
from bisam.lab.data.on_device import Normalization
from bisam.lab.data.randomness import generator, mixed

SIZE = 224
AREA = (0.08, 1.0)
ASPECT = (3 / 4, 4 / 3)
ATTEMPTS = 10


class Stream:
    """Batches of a data set in Parquet files, with the interface of `Batches`.

    With `augment`, a part of the image of 8 to 100 % of its area and an aspect ratio of 3/4 to 4/3 (Szegedy et al. 2015)
    is scaled to `size`, and mirrored with probability ½; without, the shorter side is scaled to 8/7 · `size` (256 for
    224) and the centre is cut out.

    The order of an epoch is by row groups: they are shuffled, and the samples of `mixing` of them at a time among each
    other, so that a batch reads few of them. That presumes files in which the classes are mixed already, as the hub's
    are. Order and augmentation depend on seed, epoch and row only, not on the number of workers.

    `rows` restricts it to a part of the samples, such as one side of `split`.
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
    ) -> None:
        facts = known(name)
        if split not in facts.files:
            raise ValueError(f"split must be {' or '.join(facts.files)}, got {split!r}")
        if facts.hub is None:
            raise ValueError(f"{facts.name} is small and has no files: use load({facts.name!r}) and Batches")
        if batch < 1 or mixing < 1:
            raise ValueError(f"batch and mixing must be positive, got {batch} and {mixing}")
        files = hub.download(facts, split) if folder is None else parquet.files_of(Path(folder), facts, split)
        self._samples = Samples(files, facts, split, seed=seed, size=size, augment=augment)
        self.labels_seen_once = None
        self.classes, self.device = facts.classes, torch.device(device)
        self.batch, self.seed, self.drop_last, self.mixing = batch, seed, drop_last, mixing
        self.shuffle = augment if shuffle is None else shuffle
        self.workers = min(8, os.cpu_count() or 1) if workers is None else workers
        self._rows = torch.arange(len(self._samples)) if rows is None else rows.cpu().sort().values
        if len(self._rows) and not 0 <= int(self._rows[0]) <= int(self._rows[-1]) < len(self._samples):
            raise ValueError(f"rows must be in 0 … {len(self._samples) - 1}, got {int(self._rows[0])} … ")
        self._normalize = Normalization(
            facts.mean, facts.std, device=self.device, dtype=dtype, channels_last=channels_last
        )
