"""The forest plot: all differences between methods of one kind with their intervals, grouped by table."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import altair as alt

from bisam.lab.report.charts import Chart, of, whole
from bisam.lab.tables.cells import ResultTable
from bisam.lab.tables.curves import Rows
from bisam.lab.tables.effects import paper_difference
from bisam.lab.tables.statistics import NO_SCATTER, TOO_FEW, Difference, signed
from bisam.lab.tables.summary import MethodDifference
from bisam.lab.tables.verdicts import Verdict

PAPER = "the paper's"
KINDS = {
    "resolved, better": ("circle", "#0f9d6b", "#0f9d6b"),
    "resolved, worse": ("circle", "#c2255c", "#c2255c"),
    "not resolved": ("square", "#7d8590", "#7d8590"),
    f"no interval: {TOO_FEW}": ("circle", "#00000000", "#7d8590"),
    f"no interval: {NO_SCATTER}": ("square", "#00000000", "#7d8590"),
    PAPER: ("diamond", "#8957e5", "#8957e5"),
}
"""Shape, fill and outline of each kind of mark: no two differ in colour alone."""

LONGEST = 64
"""Letters of a table's title in the plot."""

BREAK = "¦"
"""Between the parts of a label; texts have it replaced."""

LINE, NARROW_LINE = 22, 19
"""Pixels of a line of the plot, and of one of its narrow form, in which a label is above its interval."""

LARGE, SMALL = 50, 26
"""Square pixels of a mark, and of one in lines lower than `NARROW_LINE`, where marks of two rows would touch."""

LETTERS = 54
"""Letters of a line of the narrow form, on a phone; a longer label has its numbers on a line of their own."""

ROOM, LEAST_LINE = 340, 13
"""Pixels that all lines share below the verdicts of a first screen, and of the lowest line that can be read."""

WIDEST_LEGEND = 4
"""Kinds of marks whose names fit into one line above the plot."""

LINEAR = 0.5
"""Points around 0 in which a symmetric log scale is about linear."""

TICKS = [sign * value for value in (1, 2, 5, 10, 20, 50) for sign in (-1, 1)]
"""Of a symmetric log scale, beside 0."""


def forest(verdict: Verdict, room: int | None = ROOM) -> Chart:
    """Right of 0 is better. An interval that leaves the plot ends with an arrow.

    Lines share `room` pixels, as far as they can be read; None gives each its full height.
    """
    printed = [_printed(table, one) for table, one in verdict.placed]
    limits = _limits([one.found for one in verdict.differences], [one for one in printed if one is not None])
    rows: Rows = []
    before = None
    for place, ((table, one), paper) in enumerate(zip(verdict.placed, printed, strict=True)):
        if table is not before:
            title = table.title if len(table.title) <= LONGEST else f"{table.title[: LONGEST - 1]}…"
            rows.append({"wide": _key(f"h{place}", title, ""), "line": f"h{place}", "text": title, "weight": "bold"})
        before = table
        rows += _marks(place, one, paper, limits)
    counts = [len({row[field] for row in rows}) for field in ("wide", "line")]
    line = LINE if room is None else max(LEAST_LINE, min(LINE, room // counts[0]))
    x = _horizontal(limits, [one.found.mean for one in verdict.differences], verdict.measure)
    wide, narrow = (
        _layers(rows, x, is_narrow=is_narrow, line=step) for is_narrow, step in ((False, line), (True, NARROW_LINE))
    )
    return whole(wide, rows, line * counts[0], narrow, NARROW_LINE * counts[1])


def _printed(table: ResultTable, one: MethodDifference) -> Difference | None:
    """The paper's difference, of tables that are the paper's."""
    return None if one.published is None else paper_difference(table.recipe, one.row, one.method, one.baseline)


def _marks(
    place: int, one: MethodDifference, paper: Difference | None, limits: tuple[float, float]
) -> list[dict[str, Any]]:
    found, label = one.found, f"{one.row}: {one.label}"
    numbers = f"{signed(found.mean)} ({found.interval})" if found.interval else signed(found.mean)
    wide = _key(f"m{place}", label, f"{numbers}, {found.n}")
    words = {"wide": wide, "line": f"m{place}", "description": f"{label}: {one.describe()}."}
    own_line = f"n{place}" if len(label) + len(numbers) > LETTERS else f"l{place}"
    rows: list[dict[str, Any]] = [{"wide": wide, "line": f"l{place}", "text": label}]
    rows.append({"wide": wide, "line": own_line, "right": numbers})
    rows.append({**words, "kind": _kind(found), **_shown(found, limits)})
    if paper is not None:
        printed = f"{label}: {signed(paper.mean)} in the paper" + (f", {paper.interval}" if paper.interval else "")
        rows.append({**words, "description": printed, "kind": PAPER, **_shown(paper, limits)})
    return rows


def _key(name: str, left: str, right: str) -> str:
    return BREAK.join([name, left.replace(BREAK, "|"), right])


def _kind(found: Difference) -> str:
    if found.low is None:
        return f"no interval: {found.why_no_interval}"
    return "not resolved" if not found.resolved else "resolved, better" if found.mean > 0 else "resolved, worse"


def _limits(ours: Sequence[Difference], papers: Sequence[Difference]) -> tuple[float, float]:
    """Of the horizontal axis: all means, and as much of the intervals as leaves the others readable.

    An interval may be many times wider than the rest: it is cut at twice the median reach, and beyond all means.
    """
    both = (*ours, *papers)
    reaches = [max(abs(one.low), abs(one.high)) for one in both if one.low is not None and one.high is not None]
    most = max([1.15 * max(abs(one.mean) for one in both), 2 * statistics.median(reaches or [0.0])])
    kept = [0.0, *(one.mean for one in both)]
    kept += [max(-most, min(most, end)) for one in both for end in (one.low, one.high) if end is not None]
    room = 0.06 * (max(kept) - min(kept) or 1.0)
    return min(kept) - room, max(kept) + room


def _horizontal(limits: tuple[float, float], means: Sequence[float], measure: str) -> dict[str, Any]:
    """Scale, title and axis: a symmetric log scale where the largest difference would leave the others no width."""
    scale: dict[str, Any] = {"domain": [*limits], "nice": False}
    ticks: dict[str, Any] = {"tickCount": 7}
    title, reach = f"points of {measure}", max(-limits[0], limits[1])
    if reach > max(10 * LINEAR, 20 * statistics.median(abs(mean) for mean in means)):
        scale |= {"type": "symlog", "constant": LINEAR}
        ticks = {"values": [0, *(tick for tick in TICKS if limits[0] < tick < limits[1])]}
        title += ", symmetric log scale"
    return {"scale": alt.Scale(**scale), "title": title, "axis": alt.Axis(labelOverlap="greedy", **ticks)}


def _shown(found: Difference, limits: tuple[float, float]) -> dict[str, Any]:
    row: dict[str, Any] = {"at": found.mean}
    if found.low is not None and found.high is not None:
        first, last = limits
        row |= {"low": max(found.low, first), "high": min(found.high, last)}
        row |= {"left": 1} if found.low < first else {}
        row |= {"right_end": 1} if found.high > last else {}
    return row


def _layers(rows: Rows, x: dict[str, Any], *, is_narrow: bool, line: int) -> alt.LayerChart:
    field = "line" if is_narrow else "wide"
    order = list(dict.fromkeys(row[field] for row in rows))
    base = of(rows)

    def y(shown: alt.Axis | None) -> alt.Y:
        return alt.Y(f"{field}:N", sort=order, scale=alt.Scale(domain=order), title=None, axis=shown)

    marks = base.transform_filter("isValid(datum.at)")
    own, theirs = (
        marks.transform_filter(f"(datum.kind === {PAPER!r}) === {is_paper}") for is_paper in ("false", "true")
    )
    once = of(rows).transform_aggregate(rows="count()")  # not of `base`, whose y would leave it no length
    layers: list[alt.Chart] = [once.mark_rule(strokeDash=[3, 3], color="#7d8590").encode(x=alt.XDatum(0, **x))]
    present = [kind for kind in KINDS if any(row.get("kind") == kind for row in rows)]
    apart = line // 6 if PAPER in present else 0  # above and below the middle: a pair is nearer than two rows are
    for part, offset in ((own, -apart), (theirs, apart)):
        columns = 2 if is_narrow else 3 if len(present) > WIDEST_LEGEND else len(present)
        layers += _one_kind(part, y(None), x, present, columns, offset, SMALL if line < NARROW_LINE else LARGE)
    layers += [_headings(base, y(None))]
    if is_narrow:
        layers += _labels(base, y(None))
    else:
        layers += [marks.mark_point(opacity=0).encode(x=alt.X("at:Q", **x), y=y(_side(part))) for part in (1, 2)]
    made = alt.layer(*layers).properties(description="differences with 95 % intervals")
    return made.resolve_axis(y="independent")


def _side(part: int) -> alt.Axis:
    """The axis with the names, or with the numbers, of the rows."""
    return alt.Axis(
        orient="left" if part == 1 else "right", labelLimit=0, grid=False, ticks=False, domain=False, labelPadding=8,
        labelExpr=f"indexof(datum.label, 'h') === 0 ? '' : split(datum.label, '{BREAK}')[{part}]",
    )  # fmt: skip


def _one_kind(
    part: alt.Chart, y: alt.Y, x: dict[str, Any], present: Sequence[str], columns: int, offset: int, size: int
) -> list[alt.Chart]:
    """Intervals, their arrows and their means, `offset` pixels below the middle of their line."""
    scales = [alt.Scale(domain=[*KINDS], range=[kind[place] for kind in KINDS.values()]) for place in range(3)]
    legend = alt.Legend(
        title=None, orient="top", columns=columns, labelLimit=0, symbolStrokeWidth=1.5, symbolOpacity=1,
        values=[*present],
    )  # fmt: skip
    stroke = alt.Stroke("kind:N", scale=scales[2], legend=legend)
    intervals = part.transform_filter("isValid(datum.low)").mark_rule(strokeWidth=2.5, yOffset=offset)
    drawn = [intervals.encode(x=alt.X("low:Q", **x), x2="high:Q", y=y, stroke=stroke)]
    for flag, end, shape in (("left", "low", "triangle-left"), ("right_end", "high", "triangle-right")):
        arrows = part.transform_filter(f"datum.{flag}").mark_point(shape=shape, size=50, strokeWidth=3, yOffset=offset)
        drawn.append(arrows.encode(x=alt.X(f"{end}:Q", **x), y=y, stroke=stroke))
    points = part.mark_point(size=size, opacity=1, strokeWidth=1.5, yOffset=offset)
    drawn.append(
        points.encode(
            x=alt.X("at:Q", **x),
            y=y,
            stroke=stroke,
            fill=alt.Fill("kind:N", scale=scales[1], legend=legend),
            shape=alt.Shape("kind:N", scale=scales[0], legend=legend),
            tooltip=alt.Tooltip("description:N", title="in words"),
        )
    )
    return drawn


def _headings(base: alt.Chart, y: alt.Y) -> alt.Chart:
    bold = base.transform_filter("datum.weight === 'bold'")
    return bold.mark_text(align="left", fontWeight="bold", fontSize=11, dx=4, limit=alt.expr("width - 8")).encode(
        x=alt.value(0), y=y, text="text:N"
    )


def _labels(base: alt.Chart, y: alt.Y) -> list[alt.Chart]:
    """Names and numbers above the intervals, from edge to edge."""
    names = base.transform_filter("isValid(datum.text) && datum.weight !== 'bold'")
    numbers = base.transform_filter("isValid(datum.right)")
    return [
        names.mark_text(align="left", fontSize=11, dx=4, limit=alt.expr("width - 8")).encode(
            x=alt.value(0), y=y, text="text:N"
        ),
        numbers.mark_text(align="right", fontSize=11, dx=-4).encode(x=alt.value("width"), y=y, text="right:N"),
    ]
