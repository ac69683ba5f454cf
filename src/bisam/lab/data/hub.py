"""Data sets by their names on the hub, through its package `datasets`, which is imported only then."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bisam.lab.data.dataset import DataSet
from bisam.lab.data.images import DataError


def download(dataset: DataSet, split: str) -> list[Path]:
    """The Parquet files of a split, as they are there, in the hub's own cache; no second copy is made of them."""
    folder = f"give a folder with its files, {dataset.files[split]}-*.parquet, by --data"
    try:
        datasets: Any = importlib.import_module("datasets")
    except ImportError:
        raise DataError(
            f"{dataset.hub} is downloaded by the package datasets, which is not installed: pip install datasets, "
            f"or {folder}"
        ) from None
    try:
        with silent_retries():
            builder = datasets.load_dataset_builder(dataset.hub)
            urls = list(builder.config.data_files[dataset.files[split]])
            return [Path(path) for path in datasets.DownloadManager().download(urls)]
    except Exception as error:  # of the network, of permissions, of the hub
        reason = next(iter(str(error).splitlines()), "")[:200]
        raise DataError(
            f"{dataset.hub} could not be downloaded ({type(error).__name__}: {reason}): check the connection and "
            f"whether its terms must be accepted first, or {folder}"
        ) from error


@contextmanager
def silent_retries() -> Iterator[None]:
    """Without lines of the hub's packages for what fails: the last attempt raises it."""
    loggers = [logging.getLogger(name) for name in ("huggingface_hub", "datasets")]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)
