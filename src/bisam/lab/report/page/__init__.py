"""One HTML page that needs nothing but a browser: texts, tables and charts, without a request to anywhere.

A page is a list of sections, a section a list of blocks. What is written on it is escaped; charts come with the library
that draws them (Vega), so that it works offline.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any

import jinja2
import vl_convert

from bisam.lab.report.charts import Chart
from bisam.lab.tables.summary import Sheet


@dataclass
class Sentences:
    """Sentences, as a list."""

    lines: Sequence[str]
    kind: str = "plain"
    """ "plain", or "warning" for what is wrong."""
    title: str = ""


@dataclass
class Grid:
    """A table; `searchable` gives it a field to filter its rows."""

    sheet: Sheet
    searchable: bool = False


@dataclass
class Figure:
    title: str
    chart: Chart
    caption: str = ""


@dataclass
class Figures:
    """Several, side by side where there is room. They zoom together."""

    figures: Sequence[Figure]


@dataclass
class Choice:
    """One of several lists of blocks, by name: a select shows one at a time."""

    label: str
    options: Mapping[str, Sequence[Block]]


@dataclass
class Fold:
    """Blocks that are opened by a click."""

    title: str
    blocks: Sequence[Block]


Block = Sentences | Grid | Figure | Figures | Choice | Fold


@dataclass
class Section:
    title: str
    blocks: Sequence[Block]


@dataclass
class _Drawn:
    """The charts of a page by number, and their data, each once however many charts show it."""

    charts: list[dict[str, Any]] = field(default_factory=list)
    datasets: dict[str, Any] = field(default_factory=dict)

    def add(self, chart: Chart) -> int:
        spec = chart.to_dict()
        self.datasets |= spec.pop("datasets", {})
        self.charts.append(spec)
        return len(self.charts) - 1


def render(title: str, lead: str, sections: Sequence[Section]) -> str:
    """The page as HTML."""
    drawn = _Drawn()
    body = _template("body.html").render(sections=sections, kind=lambda block: type(block).__name__, draw=drawn.add)
    return _template("page.html").render(
        title=title,
        lead=lead,
        sections=sections,
        body=body,
        style=_file("page.css"),
        script=_file("page.js"),
        library=_library() if drawn.charts else "",
        data={"charts": drawn.charts, "datasets": drawn.datasets},
    )


@cache
def _library() -> str:
    return vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")


def _file(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


@cache
def _template(name: str) -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_file), autoescape=True, trim_blocks=True, lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )  # fmt: skip
    return environment.get_template(name)
