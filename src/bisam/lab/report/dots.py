"""The dot plot: every seed of every method, the mean and its interval."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import altair as alt

from bisam.lab.methods import title_of
from bisam.lab.report.charts import APART, Chart, of, styles_in, whole
from bisam.lab.tables.cells import ResultTable
from bisam.lab.tables.curves import Rows
from bisam.lab.tables.statistics import interval_of_mean


@dataclass(frozen=True)
class DotRow:
    """A line of the plot: a cell of a table."""

    title: str
    method: str
    values: Mapping[int, float]
    """By seed."""


def of_row(table: ResultTable, row: str, name: str = "test_accuracy") -> list[DotRow]:
    """The methods that have finished runs in a row."""
    found = {method: table.measured(row, method, name) for method in table.recipe.methods}
    return [DotRow(title_of(method), method, values) for method, values in found.items() if values]


def of_cells(table: ResultTable) -> list[DotRow]:
    """All cells that have finished runs, of a table whose rows have methods of their own."""
    found = [
        DotRow(f"{label}: {title_of(method)}", method, table.measured(row, method, name))
        for label, row, name in table.recipe.lines
        for method in table.recipe.methods
    ]
    return [line for line in found if line.values]


def dots(
    lines: Sequence[DotRow], methods: Sequence[str], measure: str = "test accuracy, per cent", *, joined: bool = True
) -> Chart:
    """The lines on one axis, in the colours that the `methods` of the table have; dots of one seed are `joined`."""
    rows = _rows(lines)
    looks = styles_in(methods, {title_of(line.method) for line in lines})
    domain, colours = [look.title for look in looks], [look.colour for look in looks]
    colour = alt.Color("method:N", scale=alt.Scale(domain=domain, range=colours), legend=None)
    titles = [line.title for line in lines]
    y = alt.Y("line:N", sort=titles, title=None, axis=alt.Axis(labelLimit=0, grid=False, ticks=False))
    scale = alt.Scale(zero=False, padding=12)
    axis = alt.Axis(labelOverlap="greedy", labelSeparation=APART, tickCount=6)
    x = alt.X("value:Q", title=measure, scale=scale, axis=axis)
    base = of(rows)
    seeds, means = base.transform_filter("isValid(datum.seed)"), base.transform_filter("isValid(datum.mean)")
    paths = seeds.mark_line(strokeWidth=1, opacity=0.45, color="#7d8590")
    intervals = means.transform_filter("isValid(datum.low)").mark_rule(strokeWidth=2.5, yOffset=9)
    ticks = means.mark_tick(thickness=3, size=16, yOffset=9, opacity=1)
    single = seeds.mark_point(filled=True, size=55, opacity=0.9)
    ends = intervals.encode(x=alt.X("low:Q", title=measure, scale=scale), x2="high:Q", y=y, color=colour)
    layers = alt.layer(
        *[paths.encode(x=x, y=y, detail="seed:N", order="place:Q")] * joined,
        *[ends] * any("low" in row for row in rows),
        ticks.encode(x=alt.X("mean:Q"), y=y, color=colour, tooltip=alt.Tooltip("words:N", title="mean")),
        single.encode(
            x=x,
            y=y,
            color=colour,
            tooltip=[alt.Tooltip("line:N"), alt.Tooltip("seed:O"), alt.Tooltip("value:Q", format=".2f")],
        ),
    )
    return whole(layers.properties(description=f"{measure} of every seed"), rows, height=40 * len(lines))


def _rows(lines: Sequence[DotRow]) -> Rows:
    """A row for each seed of each line, and one for its mean."""
    rows: Rows = []
    for place, line in enumerate(lines):
        names = {"line": line.title, "method": title_of(line.method)}
        rows += [{**names, "place": place, "seed": seed, "value": value} for seed, value in line.values.items()]
        mean, (low, high) = statistics.fmean(line.values.values()), interval_of_mean([*line.values.values()])
        words = f"{mean:.2f}" + ("" if low is None else f", 95 % interval {low:.2f} to {high:.2f}")
        span = {} if low is None else {"low": low, "high": high}
        rows.append({**names, "mean": mean, **span, "words": f"{words}, n = {len(line.values)}"})
    return rows
