"""A result of `bisam bench` as tables, and its progress, in a terminal or in a log."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from bisam.lab.bench.bars import Entry, Result
from bisam.lab.bench.loss import PAPER_REPETITIONS
from bisam.lab.bench.suite import Unit

LOSSES = {
    "cross_entropy": "cross entropy",
    "log": "Q (−log)",
    "tanh": "Q (tanh)",
    "plain_log": "Q (−log), plain torch",
    "plain_tanh": "Q (tanh), plain torch",
    "loop_log": "Q (−log), loop over samples",
}

Log = Callable[[str], None]
Track = Callable[[list[Unit]], Iterable[Unit]]


def console() -> Console:
    """For what it prints to: a log has no width of its own."""
    here = Console(highlight=False)
    return here if here.is_terminal else Console(highlight=False, width=140)


@contextmanager
def progress(console: Console) -> Iterator[tuple[Log, Track]]:
    """Functions that print a line and iterate over the units, with a bar in a terminal."""

    def log(line: str) -> None:
        console.print(line, markup=False, soft_wrap=True)

    if not console.is_terminal:
        yield log, iter
        return
    # no refresh in between: its thread would take time from what is measured
    with Progress(console=console, transient=True, auto_refresh=False) as bar:
        yield log, lambda units: bar.track(units, description="measuring")


def show(result: Result, console: Console) -> None:
    """All that there is of it."""
    tables = [*_loss(result), *_epoch(result), *_together(result), *_memory(result), bars(result["bars"])]
    for table in tables:
        console.print()
        console.print(table)


def bars(judged: list[Entry]) -> Table:
    words = {True: "met", False: "missed", None: "not measured"}
    rows = [
        (bar["name"], f"{bar['comparison']} {bar['limit']:g}", _number(bar["measured"], 3), words[bar["met"]])
        for bar in judged
    ]
    return _table("Bars", ["", "limit", "measured", ""], rows)


def _loss(result: Result) -> Iterator[Table]:
    sizes: dict[str, Entry] = result.get("loss", {})
    if not sizes:
        return
    kinds = ["eager", "device"] if result["device"] == "cuda" else ["eager"]
    head = ["", *(f"{size}, {kind}" for size in sizes for kind in kinds)]
    rows = [
        (name, *(_beside(entry, kind, loss) for entry in sizes.values() for kind in kinds))
        for loss, name in LOSSES.items()
    ]
    yield _table("Loss, forward and backward: µs (÷ cross entropy)", head, rows)
    if "128x100" in sizes:
        yield _repetitions(sizes["128x100"])


def _beside(entry: Entry, kind: str, loss: str) -> str:
    times, ratios = entry[f"{kind}_us"], entry[f"{kind}_ratio"]
    if not times or loss not in times:
        return ""
    return f"{times[loss]:.1f}" + (f" ({ratios[loss]:.2f})" if loss in ratios else "")


def _repetitions(entry: Entry) -> Table:
    """The paper's table of frameworks; TensorFlow's column only where it was measured."""
    paper, tensorflow = entry["paper_seconds_of_10k"], entry["tensorflow_seconds_of_10k"]
    head = ["", "here", "calls timed", "paper, PyTorch", "here ÷ paper", "paper, TensorFlow"]
    rows = []
    for loss, name in LOSSES.items():
        if loss not in entry["seconds_of_10k"]:
            continue
        theirs = "cross_entropy" if loss == "cross_entropy" else "q"
        seconds, calls = entry["seconds_of_10k"][loss], entry["calls"][loss]
        row = [name, ("≈ " if calls < PAPER_REPETITIONS else "") + f"{seconds:.2f}", f"{calls}"]
        row += [f"{paper['pytorch'][theirs]:.2f}", f"{seconds / paper['pytorch'][theirs]:.2f}"]
        row += [f"{paper['tensorflow'][theirs]:.2f}"]
        rows.append(row + ([f"{tensorflow[theirs]:.2f}"] if tensorflow else []))
    title = "Seconds of 10 000 forward and backward, 128×100; ≈ is extrapolated from the calls that were timed"
    return _table(title, head + (["TensorFlow here"] if tensorflow else []), rows)


def _epoch(result: Result) -> Iterator[Table]:
    models: dict[str, Entry] = result.get("epoch", {})
    if not models:
        return
    more = [name for name in ("eager", "loop") if any(name in entry["ms"] for entry in models.values())]
    head = ["", "SGD", "SAM", "BiSAM −log", "BiSAM tanh", *(f"−log, {name}" for name in more)]
    head += ["−log ÷ SAM", "−log ÷ SGD", "longest setup, s"]
    rows = []
    for model, entry in models.items():
        times = [_number(entry["ms"].get(method)) for method in ("sgd", "sam", "bisam-log", "bisam-tanh", *more)]
        ratios = [f"{entry['ratio'][f'bisam-log/{other}']:.3f}" for other in ("sam", "sgd")]
        name = model + (", compiled" if entry["compiled"] else "")
        rows.append([name, *times, *ratios, f"{max(entry['setup_s'].values()):.1f}"])
    settings = sorted({f"batch {entry['batch']}, {entry['precision']}" for entry in models.values()})
    yield _table(f"Milliseconds per training step: {'; '.join(settings)}", head, rows)
    head = ["", "SAM", "BiSAM", "ratio", "paper: SAM", "BiSAM", "ratio", "paper ÷ here", "authors' code ÷ here"]
    yield _table("Seconds per epoch; the paper's on an A100", head, [_beside_paper(*item) for item in models.items()])


def _beside_paper(name: str, entry: Entry) -> list[str]:
    here, paper = entry["seconds_of_epoch"], entry["paper"]
    row = [name, f"{here['sam']:.2f}", f"{here['bisam-log']:.2f}", f"{entry['ratio']['bisam-log/sam']:.2f}"]
    if paper is None:
        row += [""] * 4
    else:
        theirs = paper["seconds_of_epoch"]
        row += [f"{theirs['sam']:g}", f"{theirs['bisam']:g}", f"{paper['ratio']:.2f}"]
        row += [f"{theirs['bisam'] / here['bisam-log']:.2g}"]
    return [*row, _number(entry["speed_up_over_authors"], 1)]


def _together(result: Result) -> Iterator[Table]:
    runs: dict[str, Entry] = result.get("together", {})
    rows = [
        (name, f"{e['ms_per_model_and_step']:.2f}", f"{e['extrapolated_minutes_of_200_epochs']:.1f}")
        for name, e in runs.items()
    ]
    if rows:
        head = ["trainings", "ms per model and step", "minutes of 200 epochs of all, extrapolated"]
        yield _table("BiSAM (−log) trainings at once, in one graph", head, rows)


def _memory(result: Result) -> Iterator[Table]:
    for name, entry in result.get("memory", {}).items():
        rows = [
            (m, f"{peak:.0f}", f"{entry['peak_copies'][m]:.2f}", _number(entry["copies_beyond_sgd"].get(m)))
            for m, peak in entry["peak_mib"].items()
        ]
        title = f"Peak memory of an eager step: {name}, batch {entry['batch']}, weights {entry['weights_mib']:.0f} MiB"
        yield _table(title, ["", "MiB", "copies of the weights", "beyond SGD"], rows)


def _table(title: str, head: list[str], rows: Iterable[Iterable[Any]]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for number, name in enumerate(head):
        table.add_column(name, justify="right" if number else "left")
    for row in rows:
        table.add_row(*row)
    return table


def _number(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:.{digits}f}"
