"""The tables of the paper from runs, with the published numbers below ours, and the differences of methods."""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from bisam.lab.data import DATA_SETS
from bisam.lab.files import printable
from bisam.lab.methods import baseline_of, perturbs, title_of
from bisam.lab.recipes import RECIPES
from bisam.lab.records import Record, model_code
from bisam.lab.tables import published
from bisam.lab.tables.cells import MOST_PROBLEMS, Collection, ResultTable, Run, damage, is_of_a_table
from bisam.lab.tables.statistics import Difference, difference, signed

OPEN = "–"
"""A cell without runs."""

WIDEST = 10_000
"""Letters of a line that no table reaches."""


@dataclass
class Sheet:
    """A table of texts, for a terminal or a page. A cell may have lines: the first is what counts."""

    title: str
    head: list[str]
    rows: list[list[str]]
    notes: list[str] = field(default_factory=list)
    """Sentences below it."""

    def rich(self) -> Table:
        caption = _text("\n".join(self.notes), "table.caption") if self.notes else None
        shown = Table(title=_text(self.title, "table.title"), caption=caption, caption_justify="left")
        for number, name in enumerate(self.head):
            shown.add_column(_text(name), justify="left" if number == 0 else "right", overflow="fold")
        for row in self.rows:
            shown.add_row(*map(_text, row))
        return shown

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The table; with rows and columns exchanged where that fits the terminal and the table does not."""
        head, *rows = (list(line) for line in zip(self.head, *self.rows, strict=True))
        across, down = self.rich(), replace(self, head=head, rows=rows).rich()
        unlimited = options.update(max_width=WIDEST)  # a measure is cut at the width of the terminal
        needed = [Measurement.get(console, unlimited, table).minimum for table in (across, down)]
        yield down if needed[1] <= options.max_width < needed[0] else across

    def markdown(self) -> str:
        lines = [self.head, ["---"] * len(self.head), *self.rows]
        table = [f"| {' | '.join(map(_in_markdown, cells))} |" for cells in lines]
        notes = [f"\n{_in_markdown(note)}" for note in self.notes]
        return "\n".join([f"**{_in_markdown(self.title)}**", "", *table, *notes])


@dataclass(frozen=True)
class MethodDifference:
    """The difference between a method and its baseline, in one row of a table."""

    row: str
    method: str
    baseline: str
    found: Difference
    published: float | None
    """The same difference of the paper's means."""
    diverged: str = ""
    """The runs that are left out since they diverged, as text."""

    @property
    def label(self) -> str:
        return f"{title_of(self.method)} − {title_of(self.baseline)}"

    def describe(self) -> str:
        sentence = self.found.describe(title_of(self.method), title_of(self.baseline))
        return f"{sentence}; {self.diverged}" if self.diverged else sentence


def sheet(table: ResultTable) -> Sheet:
    """The table in the layout of the paper, with all of its rows; of another table, the rows that have runs.

    A table whose rows have methods of their own, as the frontier's, has a line for each cell instead.
    """
    paper = published_of(table)
    if paper is None and table.rows_differ:
        return _list_of_cells(table)
    shown = [line for line in table.recipe.lines if paper is not None or line[1] in table.rows]
    rows = [[label, *_line(table, paper, label, row, name)] for label, row, name in shown]
    if paper is not None and paper.average and {*paper.cells} == {label for label, *_ in table.recipe.lines}:
        rows.append(["average", *(_average(table, paper, method) for method in table.recipe.methods)])
    if len(table.rows) == 1:  # of several models or noise rates a mean would be meaningless
        for title, name in (("flips per batch, last epoch", "flips"), ("ms per step, last epoch", "milliseconds")):
            means = _means(table, name)
            if any(mean != OPEN for mean in means):
                rows.append([title, *means])
    title = f"{table.title}: {table.recipe.measure} in per cent" + (
        f", the paper's{_stood_in(table, paper)} below" if paper else ""
    )
    return Sheet(
        title,
        ["", *(title_of(method) for method in table.recipe.methods)],
        rows,
        [*_effort(table), *unlike(table)],
    )


def _list_of_cells(table: ResultTable) -> Sheet:
    rows = [
        [label, title_of(method), accuracy(table, row, method, name)]
        for label, row, name in table.recipe.lines
        for method in table.recipe.methods
        if table.of(row, method)
    ]
    title = f"{table.title}: {table.recipe.measure} in per cent"
    return Sheet(title, ["row", "method", table.recipe.measure], rows, [*_effort(table), *unlike(table)])


def _effort(table: ResultTable) -> list[str]:
    """A note where the base optimizer, with one gradient a step, did not have twice the epochs of the others.

    That it has them is a convention of the paper and of the lab's tables, not of one's own.
    """
    if table.recipe.name not in RECIPES:
        return []
    unequal: dict[str, list[str]] = defaultdict(list)
    for row in table.rows:
        epochs = {run.config.method: run.config.epochs for run in table.of_row(row)}
        others = {count for method, count in epochs.items() if perturbs(method)}
        for method, count in epochs.items():
            if not perturbs(method) and others and others != {count / 2}:
                unequal[method].append(row)
    return [
        f"{', '.join(rows)}: {title_of(method)} did not have twice the epochs of the others."
        for method, rows in unequal.items()
    ]


def unlike(table: ResultTable) -> list[str]:
    """A note where runs were trained on different data, or with different code, of the same name.

    Both are compared by the digests in their receipts. That of a streamed data set is of names and sizes of files only,
    and is not compared.
    """
    data: dict[str, Counter[str]] = defaultdict(Counter)
    code: dict[str, Counter[str]] = defaultdict(Counter)
    for run in (run for row in table.rows for run in table.of_row(row)):
        receipt = run.record.receipt or {}
        checksum, own_code = receipt.get("data_checksum"), receipt.get(model_code.KEY)
        if isinstance(checksum, str) and not _is_streamed(run.config.data):
            data[run.config.data][checksum] += 1
        if isinstance(own_code, str):
            code[run.config.model][own_code] += 1
    return [
        f"Not all of these runs were trained {what} the same {name}: {its} is "
        f"{', '.join(f'{digest[:12]} in {count}' for digest, count in found.items())} of the receipts."
        for what, its, counts in (("on", "its sha256", data), ("with", "the digest of its code", code))
        for name, found in counts.items()
        if len(found) > 1
    ]


def _is_streamed(data: str) -> bool:
    return data in DATA_SETS and DATA_SETS[data].is_streamed


def comparisons(table: ResultTable) -> list[MethodDifference]:
    """Each method minus its baseline, in each row of the table that has runs of both."""
    paper = published_of(table)
    found = []
    for label, row, name in table.recipe.lines:
        for method in table.recipe.methods:
            baseline = baseline_of(method, table.recipe.methods)
            if baseline is None:
                continue
            gap = difference(table.measured(row, method, name), table.measured(row, baseline, name))
            if gap is not None:
                printed = [paper.cells.get(label, {}).get(m) if paper else None for m in (method, baseline)]
                paper_method, paper_baseline = printed
                paper_gap = (
                    None if paper_method is None or paper_baseline is None else paper_method.mean - paper_baseline.mean
                )
                lost = diverged(table, row, (baseline, method))
                found.append(MethodDifference(label, method, baseline, gap, paper_gap, lost))
    return found


def sheet_of_comparisons(table: ResultTable) -> Sheet | None:
    """The differences with their intervals; None if no two methods have results."""
    found = comparisons(table)
    if not found:
        return None
    head = ["difference", "ours", "95 % interval", "n", "sign resolved?"]
    rows = [
        [
            f"{one.row}: {one.label}",
            signed(one.found.mean),
            one.found.interval or OPEN,
            one.found.n,
            "yes" if one.found.resolved else "no",
        ]
        for one in found
    ]
    if any(one.published is not None for one in found):
        head.append("paper's")
        for row, one in zip(rows, found, strict=True):
            row.append(OPEN if one.published is None else signed(one.published))
    return Sheet(f"{table.title}: differences in points of {table.recipe.measure}", head, rows, _cautions(found))


def _cautions(found: Sequence[MethodDifference]) -> list[str]:
    """Notes on how to read these differences."""
    lost = dict.fromkeys(f"{one.row}: {one.diverged}." for one in found if one.diverged)
    intervals = sum(one.found.low is not None for one in found)
    notes = [*lost]
    if intervals:
        notes.append(
            "Student's t over training seeds, on this test set: the choice of test samples is not included. An "
            "unresolved sign does not show that there is no difference."
        )
    if intervals > 1:
        notes.append(
            f"Each of the {intervals} intervals is a 95 % interval by itself: one in twenty misses the true value."
        )
    return notes


def diverged(table: ResultTable, row: str, methods: Iterable[str]) -> str:
    """Text such as "2 of 6 SAM runs diverged and are left out"."""
    parts = []
    for method in methods:
        runs = table.of(row, method)
        count = sum(run.status == "diverged" for run in runs)
        if count:
            parts.append(f"{count} of {len(runs)} {title_of(method)} runs diverged and are left out")
    return ", ".join(parts)


def left_out(collection: Collection) -> list[str]:
    """Runs that are not in the tables or are damaged, with the reason: one line for each folder; and the notes."""
    lines = [f"{record.folder}: {why}" for record, why in collection.unreadable if not record.foreign]
    lines += [of_others(collection.foreign)] if collection.foreign else []
    lines += [f"{run.record.folder}: {_why_not(run)}" for run in collection.others]
    damaged = [run.record for run in collection.runs if run.record.problems]
    return [*lines, *(f"{record.folder}: {damage(record)}" for record in damaged), *collection.notes]


def of_others(foreign: Sequence[Record]) -> str:
    """A line for all folders with a config.json of another program."""
    first = ", ".join(str(record.folder) for record in foreign[:MOST_PROBLEMS])
    more = f" and {len(foreign) - MOST_PROBLEMS} more" if len(foreign) > MOST_PROBLEMS else ""
    folders = "1 folder has" if len(foreign) == 1 else f"{len(foreign)} folders have"
    return f"{folders} a config.json of another program: {first}{more}"


def _why_not(run: Run) -> str:
    """Why a run is in no table."""
    if run.record.not_counted:
        return f"not counted: {run.record.not_counted}"
    if is_of_a_table(run):
        return f"a second run of this cell and seed {run.config.seed}: not counted"
    name = run.config.recipe
    if name in RECIPES:
        return f"the table {name} has no such row and method"
    return f"no table is called {name!r} here: if a Python file adds it, name that with --load"


def _text(text: str, style: str = "") -> Text:
    """As it is: in a string, brackets would be read as markup."""
    return Text(printable(text), style)


def _in_markdown(text: str) -> str:
    return printable(text).replace("<", "&lt;").replace("|", r"\|").replace("\n", "<br>")


def published_of(table: ResultTable) -> published.PublishedTable | None:
    """The paper's table, if the table is of one and nothing was changed, but the model where another stands in."""
    changed = [name for name in table.fields if not (name == "model" and table.recipe.stands_in)]
    return None if changed or (table.changes and not table.fields) else published.of(table.recipe)


def _stood_in(table: ResultTable, paper: published.PublishedTable | None) -> str:
    """The model of the paper's numbers, where another one stands in for it."""
    return f" ({paper.model})" if table.fields and paper is not None and paper.model else ""


def _line(table: ResultTable, paper: published.PublishedTable | None, label: str, row: str, name: str) -> Iterable[str]:
    for method in table.recipe.methods:
        printed = paper.cells.get(label, {}).get(method) if paper else None
        below = "" if printed is None else f"\n{spread(printed.mean, printed.std)}"
        yield accuracy(table, row, method, name) + below


def accuracy(table: ResultTable, row: str, method: str, name: str) -> str:
    """Text such as "94.20 ± 0.10, n = 3, 1 diverged"."""
    values = [*table.measured(row, method, name).values()]
    runs = table.of(row, method)
    counts = {status: sum(run.status == status for run in runs) for status in ("done", "diverged")}
    under_way = len(runs) - sum(counts.values())
    lost = [f"{counts['diverged']} diverged"] * bool(counts["diverged"]) + [f"{under_way} not finished"] * bool(
        under_way
    )
    if not values:
        return ", ".join([OPEN, *lost])
    deviation = statistics.stdev(values) if len(values) > 1 else None
    return ", ".join([spread(statistics.fmean(values), deviation), f"n = {len(values)}", *lost])


def _average(table: ResultTable, paper: published.PublishedTable, method: str) -> str:
    """Over the rows, where each has a run, each the mean of its measures, as GLUE's average; the paper's below."""
    means: dict[str, list[float]] = defaultdict(list)
    for _, row, name in table.recipe.lines:
        values = [*table.measured(row, method, name).values()]
        means[row].append(statistics.fmean(values) if values else math.nan)
    mean = statistics.fmean(map(statistics.fmean, means.values()))
    ours = OPEN if math.isnan(mean) else spread(mean, None)
    printed = paper.average.get(method)
    return ours if printed is None else f"{ours}\n{spread(printed.mean, printed.std)}"


def spread(mean: float, deviation: float | None) -> str:
    text = f"{mean:.2f}" if deviation is None else f"{mean:.2f} ± {deviation:.2f}"
    return text.replace("-", "−")


def _means(table: ResultTable, name: str) -> list[str]:
    cells = []
    for method in table.recipe.methods:
        runs = [run for run in table.of_method(method) if run.status == "done"]
        cells.append(milliseconds(runs) if name == "milliseconds" else _mean([run.last(name) for run in runs]))
    return cells


def milliseconds(runs: Sequence[Run]) -> str:
    """Text such as "2.4, 6 at once", from the runs that shared the device with the fewest others."""
    by_count: dict[float, list[float]] = defaultdict(list)
    for run in runs:
        if run.milliseconds is not None:
            by_count[run.last("together") or 1].append(run.milliseconds)
    if not by_count:
        return OPEN
    fewest = min(by_count)
    mean = f"{statistics.fmean(by_count[fewest]):.1f}"
    return f"{mean}, {fewest:.0f} at once" if fewest > 1 else mean


def _mean(values: Sequence[float | None]) -> str:
    present = [value for value in values if value is not None]
    return f"{statistics.fmean(present):.1f}" if present else OPEN
