"""Curves of training: the mean of each method, with a band from its lowest to its highest run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import altair as alt

from bisam.lab.methods import in_order
from bisam.lab.report.charts import APART, Chart, Style, by_style, styles_in, whole
from bisam.lab.tables import curves
from bisam.lab.tables.cells import Run
from bisam.lab.tables.curves import CURVES, Rows

AXES = {
    "epoch": "epoch",
    "gradients": "gradient evaluations, in passes over the training data",
    "seconds": "seconds of training, divided by the runs that share the device",
}
"""Titles of the horizontal axis, by field."""

LOSSES = ("loss",)
"""Curves that may have a logarithmic axis."""

MEANS, RUNS = "means", "runs"
"""Names of the two tables of a curve: rows of a method, and rows of single runs that are to be seen."""


def curve(name: str, found: Sequence[Style], *, with_means: bool = True, with_runs: bool = True) -> Any:
    """One curve over `datum[axis]`, without data. Its parameters are the page's controls: `axis`, `hidden` methods."""
    controls = [alt.param(name="axis", value="epoch"), alt.param(name="hidden", value=[])]
    colour, dash = by_style(found)
    count = alt.ExprRef("ceil(width / 60)")  # so that the last number, which is moved inwards, has room
    axis = alt.Axis(tickMinStep=1, tickCount=count, labelOverlap="greedy", labelSeparation=APART)
    x = alt.X("x:Q", title=AXES["epoch"], scale=alt.Scale(nice=False, zero=False), axis=axis)
    y = alt.Y(
        "value:Q",
        title=CURVES.get(name, name),
        scale=alt.Scale(zero=False),
        axis=alt.Axis(format="~r", tickCount=5, minExtent=40),  # so that those of a panel are aligned
    )
    means, runs = (_seen(table).encode(x=x, color=colour) for table in (MEANS, RUNS))
    band = means.mark_area(opacity=0.2, clip=True).encode(y=y.copy(), y2="most:Q")
    band.encoding.y.shorthand = "least:Q"
    lines = means.mark_line(strokeWidth=2.5, clip=True).encode(y=y, strokeDash=dash)
    single = runs.mark_line(strokeWidth=1, clip=True, point={"size": 12}).encode(y=y, detail="run:N")
    layers = alt.layer(*[band, lines] * with_means, *[single] * with_runs)
    described = layers.properties(description=f"{CURVES.get(name, name)} over the epochs")
    return described.add_params(*controls)


def _seen(table: str) -> alt.Chart:
    """The rows of a table that have a place on the axis and are of methods that are not hidden."""
    return (
        alt.Chart(alt.NamedData(table))
        .transform_calculate(x="datum[axis]")
        .transform_filter("isValid(datum.x) && indexof(hidden, datum.method) < 0")
    )


def drawn(rows: Rows, name: str, methods: Sequence[str]) -> Chart:
    """A curve with its data, for a file: means and bands of these rows."""
    found = [row for row in curves.bands(rows) if name in row]
    shown = {row["method"] for row in found} | {row["method"] for row in rows if name in row}
    means = [_row(row, name) for row in found]
    single = [row for row in rows if name in row and "whole" not in row]
    if len({row["epoch"] for row in found}) < 2:  # of one epoch no line can be drawn
        single = [row for row in rows if name in row]
    looks = styles_in(methods, shown)
    made = whole(curve(name, looks, with_means=bool(means), with_runs=bool(single)), means)
    return Chart(made.drawn, {MEANS: means, RUNS: [{**row, "value": row[name]} for row in single]})


def _row(row: dict[str, Any], name: str) -> dict[str, Any]:
    return {
        "method": row["method"],
        "epoch": row["epoch"],
        "gradients": row["gradients"],
        "value": row[name],
        "least": row[f"{name}_low"],
        "most": row[f"{name}_high"],
    }


def flips(runs: Sequence[Run]) -> Chart:
    """The paper's figure: how many samples of a batch the perturbation turns from right to wrong, along training."""
    rows = curves.points(runs, curves.stride(runs))
    return drawn(rows, "flips", in_order(run.config.method for run in runs))


def flips_panel(runs: Sequence[Run]) -> Any:
    """The same for a page, where it zooms."""
    from bisam.lab.report.page import Curves  # which draws its curves with this module
    from bisam.lab.report.page.series import of_methods

    rows = curves.points(runs, curves.stride(runs))
    kept = [{name: value for name, value in row.items() if name not in CURVES or name == "flips"} for row in rows]
    return Curves(of_methods(kept, in_order(run.config.method for run in runs), {}), {})
