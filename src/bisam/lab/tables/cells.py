"""Sorts runs into the cells of tables."""

from __future__ import annotations

import re
import shlex
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

from bisam.lab.config import Config, recorded
from bisam.lab.measures import lowest_of
from bisam.lab.methods import in_order as methods_in_order
from bisam.lab.methods import uses
from bisam.lab.recipes import RECIPES, Recipe
from bisam.lab.records import Record, fault_of

Cell = tuple[str, str]
"""The row and the method of a cell."""

NUMERICS = ("compile", "deterministic")
"""Fields that do not change the experiment: runs that differ in them are of the same cell."""

ROW = ("data", "model", "noise")
"""Fields that rows differ in: a run belongs to the row that has its values, whatever else was changed."""

LARGEST = 1e100
"""Larger numbers are not measurements, and sums of them would overflow."""

MOST_PROBLEMS = 3
"""Problems shown of one record: a foreign file may have one in each line."""


@dataclass(frozen=True)
class Run:
    """A record that can be shown in a table: its configuration is valid, and so are its numbers."""

    record: Record
    config: Config

    @property
    def status(self) -> str:
        """ "done", "diverged", "3 of 200 epochs" or "not counted"."""
        if self.record.not_counted:
            return "not counted"
        if self.record.result is not None:
            return str(self.record.result["status"])
        return f"{len(self.record.metrics)} of {self.config.epochs} epochs"

    def measured(self, name: str = "test_accuracy") -> float | None:
        """A measure of the result, in per cent; None without one, or if the run diverged or does not count."""
        result = self.record.result
        return None if result is None or self.status != "done" else _percent(result.get(name), lowest_of(name))

    def last(self, name: str) -> float | None:
        """A number of the last epoch."""
        return number(self.record.metrics[-1].get(name)) if self.record.metrics else None

    @property
    def together(self) -> str:
        """Number of runs that shared the device, such as "6" or "1 to 8"."""
        counts = [count for row in self.record.metrics if (count := number(row.get("together"))) is not None] or [1]
        few, many = f"{min(counts):.0f}", f"{max(counts):.0f}"
        return few if few == many else f"{few} to {many}"

    @property
    def milliseconds(self) -> float | None:
        """Per step of the last epoch, divided by the runs that shared the device; None if their costs differ."""
        if self.record.metrics and self.record.metrics[-1].get("alike") is False:
            return None
        rate, together = self.last("samples_per_second"), self.last("together") or 1
        return number(1e3 * self.config.batch / rate / together) if rate else None


@dataclass
class ResultTable:
    """A table: a recipe, what was changed of it, and the runs of each cell, by seed."""

    recipe: Recipe
    changes: str
    """The changed fields, such as "epochs=3, rho=0.1"; empty for the unchanged recipe."""
    runs: dict[Cell, dict[int, Run]] = field(default_factory=lambda: defaultdict(dict))
    borrowed: list[Run] = field(default_factory=list)
    """Runs of another table that count in this one too."""
    fields: tuple[str, ...] = ()
    """Names of the changed fields."""

    @property
    def title(self) -> str:
        return f"{self.recipe.title}, with {self.changes}" if self.changes else self.recipe.title

    @property
    def rows_differ(self) -> bool:
        """Whether its rows have different methods by design; a table of one's own may only be unfinished."""
        return self.recipe.name in RECIPES and not self.recipe.is_complete

    @property
    def name(self) -> str:
        """Short, and no other table's."""
        return f"{self.recipe.name}, {self.changes}" if self.changes else self.recipe.name

    @property
    def rows(self) -> list[str]:
        """The rows that have runs."""
        return [row for row in self.recipe.rows if any(self.runs.get((row, m)) for m in self.recipe.methods)]

    def of(self, row: str, method: str) -> list[Run]:
        return [*self.runs.get((row, method), {}).values()]

    def of_row(self, row: str) -> list[Run]:
        return [run for method in self.recipe.methods for run in self.of(row, method)]

    def of_method(self, method: str) -> list[Run]:
        return [run for row in self.recipe.rows for run in self.of(row, method)]

    def measured(self, row: str, method: str, name: str = "test_accuracy") -> dict[int, float]:
        values = {seed: run.measured(name) for seed, run in self.runs.get((row, method), {}).items()}
        return {seed: value for seed, value in values.items() if value is not None}


@dataclass
class Collection:
    """Records, sorted into tables."""

    tables: list[ResultTable]
    others: list[Run]
    """Runs of no table: not counted, of an unregistered recipe, or a second one of the same cell and seed."""
    unreadable: list[tuple[Record, str]]
    """Records that cannot be shown, and why."""
    notes: list[str] = field(default_factory=list)
    """Lines about several records."""

    @property
    def foreign(self) -> list[Record]:
        """Those of the unreadable that are no runs: their config.json is that of another program."""
        return [record for record, _ in self.unreadable if record.foreign]

    @property
    def is_empty(self) -> bool:
        """Whether it has no run, readable or not."""
        return not self.runs and len(self.foreign) == len(self.unreadable)

    @property
    def runs(self) -> list[Run]:
        """Each once, though it may be in two tables."""
        grouped = (run for table in self.tables for runs in table.runs.values() for run in runs.values())
        return [*{id(run): run for run in (*grouped, *self.others)}.values()]


def collect(records: Iterable[Record]) -> Collection:
    """Tables in the order of the recipes, unchanged ones first; then those that are made from their records."""
    tables: dict[tuple[str, tuple[str, ...]], ResultTable] = {}
    others, unreadable, runs = [], [], []
    for record in records:
        run = _run(record)
        if isinstance(run, str):
            unreadable.append((record, run))
        else:
            runs.append(run)
    own = own_recipes(runs)
    for run in runs:
        made = own.get(run.config.recipe) or _recipe(run.config.recipe)
        place = None if run.record.not_counted or made is None else _place(run.config, run.record.folder, made)
        if place is None or made is None:
            others.append(run)
            continue
        cell, changes = place
        table = tables.setdefault((made.name, tuple(changes.values())), _empty_table(made, changes))
        seeds = table.runs[cell]
        earlier = seeds.setdefault(run.config.seed, run)
        if earlier.record.result is None and run.record.result is not None:
            seeds[run.config.seed], run = run, earlier  # a finished run counts rather than one in progress
        if run is not seeds[run.config.seed]:
            others.append(run)
    found = {key: {cell: dict(runs) for cell, runs in table.runs.items()} for key, table in tables.items()}
    for (recipe, changed), table in tables.items():
        for other, of_other in found.items():
            if changed and other[0] == recipe and other[1] != changed:
                _complete(table, tables[other].fields, of_other)
    for table in tables.values():
        table.runs = {cell: dict(sorted(of_cell.items())) for cell, of_cell in table.runs.items()}
    order = [*RECIPES, *sorted(own)]
    ordered = sorted(tables, key=lambda key: (key[1] != (), order.index(key[0]), key[1]))
    return Collection([tables[key] for key in ordered], others, unreadable)


def own_recipes(runs: Iterable[Run]) -> dict[str, Recipe]:
    """Tables that are not registered, each made from its records: a cell for each row and method that they have.

    The configuration of a cell is that of a run whose folder's name has no changes, if there is one.
    """
    cells: dict[str, dict[Cell, Config]] = defaultdict(dict)
    seeds: dict[str, set[int]] = defaultdict(set)
    for run in sorted(runs, key=lambda run: ("+" in run.record.folder.name, run.config.seed)):
        config = run.config
        if config.title and config.recipe not in RECIPES:
            cells[config.recipe].setdefault((config.row, config.method), without_numerics(replace(config, seed=0)))
            seeds[config.recipe].add(config.seed)
    titles = {name: next(iter(of_recipe.values())).title for name, of_recipe in cells.items()}
    shared = {title for title, count in Counter(titles.values()).items() if count > 1}
    return {
        name: Recipe(name, _own_title(titles[name], name, shared), None, len(seeds[name]), in_order(of_recipe))
        for name, of_recipe in cells.items()
    }


def _own_title(title: str, name: str, shared: set[str]) -> str:
    """With the name of the folder, where another table has the same title: fits of one data set with other settings."""
    return f"{title} ({name})" if title in shared else title


def in_order(cells: Mapping[Cell, Config]) -> dict[Cell, Config]:
    """The cells by row, as they come, and in the order of the methods."""
    rows, methods = list(dict.fromkeys(row for row, _ in cells)), methods_in_order(method for _, method in cells)
    ordered = sorted(cells, key=lambda cell: (rows.index(cell[0]), methods.index(cell[1])))
    return {cell: cells[cell] for cell in ordered}


def _empty_table(recipe: Recipe, changes: Mapping[str, str]) -> ResultTable:
    return ResultTable(recipe, ", ".join(changes.values()), fields=tuple(changes))


def _complete(changed: ResultTable, theirs: Sequence[str], others: Mapping[Cell, Mapping[int, Run]]) -> None:
    """Add runs of another table that have the changed values anyway, as SAM's 200 epochs if SGD's were set to 200.

    A field that a method does not use, such as ρ of SGD, may have any value.
    """
    names = changed.fields
    rows = {row for row, _ in changed.runs}
    config = next(run.config for runs in changed.runs.values() for run in runs.values())
    for cell, runs in others.items():
        used = [name for name in (*names, *theirs) if uses(cell[1], name)]
        for seed, run in runs.items():
            alike = all(name in names and getattr(run.config, name) == getattr(config, name) for name in used)
            if cell[0] in rows and alike and seed not in changed.runs[cell]:
                changed.runs[cell][seed] = run
                changed.borrowed.append(run)


def fill(recipe: Recipe, records: Sequence[Record]) -> ResultTable:
    """The cells of one recipe with runs of it, changed or not, and with runs of other tables that it can borrow."""
    table = ResultTable(recipe, "")
    runs = [run for run in map(_run, records) if not isinstance(run, str) and not run.record.not_counted]
    for run in runs:
        place = _place(run.config, run.record.folder, recipe) if run.config.recipe == recipe.name else None
        if place is not None:
            cell, changes = place
            table.changes = ", ".join(changes.values()) or table.changes
            table.runs[cell][run.config.seed] = run
    borrow(table, runs)
    return table


def borrow(table: ResultTable, runs: Iterable[Run]) -> None:
    """Add runs of other tables of the lab that are the same training as a cell of this one, which lacks that seed."""
    cells = {training_of(config): cell for cell, config in table.recipe.cells.items()}
    for run in runs:
        config = run.config
        cell = cells.get(training_of(replace(config, seed=0))) if config.recipe in RECIPES else None
        if cell is None or config.recipe == table.recipe.name or run.record.not_counted:
            continue
        earlier = table.runs[cell].get(config.seed)
        if earlier is None or (earlier.record.result is None and run.record.result is not None):
            table.runs[cell][config.seed] = run
            table.borrowed.append(run)


def with_equal_runs(table: ResultTable, runs: Iterable[Run]) -> ResultTable:
    """A copy of a table whose rows have methods of their own, such as the frontier, that has borrowed SAM's runs.

    Any other table itself: its own runs are compared, and each difference counts in one table.
    """
    if not table.rows_differ or table.changes:
        return table
    own = defaultdict(dict, {cell: dict(of_cell) for cell, of_cell in table.runs.items()})
    borrowing = replace(table, runs=own, borrowed=[*table.borrowed])
    borrow(borrowing, runs)
    return borrowing


def training_of(config: Config) -> Config:
    """The same for two runs that are the same training: without the table that they are of, and `NUMERICS`."""
    return replace(without_numerics(config), recipe="", title="", row="")


def tables_with(configs: Iterable[Config]) -> list[str]:
    """The tables of the lab that have a cell which is the same training as one of these, whatever its seed."""
    wanted = {training_of(replace(config, seed=0)) for config in configs}
    return [
        name for name, make in RECIPES.items() if any(training_of(own) in wanted for own in _made(make).cells.values())
    ]


def is_of_a_table(run: Run) -> bool:
    """Whether it has a cell: of a recipe that is registered here, or of one that is made from records."""
    config = run.config
    return cell_of(config, run.record.folder) is not None if config.recipe in RECIPES else bool(config.title)


def command(run: Run) -> str:
    """The command that trains it again; empty for a run of an unregistered recipe."""
    place = _place(run.config, run.record.folder)
    if place is None or run.config.recipe not in RECIPES:
        return ""
    (row, method), _ = place
    own = replace(_made(RECIPES[run.config.recipe]).cells[row, method], seed=run.config.seed)
    options = []
    for name, change in changes_of(own, run.config).items():
        if not uses(method, name):
            continue
        options += ["--partial-data"] if change == "partial_data=true" else ["--set", change]
    cell = f"{run.config.recipe}/{row}/{method}"
    return shlex.join(["bisam", "train", cell, "--seeds", str(run.config.seed), *options])


def _recipe(name: str) -> Recipe | None:
    return _made(RECIPES[name]) if name in RECIPES else None


@cache
def _made(make: Callable[[], Recipe]) -> Recipe:
    """Each recipe once, also one that is registered later."""
    return make()


def _place(config: Config, folder: Path, recipe: Recipe | None = None) -> tuple[Cell, dict[str, str]] | None:
    """The cell that a run is of, of its own recipe or a part of it, and in what it differs from it: see `changes_of`.

    With a model or a noise rate that no row has, several rows are equally near: then the folder's name decides.
    """
    recipe = recipe or _recipe(config.recipe)
    cells = {cell: own for cell, own in recipe.cells.items() if own.method == config.method} if recipe else {}
    if config.row and any(row == config.row for row, _ in cells):
        cells = {cell: own for cell, own in cells.items() if cell[0] == config.row}
    if not cells:
        return None
    changes: dict[Cell, dict[str, str]] = {}
    distances: dict[Cell, tuple[int, int]] = {}
    for cell, expected in cells.items():
        same = {name: getattr(config, name) for name in ("seed", *NUMERICS)}
        changes[cell] = changes_of(replace(expected, **same), config)
        elsewhere = sum(getattr(expected, name) != getattr(config, name) for name in ROW)
        distances[cell] = (elsewhere, len(changes[cell]))
    nearest = [cell for cell in cells if distances[cell] == min(distances.values())]
    if len(nearest) > 1:
        names = {folder.name, folder.resolve().name}  # one of them may be a link's
        own_names = {cell: folder_name(cell[0], replace(cells[cell], seed=config.seed), config) for cell in nearest}
        nearest.sort(key=lambda cell: own_names[cell] not in names)
    return nearest[0], changes[nearest[0]]


def cell_of(config: Config, folder: Path, recipe: Recipe | None = None) -> tuple[str, Cell] | None:
    """The recipe and the cell that the run in a folder is of, changed or not; `recipe` may be an unregistered one."""
    found = _place(config, folder, recipe if recipe is not None and recipe.name == config.recipe else None)
    return None if found is None else (config.recipe, found[0])


def folder_name(row: str, own: Config, changed: Config) -> str:
    """The name of a run's folder, of characters that every file system takes.

    >>> folder_name("80%", Config(method="sam"), Config(method="sam", epochs=3))
    'noise80-sam-seed0+epochs=3'
    >>> folder_name("rte", Config(method="sam"), Config(method="sam", model="transformers:org/bert"))
    'rte-sam-seed0+model=transformers-org-bert'
    """
    name = f"noise{row.rstrip('%')}" if row.endswith("%") else re.sub(r"[^\w.%=-]+", "-", row)
    before, now = own.as_dict(), changed.as_dict()
    changes = {key: re.sub(r'[\\/:*?"<>|]', "-", str(value)) for key, value in now.items() if value != before[key]}
    extra = "".join(f"+{key}={value}" for key, value in changes.items())
    return f"{name}-{own.method}-seed{own.seed}{extra}"


def without_numerics(config: Config) -> Config:
    """The configuration with defaults for `NUMERICS`, the fields that do not change the experiment."""
    return replace(config, **{name: getattr(Config(), name) for name in NUMERICS})


def changes_of(own: Config, changed: Config) -> dict[str, str]:
    """The fields that differ, each with its text, such as {"epochs": "epochs=3"}. A title changes no run."""
    before = vars(own)
    return {
        name: f"{name}={text_of(value)}"
        for name, value in vars(changed).items()
        if value != before[name] and name != "title"
    }


def _run(record: Record) -> Run | str:
    """A run, or why the record is not one."""
    try:
        config = recorded(record.config)
    except ValueError as error:
        return str(error) if record.config else damage(record)
    fault = "" if record.result is None else fault_of(record.result)
    return fault or Run(record, config)


def damage(record: Record) -> str:
    """The problems of a record as one text; empty if it has none."""
    shown, more = record.problems[:MOST_PROBLEMS], len(record.problems) - MOST_PROBLEMS
    return "; ".join([*shown, f"{more} more"] if more > 0 else shown)


def number(value: object) -> float | None:
    """The value as a float if it is a number of a reasonable size, else None."""
    if isinstance(value, (int, float)) and not isinstance(value, bool) and -LARGEST < value < LARGEST:
        return float(value)
    return None


def _percent(value: object, lowest: float = 0.0) -> float | None:
    found = number(value)
    return found if found is not None and lowest <= found <= 100 else None


def text_of(value: object) -> str:
    """As after --set, where it is read as the same value.

    >>> text_of(0.1), text_of(1 / 3), text_of(True)
    ('0.1', '0.3333333333333333', 'true')
    """
    if isinstance(value, float):
        short = f"{value:g}"
        return short if float(short) == value else repr(value)
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)
