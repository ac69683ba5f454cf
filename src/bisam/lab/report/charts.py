"""Charts of runs, as Vega-Lite: what a page shows and what a figure file holds."""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import altair as alt
import torch

from bisam import objectives
from bisam.lab.methods import METHODS, title_of
from bisam.lab.tables.cells import Run, number
from bisam.lab.tables.summary import MethodDifference
from bisam.lab.tables.sweeps import Sweep

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Chart:
    """A chart and its data, apart from each other: Altair checks each number that passes it, for minutes if many do."""

    drawn: alt.Chart | alt.LayerChart
    data: Mapping[str, Rows]

    def to_dict(self) -> dict[str, Any]:
        return {**self.drawn.to_dict(), "datasets": dict(self.data)}


CURVES = {
    "loss": "training loss at w",
    "validation_accuracy": "validation accuracy, per cent",
    "flips": "flips per batch, right to wrong",
    "surrogate_gap": "surrogate gap, L(w + ε) − L(w)",
    "lr": "learning rate",
}
"""Titles of the curves, by their names in the rows."""

MOST_POINTS = 40_000
"""Points of all runs of a page: more make it slow, and are finer than a screen."""

LARGEST_EPOCH = 2**53
"""Larger whole numbers are none to a browser, and the library that draws refuses them."""

MOST_TOOLTIPS = 4_000
"""Points of a chart that the pointer finds: each is a shape of its own to a browser."""

OUTLIER = 10.0
"""A diverged run is not drawn beyond this multiple of the largest value of the others."""

_COLOURS = {"plain": "#7d8590", "sam": "#3b82f6", "log": "#e8590c", "tanh": "#0f9d6b"}
_NEUTRAL = "#8957e5"
"""Colour of marks that belong to no method."""

_MORE_COLOURS = ["#b8860b", "#c2255c", "#5f3dc4", "#2b8a3e"]
_DASHES = {"plain": [2, 3], "sam": [8, 3], "log": [1, 0], "tanh": [12, 2, 3, 2]}


def stride(runs: Iterable[Run]) -> int:
    """Every how many epochs a point is drawn, so that a page stays light.

    >>> stride([])
    1
    """
    return max(1, math.ceil(sum(len(run.record.metrics) for run in runs) / MOST_POINTS))


def points(runs: Sequence[Run], every: int = 1) -> Rows:
    """Rows of numbers by run and epoch; the first and the last epoch are always among them.

    `whole` marks the epochs that all runs of a method have, but for those that diverged: only there is a mean the mean
    of the same runs.
    """
    rows: Rows = []
    for run in runs:
        metrics = run.record.metrics
        for place, epoch in enumerate(metrics):
            if (place % every == 0 or place == len(metrics) - 1) and epoch["epoch"] < LARGEST_EPOCH:
                rows.append({"run": _label(run), "method": title_of(run.config.method), **numbers(epoch)})
    diverged = {_label(run) for run in runs if run.status == "diverged"}
    _drop_outliers(rows, diverged)
    sound = [row for row in rows if row["run"] not in diverged]
    present = Counter((row["method"], row["epoch"]) for row in sound)
    counts = Counter(method for method, _ in {(row["method"], row["run"]) for row in sound})
    for row in sound:
        if present[row["method"], row["epoch"]] == counts[row["method"]]:
            row["whole"] = 1
    return rows


def _label(run: Run) -> str:
    return f"{title_of(run.config.method)}, seed {run.config.seed}"


def _drop_outliers(rows: Rows, diverged: Container[str]) -> None:
    """Remove values of diverged runs far beyond the others, which would flatten all other curves."""
    for name in CURVES:
        sizes = [abs(row[name]) for row in rows if name in row and row["run"] not in diverged]
        for row in rows:
            if sizes and row["run"] in diverged and abs(row.get(name, 0.0)) > OUTLIER * max(sizes):
                del row[name]


def curve(rows: Rows, name: str, methods: Sequence[str], *, interactive: bool = True) -> Chart:
    """One number over the epochs: each run as a thin line, the mean of each method as a thick one.

    If interactive, it shows the run and the number under the pointer, and zooms.
    """
    present = [row for row in rows if name in row]
    runs_shown = {row["run"] for row in present}
    x = alt.X("epoch:Q", title="epoch", axis=alt.Axis(tickMinStep=1))
    y, mean = (
        alt.Y(f"{field}:Q", title=CURVES[name], scale=alt.Scale(zero=False), axis=alt.Axis(format="~r"))
        for field in (name, f"mean({name})")
    )
    shown = {row["method"] for row in present}
    colour, dash = _by_method([method for method in methods if title_of(method) in shown])
    base = of(rows).transform_filter(f"isValid(datum.{name})").encode(x=x)
    single = len(present) == len(runs_shown)  # an epoch each, of which no line can be drawn
    runs = base.mark_line(opacity=0.3, strokeWidth=1, clip=True, point=single)
    means = base.transform_filter("datum.whole").mark_line(strokeWidth=2.5, clip=True)
    layers = runs.encode(y=y, color=colour, detail="run:N") + means.encode(y=mean, color=colour, strokeDash=dash)
    layers = layers.properties(description=f"{CURVES[name]} over the epochs of {len(runs_shown)} runs")
    if not interactive:
        return whole(layers, rows)
    return whole(layers + _tooltips(base, name, colour, len(present)), rows)


def _tooltips(base: alt.Chart, name: str, colour: alt.Color, count: int) -> alt.Chart:
    """Points that appear under the pointer, with a tooltip of their run and number; and the zoom."""
    shown = ["run", "epoch", "method"]
    hover = alt.selection_point(
        name="hover", on="pointerover", clear="pointerout", nearest=True, empty=False, fields=shown
    )
    zoom = alt.selection_interval(
        name="zoom", bind="scales", encodings=["x"], zoom="wheel![event.ctrlKey || event.metaKey]"
    )
    every = math.ceil(count / MOST_TOOLTIPS)
    # rows with nothing but the tooltip, shown whole: Vega loses names among single fields of the nearest point
    return (
        base.transform_filter(f"datum.epoch % {every} == {1 % every}")
        .transform_aggregate(value=f"mean({name})", groupby=[*shown])
        .mark_point(size=50, filled=True, clip=True, tooltip={"content": "data"}, aria=False)
        .encode(y="value:Q", color=colour, opacity=alt.condition(hover, alt.value(1), alt.value(0)))
        .add_params(hover, zoom)
    )


def forest(comparisons: Sequence[MethodDifference]) -> Chart:
    """Differences with their intervals, and the paper's as diamonds; what is right of 0 is better."""
    rows: Rows = []
    for one in comparisons:
        row = {"difference": f"{one.row}: {one.label}", "description": f"{one.describe()}."}
        kind = "resolved" if one.found.resolved else "not resolved"
        rows.append({**row, "at": one.found.mean, "low": one.found.low, "high": one.found.high, "kind": kind})
        if one.published is not None:
            rows.append({**row, "at": one.published, "kind": "the paper's"})
    order = list(dict.fromkeys(row["difference"] for row in rows))
    kinds = [kind for kind in ("resolved", "not resolved", "the paper's") if any(row["kind"] == kind for row in rows)]
    shapes = {"resolved": "circle", "not resolved": "cross", "the paper's": "diamond"}
    shape = alt.Shape(
        "kind:N",
        scale=alt.Scale(domain=kinds, range=[shapes[kind] for kind in kinds]),
        legend=alt.Legend(title=None, orient="top", columns=2, symbolFillColor=_NEUTRAL, symbolStrokeColor=_NEUTRAL),
    )
    base = of(rows).encode(
        y=alt.Y(
            "difference:N",
            sort=order,
            title=None,
            axis=alt.Axis(labelLimit=320, grid=False, labelExpr="split(datum.label, ': ')"),
        ),
        tooltip=alt.Tooltip("description:N", title="in words"),
    )
    once = of(rows).transform_aggregate(rows="count()")  # not of `base`, whose y would leave it no length
    zero = once.mark_rule(strokeDash=[3, 3], color=_COLOURS["plain"]).encode(x=alt.XDatum(0))
    x = alt.X("low:Q", title="points of test accuracy")
    intervals = base.transform_filter("isValid(datum.low)").mark_rule(strokeWidth=2, color=_NEUTRAL)
    marks = base.mark_point(size=80, opacity=1, filled=True, color=_NEUTRAL).encode(x="at:Q", shape=shape)
    layers = zero + intervals.encode(x=x, x2="high:Q") + marks
    described = layers.properties(description="differences with 95 % intervals")
    return whole(described, rows, height=34 * len(order) + 10)


def flips(runs: Sequence[Run], *, interactive: bool = True) -> Chart:
    """The paper's figure: how many samples of a batch the perturbation turns from right to wrong, along training."""
    return curve(points(runs, stride(runs)), "flips", _methods(runs), interactive=interactive)


def grid(sweep: Sweep) -> Chart:
    """Validation accuracy over the values of one number: each seed as a thin line, the means as a thick one."""
    (name,) = sweep.fields
    rows: Rows = [
        {name: point.values[0], "accuracy": accuracy, "seed": seed, "value": sweep.mark(point) or "of the grid"}
        for point in sweep.points
        for seed, accuracy in point.accuracies.items()
    ]
    positive = all(point.values[0] > 0 for point in sweep.points)
    scale = alt.Scale(type="log" if positive else "linear", nice=False, padding=20)
    title = "validation accuracy, per cent"
    base = of(rows).encode(x=alt.X(f"{name}:Q", scale=scale, axis=alt.Axis(format="~g")))
    y = alt.Y("accuracy:Q", title=title, scale=alt.Scale(zero=False))
    seeds = base.mark_line(color=_COLOURS["plain"], strokeWidth=1, opacity=0.4).encode(y=y, detail="seed:N")
    means = base.mark_line(color=_COLOURS["plain"], strokeWidth=2.5).encode(y=alt.Y("mean(accuracy):Q", title=title))
    marks = list(dict.fromkeys(row["value"] for row in rows))
    colours = [_NEUTRAL if "chosen" in mark else _COLOURS["sam" if "recipe" in mark else "plain"] for mark in marks]
    runs = base.mark_point(filled=True, size=60, opacity=0.9).encode(
        y=y,
        color=alt.Color(
            "value:N", scale=alt.Scale(domain=marks, range=colours), legend=alt.Legend(title=None, orient="top")
        ),
        tooltip=[alt.Tooltip(f"{name}:Q"), alt.Tooltip("seed:O"), alt.Tooltip("accuracy:Q", format=".2f")],
    )
    return whole((seeds + means + runs).properties(description=f"validation accuracy over {name}"), rows)


def lower_bounds(alpha: float = 0.1) -> Chart:
    """The paper's figure: both φ below the step function of the 0-1 loss, and cross entropy of two classes above it."""
    x = torch.linspace(-10, 10, 401, dtype=torch.float64)
    curves = {
        "φ = −log": objectives.log_phi(x),
        f"φ = tanh, α = {alpha:g}": objectives.tanh_phi(x, alpha),
        "cross entropy/log 2": torch.nn.functional.softplus(x) / math.log(2),
    }
    rows = [
        {"x": round(at, 4), "value": value, "curve": name}
        for name, values in curves.items()
        for at, value in zip(x.tolist(), values.tolist(), strict=True)
    ]
    name = "0-1 loss"
    rows += [{"x": at, "value": value, "curve": name} for at, value in [(-10, 0), (0, 0), (0, 1), (10, 1)]]
    colour = alt.Color(
        "curve:N",
        scale=alt.Scale(domain=[name, *curves], range=[_COLOURS[key] for key in ("plain", "log", "tanh", "sam")]),
        legend=alt.Legend(title=None, orient="top"),
    )
    tooltip = [alt.Tooltip("curve:N"), alt.Tooltip("x:Q", format=".3~g"), alt.Tooltip("value:Q", format=".4~g")]
    lines = (
        of(rows)
        .mark_line(clip=True, strokeWidth=2.5)
        .encode(
            x=alt.X("x:Q", title="margin of a wrong class, x = z_j − z_y"),
            y=alt.Y("value:Q", title="value", scale=alt.Scale(domain=[-3, 3])),
            color=colour,
            strokeDash=alt.StrokeDash(
                "curve:N",
                scale=alt.Scale(
                    domain=[name, *curves], range=[_DASHES[key] for key in ("sam", "log", "tanh", "plain")]
                ),
                legend=None,
            ),
            tooltip=tooltip,
        )
    )
    return whole(lines.properties(description="two lower bounds and an upper bound of the 0-1 loss"), rows)


def numbers(epoch: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a line of metrics that charts show: the epoch, counted from 1, and the `CURVES` that it has."""
    loss, perturbed = number(epoch.get("loss")), number(epoch.get("perturbed_loss"))
    gap = None if loss is None or perturbed is None else perturbed - loss
    values = {name: rounded(value) for name, value in {**epoch, "surrogate_gap": gap}.items() if name in CURVES}
    return {"epoch": epoch["epoch"] + 1, **{name: value for name, value in values.items() if value is not None}}


def rounded(value: Any) -> float | None:
    """Five digits, as many as a chart can show; None for what is not a number."""
    found = number(value)
    return None if found is None else float(f"{found:.5g}")


def _methods(runs: Iterable[Run]) -> list[str]:
    present = {run.config.method for run in runs}
    return [method for method in METHODS if method in present]


def _by_method(methods: Sequence[str]) -> tuple[alt.Color, alt.StrokeDash]:
    """A colour and a dash for each, so that either distinguishes them."""
    kinds = [_kind(method) for method in methods]
    domain = [title_of(method) for method in methods]
    spare = iter(_MORE_COLOURS * len(methods))  # for methods of one kind in one chart
    colours = [next(spare) if kind in kinds[:place] else _COLOURS[kind] for place, kind in enumerate(kinds)]
    legend = alt.Legend(title=None, orient="top", symbolType="stroke", symbolSize=400, symbolOpacity=1, columns=2)
    return (
        alt.Color("method:N", scale=alt.Scale(domain=domain, range=colours), legend=legend),
        alt.StrokeDash(
            "method:N", scale=alt.Scale(domain=domain, range=[_DASHES[kind] for kind in kinds]), legend=legend
        ),
    )


def _kind(method: str) -> str:
    """The key of colour and dash: φ of the ascent, or whether the method perturbs."""
    found = METHODS[method]
    return found.phi if found.phi in _COLOURS else "sam" if found.perturbs else "plain"


def of(rows: Rows) -> alt.Chart:
    """A chart of these rows, to be made `whole` when it is drawn."""
    return alt.Chart(alt.NamedData(_name(rows)))


def whole(drawn: Any, rows: Rows, height: int = 240) -> Chart:
    """The chart with its data, as wide as its container."""
    return Chart(drawn.properties(width="container", height=height), {_name(rows): rows})


def _name(rows: Rows) -> str:
    """The same for the same contents, so that charts of one page share them."""
    return f"data-{hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]}"
