"""The command that puts two runs side by side: compare."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress as Bars

from bisam.lab import cli_options, comparison, comparison_tables
from bisam.lab.cli_options import Folder, Partial, told_in_a_line
from bisam.lab.cli_output import drawing, write_text
from bisam.lab.inspection import Plan, Progress
from bisam.lab.trained import Pool, pool

WIDTH_OF_A_LOG = 120
RHO, SAMPLES = Plan().rho, Plan().samples
PAGE = Path("compare.html")


def compare(
    first: Annotated[Path, typer.Argument(metavar="RUN_A", help="Folder of a run.")],
    second: Annotated[Path, typer.Argument(metavar="RUN_B", help="Folder of another.")],
    folder: Folder = None,
    partial_data: Partial = False,
    device: Annotated[str, typer.Option(metavar="auto|cpu|cuda", help="Where to look at the weights.")] = "auto",
    samples: Annotated[int, typer.Option(min=1, help="Training samples to look at them with.")] = SAMPLES,
    rho: Annotated[float, typer.Option(min=0, help="Radius of the perturbations, the same for both.")] = RHO,
    weights: Annotated[bool, typer.Option("--weights/--no-weights", help="Look at the weights too.")] = True,
    out: Annotated[Path, typer.Option(help="The page.")] = PAGE,
) -> None:
    """Two runs side by side: what was set differently, what came of it, and how sharp their minima are."""
    with told_in_a_line():
        place = cli_options.device(device)
        plan = Plan(rho=rho, samples=samples) if weights else None
        errors = _console(stderr=True)

        @cache
        def load(name: str, part: bool) -> Pool:
            return pool(name, part or partial_data, folder=folder, say=partial(errors.print, soft_wrap=True))

        with _progress(errors) as progress:
            found = comparison.compare(first, second, load, place, plan, progress)
        _show(found)
        write_text(out, drawing("comparison_page").write(found))


def _show(found: comparison.Comparison) -> None:
    console = _console()
    for side in found.sides:
        console.print(f"{side.name}: {side.record.folder}", soft_wrap=True)
    for note in found.notes:
        console.print(note, soft_wrap=True)
    for sheet in comparison_tables.sheets(found):
        console.print()
        console.print(sheet.rich())


def _console(*, stderr: bool = False) -> Console:
    """Texts as they are: brackets in the name of a folder are no markup. A log has no width of its own."""
    here = Console(stderr=stderr, markup=False, emoji=False, highlight=False)
    if not here.is_terminal:
        here.width = max(here.width, WIDTH_OF_A_LOG)
    return here


@contextmanager
def _progress(console: Console) -> Iterator[Progress]:
    """A bar in a terminal; elsewhere a line when something new begins."""
    if not console.is_terminal:
        before = ""

        def line(what: str, done: int, total: int) -> None:
            nonlocal before
            if what != before:
                console.print(what, soft_wrap=True)
            before = what

        yield line
        return
    with Bars(console=console, transient=True) as bars:
        task = bars.add_task("")
        yield lambda what, done, total: bars.update(task, description=escape(what), completed=done, total=total)
