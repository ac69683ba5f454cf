"""Reading plain files, atomic writes, and error messages with a remedy for files that cannot be written."""

from __future__ import annotations

import errno
import os
import re
import secrets
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

_REMEDIES = {
    errno.ENOSPC: "Free some space and start again",
    errno.EDQUOT: "Free some of your quota and start again",
    errno.EFBIG: "Raise the limit on the size of a file (ulimit -f) and start again",
    errno.EACCES: "Make it writable or give another folder",
    errno.EPERM: "Make it writable or give another folder",
    errno.EROFS: "Make it writable or give another folder",
    errno.ENAMETOOLONG: "Give a shorter one, or fewer changes, which are in the name of a run's folder",
    errno.ENOENT: "Give a folder that exists or can be made",
    errno.EEXIST: "A file is where a folder should be: move it away or give another folder",
    errno.ENOTDIR: "A file is where a folder should be: move it away or give another folder",
    errno.EISDIR: "A folder is where a file should be: move it away or name another file",
}


NO_LINKS = getattr(os, "O_NOFOLLOW", 0)
"""Flag of `os.open`: raise OSError for a link. Windows lacks it."""


def new_draft(path: Path) -> tuple[int, Path]:
    """Create the file that `path` is written under, and open it: no link can have been put under its name before."""
    draft = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    return os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | NO_LINKS | getattr(os, "O_BINARY", 0), 0o666), draft


def drafts_of(path: Path) -> list[Path]:
    """The drafts that killed writes of a file have left, of this version and of older ones."""
    own = re.compile(rf"{re.escape(path.name)}(\.[0-9a-f]{{8}})?\.tmp")
    return [found for found in path.parent.iterdir() if own.fullmatch(found.name)]


def write_atomically(path: Path, *parts: bytes | memoryview, follow_links: bool = True) -> None:
    """Put the parts into that file: whenever the process or the machine stops, the old file is there or the new one.

    A link stays one: the file that it leads to is replaced. What is no file, such as a pipe, is written to as it is.
    Without `follow_links` a file takes the place of a link or a pipe, and what the link leads to stays as it is.
    """
    if follow_links:
        if path.exists() and not path.is_file():
            with path.open("wb") as file:
                file.writelines(parts)
            return
        path = Path(os.path.realpath(path))
    handle, draft = new_draft(path)
    try:
        with os.fdopen(handle, "wb") as file:
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except BaseException:
        with suppress(OSError):
            draft.unlink()
        raise
    _sync(path.parent)


def refuse_foreign(path: Path, remedy: str) -> None:
    """Raise OSError for a link, a folder, a pipe or a device in the place of a file to write, with the remedy."""
    try:
        kind = kind_of(path.lstat().st_mode)
    except OSError:  # it is not there, or writing it raises with the reason
        return
    if kind != "file":
        raise OSError(f"{path} is a {kind} and is not written to: {remedy}")


def kind_of(mode: int) -> str:
    """What a path is, by its mode: "file", "folder", "link", "named pipe", "device" or "socket".

    >>> kind_of(Path(os.devnull).stat().st_mode)
    'device'
    """
    kinds = {stat.S_IFREG: "file", stat.S_IFDIR: "folder", stat.S_IFLNK: "link", stat.S_IFIFO: "named pipe"}
    return kinds.get(stat.S_IFMT(mode), "socket" if stat.S_ISSOCK(mode) else "device")


class UnreadableError(OSError):
    """A path that is not read: it is not a plain file, or too large."""

    def __init__(self, message: str) -> None:
        super().__init__(errno.EINVAL, message)

    def __str__(self) -> str:
        return str(self.strerror)


def read_file(path: Path, most: int) -> bytes:
    """The contents of a plain file of at most `most` bytes, also behind a link; see `open_file`."""
    with open_file(path, most) as (file, size):
        return file.read(size)


@contextmanager
def open_file(path: Path, most: int) -> Iterator[tuple[BinaryIO, int]]:
    """A plain file of at most `most` bytes, and its size now: what another process adds meanwhile is not read.

    UnreadableError for anything else: a pipe would block, and a device or a sparse file could fill the memory.
    """
    check_file(path, most)
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    with os.fdopen(os.open(path, flags), "rb") as file:
        found = os.fstat(file.fileno())  # it may have been replaced meanwhile
        _check_stat(found, most)
        yield file, found.st_size


def check_file(path: Path, most: int) -> None:
    """Raise UnreadableError if it is not a plain file of at most `most` bytes, also behind a link."""
    _check_stat(path.stat(), most)


def _check_stat(found: os.stat_result, most: int) -> None:
    kind = kind_of(found.st_mode)
    if kind != "file":
        raise UnreadableError(f"it is a {kind}, not a file")
    if found.st_size > most:
        raise UnreadableError(f"it has {found.st_size:,} bytes, and at most {most:,} are read")


def printable(text: str) -> str:
    """Text from a record or the name of a file, for a terminal: what it would obey is escaped, line breaks stay.

    >>> printable("a\\x1b[2J\\nb")
    'a\\\\x1b[2J\\nb'
    """
    return "".join(one if one.isprintable() or one == "\n" else ascii(one)[1:-1] for one in text)


def explained(error: OSError, what: str) -> str:
    """An error message: what failed, why, and the remedy."""
    message = f"{what}: {error.strerror or error}"
    remedy = _REMEDIES.get(error.errno or 0)
    return f"{message}. {remedy}." if remedy else f"{message}."


def _sync(folder: Path) -> None:
    """Make the names in a folder survive a loss of power."""
    if sys.platform == "win32":  # does it by itself, and opens no folders
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
