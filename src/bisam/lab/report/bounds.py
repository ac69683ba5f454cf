"""The paper's figure of the bounds of the 0-1 loss."""

from __future__ import annotations

import math

import altair as alt
import torch

from bisam import objectives
from bisam.lab.report.charts import COLOURS, DASHES, Chart, Style, by_style, of, whole
from bisam.lab.tables.curves import Rows


def lower_bounds(alpha: float = 0.1) -> Chart:
    """Both φ below the step function of the 0-1 loss, and cross entropy of two classes above it."""
    x = torch.linspace(-10, 10, 401, dtype=torch.float64)
    curves = {
        "φ = −log": objectives.log_phi(x),
        f"φ = tanh, α = {alpha:g}": objectives.tanh_phi(x, alpha),
        "cross entropy/log 2": torch.nn.functional.softplus(x) / math.log(2),
    }
    rows: Rows = [
        {"x": round(at, 4), "value": value, "curve": name}
        for name, values in curves.items()
        for at, value in zip(x.tolist(), values.tolist(), strict=True)
    ]
    name = "0-1 loss"
    rows += [{"x": at, "value": value, "curve": name} for at, value in [(-10, 0), (0, 0), (0, 1), (10, 1)]]
    kinds = [("plain", "sam"), ("log", "log"), ("tanh", "tanh"), ("sam", "plain")]
    looks = [
        Style(title, COLOURS[kind], DASHES[dash]) for title, (kind, dash) in zip([name, *curves], kinds, strict=True)
    ]
    colour, dash = by_style(looks, "curve:N", columns=4)
    tooltip = [alt.Tooltip("curve:N"), alt.Tooltip("x:Q", format=".3~g"), alt.Tooltip("value:Q", format=".4~g")]
    lines = (
        of(rows)
        .mark_line(clip=True, strokeWidth=2.5)
        .encode(
            x=alt.X("x:Q", title="margin of a wrong class, x = z_j − z_y", axis=alt.Axis(tickCount=10)),
            y=alt.Y("value:Q", title="value", scale=alt.Scale(domain=[-3, 3]), axis=alt.Axis(tickCount=8)),
            color=colour,
            strokeDash=dash,
            tooltip=tooltip,
        )
    )
    return whole(lines.properties(description="two lower bounds and an upper bound of the 0-1 loss"), rows)
