"""Writing a run folder, one process at a time."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import Tensor

from bisam.lab.config import completed
from bisam.lab.files import drafts_of, explained, read_file, write_atomically
from bisam.lab.records.checkpoint import pack, portable, unpack
from bisam.lab.records.digests import KEY, sha256_of
from bisam.lab.records.layout import (
    CHECKPOINTS,
    CONFIG,
    FORMAT,
    LARGEST_STATE,
    LOCK,
    METRICS,
    PREDICT,
    RECEIPT,
    RESULT,
    WEIGHTS,
    RecordError,
)
from bisam.lab.records.lock import Lock
from bisam.lab.records.metrics import Metrics
from bisam.lab.records.record import read_config
from bisam.lab.records.result import gap_in
from bisam.lab.records.values import as_json, differences, load_object, plain, restored


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

    def __init__(self, folder: Path, config: dict[str, Any], lock: Lock) -> None:
        """Use `open`, which prepares the folder."""
        self.folder = folder
        self.config = config
        self.notes: list[str] = []
        self._lock = lock
        self.metrics = Metrics(folder / METRICS, self.notes, self._refuse_if_closed)

    @classmethod
    def open(cls, folder: Path, config: Mapping[str, Any]) -> RunFolder:
        """Make the folder, or open the run in it to resume it; it must have this configuration.

        `notes` then has a line for each repair. Raises RunInUse, ConfigMismatch or RecordError if it cannot be used.
        """
        values = plain(config, ())
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = Lock(folder / LOCK)
        except OSError as error:
            raise RecordError(explained(error, f"cannot use {folder} for a run")) from error
        try:
            for name in (RESULT, RECEIPT, WEIGHTS, PREDICT):  # before the training, which writes them when it ends
                _refuse_folder(folder / name)
            _remove_drafts(folder)
            if not check(folder, config):
                content = as_json({"format": FORMAT, "config": restored(values)})
                write_atomically(folder / CONFIG, content, follow_links=False)
            return cls(folder, restored(values), lock)
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
        """The folder of the checkpoints."""
        return self.folder / CHECKPOINTS

    @property
    def result(self) -> dict[str, Any] | None:
        """The result that `finish` wrote; None before."""
        path = self.folder / RESULT
        try:
            return load_object(path)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise RecordError(f"{path} cannot be read ({error}): remove it and run again") from error

    def finish(self, result: Mapping[str, Any], receipt: Mapping[str, Any] | None = None) -> None:
        """Write the result, whose `status` is how the run ended: "done", "diverged", …

        The receipt, if given, is written before it, with the digest of each file of the run.
        """
        if not isinstance(result.get("status"), str):
            raise ValueError(f"a result needs a status such as 'done' or 'diverged', got {result.get('status')!r}")
        content = as_json(result)
        if receipt is not None:
            there = [name for name in (CONFIG, METRICS, WEIGHTS, PREDICT) if (self.folder / name).exists()]
            digests = {name: sha256_of(self.folder / name) for name in there}
            self.receipt({**receipt, KEY: {**digests, RESULT: hashlib.sha256(content).hexdigest()}})
        self._write(RESULT, content)

    def receipt(self, receipt: Mapping[str, Any]) -> None:
        """Write where, when and with what the run was made."""
        self._write(RECEIPT, as_json(receipt))

    def save_weights(self, state_dict: Mapping[str, Tensor]) -> None:
        """Write a model's state dict as a safetensors file that any reader of such files loads."""
        tensors = {name: portable(tensor, (name,)) for name, tensor in state_dict.items()}
        self._write(WEIGHTS, *pack(tensors, {"format": "pt"}))

    def save_for_prediction(self, content: bytes) -> None:
        """Write what prediction needs beside the weights."""
        self._write(PREDICT, content)

    def load_weights(self) -> dict[str, Tensor]:
        """The weights that `save_weights` wrote last, on the CPU."""
        path = self.folder / WEIGHTS
        try:
            tensors, _ = unpack(read_file(path, LARGEST_STATE))
        except FileNotFoundError:
            raise RecordError(f"{path} does not exist: save_weights() has not been called in this run") from None
        except (OSError, ValueError) as error:
            raise RecordError(f"{path} cannot be used: {error}. Remove it and run again.") from error
        return tensors

    def _write(self, name: str, *parts: bytes | memoryview) -> None:
        self._refuse_if_closed()
        path = self.folder / name
        try:
            write_atomically(path, *parts, follow_links=False)
        except OSError as error:
            raise RecordError(explained(error, f"cannot write {path}")) from error

    def _refuse_if_closed(self) -> None:
        if not self._lock.is_held:
            raise RuntimeError(f"the run in {self.folder} is closed: open it again to write to it")


def check(folder: Path, config: Mapping[str, Any]) -> bool:
    """Whether there is a run in the folder. Raises ConfigMismatch or RecordError if it has another configuration."""
    if not (folder / CONFIG).exists():
        found = [name for name in (METRICS, RESULT, RECEIPT, WEIGHTS, CHECKPOINTS) if (folder / name).exists()]
        if found:
            raise RecordError(
                f"{folder} has {', '.join(found)} but no {CONFIG}, so the run cannot be identified. "
                "Remove the folder or give another one."
            )
        return False
    problems: list[str] = []
    there = read_config(folder, problems)
    if problems:
        raise RecordError(f"{folder} cannot be resumed: {problems[0]}. Remove it or give another folder.")
    different = config_differences(plain(there, ()), plain(config, ()))
    if different:
        raise ConfigMismatch(folder, different)
    return True


def check_result(folder: Path, result: Mapping[str, Any] | None) -> None:
    """Raise RecordError for a result that does not count: its run may be unfinished, with checkpoints to resume."""
    fault = "" if result is None else gap_in(result)
    if fault:
        raise RecordError(
            f"{folder / RESULT} is not the result of a run: {fault}. Remove it to resume the run, or give another "
            "folder."
        )


def config_differences(there: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """A line for each field that is not the same in both; a field that an older version lacks has its default.

    A table's title is what it is called, and changes no run.
    """
    known, wanted = completed(there), completed(now)
    return differences({**known, "title": ""}, {**wanted, "title": ""})


def _refuse_folder(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        raise RecordError(f"{path} is a folder, where a file will be written: move it away, or give another folder")


def _remove_drafts(folder: Path) -> None:
    """Remove the drafts of writes that were killed. One that cannot be removed does no harm."""
    for name in (CONFIG, METRICS, RESULT, RECEIPT, WEIGHTS, PREDICT):
        for draft in drafts_of(folder / name):
            with suppress(OSError):
                draft.unlink()
