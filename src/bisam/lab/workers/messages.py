"""What a worker sends to the command that watches it."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

from bisam.lab.records import RunInUse


@dataclass(frozen=True)
class Shown:
    """A call of a method of `Progress`."""

    method: str
    arguments: tuple[Any, ...]


@dataclass(frozen=True)
class Begun:
    """A worker has the task."""

    worker: str


@dataclass(frozen=True)
class Done:
    """The runs of the task have their results."""


@dataclass(frozen=True)
class InUse:
    """Another command trains them."""

    error: RunInUse


@dataclass(frozen=True)
class Failed:
    """An error that would come again, such as data that are not there."""

    text: str


@dataclass(frozen=True)
class Lost:
    """A worker has died, or raised what may not come again."""

    worker: str
    reason: str
    again: bool
    """Whether the task is given to another worker."""


Message = Shown | Begun | Done | InUse | Failed | Lost

Happening = Generator[tuple[int, Message], None, None]
"""Messages, each with the number of its task; closing it ends the workers."""
