"""Folders of Parquet files in the hub's layout: a column of encoded images, structs of bytes and path, and labels."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from PIL import Image, UnidentifiedImageError

from bisam.lab.data.dataset import DataSet, check
from bisam.lab.data.images import DataError, Images
from bisam.lab.files import check_file

SUBFOLDERS = (".", "data", "plain_text")
"""Subfolders of the hub's repositories that may have the files; one with the data set's name may have them too."""

FORMATS = ("PNG", "JPEG", "WEBP")
"""Formats of images that are decoded; for others, such as EPS, Pillow may start other programs."""

MOST_PIXELS = 89_000_000
"""Pixels of an image that is decoded; about here Pillow begins to warn of images that take all memory."""

LARGEST_FILE = 64 * 2**30
"""Bytes of a file that is read."""


def files_of(folder: Path, dataset: DataSet, split: str) -> list[Path]:
    """The files of a split, in order, and all of them."""
    needed = " and ".join(f"{prefix}-*.parquet" for prefix in dataset.files.values())
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder: give the one that has {needed} of {dataset.name}")
    prefix = dataset.files[split]
    subfolders = (*SUBFOLDERS, dataset.name)
    for subfolder in subfolders:
        files = sorted((folder / subfolder).glob(f"{prefix}-*.parquet"))
        if files:
            _check_complete(files, prefix)
            for path in files:
                check_plain(path)
            return files
    raise DataError(
        f"{folder} has no {prefix}-*.parquet, neither directly nor in {', '.join(subfolders[1:])}: "
        f"{dataset.name} needs {needed}"
    )


def decode(files: Sequence[Path], dataset: DataSet, split: str, log: Callable[[str], None]) -> Images:
    """All images of a split in memory, checked against the data set."""
    assert dataset.size is not None
    shards = [ParquetShard(path, dataset) for path in files]
    check_count(shards, dataset, split)
    count, side = sum(shard.rows for shard in shards), dataset.size
    pixels, labels = np.empty((count, side, side, 3), dtype=np.uint8), np.empty(count, dtype=np.int64)
    position = 0
    for number, shard in enumerate(shards, start=1):
        log(f"{dataset.name}: decoding {shard.path.name}, {shard.rows} images, file {number} of {len(shards)}")
        for group in range(len(shard.groups)):
            for _, image, label in shard.samples(group):
                pixels[position], labels[position] = np.asarray(image), label
                position += 1
    images = Images(torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous(), torch.from_numpy(labels))
    check(images, dataset, split, str(files[0].parent))
    return images


class ParquetShard:
    """One Parquet file with the columns of that data set. Reads happen in the calling thread, so it may be forked."""

    def __init__(self, path: Path, dataset: DataSet) -> None:
        self.path, self.dataset = path, dataset
        check_plain(path)
        try:
            self._file = pq.ParquetFile(path, page_checksum_verification=True)
        except (pa.ArrowException, OSError) as error:
            raise self._broken(error) from error
        self._check_columns(self._file.schema_arrow)
        metadata = self._file.metadata
        self.groups = [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]
        self.rows = sum(self.groups)
        self._first = [0, *accumulate(self.groups)]

    def samples(self, group: int, wanted: Iterable[int] | None = None) -> Iterator[tuple[int, Image.Image, int]]:
        """Row in the file, RGB image and label of the samples of a row group: all, or those at these places in it."""
        try:
            table = self._file.read_row_group(
                group, columns=[f"{self.dataset.image}.bytes", self.dataset.label], use_threads=False
            )
            encoded = pc.struct_field(table.column(self.dataset.image), "bytes")
            labels = table.column(self.dataset.label).to_pylist()
        except (pa.ArrowException, OSError) as error:
            raise self._broken(error) from error
        for place in range(len(labels)) if wanted is None else wanted:
            row, label = self._first[group] + place, labels[place]
            if label is None or not 0 <= label < self.dataset.classes:
                raise DataError(
                    f"{self.path}, row {row}: the label is {label} and {self.dataset.name} has 0 … "
                    f"{self.dataset.classes - 1}: this is another data set, or a split without labels"
                )
            yield row, self._image(encoded[place], row), label

    def _image(self, encoded: Any, row: int) -> Image.Image:
        if not encoded.is_valid:
            raise DataError(f"{self.path}, row {row}: the image is not in the file: get one with embedded images")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # `_check_size` refuses it
                image = Image.open(io.BytesIO(encoded.as_buffer()), formats=FORMATS)  # reads no pixels yet
        except UnidentifiedImageError as error:
            raise DataError(
                f"{self.path}, row {row}: the image is damaged, or not one of {', '.join(FORMATS)}: get the file again"
            ) from error
        except Exception as error:  # broken images raise a dozen kinds
            raise self._damaged(row, error) from error
        self._check_size(image, row)
        try:
            return image.convert("RGB")
        except Exception as error:
            raise self._damaged(row, error) from error

    def _check_size(self, image: Image.Image, row: int) -> None:
        """Before the pixels are decoded, which may take all memory."""
        (width, height), side = image.size, self.dataset.size
        if side is not None and (width, height) != (side, side):
            raise DataError(
                f"{self.path}, row {row}: the image is {width}×{height} and those of {self.dataset.name} are "
                f"{side}×{side}: this is another data set"
            )
        if width * height > MOST_PIXELS:
            raise DataError(
                f"{self.path}, row {row}: the image is {width}×{height}, and at most {MOST_PIXELS:,} pixels are decoded"
            )

    def _damaged(self, row: int, error: Exception) -> DataError:
        return DataError(f"{self.path}, row {row}: the image is damaged ({error}): get the file again")

    def _check_columns(self, schema: Any) -> None:
        dataset, names = self.dataset, ", ".join(schema.names)
        for column in (dataset.image, dataset.label):
            if column not in schema.names:
                raise DataError(
                    f"{self.path} has no column {column!r}, it has {names}: {dataset.name} has {dataset.image} and "
                    f"{dataset.label}, is this another data set?"
                )
        image, label = (schema.field(column).type for column in (dataset.image, dataset.label))
        if not pa.types.is_struct(image) or image.get_field_index("bytes") < 0:
            raise DataError(
                f"{self.path}: column {dataset.image!r} must be a struct of the bytes and the path of an encoded "
                f"image, got {image}"
            )
        if not pa.types.is_integer(label):
            raise DataError(
                f"{self.path}: column {dataset.label!r} must have integers, the number of a class, got {label}"
            )

    def _broken(self, error: Exception) -> DataError:
        return DataError(f"{self.path} is not a complete Parquet file ({error}): it may be truncated, get it again")


def check_plain(path: Path) -> None:
    """Raise DataError for what cannot be read to its end, such as a pipe."""
    try:
        check_file(path, LARGEST_FILE)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error


def check_count(shards: Sequence[ParquetShard], dataset: DataSet, split: str) -> None:
    found = sum(shard.rows for shard in shards)
    if found != dataset.samples[split] if dataset.whole else found == 0:
        raise DataError(
            f"{shards[0].path.parent}: the {split} split has {found} samples in {len(shards)} "
            f"{'file' if len(shards) == 1 else 'files'} and that of {dataset.name} has {dataset.samples[split]}: "
            f"files are missing, or of another data set"
        )


def _check_complete(files: Sequence[Path], prefix: str) -> None:
    """Raise DataError if a file of a series such as `00000-of-00002` is missing or foreign."""
    totals = {int(match[1]) for path in files if (match := re.search(r"-of-(\d+)\.parquet$", path.name))}
    if not totals:
        return
    total, names = max(totals), {path.name for path in files}
    wanted = [f"{prefix}-{number:05d}-of-{total:05d}.parquet" for number in range(total)]
    missing, extra = [name for name in wanted if name not in names], sorted(names.difference(wanted))
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise DataError(f"{files[0].parent} has no {missing[0]}{more}: copy all {total} files of the split")
    if extra:
        raise DataError(f"{files[0].parent} has {extra[0]} beside {wanted[0]}: keep the files of one version only")
