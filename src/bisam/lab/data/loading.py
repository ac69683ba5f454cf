"""Data sets that fit into memory, by name."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

from bisam.lab.data.cache import cached, default_folder
from bisam.lab.data.catalogue import find_dataset
from bisam.lab.data.dataset import DataSet, check_loaded, check_whole
from bisam.lab.data.images import Images, ImageSplits


def print_to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def load(
    name: str,
    folder: str | os.PathLike[str] | None = None,
    cache: str | os.PathLike[str] | None = None,
    log: Callable[[str], None] = print_to_stderr,
    *,
    partial: bool = False,
) -> ImageSplits:
    """A data set that fits into memory, by our name or the hub's.

    It is read from a folder of Parquet files in the hub's layout, or else from the hub, decoded once, and kept decoded
    in `cache`: by default $BISAM_CACHE, or `bisam` in the user's folder for caches. A data set with a `load` function
    is what that function returns. `log` gets a line about what takes a while and what was found wrong. Files that are
    not what they should be raise `DataError`; with `partial`, fewer samples than the data set has are accepted.

    >>> data = load("digits")
    >>> data.train.pixels.shape, len(data.test), data.classes
    (torch.Size([1197, 1, 8, 8]), 600, 10)
    """
    dataset = find_dataset(name, partial=partial)
    if dataset.load is not None:
        if folder is not None:
            raise ValueError(f"{dataset.name} is not read from files: remove --data, got {folder}")
        return _splits(dataset, *dataset.load())
    if dataset.is_streamed:
        raise ValueError(f"{dataset.name} does not fit into memory: use Stream({dataset.name!r}, folder, …)")
    source = None if folder is None else Path(folder).expanduser()
    place = default_folder() if cache is None else Path(cache).expanduser()
    train, test = (cached(dataset, part, source, place, log) for part in ("train", "test"))
    data = ImageSplits(dataset.name, train, test, dataset.classes, dataset.mean, dataset.std)
    check_whole(data, dataset, str(source or dataset.hub), place / dataset.name)
    return data


def _splits(dataset: DataSet, train: Images, test: Images) -> ImageSplits:
    check_loaded(train, dataset, "train")
    check_loaded(test, dataset, "test")
    return ImageSplits(dataset.name, train, test, dataset.classes, dataset.mean, dataset.std)
