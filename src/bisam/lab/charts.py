"""Charts of runs, as Vega-Lite: what a page shows and what a figure file holds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import altair as alt
import torch

from bisam import objectives
from bisam.lab.cells import Run
from bisam.lab.methods import TITLES
from bisam.lab.summary import Comparison

Rows = list[dict[str, Any]]
Chart = alt.Chart | alt.LayerChart | alt.HConcatChart | alt.FacetChart

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

_COLOURS = {"plain": "#7d8590", "sam": "#3b82f6", "log": "#e8590c", "tanh": "#0f9d6b"}
_DASHES = {"plain": [2, 3], "sam": [8, 3], "log": [1, 0], "tanh": [12, 2, 3, 2]}


def stride(runs: Iterable[Run]) -> int:
    """Every how many epochs a point is drawn, so that a page stays light.

    >>> stride([])
    1
    """
    return max(1, math.ceil(sum(len(run.record.metrics) for run in runs) / MOST_POINTS))


def points(runs: Iterable[Run], every: int = 1) -> Rows:
    """Rows of numbers by run and epoch; the first and the last epoch are always among them."""
    rows = []
    for run in runs:
        metrics = run.record.metrics
        for number, epoch in enumerate(metrics):
            if number % every == 0 or number == len(metrics) - 1:
                rows.append(_point(run, epoch))
    return rows


def curve(rows: Rows, name: str, methods: Sequence[str], *, interactive: bool = True) -> alt.LayerChart:
    """One number over the epochs: each run as a thin line, the mean of each method as a thick one.

    Interactive, it tells the run and the number under the pointer, and zooms.
    """
    present = [row for row in rows if row.get(name) is not None]
    x = alt.X("epoch:Q", title="epoch", axis=alt.Axis(tickMinStep=1))
    y, mean = (alt.Y(f"{f}:Q", title=CURVES[name], scale=alt.Scale(zero=False)) for f in (name, f"mean({name})"))
    colour, dash = _by_method(methods)
    base = _chart(present).encode(x=x)
    runs = base.mark_line(opacity=0.3, strokeWidth=1, clip=True).encode(y=y, color=colour, detail="run:N")
    means = base.mark_line(strokeWidth=2.5, clip=True).encode(y=mean, color=colour, strokeDash=dash)
    described = f"{CURVES[name]} over the epochs of {len({row['run'] for row in present})} runs"
    layers = (runs + means).properties(description=described)
    if not interactive:
        return _sized(layers)
    hover = alt.selection_point(name="hover", on="pointerover", clear="pointerout", nearest=True, empty=False)
    told = [
        alt.Tooltip("run:N", title="run"),
        alt.Tooltip("epoch:Q", title="epoch"),
        alt.Tooltip(f"{name}:Q", title=CURVES[name], format=".5~g"),
    ]
    marks = base.mark_point(size=50, filled=True, clip=True).encode(
        y=y, color=colour, opacity=alt.condition(hover, alt.value(1), alt.value(0)), tooltip=told
    )
    zoom = alt.selection_interval(
        name="zoom", bind="scales", encodings=["x"], zoom="wheel![event.ctrlKey || event.metaKey]"
    )
    return _sized(layers + marks.add_params(hover, zoom))


def forest(comparisons: Sequence[Comparison]) -> alt.LayerChart:
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
    base = _chart(rows).encode(y=y)
    zero = _chart([{"zero": 0}]).mark_rule(strokeDash=[3, 3], color=_COLOURS["plain"]).encode(x="zero:Q")
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
    return _sized(described, height=30 * len(rows) + 10)


def flips(runs: Sequence[Run], *, interactive: bool = True) -> alt.LayerChart:
    """The paper's figure: how many samples of a batch the perturbation turns from right to wrong, along training."""
    return curve(points(runs, stride(runs)), "flips", _methods(runs), interactive=interactive)


def lower_bounds(alpha: float = 0.1) -> alt.LayerChart:
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
        _chart(rows)
        .mark_line(clip=True, strokeWidth=2.5)
        .encode(
            x=alt.X("x:Q", title="margin of a wrong class, x = z_j − z_y"),
            y=alt.Y("value:Q", title=None, scale=alt.Scale(domain=[-3, 1.25])),
            color=colour,
            strokeDash=alt.StrokeDash(
                "curve:N",
                scale=alt.Scale(domain=[name, *curves], range=[_DASHES[key] for key in ("sam", "log", "tanh")]),
                legend=None,
            ),
            tooltip=told,
        )
    )
    return _sized(alt.layer(lines).properties(description="two lower bounds of the 0-1 loss"))


def _point(run: Run, epoch: dict[str, Any]) -> dict[str, Any]:
    loss, perturbed = _rounded(epoch.get("loss")), _rounded(epoch.get("perturbed_loss"))
    values = {name: _rounded(epoch.get(name)) for name in CURVES}
    values["surrogate_gap"] = None if loss is None or perturbed is None else _rounded(perturbed - loss)
    title = TITLES[run.config.method]
    point = {"run": f"{title}, seed {run.config.seed}", "method": title, "epoch": epoch["epoch"] + 1, **values}
    return {name: value for name, value in point.items() if value is not None}


def _rounded(value: Any) -> float | None:
    """Five digits: what a chart can show; None of what no chart can."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(f"{value:.5g}")


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


def _chart(rows: Rows) -> alt.Chart:
    return alt.Chart(alt.InlineData(values=rows))


def _sized(chart: Any, height: int = 240) -> Any:
    return chart.properties(width="container", height=height)
