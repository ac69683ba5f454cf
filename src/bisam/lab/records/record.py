"""Reading run folders, for reports: nothing is locked or written, and no content raises."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from bisam.lab.files import read_file
from bisam.lab.records.digests import mismatches
from bisam.lab.records.layout import CONFIG, FORMAT, METRICS, NOT_COUNTED, RECEIPT, RESULT, RecordError
from bisam.lab.records.metrics import is_epoch, missing_epochs, read_rows
from bisam.lab.records.values import read_object

LARGEST_REASON = 2**16
"""Bytes of not-counted.txt that are read."""

WITHOUT_RUNS = frozenset({".git", "__pycache__", "node_modules", "site-packages"})
"""Folders of many files that other programs make, and that are not searched for runs."""

ENVIRONMENT = "pyvenv.cfg"
"""The file that makes a folder a virtual environment of Python, which is not searched either."""


NOT_OURS = f"{CONFIG}: it is not a run's configuration"


@dataclass(frozen=True)
class Record:
    """The contents of a run folder, as far as they can be read; `problems` describes the rest."""

    folder: Path
    config: dict[str, Any] = field(default_factory=dict)
    metrics: list[dict[str, Any]] = field(default_factory=list)
    result: dict[str, Any] | None = None
    receipt: dict[str, Any] | None = None
    problems: list[str] = field(default_factory=list)
    not_counted: str = ""
    """The contents of not-counted.txt; empty if the run counts."""

    @property
    def foreign(self) -> bool:
        """Whether its config.json is that of another program, such as a model's, and no other file is of a run."""
        return NOT_OURS in self.problems and not self.metrics and self.receipt is None

    @property
    def commits(self) -> str:
        """Commits of the code that trained it, several if it was resumed with another; empty if not recorded."""
        return self._by_receipts("commit")

    @property
    def hardware(self) -> str:
        """Devices that trained it, several if it was resumed on another; empty if not recorded."""
        return self._by_receipts("gpu", "cpu")

    def _by_receipts(self, *names: str) -> str:
        """The first of these values that is set, in the receipt of each process that trained the run."""
        last = self.receipt or {}
        earlier = last.get("earlier")
        receipts = [*(earlier if isinstance(earlier, list) else ()), last]
        values = [next(filter(None, map(one.get, names)), None) for one in receipts if isinstance(one, dict)]
        return ", ".join(dict.fromkeys(str(value) for value in values if value))


def read(folder: Path) -> Record:
    """A run folder, also while another process writes to it. No content raises."""
    problems: list[str] = []
    config = read_config(folder, problems)
    faults: list[str] = []
    # before the metrics: another process writes them after its last line
    result, receipt = (read_object(folder / name, faults) for name in (RESULT, RECEIPT))
    metrics, damage = read_rows(folder / METRICS)
    problems += [f"{METRICS}: {problem}" for problem in damage]
    epochs = [row["epoch"] for row in metrics]
    if any(later <= earlier for earlier, later in pairwise(epochs)):
        problems.append(f"{METRICS}: epochs are repeated or out of order")
    ended = (result or {}).get("epochs")
    missing = missing_epochs(metrics, ended if is_epoch(ended) else max(epochs, default=-1) + 1)
    if missing:
        problems.append(f"{METRICS}: it lacks {missing}")
    problems += faults
    if result is not None:  # before, a run may still be changed
        problems += mismatches(folder, receipt)
    if result is not None and not isinstance(result.get("status"), str):
        problems.append(f"{RESULT}: it has no status")
    return Record(folder, config, metrics, result, receipt, problems, _reason(folder / NOT_COUNTED, problems))


def find_records(root: Path, progress: Callable[[int, int], None] | None = None) -> list[Record]:
    """Every folder in that tree with a config.json, or what else only a run leaves, by path; behind links too.

    `progress` is called with the number of files and folders that were seen, and of runs among them.
    """
    if not root.is_dir():
        raise RecordError(f"{root} is not a folder: give the one that has the runs, or a run itself")
    closed: list[OSError] = []
    folders: list[Path] = []
    seen = 0
    for place, files in _walk(root, closed.append):
        if not {CONFIG, METRICS, RESULT}.isdisjoint(files):
            folders.append(Path(place))
        seen += 1 + len(files)
        if progress is not None:
            progress(seen, len(folders))
    unseen = [
        Record(Path(error.filename), problems=[f"it cannot be read ({error.strerror})"])
        for error in closed
        if not isinstance(error, FileNotFoundError)  # checkpoints of a run that has ended meanwhile
    ]
    return sorted([*map(read, folders), *unseen], key=lambda record: record.folder)


def _walk(root: Path, on_error: Callable[[OSError], None]) -> Iterator[tuple[str, list[str]]]:
    """Every folder of a tree once, with its files. Links come last, so that a folder has its own name if it is here.

    `on_error` gets the error of each folder that cannot be read.
    """
    waiting, seen = deque([str(root)]), set[str]()
    while waiting:
        top = waiting.popleft()
        real_top = os.path.realpath(top)
        for place, folders, files in os.walk(top, onerror=on_error):
            real = real_top + place.removeprefix(top)  # no link is between them
            if real in seen:
                folders.clear()
                continue
            seen.add(real)
            folders[:] = [] if ENVIRONMENT in files else [name for name in folders if name not in WITHOUT_RUNS]
            links = (path for name in folders if os.path.islink(path := os.path.join(place, name)))
            waiting += sorted(links, key=Path)
            yield place, files


def read_config(folder: Path, problems: list[str]) -> dict[str, Any]:
    wrapper = read_object(folder / CONFIG, problems)
    if wrapper is None:
        if not problems:
            problems.append(f"{CONFIG}: it is missing, so the run cannot be identified")
        return {}
    version, config = wrapper.get("format"), wrapper.get("config")
    if not isinstance(version, int) or not isinstance(config, dict):
        problems.append(NOT_OURS)
        return {}
    if version != FORMAT:
        problems.append(f"{CONFIG}: it has format {version}, and this version reads format {FORMAT}")
    return config


def _reason(path: Path, problems: list[str]) -> str:
    """The reason in one line; empty if the file is not there, or the folder is none."""
    if not os.path.lexists(path):
        return ""
    if path.is_symlink():  # the page would show the text of another file
        problems.append(f"{path.name}: it is a link, which is not followed")
        return "the reason cannot be read"
    try:
        text = read_file(path, LARGEST_REASON).decode("utf-8", "replace")
        return " ".join(text.split()) or "no reason is given"
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except OSError as error:
        problems.append(f"{path.name}: it cannot be read ({error.strerror})")
        return "the reason cannot be read"
