"""Data by name: small image sets whole, as tensors; ImageNet as a stream from disk."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

from bisam.lab.data.cache import cached, default_folder
from bisam.lab.data.digits import digits
from bisam.lab.data.images import DATA_SETS, DataError, DataSet, Facts, Images, check_whole, known
from bisam.lab.data.labels import split, with_noise
from bisam.lab.data.on_device import Batches
from bisam.lab.data.stream import Stream

__all__ = [
    "DATA_SETS", "Batches", "DataError", "DataSet", "Facts", "Images", "Stream", "known", "load", "split",
    "with_noise",
]  # fmt: skip


def say_on_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def load(
    name: str,
    folder: str | os.PathLike[str] | None = None,
    cache: str | os.PathLike[str] | None = None,
    say: Callable[[str], None] = say_on_stderr,
    *,
    partial: bool = False,
) -> DataSet:
    """A data set that fits into memory, by our name or the hub's.

    It is read from a folder of Parquet files in the hub's layout, or else from the hub, decoded once, and kept decoded
    in `cache`: by default $BISAM_CACHE, or `bisam` in the user's folder for caches. `say` is told, line by line, what
    takes a while and what was found wrong. Files that are not what they should be are a `DataError`; with `partial`,
    fewer samples than the data set has will do, for trying things out.

    >>> data = load("digits")
    >>> data.train.pixels.shape, len(data.test), data.classes
    (torch.Size([1197, 1, 8, 8]), 600, 10)
    """
    facts = known(name, partial=partial)
    if facts.hub is None:
        if folder is not None:
            raise ValueError(f"{facts.name} come with scikit-learn and are in no folder: leave it away, got {folder}")
        return digits()
    if facts.size is None:
        raise ValueError(f"{facts.name} does not fit into memory: use Stream({facts.name!r}, folder, …)")
    source = None if folder is None else Path(folder).expanduser()
    place = default_folder() if cache is None else Path(cache).expanduser()
    train, test = (cached(facts, part, source, place, say) for part in ("train", "test"))
    data = DataSet(facts.name, train, test, facts.classes, facts.mean, facts.std)
    check_whole(data, facts, str(source or facts.hub), place / facts.name)
    return data
