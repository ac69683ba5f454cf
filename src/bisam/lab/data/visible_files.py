"""The files of a folder of data, without those that a system or a program has put beside them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

MOST_NAMED = 10
"""Endings of files that a line names."""

OF_ARCHIVES = "__MACOSX"
"""The folder that macOS adds to an archive: its files have the names of images, and are none."""


def is_hidden(path: Path) -> bool:
    """Whether a part of the path is hidden, as checkpoints of notebooks are. Give it from the folder of data on.

    >>> [is_hidden(Path(name)) for name in ("rose/1.jpg", "rose/._1.jpg", ".cache/1.jpg", "__MACOSX/rose/1.jpg")]
    [False, True, True, True]
    """
    return any(part.startswith(".") or part == OF_ARCHIVES for part in path.parts)


def visible_files(folder: Path) -> list[Path]:
    """All files below a folder that are not hidden, relative to it, by name."""
    below = ((path, path.relative_to(folder)) for path in folder.rglob("*"))
    return sorted(relative for path, relative in below if not is_hidden(relative) and path.is_file())


def visible_folders(folder: Path) -> list[Path]:
    """The folders in a folder that are not hidden, by name."""
    return sorted(path for path in folder.iterdir() if path.is_dir() and not is_hidden(Path(path.name)))


def counted_by_ending(paths: Iterable[Path]) -> str:
    """
    >>> counted_by_ending(map(Path, ("1.heic", "2.HEIC", "notes.txt", "README")))
    '2 .heic, 1 .txt, 1 without an ending'
    """
    counts = Counter(path.suffix.lower() or "without an ending" for path in paths).most_common()
    named = [f"{count} {ending}" for ending, count in counts[:MOST_NAMED]]
    others = sum(count for _, count in counts[MOST_NAMED:])
    return ", ".join([*named, f"{others} others"] if others else named)
