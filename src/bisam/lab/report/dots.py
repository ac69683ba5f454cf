"""The dot plot of a row: every seed of every method, the mean and its interval."""

from __future__ import annotations

import statistics

import altair as alt

from bisam.lab.methods import title_of
from bisam.lab.report.charts import APART, Chart, of, styles_in, whole
from bisam.lab.tables.cells import Group
from bisam.lab.tables.curves import Rows
from bisam.lab.tables.statistics import interval_of_mean


def dots(group: Group, row: str, name: str = "test_accuracy", measure: str = "test accuracy, per cent") -> Chart | None:
    """One line for each method; the dots of one seed are joined. None if no run of the row is finished."""
    found = {method: group.measured(row, method, name) for method in group.recipe.methods}
    methods = [method for method in group.recipe.methods if found[method]]
    if not methods:
        return None
    rows: Rows = []
    for place, method in enumerate(methods):
        values = found[method]
        rows += [
            {"method": title_of(method), "place": place, "seed": seed, "value": value} for seed, value in values.items()
        ]
        mean, (low, high) = statistics.fmean(values.values()), interval_of_mean([*values.values()])
        words = f"{mean:.2f}" + ("" if low is None else f", 95 % interval {low:.2f} to {high:.2f}")
        span = {} if low is None else {"low": low, "high": high}
        rows.append({"method": title_of(method), "mean": mean, **span, "words": f"{words}, n = {len(values)}"})
    titles = [title_of(method) for method in methods]
    looks = styles_in(group.recipe.methods, titles)
    colour = alt.Color("method:N", scale=alt.Scale(domain=titles, range=[look.colour for look in looks]), legend=None)
    y = alt.Y("method:N", sort=titles, title=None, axis=alt.Axis(labelLimit=0, grid=False, ticks=False))
    scale = alt.Scale(zero=False, padding=12)
    axis = alt.Axis(labelOverlap="greedy", labelSeparation=APART, tickCount=6)
    x = alt.X("value:Q", title=measure, scale=scale, axis=axis)
    base = of(rows)
    seeds, means = base.transform_filter("isValid(datum.seed)"), base.transform_filter("isValid(datum.mean)")
    joined = seeds.mark_line(strokeWidth=1, opacity=0.45, color="#7d8590").encode(
        x=x, y=y, detail="seed:N", order="place:Q"
    )
    intervals = means.transform_filter("isValid(datum.low)").mark_rule(strokeWidth=2.5, yOffset=9)
    ticks = means.mark_tick(thickness=3, size=16, yOffset=9, opacity=1)
    single = seeds.mark_point(filled=True, size=55, opacity=0.9)
    ends = intervals.encode(x=alt.X("low:Q", title=measure, scale=scale), x2="high:Q", y=y, color=colour)
    layers = alt.layer(
        joined,
        *[ends] * any("low" in row for row in rows),
        ticks.encode(x=alt.X("mean:Q"), y=y, color=colour, tooltip=alt.Tooltip("words:N", title="mean")),
        single.encode(
            x=x,
            y=y,
            color=colour,
            tooltip=[alt.Tooltip("method:N"), alt.Tooltip("seed:O"), alt.Tooltip("value:Q", format=".2f")],
        ),
    )
    return whole(layers.properties(description=f"{measure} of every seed"), rows, height=40 * len(methods))
