"""`metrics.jsonl`: a line for each epoch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeGuard

from bisam.lab.files import NO_LINKS, UnreadableError, explained, read_file, refuse_foreign, write_atomically
from bisam.lab.records.layout import LARGEST_METRICS, RecordError
from bisam.lab.records.values import decoded, encoded


class Metrics:
    """`metrics.jsonl`: a line for each epoch, in their order. A line counts once its newline is there."""

    def __init__(self, path: Path, notes: list[str], check: Callable[[], None]) -> None:
        """Cuts off the half of a line that a kill has left, and adds a note about it."""
        self.path = path
        self._check = check
        refuse_foreign(path, "move it away, or give another folder")
        if not path.exists():
            write_atomically(path, follow_links=False)
        try:
            data = read_file(path, LARGEST_METRICS)
        except UnreadableError as error:
            raise RecordError(f"{path} cannot be used: {error}. Move it away, or give another folder.") from error
        if path.stat().st_nlink > 1:  # a hard link: the file that it also is must not change with it
            write_atomically(path, data, follow_links=False)
        self._end = data.rfind(b"\n") + 1
        if self._end < len(data):
            self._cut()
            notes.append(f"{path.name}: the last line was half-written and is removed ({len(data) - self._end} bytes)")
        rows = self.read()
        self._last = rows[-1]["epoch"] if rows else None

    def append(self, row: Mapping[str, Any]) -> None:
        """Add the line of an epoch; it is on the disk when this returns."""
        self._check()
        epoch = row.get("epoch")
        if not is_epoch(epoch):
            raise ValueError(f"a line of metrics needs an epoch, an int from 0, got {epoch!r}")
        if self._last is not None and epoch <= self._last:
            raise ValueError(f"epoch {epoch} cannot follow epoch {self._last}: call rewind({epoch}) first")
        line = encoded(row) + b"\n"
        try:
            with self._open(os.O_APPEND) as file:
                file.write(line)
                file.flush()
                os.fsync(file.fileno())
        except BaseException as error:
            with suppress(OSError):
                self._cut()  # a part of the line may be there, to which the next one would be added
            if isinstance(error, OSError):
                raise RecordError(explained(error, f"cannot write {self.path}")) from error
            raise
        self._end += len(line)
        self._last = epoch

    def rewind(self, epoch: int) -> int:
        """Drop the lines from that epoch on, which a resumed run writes again. Returns how many there were."""
        self._check()
        rows = self.read()
        kept = [row for row in rows if row["epoch"] < epoch]
        if len(kept) < len(rows):
            data = b"".join(encoded(row) + b"\n" for row in kept)
            try:
                write_atomically(self.path, data, follow_links=False)
            except OSError as error:
                raise RecordError(explained(error, f"cannot write {self.path}")) from error
            self._end = len(data)
            self._last = kept[-1]["epoch"] if kept else None
        return len(rows) - len(kept)

    def read(self) -> list[dict[str, Any]]:
        """All lines, one dict for each."""
        rows, problems = read_rows(self.path)
        if problems:
            raise RecordError(f"{self.path} is damaged: {'; '.join(problems)}. Repair or remove these lines by hand.")
        return rows

    def lacks(self, epochs: int) -> str:
        """The lines that are missing of the first `epochs` epochs, as text; empty if none is."""
        missing = missing_epochs(self.read(), epochs)
        return f"{self.path.name} lacks {missing}" if missing else ""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.read())

    def _cut(self) -> None:
        """Remove what follows the last whole line."""
        with self._open() as file:
            file.truncate(self._end)
            os.fsync(file.fileno())

    def _open(self, flags: int = 0) -> BinaryIO:
        """Open it for writing, if it is not a link to another file."""
        return os.fdopen(os.open(self.path, os.O_WRONLY | NO_LINKS | getattr(os, "O_BINARY", 0) | flags), "wb")


class _Rows(NamedTuple):
    rows: list[dict[str, Any]]
    problems: list[str]


def read_rows(path: Path) -> _Rows:
    """The lines of metrics that can be read, and what is wrong with the others."""
    found = _Rows([], [])
    try:
        *lines, rest = read_file(path, LARGEST_METRICS).split(b"\n")
    except FileNotFoundError:
        return found
    except OSError as error:
        found.problems.append(f"it cannot be read ({error.strerror})")
        return found
    for number, line in enumerate(lines, start=1):
        try:
            row = decoded(line)
        except ValueError:
            found.problems.append(f"line {number} is not a JSON object")
            continue
        if is_epoch(row.get("epoch")):
            found.rows.append(row)
        else:
            found.problems.append(f"line {number} has no epoch")
    if rest:
        found.problems.append("the last line is half-written")
    return found


def missing_epochs(rows: Sequence[Mapping[str, Any]], epochs: int) -> str:
    """The lines that are missing of the first `epochs` epochs, as text; empty if none is."""
    there = sorted({row["epoch"] for row in rows if row["epoch"] < epochs})
    if len(there) == epochs:
        return ""
    first = next((number for number, epoch in enumerate(there) if epoch != number), len(there))
    return f"{epochs - len(there)} of the lines of epochs 0 to {epochs - 1}, the first is that of epoch {first}"


def is_epoch(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
