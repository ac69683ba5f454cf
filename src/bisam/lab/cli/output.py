"""The output of commands: files, and lines in the terminal."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress as Bars

from bisam.lab import records
from bisam.lab.files import explained, printable, refuse_foreign, write_atomically

WIDTH_OF_A_LOG = 120

SEARCH_SHOWN_EVERY = {True: 5_000, False: 50_000}
"""Files and folders after which a search shows how far it is: in a terminal, and elsewhere."""


def drawing_module(name: str) -> ModuleType:
    """Import a module that draws, when it is needed: training does not need its libraries."""
    try:
        return importlib.import_module(f"bisam.lab.{name}")
    except ModuleNotFoundError as error:
        raise ValueError(f"charts need the library {error.name}: pip install 'bisam[lab]'") from None


def write_text(path: Path, text: str, *, given: bool = True) -> None:
    """Whole or not at all. A path that was not `given` by an option may be no link or pipe: see `refuse_foreign`."""
    if not given:
        refuse_foreign(path, "remove it, or name the file with --out")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text.encode(errors="backslashreplace"))  # names of folders may be no text


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise an OSError with a remedy if writing fails."""
    try:
        yield
    except OSError as error:
        raise OSError(explained(error, f"cannot write {path}")) from None


def console(*, stderr: bool = False) -> Console:
    """A console without markup, since names of folders have brackets; of a fixed width where there is no terminal."""
    here = Console(stderr=stderr, markup=False, emoji=False, highlight=False)
    if not here.is_terminal and "COLUMNS" not in os.environ:
        here.width = WIDTH_OF_A_LOG
    return here


def quiet_console() -> Console:
    """A console that prints nothing: for processes beside the one that does."""
    return Console(quiet=True)


def print_line(line: str) -> None:
    """Print a line without markup; control characters are escaped."""
    console().print(printable(line).replace("\n", "\\n"), soft_wrap=True)


@contextmanager
def counting(here: Console, doing: str = "") -> Iterator[Callable[[str, int, int], None]]:
    """A bar in a terminal; elsewhere a line when something new begins. `doing` is the word before its name."""
    if not here.is_terminal:
        before = ""

        def line(what: str, done: int, total: int) -> None:
            nonlocal before
            if what != before:
                here.print(printable(doing + what), soft_wrap=True)
            before = what

        yield line
        return
    with Bars(console=here, transient=True) as bars:
        task = bars.add_task("")
        yield lambda what, done, total: bars.update(
            task, description=escape(printable(doing + what)), completed=done, total=total
        )


@contextmanager
def searching(here: Console, folder: Path) -> Iterator[Callable[[int, int], None]]:
    """How far the search for runs in a large folder is: a line that changes in a terminal, elsewhere several."""
    status, shown = here.status(""), 0

    def show(seen: int, runs: int) -> None:
        nonlocal shown
        if seen < shown + SEARCH_SHOWN_EVERY[here.is_terminal]:
            return
        shown = seen
        text = printable(f"looking for runs in {folder}: {seen:,} files and folders so far, runs: {runs:,}")
        if here.is_terminal:
            status.update(escape(text))
            status.start()
        else:
            here.print(text, soft_wrap=True)

    try:
        yield show
    finally:
        status.stop()


def find_runs(folder: Path) -> list[records.Record]:
    """The records in a folder. A long search is shown on the standard error."""
    with searching(console(stderr=True), folder) as progress:
        return records.find_records(folder, progress)
