"""What sentences of the docs say in numbers: functions of cells of the ledger, for `sentences`.

A cell is table/row/method, with the changes of a recipe after the table: demo,rho=0.1,select=best/40%/sam. A second
cell may be a method alone, or row/method: the rest is the first one's. The tables of the frontier have short names,
with a setting as row: cifar40/late10/sam, cifar0/all/sam.

A cell means the test accuracy of its runs, or what follows an @, which a second cell has too unless it has its own:
`@last` and `@validation` are other accuracies, `@paper` is what the paper prints, `@seed0` is one run, `@without0` all
others, `@above30` and `@below30` are the runs that end there.

The difference of a group of rows is that of the means over them, seed by seed: clean_cifar/bisam-log sam.

`measured:` and a path is a number of a file of benchmarks/results, or a list of them, which are the runs then:
measured:bench_h200/epoch/resnet56/speed_up_over_authors. A `*` is each one there, and `_` may be a blank.
"""

import json
import math
import re
import statistics
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import frontier

from bisam.lab.recipes import frontier_row
from bisam.lab.tables import published
from bisam.lab.tables.cells import Collection, ResultTable
from bisam.lab.tables.statistics import Difference, Moments, difference, difference_of_means

GROUPS = {
    "clean_cifar": ["label_noise/0%", "cifar10/vgg19bn", "cifar10/resnet56"],
    "noisy_cifar": ["label_noise/20%", "label_noise/40%", "label_noise/60%"],
}
"""Rows that a sentence averages over. At 80 % wrong labels some trainings fail: their scatter would decide."""

FRONTIERS = {
    "cifar0": ("frontier", "resnet32", 0.0),
    "cifar40": ("frontier", "resnet32", 0.4),
    "digits40": ("frontier_digits", "digitsnet", 0.4),
}
"""Table, model and part of wrong labels of the short names."""

MEASURES = {"last": "last_test_accuracy", "validation": "validation_accuracy"}
MEASURED = "measured:"
MOVED = 2.300
"""A training loss below that of ten equal logits, which is log 10 = 2.303."""

RESULTS = Path(__file__).parents[2] / "benchmarks/results"
WORDS = [
    "no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve", "thirteen",
    "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty",
]  # fmt: skip


class Tables:
    """The ledger's tables by name; those of the frontier have equal runs of other tables too."""

    def __init__(self, collection: Collection) -> None:
        self._tables = {table.name.replace(" ", ""): table for table in collection.tables}
        self._tables |= {name: frontier.filled(collection, name) for name, _, _ in FRONTIERS.values()}

    def __getitem__(self, name: str) -> ResultTable:
        if name not in self._tables:
            raise ValueError(f"the ledger has no table {name!r}, but {', '.join(self._tables)}")
        return self._tables[name]


class Query:
    """The arguments of a function in a sentence, and its number of decimals."""

    def __init__(self, tables: Tables, arguments: list[str], digits: int) -> None:
        self.tables = tables
        self.arguments = arguments
        self.digits = digits

    def number(self, value: float) -> str:
        text = f"{value:.{self.digits}f}".replace("-", "−")
        return text.removeprefix("−") if float(text.replace("−", "-")) == 0 else text

    def signed(self, value: float) -> str:
        return f"{value:+.{self.digits}f}".replace("-", "−")

    def cell(self, place: int = 0) -> tuple[ResultTable, str, str, str]:
        """Table, row, method of an argument, and what follows its @."""
        path, at, chosen = self.arguments[place].partition("@")
        parts = path.split("/")
        if place:
            first, _, of_first = self.arguments[0].partition("@")
            parts = [*first.split("/")[: 3 - len(parts)], *parts]
            chosen = chosen if at else of_first
        table, row, method = parts
        if table in FRONTIERS:
            table, model, noise = FRONTIERS[table]
            row = frontier_row(model, noise, row.replace("all", ""))
        result_table = self.tables[table]
        if (row, method) not in result_table.recipe.cells:
            raise ValueError(f"{table} has no cell {row}/{method}: its rows are {', '.join(result_table.recipe.rows)}")
        return result_table, row, method, chosen

    def values(self, place: int = 0) -> dict[int, float]:
        """The accuracy of each of the cell's runs, in per cent, by seed."""
        path, _, chosen = self.arguments[place].partition("@")
        if path.startswith(MEASURED):
            found = dict(enumerate(_measured(path.removeprefix(MEASURED))))
        else:
            result_table, row, method, chosen = self.cell(place)
            primary = f"test_{result_table.recipe.cells[row, method].primary}"
            found = result_table.measured(row, method, MEASURES.get(chosen, primary))
        values = _chosen(found, chosen)
        if not values:
            raise ValueError(f"no run of {self.arguments[place]} is finished")
        return values

    def of_paper(self, place: int) -> Moments | None:
        """What the paper prints, if the argument means that."""
        if self.arguments[place].startswith(MEASURED):
            return None
        result_table, row, method, chosen = self.cell(place)
        if chosen != "paper":
            return None
        table = published.of(result_table.recipe)
        printed = table.moments(row, method) if table else None
        if printed is None:
            raise ValueError(f"the paper does not print {self.arguments[place]}")
        return printed

    def moments(self, place: int = 0) -> Moments:
        """Mean, standard deviation and number of runs, ours or the paper's."""
        if printed := self.of_paper(place):
            return printed
        values = [*self.values(place).values()]
        return Moments(statistics.fmean(values), statistics.stdev(values) if values[1:] else None, len(values))

    def gap(self) -> Difference:
        """Of the first cell − the second; of a group of rows that of the seeds' means over them: rows share seeds."""
        group, _, method = self.arguments[0].partition("/")
        if group in GROUPS:
            of_rows = [
                Query(self.tables, [f"{row}/{method}", *self.arguments[1:]], self.digits) for row in GROUPS[group]
            ]
            found = difference(*(_means([query.values(place) for query in of_rows]) for place in (0, 1)))
            assert found is not None
            return found
        if self.of_paper(0) or self.of_paper(1):
            return difference_of_means(self.moments(0), self.moments(1))
        found = difference(self.values(0), self.values(1))
        assert found is not None
        return found


def _means(rows: list[dict[int, float]]) -> dict[int, float]:
    """The mean over rows of each seed that all of them have.

    >>> _means([{0: 1.0, 1: 2.0}, {0: 3.0}])
    {0: 2.0}
    """
    return {seed: statistics.fmean(row[seed] for row in rows) for seed in rows[0] if all(seed in row for row in rows)}


def _measured(path: str) -> list[float]:
    name, *keys = path.split("/")
    found = [json.loads((RESULTS / f"{name}.json").read_text())]
    for key in keys:
        found = [inner for one in found for inner in _inner(one, key)]
    return found[0] if isinstance(found[0], list) else found


def _inner(found: Any, key: str) -> list[Any]:
    """
    >>> _inner({"of sam": 1, "of_sgd": 2}, "of_sam"), _inner({"of sam": 1, "of_sgd": 2}, "*")
    ([1], [1, 2])
    """
    if key == "*":
        return [*found.values()]
    if isinstance(found, list):
        return [found[int(key)]]
    return [found[key] if key in found else found[key.replace("_", " ")]]


def _chosen(values: Mapping[int, float], chosen: str) -> dict[int, float]:
    """
    >>> values = {0: 9.8, 1: 92.0, 2: 94.0}
    >>> _chosen(values, "seed1"), _chosen(values, "without1"), _chosen(values, "above30"), _chosen(values, "below30")
    ({1: 92.0}, {0: 9.8, 2: 94.0}, {1: 92.0, 2: 94.0}, {0: 9.8})
    """
    if chosen in {"", *MEASURES}:
        return dict(values)
    found = re.fullmatch(r"(seed|without|above|below)(\d+)", chosen)
    if not found:
        raise ValueError(f"unknown @{chosen}")
    kind, limit = found[1], int(found[2])
    belongs: dict[str, Callable[[int, float], bool]] = {
        "seed": lambda seed, _: seed == limit,
        "without": lambda seed, _: seed != limit,
        "above": lambda _, value: value > limit,
        "below": lambda _, value: value <= limit,
    }
    return {seed: value for seed, value in values.items() if belongs[kind](seed, value)}


def _word(count: int) -> str:
    return WORDS[count] if count < len(WORDS) else str(count)


def mean(query: Query) -> str:
    return query.number(query.moments().mean)


def scatter(query: Query) -> str:
    """The standard deviation over seeds."""
    deviation = query.moments().deviation
    if deviation is None:
        raise ValueError("one run has no deviation")
    return query.number(deviation)


def median(query: Query) -> str:
    return query.number(statistics.median(query.values().values()))


def lowest(query: Query) -> str:
    return query.number(min(query.values().values()))


def highest(query: Query) -> str:
    return query.number(max(query.values().values()))


def seeds(query: Query) -> str:
    """How many runs, as a word."""
    return _word(len(query.values()))


def gap(query: Query) -> str:
    """The first − the second, with its sign."""
    return query.signed(query.gap().mean)


def above(query: Query) -> str:
    """How far the first is above the second."""
    found = query.gap().mean
    if found < 0:
        raise ValueError(f"the first is not above the second: {found:+.2f}")
    return query.number(found)


def below(query: Query) -> str:
    """How far the first is below the second."""
    found = query.gap().mean
    if found > 0:
        raise ValueError(f"the first is not below the second: {found:+.2f}")
    return query.number(-found)


def median_gap(query: Query) -> str:
    """The median of the differences of pairs."""
    return query.signed(statistics.median(_gaps_of_pairs(query)))


def pairs_below(query: Query) -> str:
    """In how many pairs the first is below the second."""
    return _word(sum(gap < 0 for gap in _gaps_of_pairs(query)))


def _gaps_of_pairs(query: Query) -> list[float]:
    ours, theirs = query.values(0), query.values(1)
    return [ours[seed] - theirs[seed] for seed in ours.keys() & theirs.keys()]


def interval(query: Query) -> str:
    """The 95 % interval of the difference: without signs if it is resolved, the end next to 0 first."""
    low, high = _ends(query)
    if low <= 0 <= high:
        return signed_interval(query)
    return " to ".join(query.number(end) for end in sorted((abs(low), abs(high))))


def signed_interval(query: Query) -> str:
    return " to ".join(map(query.signed, _ends(query)))


def _ends(query: Query) -> tuple[float, float]:
    found = query.gap()
    if found.low is None or found.high is None:
        raise ValueError("the difference has no interval")
    return found.low, found.high


def resolved(query: Query) -> str:
    """A claim: the interval of the difference excludes 0."""
    if not query.gap().resolved:
        raise ValueError(f"the difference is not resolved: {query.gap().interval}")
    return ""


def unresolved(query: Query) -> str:
    """A claim: it does not."""
    if query.gap().resolved:
        raise ValueError(f"the difference is resolved: {query.gap().interval}")
    return ""


def between(query: Query) -> str:
    """The accuracy at a part of the way from the first cell to the second: label_noise/20%/sam 40%/sam 0.8."""
    part = float(query.arguments[2])
    return query.number((1 - part) * query.moments(0).mean + part * query.moments(1).mean)


def radius(query: Query) -> str:
    """ρ of the first ÷ that of the second."""
    ours, theirs = (
        table.recipe.cells[row, method].rho for table, row, method, _ in (query.cell(place) for place in (0, 1))
    )
    return query.number(ours / theirs)


def loss(query: Query) -> str:
    """The training loss of the last epoch, the mean over seeds."""
    table, row, method, _ = query.cell()
    runs = table.runs.get((row, method), {}).values()
    return query.number(statistics.fmean(loss for run in runs if (loss := run.last("loss")) is not None))


def stuck(query: Query) -> str:
    """Epochs before the training loss of a run, such as @seed0, is below that of ten equal logits."""
    table, row, method, chosen = query.cell()
    runs = table.runs.get((row, method), {})
    epochs = {seed: _epochs_before(MOVED, run.record.metrics) for seed, run in runs.items()}
    (found,) = _chosen(epochs, chosen).values()
    return f"{found:.0f}"


def _epochs_before(loss: float, metrics: Iterable[Mapping[str, float]]) -> float:
    return next((metric["epoch"] for metric in metrics if metric["loss"] < loss), math.inf)


def lost_by_choice(query: Query) -> str:
    """Points between the best epoch and the chosen one, the mean over runs: what a choice by clean labels may gain.

    From validation curves that are smoothed over eleven epochs, with the effect of wrong labels taken out.
    """
    table, row, method, _ = query.cell()
    noise = table.recipe.cells[row, method].noise
    gaps = []
    for run in table.runs.get((row, method), {}).values():
        if run.record.result is None:
            continue
        curve = smoothed([of_clean_labels(one["validation_accuracy"], noise) for one in run.record.metrics])
        gaps.append(max(curve) - curve[run.record.result["best_epoch"]])
    return query.number(statistics.fmean(gaps))


def of_clean_labels(accuracy: float, noise: float, classes: int = 10) -> float:
    """The accuracy on clean labels that gives this one where a part of the labels moved to another class, uniformly.

    >>> round(of_clean_labels(60.0, 0.4)), round(of_clean_labels(10.0, 0.4))
    (100, 10)
    """
    hit_by_chance = noise / (classes - 1)
    return (accuracy - 100 * hit_by_chance) / (1 - noise - hit_by_chance)


def smoothed(curve: list[float], beside: int = 5) -> list[float]:
    """
    >>> smoothed([0.0, 3.0, 0.0], beside=1)
    [1.5, 1.0, 1.5]
    """
    return [statistics.fmean(curve[max(0, place - beside) : place + beside + 1]) for place in range(len(curve))]


def times(query: Query) -> str:
    """A factor, as a word."""
    return _word(round(query.moments().mean))


def time(query: Query) -> str:
    """Time of the training relative to 200 epochs of SGD, of a cell of the frontier."""
    table, row, method, _ = query.cell()
    config = table.recipe.cells[row, method]
    found = frontier.relative_time(config, frontier.timing()[config.model]["ratio"])
    if found is None:
        raise ValueError("it was not timed")
    return query.number(found)


FUNCTIONS: Mapping[str, Callable[[Query], str]] = {
    function.__name__: function
    for function in (
        mean, scatter, median, lowest, highest, seeds, gap, above, below, interval, signed_interval, resolved,
        unresolved, median_gap, pairs_below, between, radius, loss, stuck, lost_by_choice, time, times,
    )
}  # fmt: skip
