"""Runs in a storage that is no folder of this machine, such as s3://bucket/runs: any URL that fsspec opens.

A worker trains in a folder of its own, fetched before and pushed after each checkpoint. Storages have no locks: the
command that starts the workers gives each run to one of them.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path, PurePosixPath
from typing import Any

from bisam.lab.files import new_draft
from bisam.lab.records.checkpoint import head_of
from bisam.lab.records.layout import CHECKPOINTS, LOCK, RESULT, WEIGHTS

PART = ".part"
"""Ending of a text that is being written."""


class StorageError(OSError):
    """A storage that cannot be read or written."""


@dataclass(frozen=True)
class Storage:
    """The runs below a URL; a name is the path of a run's folder below it."""

    url: str

    @property
    def shown(self) -> str:
        """The URL without a password.

        >>> Storage("ftp://me:secret@host/runs").shown
        'ftp://host/runs'
        """
        return re.sub(r"//[^/@]*@", "//", self.url)

    @property
    def mirror(self) -> Path:
        """The folder of this machine that its records are gathered in.

        >>> Storage("s3://bucket/my runs").mirror.as_posix()
        'runs/s3-bucket-my-runs'
        """
        return Path("runs") / re.sub(r"[^\w.]+", "-", self.shown).strip("-.")

    def check(self) -> None:
        """Write a small file and remove it, before hours of training; StorageError if that is not possible."""
        path = self._path(f".writable-{secrets.token_hex(8)}")
        with self._explained("write"):
            self._make_folder(path.rpartition("/")[0])
            self._system.pipe_file(path, b"\n")
            self._system.rm_file(path)

    def fetch(self, name: str, folder: Path, *, checkpoints: bool = True) -> bool:
        """Copy a run into a folder; whether the storage has any of it."""
        return self._fetched(name, self._sizes(name), folder, checkpoints=checkpoints)

    def gather(self, names: list[str], root: Path) -> None:
        """Copy the records of these runs below a folder, without checkpoints, unless their results are there."""
        missing = [name for name in names if not (root / name / RESULT).is_file()]
        for parent in dict.fromkeys(str(PurePosixPath(name).parent) for name in missing):
            found = self._sizes(parent)  # one listing for all of them
            for name in (name for name in missing if str(PurePosixPath(name).parent) == parent):
                own = f"{PurePosixPath(name).name}/"
                sizes = {path.removeprefix(own): size for path, size in found.items() if path.startswith(own)}
                self._fetched(name, sizes, root / name, checkpoints=False)

    def fetch_files(self, name: str, folder: Path) -> None:
        """Copy the plain files of a folder, not those below it."""
        sizes = {path: size for path, size in self._sizes(name).items() if "/" not in path}
        self._fetched(name, sizes, folder, checkpoints=False)

    def push_file(self, path: Path, name: str) -> None:
        """Copy a file into a folder of the storage."""
        with self._explained("write"):
            self._put_text(path, self._path(name, path.name))

    def push(self, folder: Path, name: str) -> None:
        """Copy a run's folder into the storage, its result last; then remove there what the folder lacks."""
        paths = (path for path in folder.rglob("*") if path.is_file() and not _is_passing(path))
        here = {path.relative_to(folder).as_posix(): path for path in paths}
        there = self._sizes(name)
        with self._explained("write"):
            for relative in sorted(here, key=lambda one: (one == RESULT, "/." in one, one)):
                path, target = here[relative], self._path(name, relative)
                if _is_text(relative):
                    self._put_text(path, target)
                elif there.get(relative) != path.stat().st_size or not self._has(path, target):
                    self._put(path, target)
            for relative in there.keys() - here.keys():
                self._system.rm_file(self._path(name, relative))

    def _fetched(self, name: str, sizes: Mapping[str, int], folder: Path, *, checkpoints: bool) -> bool:
        wanted = [path for path in sizes if checkpoints or not path.startswith(f"{CHECKPOINTS}/")]
        for relative in sorted(wanted, key=lambda one: (one == RESULT, one)):
            target = folder / relative
            target.parent.mkdir(parents=True, exist_ok=True)
            handle, draft = new_draft(target)
            os.close(handle)
            try:
                with self._explained("read"):
                    self._system.get_file(self._path(name, relative), str(draft))
                draft.replace(target)
            finally:
                draft.unlink(missing_ok=True)
        return bool(wanted)

    def _put(self, path: Path, target: str) -> None:
        self._make_folder(target.rpartition("/")[0])
        self._system.put_file(str(path), target)

    def _has(self, path: Path, target: str) -> bool:
        """Whether the tensors there, in a file of the same size, are those here: another training may give others."""
        head = head_of(path)
        return bool(self._system.cat_file(target, start=0, end=len(head)) == head)

    def _make_folder(self, path: str) -> None:
        """Make a folder, where a storage has some, but no bucket: a misspelt one would be made as well."""
        self._find_top()
        self._system.makedirs(path, exist_ok=True)

    @cache  # noqa: B019 - of a few storages in a process
    def _find_top(self) -> None:
        """Raise FileNotFoundError if the bucket, or the first folder, is not there."""
        top = "/" * self._root.startswith("/") + self._root.lstrip("/").partition("/")[0]
        if not self._system.exists(top):
            raise FileNotFoundError(f"there is no {top}: make it, or give another URL")

    def _put_text(self, path: Path, target: str) -> None:
        """Under another name first: a kill leaves the old text or the new one. Other files carry digests."""
        self._put(path, target + PART)
        self._system.mv(target + PART, target)

    def _sizes(self, name: str) -> dict[str, int]:
        """Bytes of each file of a folder and those below it, by its path inside of it; empty if there is none."""
        base = self._path(name)
        with self._explained("read"):
            self._system.invalidate_cache()
            found = {}
            with suppress(FileNotFoundError):
                found = self._system.find(base, detail=True)
        sizes = {path[len(base) :].lstrip("/"): int(info["size"] or 0) for path, info in found.items()}
        return {path: size for path, size in sizes.items() if ".." not in path.split("/") and not path.endswith(PART)}

    def _path(self, *names: str) -> str:
        return "/".join([self._root.rstrip("/"), *(name for name in names if name not in ("", "."))])

    @property
    def _system(self) -> Any:
        return self._opened[0]

    @property
    def _root(self) -> str:
        return self._opened[1]

    @cached_property
    def _opened(self) -> tuple[Any, str]:
        """The file system of the URL, and the path in it."""
        try:
            from fsspec.core import url_to_fs
        except ImportError:
            raise ValueError(f"{self.shown} needs the package fsspec: pip install fsspec") from None
        try:
            return url_to_fs(self.url)
        except ImportError as error:
            raise ValueError(f"{self.shown} cannot be opened: {error}") from None
        except ValueError as error:
            raise ValueError(f"{self.shown} is no storage that fsspec supports: {error}") from None
        except Exception as error:
            raise StorageError(f"cannot open {self.shown}: {_described(error)}") from error

    def __getstate__(self) -> dict[str, str]:
        return {"url": self.url}  # a connection is not sent to another process

    @contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        """A StorageError for whatever the library of a storage raises: they have no common kind."""
        try:
            yield
        except StorageError:
            raise
        except Exception as error:
            raise StorageError(f"cannot {what} {self.shown}: {_described(error)}") from error


def storage_of(text: str) -> Storage | None:
    """The storage of a URL; None for a path. ValueError for one that only a single process sees.

    >>> storage_of("runs"), storage_of("s3://bucket/x")
    (None, Storage(url='s3://bucket/x'))
    """
    if "://" not in text:
        return None
    if text.startswith("memory://"):
        raise ValueError(f"{text} is the memory of one process, and workers are others: give a folder or another URL")
    return Storage(text)


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip() or 'no reason given'}".splitlines()[0][:300]


def _is_passing(path: Path) -> bool:
    return path.name == LOCK or path.suffix == ".tmp"


def _is_text(relative: str) -> bool:
    return "/" not in relative and relative != WEIGHTS
