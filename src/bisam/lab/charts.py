"""Charts of runs, as Vega-Lite: what a page shows and what a figure file holds."""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import altair as alt
import torch

from bisam import objectives
from bisam.lab.cells import Run, number
from bisam.lab.methods import TITLES
from bisam.lab.summary import Comparison
from bisam.lab.sweep import Sweep

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
"""What is drawn over the epochs, by its name in the rows."""

MOST_POINTS = 40_000
"""Of all runs of a page together: more make it slow, and are finer than a screen."""

MOST_TOLD = 4_000
"""Points of a chart that can be told one by one: each is a shape of its own to a browser."""

_COLOURS = {"plain": "#7d8590", "sam": "#3b82f6", "log": "#e8590c", "tanh": "#0f9d6b"}
_DASHES = {"plain": [2, 3], "sam": [8, 3], "log": [1, 0], "tanh": [12, 2, 3, 2]}


def stride(runs: Iterable[Run]) -> int:
    """Every how many epochs a point is drawn, so that a page stays light.

    >>> stride([])
    1
    """
    return max(1, math.ceil(sum(len(run.record.metrics) for run in runs) / MOST_POINTS))


def points(runs: Sequence[Run], every: int = 1) -> Rows:
    """Rows of numbers by run and epoch; the first and the last epoch are always among them.

    `whole` marks the epochs that all runs of a method have: only there is a mean the mean of the same runs.
    """
    rows: Rows = []
    for run in runs:
        metrics = run.record.metrics
        for place, epoch in enumerate(metrics):
            if (place % every == 0 or place == len(metrics) - 1) and number(epoch["epoch"]) is not None:
                title = TITLES[run.config.method]
                rows.append({"run": f"{title}, seed {run.config.seed}", "method": title, **numbers(epoch)})
    present = Counter((row["method"], row["epoch"]) for row in rows)
    counts = Counter(TITLES[run.config.method] for run in runs if run.record.metrics)
    for row in rows:
        if present[row["method"], row["epoch"]] == counts[row["method"]]:
            row["whole"] = 1
    return rows


def curve(rows: Rows, name: str, methods: Sequence[str], *, interactive: bool = True) -> Chart:
    """One number over the epochs: each run as a thin line, the mean of each method as a thick one.

    Interactive, it tells the run and the number under the pointer, and zooms.
    """
    present = [row for row in rows if name in row]
    x = alt.X("epoch:Q", title="epoch", axis=alt.Axis(tickMinStep=1))
    y, mean = (alt.Y(f"{f}:Q", title=CURVES[name], scale=alt.Scale(zero=False)) for f in (name, f"mean({name})"))
    shown = {row["method"] for row in present}
    colour, dash = _by_method([method for method in methods if TITLES[method] in shown])
    base = of(rows).transform_filter(f"isValid(datum.{name})").encode(x=x)
    runs = base.mark_line(opacity=0.3, strokeWidth=1, clip=True).encode(y=y, color=colour, detail="run:N")
    means = (
        base.transform_filter("datum.whole")
        .mark_line(strokeWidth=2.5, clip=True)
        .encode(y=mean, color=colour, strokeDash=dash)
    )
    described = f"{CURVES[name]} over the epochs of {len({row['run'] for row in present})} runs"
    layers = (runs + means).properties(description=described)
    if not interactive:
        return whole(layers, rows)
    # of one run where there are few, of the mean where there are many
    told = ["run", "epoch", "method"] if len(present) <= MOST_TOLD else ["epoch", "method"]
    hover = alt.selection_point(
        name="hover", on="pointerover", clear="pointerout", nearest=True, empty=False, fields=told
    )
    # rows with nothing but what is told, and told whole: Vega loses names among single fields of the nearest point
    marks = (
        base.transform_aggregate(value=f"mean({name})", groupby=[*told])
        .mark_point(size=50, filled=True, clip=True, tooltip={"content": "data"})
        .encode(y="value:Q", color=colour, opacity=alt.condition(hover, alt.value(1), alt.value(0)))
    )
    zoom = alt.selection_interval(
        name="zoom", bind="scales", encodings=["x"], zoom="wheel![event.ctrlKey || event.metaKey]"
    )
    return whole(layers + marks.add_params(hover, zoom), rows)


def forest(comparisons: Sequence[Comparison]) -> Chart:
    """Differences with their intervals, and the paper's as hollow diamonds; what is right of 0 is better."""
    rows = [
        {
            "difference": f"{one.row}: {one.label}",
            "mean": one.found.mean,
            "low": one.found.low,
            "high": one.found.high,
            "paper": one.published,
            "verdict": "resolved" if one.found.resolved else "not resolved",
            "words": one.words,
        }
        for one in comparisons
    ]
    order = [str(row["difference"]) for row in rows]
    y = alt.Y("difference:N", sort=order, title=None, axis=alt.Axis(labelLimit=320, grid=False))
    colour = alt.Color(
        "verdict:N",
        scale=alt.Scale(domain=["resolved", "not resolved"], range=[_COLOURS["log"], _COLOURS["plain"]]),
        legend=alt.Legend(title=None, orient="top"),
    )
    told = alt.Tooltip("words:N", title="in words")
    base = of(rows).encode(y=y)
    once = of(rows).transform_aggregate(rows="count()")  # not of `base`, whose y would leave it no length
    zero = once.mark_rule(strokeDash=[3, 3], color=_COLOURS["plain"]).encode(x=alt.XDatum(0))
    x = alt.X("low:Q", title="points of test accuracy")
    intervals = base.mark_rule(strokeWidth=2.5).encode(x=x, x2="high:Q", color=colour, tooltip=told)
    means = base.mark_point(filled=True, size=90, opacity=1).encode(
        x=alt.X("mean:Q", title="points of test accuracy"), color=colour, tooltip=told
    )
    layers = zero + intervals + means
    if any(one.published is not None for one in comparisons):
        papers = base.transform_filter("datum.paper != null").mark_point(shape="diamond", size=70, filled=False)
        told = alt.Tooltip("paper:Q", title="paper's")
        layers += papers.encode(x="paper:Q", color=alt.value(_COLOURS["sam"]), tooltip=told)
    described = layers.properties(description="differences with 95 % intervals")
    return whole(described, rows, height=30 * len(rows) + 10)


def flips(runs: Sequence[Run], *, interactive: bool = True) -> Chart:
    """The paper's figure: how many samples of a batch the perturbation turns from right to wrong, along training."""
    return curve(points(runs, stride(runs)), "flips", _methods(runs), interactive=interactive)


def grid(sweep: Sweep) -> Chart:
    """Validation accuracy over the values of one number: each run as a point, the means as a line."""
    (name,) = sweep.fields
    own, chosen = sweep.own_point, sweep.chosen
    rows: Rows = [
        {
            name: point.values[0],
            "accuracy": accuracy,
            "seed": seed,
            "value": "chosen" if point is chosen else "the recipe's" if point is own else "of the grid",
        }
        for point in sweep.points
        for seed, accuracy in point.accuracies.items()
    ]
    positive = all(point.values[0] > 0 for point in sweep.points)
    x = alt.X(f"{name}:Q", scale=alt.Scale(type="log" if positive else "linear"), axis=alt.Axis(format="~g"))
    title = "validation accuracy, per cent"
    base = of(rows).encode(x=x)
    means = base.mark_line(color=_COLOURS["plain"]).encode(y=alt.Y("mean(accuracy):Q", title=title))
    runs = base.mark_point(filled=True, size=60, opacity=0.9).encode(
        y=alt.Y("accuracy:Q", title=title, scale=alt.Scale(zero=False)),
        color=alt.Color(
            "value:N",
            scale=alt.Scale(
                domain=["chosen", "the recipe's", "of the grid"],
                range=[_COLOURS["log"], _COLOURS["sam"], _COLOURS["plain"]],
            ),
            legend=alt.Legend(title=None, orient="top"),
        ),
        tooltip=[alt.Tooltip(f"{name}:Q"), alt.Tooltip("seed:O"), alt.Tooltip("accuracy:Q", format=".2f")],
    )
    return whole((means + runs).properties(description=f"validation accuracy over {name}"), rows)


def lower_bounds(alpha: float = 0.1) -> Chart:
    """The paper's figure: both φ against the step function of the 0-1 loss."""
    x = torch.linspace(-10, 10, 401, dtype=torch.float64)
    curves = {"φ = −log": objectives.log_phi(x), f"φ = tanh, α = {alpha:g}": objectives.tanh_phi(x, alpha)}
    rows = [
        {"x": round(at, 4), "value": value, "curve": name}
        for name, values in curves.items()
        for at, value in zip(x.tolist(), values.tolist(), strict=True)
    ]
    name = "0-1 loss"
    rows += [{"x": at, "value": value, "curve": name} for at, value in [(-10, 0), (0, 0), (0, 1), (10, 1)]]
    colour = alt.Color(
        "curve:N",
        scale=alt.Scale(domain=[name, *curves], range=[_COLOURS[key] for key in ("plain", "log", "tanh")]),
        legend=alt.Legend(title=None, orient="top"),
    )
    told = [alt.Tooltip("curve:N"), alt.Tooltip("x:Q", format=".3~g"), alt.Tooltip("value:Q", format=".4~g")]
    lines = (
        of(rows)
        .mark_line(clip=True, strokeWidth=2.5)
        .encode(
            x=alt.X("x:Q", title="margin of a wrong class, x = z_j − z_y"),
            y=alt.Y("value:Q", title="φ(x)", scale=alt.Scale(domain=[-3, 1.25])),
            color=colour,
            strokeDash=alt.StrokeDash(
                "curve:N",
                scale=alt.Scale(domain=[name, *curves], range=[_DASHES[key] for key in ("sam", "log", "tanh")]),
                legend=None,
            ),
            tooltip=told,
        )
    )
    return whole(lines.properties(description="two lower bounds of the 0-1 loss"), rows)


def numbers(epoch: Mapping[str, Any]) -> dict[str, Any]:
    """What a chart can show of a line of metrics: the epoch, counted from 1, and `CURVES` as far as they are known."""
    loss, perturbed = rounded(epoch.get("loss")), rounded(epoch.get("perturbed_loss"))
    values = {name: rounded(epoch.get(name)) for name in CURVES}
    values["surrogate_gap"] = None if loss is None or perturbed is None else rounded(perturbed - loss)
    return {"epoch": epoch["epoch"] + 1, **{name: value for name, value in values.items() if value is not None}}


def rounded(value: Any) -> float | None:
    """Five digits: what a chart can show; None of what no chart can."""
    known = number(value)
    return None if known is None else float(f"{known:.5g}")


def _methods(runs: Iterable[Run]) -> list[str]:
    present = {run.config.method for run in runs}
    return [method for method in TITLES if method in present]


def _by_method(methods: Sequence[str]) -> tuple[alt.Color, alt.StrokeDash]:
    """A colour and a dash for each, so that neither is needed to tell them apart."""
    kinds = [_kind(method) for method in methods]
    domain = [TITLES[method] for method in methods]
    legend = alt.Legend(title=None, orient="top", symbolType="stroke", symbolSize=400, symbolOpacity=1, columns=2)
    return (
        alt.Color("method:N", scale=alt.Scale(domain=domain, range=[_COLOURS[kind] for kind in kinds]), legend=legend),
        alt.StrokeDash(
            "method:N", scale=alt.Scale(domain=domain, range=[_DASHES[kind] for kind in kinds]), legend=legend
        ),
    )


def _kind(method: str) -> str:
    return next((kind for kind in ("log", "tanh") if method.endswith(kind)), "plain" if method == "sgd" else "sam")


def of(rows: Rows) -> alt.Chart:
    """A chart of these rows, to be made `whole` when it is drawn."""
    return alt.Chart(alt.NamedData(_name(rows)))


def whole(drawn: Any, rows: Rows, height: int = 240) -> Chart:
    """With its data, as wide as there is room."""
    return Chart(drawn.properties(width="container", height=height), {_name(rows): rows})


def _name(rows: Rows) -> str:
    """The same for the same contents, so that charts of one page share them."""
    return f"data-{hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]}"
