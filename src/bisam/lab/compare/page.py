"""A comparison of two runs as a page: curves, worst cases, the loss around both minima, and all tables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import altair as alt

from bisam.diagnostics import Surface
from bisam.lab.compare import tables as comparison_tables
from bisam.lab.compare.comparison import RunComparison, Side
from bisam.lab.compare.inspection import Inspection
from bisam.lab.report import charts, page
from bisam.lab.report.charts import Chart, Rows
from bisam.lab.report.page import Block, Figure, Figures, Grid, Section, Sentences

_AS_LINES = {"symbolType": "stroke", "symbolSize": 400}
COLOURS = ["#3b82f6", "#e8590c"]
"""Colours of the first and the second run."""


def write(comparison: RunComparison) -> str:
    """The page, as HTML."""
    a, b = comparison.sides
    of_records, of_weights = (
        [Grid(sheet) for sheet in sheets(comparison)]
        for sheets in (comparison_tables.sheets_of_records, comparison_tables.sheets_of_weights)
    )
    sections = [
        Section("Notes", [Sentences(comparison.notes, "warning")] if comparison.notes else []),
        Section("Configuration and results", of_records),
        Section("Curves", _curves(comparison)),
        Section("Around the minima", _surroundings(comparison)),
        Section("Sharpness in numbers", of_weights),
    ]
    lead = f"{a.name} is {a.record.folder}, {b.name} is {b.record.folder}."
    return page.render(f"{a.name} and {b.name}", lead, [section for section in sections if section.blocks])


def _curves(comparison: RunComparison) -> list[Block]:
    rows = [
        {"run": side.name, **charts.numbers(epoch)}
        for side in comparison.sides
        for epoch in side.record.metrics
        if epoch["epoch"] < charts.LARGEST_EPOCH
    ]  # fmt: skip
    names = [name for name in charts.CURVES if any(name in row for row in rows)]
    return [Figures([Figure(charts.CURVES[name], _lines(comparison, rows, name)) for name in names])] if names else []


def _surroundings(comparison: RunComparison) -> list[Block]:
    looked = [(side, side.inspection) for side in comparison.sides if side.inspection is not None]
    if not looked:
        return []
    plan = looked[0][1].plan
    blocks: list[Block] = [
        Figure(
            f"How far the loss rises within ρ = {plan.rho:g}",
            _worst_cases(comparison, looked),
            "What the perturbation maximises, in which ball, in how many steps. Radii of the two balls do not compare.",
        ),
        Figures(
            [
                Figure(f"{words} along one random direction", _along(comparison, looked, name), _CAPTION)
                for name, words in (("loss", "Loss"), ("error", "0-1 error"))
                if any(name in row for row in _line_rows(looked))
            ]
        ),
    ]
    planes = [(side, _plane_rows(found.plane)) for side, found in looked]
    logs = [row["log"] for _, rows in planes for row in rows if "log" in row]
    if logs:
        scale = [min(logs), max(logs)]
        drawn = [Figure(f"{side.name}: loss on a plane", _plane(rows, scale), _CAPTION) for side, rows in planes]
        blocks.append(Figures(drawn))
    return blocks


_CAPTION = "Filter-normalised: 1 is as far as a filter is long. The same directions for both."


def _lines(comparison: RunComparison, rows: Rows, name: str) -> Chart:
    y = alt.Y(f"{name}:Q", title=charts.CURVES[name], scale=alt.Scale(zero=False))
    return _drawn(comparison, rows, "epoch", name, alt.X("epoch:Q", title="epoch", axis=alt.Axis(tickMinStep=1)), y)


def _along(comparison: RunComparison, looked: Sequence[tuple[Side, Inspection]], name: str) -> Chart:
    rows = _line_rows(looked)
    x = alt.X("distance:Q", title="distance from w")
    return _drawn(comparison, rows, "distance", name, x, alt.Y(f"{name}:Q", title=name))


def _drawn(comparison: RunComparison, rows: Rows, along: str, name: str, x: alt.X, y: alt.Y) -> Chart:
    tooltip = [alt.Tooltip("run:N"), alt.Tooltip(f"{along}:Q"), alt.Tooltip(f"{name}:Q", format=".4~g")]
    colour = _by_run(comparison, **_AS_LINES)
    base = charts.of(rows).transform_filter(f"isValid(datum.{name})").encode(x=x, y=y, color=colour)
    single = len(rows) == len({row["run"] for row in rows})  # of one point no line can be drawn
    points = base.mark_point(size=30, filled=True, opacity=float(single), aria=False).encode(tooltip=tooltip)
    lines = base.mark_line(strokeWidth=2, clip=True).encode(strokeDash=_dashed(comparison, **_AS_LINES))
    return charts.whole(lines + points, rows)


def _worst_cases(comparison: RunComparison, looked: Sequence[tuple[Side, Inspection]]) -> Chart:
    rows: Rows = [
        {"run": side.name, "case": case.name, "rise": case.found.value}
        for side, found in looked
        for case in found.worst
        if math.isfinite(case.found.value)
    ]
    cases = list(dict.fromkeys(row["case"] for row in rows))
    bars = charts.of(rows).mark_bar()
    encoded = bars.encode(
        x=alt.X("rise:Q", title="L(w + ε) − L(w)"),
        y=alt.Y("case:N", sort=cases, title=None, axis=alt.Axis(labelLimit=300)),
        yOffset=alt.YOffset("run:N", sort=[side.name for side in comparison.sides]),
        color=_by_run(comparison),
        tooltip=["run:N", "case:N", alt.Tooltip("rise:Q", format=".4~g")],
    )
    return charts.whole(encoded, rows, height=34 * len(cases) + 10)


def _plane(rows: Rows, scale: list[float]) -> Chart:
    axis = alt.Axis(labelOverlap=True, format=".1f")
    drawn = (
        charts.of(rows)
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
    return charts.whole(drawn, rows, height=280)


def _line_rows(looked: Sequence[tuple[Side, Inspection]]) -> Rows:
    rows: Rows = []
    for side, found in looked:
        line = found.line
        for place, distance in enumerate(line.coordinates):
            values = {"loss": line.losses[place], "error": line.errors[place] if line.errors else None}
            rows.append({"run": side.name, "distance": round(distance, 4), **_finite(values)})
    return rows


def _plane_rows(plane: Surface) -> Rows:
    rows: Rows = []
    for i, a in enumerate(plane.coordinates):
        for j, b in enumerate(plane.coordinates):
            loss: Any = plane.losses[i][j]  # type: ignore[index]
            error: Any = plane.errors[i][j] if plane.errors else None  # type: ignore[index]
            log = math.log10(loss) if math.isfinite(loss) and loss > 0 else None
            rows.append({"a": round(a, 4), "b": round(b, 4), **_finite({"loss": loss, "error": error, "log": log})})
    return rows


def _finite(values: dict[str, Any]) -> dict[str, float]:
    return {name: charts.rounded(value) for name, value in values.items() if charts.rounded(value) is not None}  # type: ignore[misc]


def _by_run(comparison: RunComparison, **legend: Any) -> alt.Color:
    names = [side.name for side in comparison.sides]
    return alt.Color("run:N", scale=alt.Scale(domain=names, range=COLOURS), legend=_legend(**legend))


def _dashed(comparison: RunComparison, **legend: Any) -> alt.StrokeDash:
    """Dashes, so that a line does not hide another."""
    names = [side.name for side in comparison.sides]
    return alt.StrokeDash("run:N", scale=alt.Scale(domain=names, range=[[1, 0], [6, 4]]), legend=_legend(**legend))


def _legend(**options: Any) -> alt.Legend:
    return alt.Legend(title=None, orient="top", columns=1, labelLimit=360, symbolOpacity=1, **options)
