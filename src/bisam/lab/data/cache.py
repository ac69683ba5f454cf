"""Decoded images on disk: a safetensors file of pixels and labels for each split, and beside it, in JSON, what they are
made of and the checksum that they must have.
"""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save

from bisam.lab.data import hub, parquet
from bisam.lab.data.dataset import DataSet
from bisam.lab.data.images import DataError, Images
from bisam.lab.files import check_file, read_file

VERSION = 1
"""Of the cache format; a cache of another version is not read."""

LARGEST_SIDECAR = 16 * 2**20
"""Bytes of the description of a cache that is read."""

Log = Callable[[str], None]


def default_folder() -> Path:
    """$BISAM_CACHE, or else bisam in the user's folder for caches."""
    if given := os.environ.get("BISAM_CACHE"):
        return Path(given).expanduser()
    caches = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (caches if caches.is_absolute() else Path.home() / ".cache") / "bisam"


def cached(dataset: DataSet, split: str, folder: Path | None, cache: Path, log: Log) -> Images:
    """The images of a split: from the cache, or else decoded and put there.

    With a folder, the cache must have been made of exactly the files that are there. Without one, a whole cache is used
    as it is; a missing or damaged one is made again from the folder that it was made of, or from the hub.
    """
    entry = Entry(cache / (dataset.name if dataset.whole else f"part-of-{dataset.name}"), split)
    files = None if folder is None else parquet.files_of(folder, dataset, split)
    source = None if files is None else _fingerprints(files)
    unfit = None
    try:
        return entry.read(dataset, source)
    except FileNotFoundError:
        pass
    except UnfitError as error:
        unfit = f"{entry.tensors} {error}"
    try:
        files = files or _source_of(entry, dataset, split) or hub.download(dataset, split)
    except DataError as error:
        if unfit is None:
            raise
        raise DataError(f"{unfit}, and its source files are not there: {error}") from error
    if unfit is not None:
        log(f"{unfit}: its files are decoded again")
    images = parquet.decode(files, dataset, split, log)
    try:
        entry.write(images, dataset, files, source or _fingerprints(files))
    except OSError as error:
        log(f"{entry.tensors} cannot be written ({error}): the images will be decoded again next time")
    return images


class UnfitError(Exception):
    """A cache that cannot be used, with the reason."""


@dataclass(frozen=True)
class Entry:
    """The two files of a split."""

    folder: Path
    split: str

    @property
    def tensors(self) -> Path:
        return self.folder / f"{self.split}.safetensors"

    @property
    def sidecar(self) -> Path:
        return self.folder / f"{self.split}.json"

    def about(self) -> dict[str, Any]:
        try:
            found = json.loads(read_file(self.sidecar, LARGEST_SIDECAR))
        except FileNotFoundError:
            raise
        except (OSError, ValueError) as error:
            raise UnfitError(f"is damaged: {self.sidecar.name} cannot be read ({error})") from None
        if not isinstance(found, dict) or found.get("version") != VERSION:
            raise UnfitError("was written by another version of bisam")
        return found

    def read(self, dataset: DataSet, source: Sequence[dict[str, Any]] | None) -> Images:
        """The cached images, verified; UnfitError if they were made of other source files."""
        about = self.about()
        if source is not None and about.get("files") != list(source):
            raise UnfitError("was made of other files")
        try:
            check_file(self.tensors, parquet.LARGEST_FILE)
            found = load_file(self.tensors)
            images = Images(found["pixels"], found["labels"])
        except FileNotFoundError:
            raise
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise UnfitError(f"is damaged: {error}") from None
        if images.checksum != about.get("sha256") or (dataset.whole and len(images) != dataset.samples[self.split]):
            raise UnfitError("is damaged: its contents do not have the recorded checksum")
        return images

    def write(self, images: Images, dataset: DataSet, files: Sequence[Path], source: Sequence[dict[str, Any]]) -> None:
        """The tensors first: without the sidecar that belongs to them they count as damaged."""
        self.folder.mkdir(parents=True, exist_ok=True)
        about = {
            "version": VERSION,
            "name": dataset.name,
            "split": self.split,
            "samples": len(images),
            "shape": list(images.pixels.shape),
            "sha256": images.checksum,
            "source": str(files[0].parent.absolute()),
            "files": list(source),
        }
        with _draft(self.tensors) as draft:
            draft.write_bytes(save({"pixels": images.pixels, "labels": images.labels}))
        with _draft(self.sidecar) as draft:
            draft.write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")


@contextmanager
def _draft(path: Path) -> Iterator[Path]:
    """A name to write to; it becomes `path` at once, when all is written, or nothing is left of it."""
    draft = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")  # several processes may write the same cache
    try:
        yield draft
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def _source_of(entry: Entry, dataset: DataSet, split: str) -> list[Path] | None:
    """The files that a cache was made of, if they are still there."""
    try:
        folder = Path(entry.about()["source"])
        return parquet.files_of(folder, dataset, split) if folder.is_dir() else None
    except (FileNotFoundError, UnfitError, DataError, KeyError, TypeError):
        return None


def _fingerprints(files: Sequence[Path]) -> list[dict[str, Any]]:
    """Name, size and sha256 of each."""
    found = []
    for path in files:
        digest, count = hashlib.sha256(), 0
        try:
            with path.open("rb") as file:
                while chunk := file.read(1 << 20):
                    digest.update(chunk)
                    count += len(chunk)
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror}") from error
        found.append({"name": path.name, "bytes": count, "sha256": digest.hexdigest()})
    return found
