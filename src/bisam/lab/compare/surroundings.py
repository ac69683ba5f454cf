"""Charts of the loss around the weights: worst cases, a line and planes."""

from __future__ import annotations

import math
from typing import Any

import altair as alt

from bisam.diagnostics import Surface
from bisam.lab.compare.comparison import RunComparison
from bisam.lab.report.charts import Chart, Style, by_style, of, styles, whole
from bisam.lab.tables.curves import Rows, rounded


def looks(comparison: RunComparison) -> list[Style]:
    """Colours and dashes of the two sides: those that their methods have in a report."""
    methods = [str(side.record.config.get("method")) for side in comparison.sides]
    return styles(methods, [side.name for side in comparison.sides])


def along(comparison: RunComparison, name: str) -> Chart:
    """Loss or error on the line through the weights: the mean of each side, and each run of a group as a thin line."""
    rows: Rows = []
    for side in comparison.sides:
        for one in side.members:
            line = one.inspection.line if one.inspection is not None else None
            values: Any = [] if line is None else (line.losses if name == "loss" else line.errors or [])
            for distance, value in zip(line.coordinates if line else [], values, strict=False):
                row = {"side": side.name, "run": one.name, "distance": round(distance, 4)}
                rows.append({**row, **finite({"value": value})})
    colour, dash = by_style(looks(comparison), "side:N", columns=1)
    x = alt.X("distance:Q", title="distance from w", axis=alt.Axis(tickCount=4))
    base = of(rows).transform_filter("isValid(datum.value)").encode(x=x)
    y: dict[str, Any] = {"title": name}
    means = base.mark_line(strokeWidth=2.5, clip=True).encode(
        y=alt.Y("mean(value):Q", **y), color=colour, strokeDash=dash
    )
    tooltip = [alt.Tooltip("run:N"), alt.Tooltip("distance:Q"), alt.Tooltip("value:Q", title=name, format=".4~g")]
    points = base.mark_point(size=30, filled=True, opacity=0, aria=False).encode(
        y=alt.Y("value:Q", **y), color=colour, tooltip=tooltip
    )
    layers = [means, points]
    if any(side.others for side in comparison.sides):
        thin = base.mark_line(strokeWidth=1, opacity=0.4, clip=True)
        layers.insert(0, thin.encode(y=alt.Y("value:Q", **y), color=colour, detail="run:N"))
    return whole(alt.layer(*layers).properties(description=f"{name} along a random direction"), rows)


def worst_cases(comparison: RunComparison) -> Chart:
    """The rise of the loss in each ball: a bar for the mean of a side, a line from its lowest to its highest run."""
    rows: Rows = [
        {"side": side.name, "run": one.name, "case": case.name, "rise": case.found.value}
        for side in comparison.sides
        for one in side.members
        for case in (one.inspection.worst if one.inspection is not None else [])
        if math.isfinite(case.found.value)
    ]
    cases = list(dict.fromkeys(row["case"] for row in rows))
    found = looks(comparison)
    titles = [look.title for look in found]
    legend = alt.Legend(title=None, orient="top", labelLimit=0)
    colour = alt.Color("side:N", scale=alt.Scale(domain=titles, range=[look.colour for look in found]), legend=legend)
    base = of(rows).encode(
        y=alt.Y("case:N", sort=cases, title=None, axis=alt.Axis(labelLimit=0)),
        yOffset=alt.YOffset("side:N", sort=titles),
    )
    x: dict[str, Any] = {"title": "L(w + ε) − L(w)", "axis": alt.Axis(tickCount=6, labelOverlap="greedy")}
    bars = base.mark_bar().encode(
        x=alt.X("mean(rise):Q", **x),
        color=colour,
        tooltip=["side:N", "case:N", alt.Tooltip("mean(rise):Q", title="rise", format=".4~g")],
    )
    layers: list[Any] = [bars]
    if any(side.others for side in comparison.sides):
        layers.append(
            base.mark_rule(strokeWidth=1.5, color="currentColor").encode(x=alt.X("min(rise):Q", **x), x2="max(rise):Q")
        )
    room = {"left": 5, "top": 5, "right": 12, "bottom": 5}  # half of the last label may stand beyond the axis
    made = alt.layer(*layers).properties(description="how far the loss rises", padding=room)
    return whole(made, rows, height=34 * len(cases) + 10)


def plane(rows: Rows, scale: list[float]) -> Chart:
    ends = {row["a"] for row in rows}
    axis = alt.Axis(values=sorted({min(ends), *({0.0} & ends), max(ends)}), labelAngle=0, format="~g")
    drawn = (
        of(rows)
        .mark_rect()
        .encode(
            x=alt.X("a:O", title="along the first direction", axis=axis),
            y=alt.Y("b:O", title="along the second", sort="descending", axis=axis),
            color=alt.Color(
                "log:Q",
                title="log₁₀ of the loss",
                scale=alt.Scale(domain=scale, scheme="viridis"),
                legend=alt.Legend(orient="top", gradientLength=160),
            ),
            tooltip=["a:Q", "b:Q", alt.Tooltip("loss:Q", format=".4~g"), alt.Tooltip("error:Q", format=".2%")],
        )
    )
    return whole(drawn, rows, height=280)


def plane_rows(found: Surface) -> Rows:
    rows: Rows = []
    for i, a in enumerate(found.coordinates):
        for j, b in enumerate(found.coordinates):
            loss: Any = found.losses[i][j]  # type: ignore[index]
            error: Any = found.errors[i][j] if found.errors else None  # type: ignore[index]
            log = math.log10(loss) if math.isfinite(loss) and loss > 0 else None
            rows.append({"a": round(a, 4), "b": round(b, 4), **finite({"loss": loss, "error": error, "log": log})})
    return rows


def finite(values: dict[str, Any]) -> dict[str, float]:
    made = {name: rounded(value) for name, value in values.items()}
    return {name: value for name, value in made.items() if value is not None}
