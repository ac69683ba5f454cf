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

from bisam.lab.report.charts import Chart, Style, compiled
from bisam.lab.report.curves import AXES, LOSSES, curve
from bisam.lab.report.page.blocks import (
    Block,
    Cards,
    Choice,
    Curves,
    Figure,
    Figures,
    Fold,
    Grid,
    Runs,
    Section,
    Sentences,
)  # fmt: skip
from bisam.lab.report.page.series import Series
from bisam.lab.tables.curves import CURVES
from bisam.lab.tables.exports import csv_text, latex
from bisam.lab.tables.summary import Sheet

__all__ = [
    "Block", "Cards", "Choice", "Curves", "Figure", "Figures", "Fold", "Grid", "Runs", "Section", "Sentences", "Series",
    "render",
]  # fmt: skip

SCRIPTS = ("data", "theme", "draw", "zoom", "curves", "tables", "drawer", "start")
"""Files of the page's script, in the order in which they run."""


@dataclass
class _Contents:
    """What the script of a page reads, each once however often the page shows it."""

    charts: list[dict[str, Any]] = field(default_factory=list)
    datasets: dict[str, Any] = field(default_factory=dict)
    series: list[dict[str, Any]] = field(default_factory=list)
    exports: list[dict[str, str]] = field(default_factory=list)
    runs: dict[str, Any] = field(default_factory=dict)
    _drawn: dict[int, int] = field(default_factory=dict)

    def draw(self, chart: Chart) -> int:
        """The number of a chart."""
        made = {"wide": compiled(chart.drawn)}
        if chart.narrow is not None:
            made["narrow"] = compiled(chart.narrow)
        self.datasets |= dict(chart.data)
        self.charts.append(made)
        return len(self.charts) - 1

    def plot(self, series: Series) -> int:
        """The number of the data of some curves."""
        if id(series) not in self._drawn:
            self._drawn[id(series)] = len(self.series)
            self.series.append(series.to_dict())
        return self._drawn[id(series)]

    def export(self, sheet: Sheet) -> int:
        """The number of a table that can be copied."""
        self.exports.append({"LaTeX": latex(sheet), "Markdown": sheet.markdown(), "CSV": csv_text(sheet)})
        return len(self.exports) - 1

    def keep(self, runs: Sequence[Mapping[str, Any]]) -> str:
        """The contents of the drawers."""
        kept = ("result", "receipt", "config", "changed", "command")
        self.runs |= {run["id"]: {**{n: run[n] for n in kept}, "series": self.plot(run["series"])} for run in runs}
        return ""

    def to_dict(self) -> dict[str, Any]:
        made = {"charts": self.charts, "datasets": self.datasets, "exports": self.exports}
        if self.series:
            template = _curve()
            made |= {"series": self.series, "curve": template, "titles": CURVES, "axes": AXES, "logarithmic": LOSSES}
        return {**made, "runs": self.runs} if self.runs else made


def render(title: str, lead: str, sections: Sequence[Section]) -> str:
    """The page as HTML."""
    contents = _Contents()
    body = _template("body.html").render(
        sections=sections, kind=lambda block: type(block).__name__, contents=contents, titles=CURVES, axes=AXES
    )
    data = contents.to_dict()
    return _template("page.html").render(
        title=title,
        lead=lead,
        sections=sections,
        body=body,
        style=_file("page.css"),
        script="\n".join(_file(f"{name}.js") for name in SCRIPTS),
        library=_library() if contents.charts or contents.series else "",
        data=data,
    )


@cache
def _curve() -> dict[str, Any]:
    """The curve that the script fills with the data, colours and titles of any other."""
    return compiled(curve("", [Style("", "", [1, 0])]).properties(width="container", height=220))


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
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    return environment.get_template(name)
