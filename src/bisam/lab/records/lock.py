"""One process at a time. The operating system holds the lock and drops it with the process; the file stays."""

from __future__ import annotations

import errno
import os
import sys
import weakref
from pathlib import Path

from bisam.lab.files import NO_LINKS, read_file, refuse_foreign


class RunInUse(RuntimeError):  # noqa: N818
    """Another process has the run open."""

    def __init__(self, folder: Path, owner: str) -> None:
        super().__init__(folder, owner)
        self.folder, self.owner = folder, owner

    def __str__(self) -> str:
        return f"the run in {self.folder} is in use by process {self.owner}: wait for it, or give another folder"


class Lock:
    """An exclusive lock on a file that holds the process id of its owner."""

    def __init__(self, path: Path) -> None:
        refuse_foreign(path, "remove it, or give another folder")
        self._handle: int | None = os.open(path, os.O_RDWR | os.O_CREAT | NO_LINKS, 0o666)
        try:
            if os.fstat(self._handle).st_nlink > 1:
                raise OSError(f"{path} is another file too (a hard link): remove it, or give another folder")
            _seize(self._handle)
            os.ftruncate(self._handle, 0)
            os.lseek(self._handle, 0, os.SEEK_SET)
            os.write(self._handle, f"{os.getpid()}\n".encode())
        except OSError as error:
            self.release()
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise
            raise RunInUse(path.parent, _owner(path)) from None
        _held.add(self)

    @property
    def is_held(self) -> bool:
        return self._handle is not None

    def release(self) -> None:
        if self._handle is not None:
            os.close(self._handle)  # which unlocks, unless the lock is another process's and this is a fork's copy
            self._handle = None


def _owner(path: Path) -> str:
    try:
        number = read_file(path, 20).decode(errors="replace").strip()
    except OSError:
        return "unknown"
    return number if number.isdecimal() else "unknown"


_held: weakref.WeakSet[Lock] = weakref.WeakSet()

if sys.platform == "win32":
    import msvcrt

    def _seize(handle: int) -> None:
        os.lseek(handle, 2**20, os.SEEK_SET)  # far behind the text, since no other process can read a locked byte
        msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)

else:
    import fcntl

    def _seize(handle: int) -> None:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def _release_all() -> None:
        """In a forked process: workers that outlive a killed process would hold its lock."""
        for lock in list(_held):
            lock.release()

    os.register_at_fork(after_in_child=_release_all)
