"""A sweep as a chart: the validation measure over the values of one number."""

from __future__ import annotations

import altair as alt

from bisam.lab.report.charts import COLOURS, NEUTRAL, Chart, of, whole
from bisam.lab.tables.curves import Rows
from bisam.lab.tables.sweeps import Sweep


def grid(sweep: Sweep) -> Chart:
    """Each seed as a thin line, the means as a thick one; the chosen value and the recipe's are marked."""
    (name,) = sweep.fields
    rows: Rows = [
        {name: point.values[0], "accuracy": accuracy, "seed": seed, "value": sweep.mark(point) or "of the grid"}
        for point in sweep.points
        for seed, accuracy in point.accuracies.items()
    ]
    positive = all(point.values[0] > 0 for point in sweep.points)
    scale = alt.Scale(type="log" if positive else "linear", nice=False, padding=20)
    title = f"{sweep.measure}, per cent"
    base = of(rows).encode(x=alt.X(f"{name}:Q", scale=scale, axis=alt.Axis(format="~g")))
    y = alt.Y("accuracy:Q", title=title, scale=alt.Scale(zero=False))
    seeds = base.mark_line(color=COLOURS["plain"], strokeWidth=1, opacity=0.4).encode(y=y, detail="seed:N")
    means = base.mark_line(color=COLOURS["plain"], strokeWidth=2.5).encode(y=alt.Y("mean(accuracy):Q", title=title))
    marks = list(dict.fromkeys(row["value"] for row in rows))
    scales = [
        alt.Scale(domain=marks, range=[_colour(mark) for mark in marks]),
        alt.Scale(domain=marks, range=[_shape(mark) for mark in marks]),
    ]
    legend = alt.Legend(title=None, orient="top")
    runs = base.mark_point(filled=True, size=60, opacity=0.9).encode(
        y=y,
        color=alt.Color("value:N", scale=scales[0], legend=legend),
        shape=alt.Shape("value:N", scale=scales[1], legend=legend),
        tooltip=[alt.Tooltip(f"{name}:Q"), alt.Tooltip("seed:O"), alt.Tooltip("accuracy:Q", format=".2f")],
    )
    return whole((seeds + means + runs).properties(description=f"{sweep.measure} over {name}"), rows)


def _colour(mark: str) -> str:
    return NEUTRAL if "chosen" in mark else COLOURS["sam" if "recipe" in mark else "plain"]


def _shape(mark: str) -> str:
    return "diamond" if "chosen" in mark else "square" if "recipe" in mark else "circle"
