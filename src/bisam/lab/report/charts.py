"""Charts as Vega-Lite with their data, and the colours and dashes of methods that all of them share."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import altair as alt
import vl_convert

from bisam.lab.methods import METHODS, title_of
from bisam.lab.tables.curves import Rows

COLOURS = {"plain": "#7d8590", "sam": "#3b82f6", "log": "#e8590c", "tanh": "#0f9d6b"}
"""Colours by the kind of a method. Each has a contrast of 3 or more with both papers of the page."""

MORE_COLOURS = ["#b8860b", "#c2255c", "#8957e5", "#2b8a3e", "#0b7285"]
"""For further methods of one kind in one chart."""

DASHES = {"plain": [2, 3], "sam": [8, 3], "log": [1, 0], "tanh": [12, 2, 3, 2]}
NEUTRAL = "#8957e5"
"""Colour of marks that belong to no method."""

APART = 6
"""Pixels between the numbers along an axis, at least."""

WIDE_LETTERS = 1.23
"""The width of DejaVu's bold letters, the widest usual ones, relative to those that SVG is laid out with."""


@dataclass(frozen=True)
class Chart:
    """A chart and its data, apart from each other: Altair checks each number that passes it, for minutes if many do."""

    drawn: alt.Chart | alt.LayerChart
    data: Mapping[str, Rows]
    narrow: alt.Chart | alt.LayerChart | None = None
    """The same chart for a container that is too narrow for it."""

    def to_dict(self) -> dict[str, Any]:
        return {**self.drawn.to_dict(validate=False), "datasets": dict(self.data)}


@dataclass(frozen=True)
class Style:
    """How the marks of a method, or of a group of runs, look: either colour or dash distinguishes them."""

    title: str
    colour: str
    dash: list[int]


def styles(methods: Sequence[str], titles: Sequence[str] = ()) -> list[Style]:
    """A style for each method; the second of a kind has another colour and the next dash.

    >>> [style.colour for style in styles(["sam", "sam"], ["a", "b"])]
    ['#3b82f6', '#b8860b']
    """
    kinds = [_kind(method) for method in methods]
    names = titles or [title_of(method) for method in methods]
    spare, dashes = cycle(MORE_COLOURS), [*DASHES.values()]
    made: list[Style] = []
    for place, (kind, name) in enumerate(zip(kinds, names, strict=True)):
        if kind not in kinds[:place]:
            made.append(Style(name, COLOURS[kind], DASHES[kind]))
            continue
        colour = next(spare)
        of_colour = [style.dash for style in made if style.colour == colour]
        unused = [dash for dash in dashes if dash not in [style.dash for style in made]]
        free = [*unused, DASHES[kind], *dashes]
        made.append(Style(name, colour, next((dash for dash in free if dash not in of_colour), DASHES[kind])))
    return made


def styles_in(methods: Sequence[str], titles: Container[str]) -> list[Style]:
    """Of the methods of a table, those with these titles: a method looks the same in all charts of the table.

    >>> [style.colour for style in styles_in(["sam", "msam"], ["MSAM"])] == [COLOURS["sam"]]
    False
    """
    return [style for style in styles(methods) if style.title in titles]


def by_style(found: Sequence[Style], field: str = "method:N", **legend: Any) -> tuple[alt.Color, alt.StrokeDash]:
    """Encodings of colour and dash, with one legend for both."""
    titles = [style.title for style in found]
    options = {"title": None, "orient": "top", "columns": 2, "labelLimit": 360, **legend}
    shown = alt.Legend(symbolType="stroke", symbolSize=400, symbolOpacity=1, **options)
    return (
        alt.Color(field, scale=alt.Scale(domain=titles, range=[style.colour for style in found]), legend=shown),
        alt.StrokeDash(field, scale=alt.Scale(domain=titles, range=[style.dash for style in found]), legend=shown),
    )


def compiled(drawn: alt.Chart | alt.LayerChart) -> dict[str, Any]:
    """The chart as Vega: a browser draws it faster than Vega-Lite, and without messages in its console."""
    return vl_convert.vegalite_to_vega(drawn.to_dict(validate=False))  # its parts were when they were made


def svg(spec: Mapping[str, Any]) -> bytes:
    """A Vega-Lite chart as SVG, with room for the letters of other systems, which a browser does not measure again.

    The layout is that of larger letters, which are then written in the usual size.
    """
    usual = {"axis": {"labelFontSize": 10, "titleFontSize": 11}, "legend": {"labelFontSize": 10, "titleFontSize": 11}}
    sizes = {part: {name: WIDE_LETTERS * size for name, size in of.items()} for part, of in usual.items()}
    config = dict(spec.get("config", {}))
    for part, larger in sizes.items():
        config[part] = {**config.get(part, {}), **larger}
    drawn = vl_convert.vegalite_to_svg({**spec, "config": config})
    for size in (10, 11):
        drawn = drawn.replace(f'font-size="{WIDE_LETTERS * size:g}px"', f'font-size="{size}px"')
    return drawn.encode()


def of(rows: Rows) -> alt.Chart:
    """A chart of these rows, to be made `whole` when it is drawn."""
    return alt.Chart(alt.NamedData(_name(rows)))


def whole(drawn: Any, rows: Rows, height: int = 240, narrow: Any = None, narrow_height: int = 0) -> Chart:
    """The chart with its data, as wide as its container."""
    small = None if narrow is None else narrow.properties(width="container", height=narrow_height or height)
    return Chart(drawn.properties(width="container", height=height), {_name(rows): rows}, small)


def for_notebook(chart: Chart) -> alt.Chart | alt.LayerChart:
    """The chart with its data in it, as a notebook draws it by itself."""
    return type(chart.drawn).from_dict({**chart.to_dict(), "width": 480})


def _kind(method: str) -> str:
    """The key of colour and dash: φ of the ascent, or whether the method perturbs."""
    if method not in METHODS:
        return "plain"
    found = METHODS[method]
    return found.phi if found.phi in COLOURS else "sam" if found.perturbs else "plain"


def _name(rows: Rows) -> str:
    """The same for the same contents, so that charts of one page share them."""
    return f"data-{hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]}"
