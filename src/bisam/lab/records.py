"""One folder for each run: its configuration, a line of metrics for each epoch, its result, receipt and best weights.

`RunFolder` writes them, for one process at a time. `read` and `find` are for reports: they neither lock nor write.
Somebody who knows why a run should not count puts the reason into the folder, as `not-counted.txt`.
In the files, numbers that JSON lacks are the strings "nan", "inf" and "-inf".
"""

from __future__ import annotations

import errno
import json
import math
import os
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, TypeGuard

from torch import Tensor

from bisam.lab.checkpoint import pack, portable, unpack
from bisam.lab.config import completed
from bisam.lab.files import draft_of, explained, write_atomically

FORMAT = 1
CONFIG = "config.json"
METRICS = "metrics.jsonl"
RESULT = "result.json"
RECEIPT = "receipt.json"
WEIGHTS = "best.safetensors"
NOT_COUNTED = "not-counted.txt"
LOCK = "lock"
CHECKPOINTS = "checkpoints"

_WORDS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_ABSENT = object()


class RecordError(RuntimeError):
    """A run folder cannot be written, or what is in it cannot be gone on with."""


class RunInUse(RuntimeError):  # noqa: N818
    """Another process has the run open."""


class ConfigMismatch(ValueError):  # noqa: N818
    """The folder's run has another configuration; `differences` has a line for each field."""

    def __init__(self, folder: Path, differences: list[str]) -> None:
        lines = "".join(f"\n  {line}" for line in differences)
        super().__init__(
            f"{folder} has a run with another configuration:{lines}\n"
            "Give another folder, or the configuration that is there."
        )
        self.differences = differences


class RunFolder:
    """A run folder, locked until `close`, the end of a `with`, or the end of the process, however it ends."""

    def __init__(self, folder: Path, config: dict[str, Any], lock: _Lock) -> None:
        """Of a folder that `open` has prepared."""
        self.folder = folder
        self.config = config
        self.notes: list[str] = []
        self._lock = lock
        self.metrics = Metrics(folder / METRICS, self.notes, self._refuse_if_closed)

    @classmethod
    def open(cls, folder: Path, config: Mapping[str, Any]) -> RunFolder:
        """Make the folder, or go on with the run in it, which must have this configuration.

        `notes` then tells what was mended. RunInUse, ConfigMismatch and RecordError say why it cannot be used.
        """
        plain = _plain(config, ())
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = _Lock(folder / LOCK)
        except OSError as error:
            raise RecordError(explained(error, f"cannot use {folder} for a run")) from error
        try:
            _remove_drafts(folder)
            if not check(folder, config):
                write_atomically(folder / CONFIG, _text({"format": FORMAT, "config": _restored(plain)}))
            return cls(folder, _restored(plain), lock)
        except BaseException as error:
            lock.release()
            if isinstance(error, OSError):
                raise RecordError(explained(error, f"cannot use {folder} for a run")) from error
            raise

    def close(self) -> None:
        self._lock.release()

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def checkpoints(self) -> Path:
        """Where `checkpoint.save` and `load` have theirs."""
        return self.folder / CHECKPOINTS

    @property
    def result(self) -> dict[str, Any] | None:
        """What `finish` was given; None before."""
        path = self.folder / RESULT
        try:
            return _object(path)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise RecordError(f"{path} cannot be read ({error}): remove it and run again") from error

    def finish(self, result: Mapping[str, Any]) -> None:
        """Write the result, whose `status` says how the run ended: "done", "diverged", …"""
        if not isinstance(result.get("status"), str):
            raise ValueError(f"a result needs a status such as 'done' or 'diverged', got {result.get('status')!r}")
        self._write(RESULT, _text(result))

    def receipt(self, receipt: Mapping[str, Any]) -> None:
        """Write where, when and with what the run was made."""
        self._write(RECEIPT, _text(receipt))

    def save_weights(self, state_dict: Mapping[str, Tensor]) -> None:
        """Write a model's state dict as a safetensors file that any reader of such files loads."""
        tensors = {name: portable(tensor, (name,)) for name, tensor in state_dict.items()}
        self._write(WEIGHTS, *pack(tensors, {"format": "pt"}))

    def load_weights(self) -> dict[str, Tensor]:
        """What `save_weights` was given last, on the CPU."""
        path = self.folder / WEIGHTS
        try:
            tensors, _ = unpack(path.read_bytes())
        except FileNotFoundError:
            raise RecordError(f"{path} does not exist: save_weights() has not been called in this run") from None
        except (OSError, ValueError) as error:
            raise RecordError(f"{path} cannot be used: {error}. Remove it and run again.") from error
        return tensors

    def _write(self, name: str, *parts: bytes | memoryview) -> None:
        self._refuse_if_closed()
        path = self.folder / name
        try:
            write_atomically(path, *parts)
        except OSError as error:
            raise RecordError(explained(error, f"cannot write {path}")) from error

    def _refuse_if_closed(self) -> None:
        if not self._lock.is_held:
            raise RuntimeError(f"the run in {self.folder} is closed: open it again to write to it")


class Metrics:
    """`metrics.jsonl`: a line for each epoch, in their order. A line counts once its newline is there."""

    def __init__(self, path: Path, notes: list[str], check: Callable[[], None]) -> None:
        """Cuts off the half of a line that a kill has left, and adds a note about it."""
        self.path = path
        self._check = check
        if not path.exists():
            write_atomically(path)
        data = path.read_bytes()
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
        if not _is_epoch(epoch):
            raise ValueError(f"a line of metrics needs an epoch, an int from 0, got {epoch!r}")
        if self._last is not None and epoch <= self._last:
            raise ValueError(f"epoch {epoch} cannot follow epoch {self._last}: call rewind({epoch}) first")
        line = _encoded(row) + b"\n"
        try:
            with self.path.open("ab") as file:
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
            data = b"".join(_encoded(row) + b"\n" for row in kept)
            try:
                write_atomically(self.path, data)
            except OSError as error:
                raise RecordError(explained(error, f"cannot write {self.path}")) from error
            self._end = len(data)
            self._last = kept[-1]["epoch"] if kept else None
        return len(rows) - len(kept)

    def read(self) -> list[dict[str, Any]]:
        """All lines, one dict for each."""
        rows, problems = _rows(self.path)
        if problems:
            raise RecordError(f"{self.path} is damaged: {'; '.join(problems)}. Mend or remove these lines by hand.")
        return rows

    def lacks(self, epochs: int) -> str:
        """Which lines of the first so many epochs are not there; empty if they all are."""
        missing = _missing(self.read(), epochs)
        return f"{self.path.name} lacks {missing}" if missing else ""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.read())

    def _cut(self) -> None:
        """Remove what follows the last whole line."""
        with self.path.open("r+b") as file:
            file.truncate(self._end)
            os.fsync(file.fileno())


@dataclass(frozen=True)
class Record:
    """What a run folder holds, as far as it can be read; `problems` tells of the rest."""

    folder: Path
    config: dict[str, Any] = field(default_factory=dict)
    metrics: list[dict[str, Any]] = field(default_factory=list)
    result: dict[str, Any] | None = None
    receipt: dict[str, Any] | None = None
    problems: list[str] = field(default_factory=list)
    not_counted: str = ""
    """Why it should not count, in somebody's words; empty if it should."""

    @property
    def commits(self) -> str:
        """Of the code that trained it: several, if it was resumed with another; empty if nothing tells."""
        return self._by_receipts("commit")

    @property
    def hardware(self) -> str:
        """What trained it: several, if it was resumed elsewhere; empty if nothing tells."""
        return self._by_receipts("gpu", "cpu")

    def _by_receipts(self, *names: str) -> str:
        """Of the receipt of each process that trained it, the first of these that it has."""
        last = self.receipt or {}
        earlier = last.get("earlier")
        receipts = [*(earlier if isinstance(earlier, list) else ()), last]
        told = [next(filter(None, map(one.get, names)), None) for one in receipts if isinstance(one, dict)]
        return ", ".join(dict.fromkeys(str(value) for value in told if value))


def read(folder: Path) -> Record:
    """A run folder, also while another process writes to it. Whatever is in it, nothing is raised."""
    problems: list[str] = []
    config = _read_config(folder, problems)
    faults: list[str] = []
    # before the metrics: another process writes them after its last line
    result, receipt = (_read_object(folder / name, faults) for name in (RESULT, RECEIPT))
    metrics, damage = _rows(folder / METRICS)
    problems += [f"{METRICS}: {problem}" for problem in damage]
    epochs = [row["epoch"] for row in metrics]
    if any(later <= earlier for earlier, later in pairwise(epochs)):
        problems.append(f"{METRICS}: epochs are repeated or out of order")
    ended = (result or {}).get("epochs")
    missing = _missing(metrics, ended if _is_epoch(ended) else max(epochs, default=-1) + 1)
    if missing:
        problems.append(f"{METRICS}: it lacks {missing}")
    problems += faults
    if result is not None and not isinstance(result.get("status"), str):
        problems.append(f"{RESULT}: it has no status")
    return Record(folder, config, metrics, result, receipt, problems, _reason(folder / NOT_COUNTED, problems))


def find(root: Path) -> list[Record]:
    """Every folder in that tree with a config.json, or what else only a run leaves, by path; behind links too."""
    if not root.is_dir():
        raise RecordError(f"{root} is not a folder: give the one that has the runs, or a run itself")
    closed: list[OSError] = []
    folders = [place for place, files in _walk(root, closed.append) if not {CONFIG, METRICS, RESULT}.isdisjoint(files)]
    unseen = [
        Record(Path(error.filename), problems=[f"it cannot be read ({error.strerror})"])
        for error in closed
        if not isinstance(error, FileNotFoundError)  # checkpoints of a run that has ended meanwhile
    ]
    return sorted([*map(read, folders), *unseen], key=lambda record: record.folder)


def _walk(root: Path, tell: Callable[[OSError], None]) -> Iterator[tuple[Path, list[str]]]:
    """Every folder of a tree once, with its files. Links come last, so that a folder has its own name if it is here.

    `tell` gets the error of each folder that cannot be read.
    """
    waiting, seen = deque([root]), set[str]()
    while waiting:
        for place, folders, files in os.walk(waiting.popleft(), onerror=tell):
            real = os.path.realpath(place)
            if real in seen:
                folders.clear()
                continue
            seen.add(real)
            waiting += sorted(Path(place, name) for name in folders if os.path.islink(Path(place, name)))
            yield Path(place), files


def check(folder: Path, config: Mapping[str, Any]) -> bool:
    """Whether there is a run in the folder. ConfigMismatch or RecordError if it is not of this configuration."""
    if not (folder / CONFIG).exists():
        found = [name for name in (METRICS, RESULT, RECEIPT, WEIGHTS, CHECKPOINTS) if (folder / name).exists()]
        if found:
            raise RecordError(
                f"{folder} has {', '.join(found)} but no {CONFIG}: nobody knows of which run. "
                "Remove the folder or give another one."
            )
        return False
    problems: list[str] = []
    there = _read_config(folder, problems)
    if problems:
        raise RecordError(f"{folder} cannot be gone on with: {problems[0]}. Remove it or give another folder.")
    different = config_differences(_plain(there, ()), _plain(config, ()))
    if different:
        raise ConfigMismatch(folder, different)
    return True


# The configuration.


def _read_config(folder: Path, problems: list[str]) -> dict[str, Any]:
    wrapper = _read_object(folder / CONFIG, problems)
    if wrapper is None:
        if not problems:
            problems.append(f"{CONFIG}: there is none, so nobody knows what run this is")
        return {}
    version, config = wrapper.get("format"), wrapper.get("config")
    if not isinstance(version, int) or not isinstance(config, dict):
        problems.append(f"{CONFIG}: it is not that of a run")
        return {}
    if version != FORMAT:
        problems.append(f"{CONFIG}: it is of format {version}, and this version knows format {FORMAT}")
    return config


def config_differences(there: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """A line for each field that is not the same in both; what an older version did not have yet is as by default."""
    return differences(completed(there), completed(now))


def differences(there: Any, now: Any, place: str = "") -> list[str]:
    """A line for each field of two plain values that is not the same in both."""
    prefix = f"{place}." if place else ""
    if isinstance(there, dict) and isinstance(now, dict):
        keys = [*there, *(key for key in now if key not in there)]
        pairs = [(key, there.get(key, _ABSENT), now.get(key, _ABSENT)) for key in keys]
        return [line for key, a, b in pairs for line in differences(a, b, f"{prefix}{key}")]
    if isinstance(there, list) and isinstance(now, list) and len(there) == len(now):
        pairs = [(str(i), a, b) for i, (a, b) in enumerate(zip(there, now, strict=True))]
        return [line for i, a, b in pairs for line in differences(a, b, f"{prefix}{i}")]
    if there == now and isinstance(there, bool) == isinstance(now, bool):
        return []
    return [f"{place}: {_shown(there)} there, {_shown(now)} now"]


def _shown(value: Any) -> str:
    return "absent" if value is _ABSENT else repr(_restored(value))


# Values as JSON.


def _plain(value: Any, place: tuple[str, ...]) -> Any:
    """The value with nothing in it that strict JSON lacks; TypeError names the place of what has no form there."""
    name = ".".join(place) or "the whole"
    if isinstance(value, str):
        if value in _WORDS:
            raise ValueError(f"{name} is the string {value!r}, which would be read as a number: use another word")
        return value
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else repr(float(value))
    if isinstance(value, (list, tuple)):
        return [_plain(part, (*place, str(i))) for i, part in enumerate(value)]
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"{name} has the key {key!r}: JSON has keys of type str only")
        return {key: _plain(part, (*place, key)) for key, part in value.items()}
    raise TypeError(f"{name} is a {type(value).__name__}, which JSON lacks: {value!r}")


def _restored(plain: Any) -> Any:
    """What `_plain` was given, with lists for tuples."""
    if isinstance(plain, dict):
        return {key: _restored(part) for key, part in plain.items()}
    if isinstance(plain, list):
        return [_restored(part) for part in plain]
    return _WORDS.get(plain, plain) if isinstance(plain, str) else plain


def _encoded(value: Mapping[str, Any]) -> bytes:
    return json.dumps(_plain(value, ()), ensure_ascii=False, allow_nan=False).encode()


def _text(value: Mapping[str, Any]) -> bytes:
    return json.dumps(_plain(value, ()), ensure_ascii=False, allow_nan=False, indent=1).encode() + b"\n"


def _decoded(data: bytes) -> dict[str, Any]:
    """An object; ValueError for anything else."""
    try:
        value = _restored(json.loads(data.decode()))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError(f"it is a {type(value).__name__}, not an object")
    return value


def _object(path: Path) -> dict[str, Any]:
    return _decoded(path.read_bytes())


def _read_object(path: Path, problems: list[str]) -> dict[str, Any] | None:
    """As `_object`; None if the file is not there, and None with a problem if it cannot be read."""
    try:
        return _object(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        problems.append(f"{path.name}: it cannot be read ({error.strerror})")
    except ValueError as error:
        problems.append(f"{path.name}: it is half-written or foreign ({error})")
    return None


def _reason(path: Path, problems: list[str]) -> str:
    """Somebody's words in one line; empty if the file is not there."""
    if path.exists() and not path.is_file():  # a pipe would keep us waiting
        problems.append(f"{path.name}: it is no file")
        return "the reason cannot be read"
    try:
        return " ".join(path.read_text(encoding="utf-8", errors="replace").split()) or "no reason is given"
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except OSError as error:
        problems.append(f"{path.name}: it cannot be read ({error.strerror})")
        return "the reason cannot be read"


class _Rows(NamedTuple):
    rows: list[dict[str, Any]]
    problems: list[str]


def _rows(path: Path) -> _Rows:
    """The lines of metrics that can be read, and what is wrong with the others."""
    found = _Rows([], [])
    try:
        *lines, rest = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return found
    except OSError as error:
        found.problems.append(f"it cannot be read ({error.strerror})")
        return found
    for number, line in enumerate(lines, start=1):
        try:
            row = _decoded(line)
        except ValueError:
            found.problems.append(f"line {number} is not a JSON object")
            continue
        if _is_epoch(row.get("epoch")):
            found.rows.append(row)
        else:
            found.problems.append(f"line {number} has no epoch")
    if rest:
        found.problems.append("the last line is half-written")
    return found


def _missing(rows: Sequence[Mapping[str, Any]], epochs: int) -> str:
    """Which of the first so many epochs have no line, in words; empty if all have one."""
    there = sorted({row["epoch"] for row in rows if row["epoch"] < epochs})
    if len(there) == epochs:
        return ""
    first = next((number for number, epoch in enumerate(there) if epoch != number), len(there))
    return f"{epochs - len(there)} of the lines of epochs 0 to {epochs - 1}, the first is that of epoch {first}"


def _is_epoch(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _remove_drafts(folder: Path) -> None:
    """Of writes that a kill has cut short."""
    for name in (CONFIG, METRICS, RESULT, RECEIPT, WEIGHTS):
        draft_of(folder / name).unlink(missing_ok=True)


# One process at a time. The operating system holds the lock and drops it with the process; the file stays.


class _Lock:
    """An exclusive lock on a file, in which stands who has it."""

    def __init__(self, path: Path) -> None:
        self._handle: int | None = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            _seize(self._handle)
            os.ftruncate(self._handle, 0)
            os.lseek(self._handle, 0, os.SEEK_SET)
            os.write(self._handle, f"{os.getpid()}\n".encode())
        except OSError as error:
            self.release()
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise
            owner = path.read_text(encoding="utf-8", errors="replace").strip() or "unknown"
            raise RunInUse(
                f"the run in {path.parent} is in use by process {owner}: wait for it, or give another folder"
            ) from None
        _held.add(self)

    @property
    def is_held(self) -> bool:
        return self._handle is not None

    def release(self) -> None:
        if self._handle is not None:
            os.close(self._handle)  # which unlocks, unless the lock is another process's and this is a fork's copy
            self._handle = None


_held: weakref.WeakSet[_Lock] = weakref.WeakSet()

if sys.platform == "win32":
    import msvcrt

    def _seize(handle: int) -> None:
        os.lseek(handle, 2**20, os.SEEK_SET)  # far behind the text, since nobody else can read a locked byte
        msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)

else:
    import fcntl

    def _seize(handle: int) -> None:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def _let_go() -> None:
        """In a fork: workers that outlive a killed process would hold its lock."""
        for lock in list(_held):
            lock.release()

    os.register_at_fork(after_in_child=_let_go)
