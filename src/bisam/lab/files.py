"""Atomic writes, and error messages with a remedy for files that cannot be written."""

from __future__ import annotations

import errno
import os
import sys
from contextlib import suppress
from pathlib import Path

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
}


def draft_of(path: Path) -> Path:
    """The temporary name that a file is written under."""
    return path.with_name(path.name + ".tmp")


def write_atomically(path: Path, *parts: bytes | memoryview) -> None:
    """Put the parts into that file: whenever the process or the machine stops, the old file is there or the new one.

    A link stays one: the file that it leads to is replaced. What is no file, such as a pipe, is written to as it is.
    """
    if path.exists() and not path.is_file():
        with path.open("wb") as file:
            file.writelines(parts)
        return
    path = Path(os.path.realpath(path))
    draft = draft_of(path)
    try:
        with draft.open("wb") as file:
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
