"""Charts as files: the ending of the name decides the format."""

from __future__ import annotations

from pathlib import Path

import vl_convert

from bisam.lab.files import write_atomically
from bisam.lab.report import page
from bisam.lab.report.charts import Chart, svg

FORMS = ("svg", "png", "html")
WIDTH = 640


def save(chart: Chart | page.Curves, path: Path, title: str = "bisam", *, follow_links: bool = True) -> None:
    """SVG, PNG, or a page that answers the pointer (HTML), by the name's ending. For links see `write_atomically`.

    Curves are for a page: there they zoom.
    """
    form = path.suffix.lower().lstrip(".")
    if form not in FORMS:
        raise ValueError(f"a figure is written as {', '.join(FORMS)}, got the name {path.name!r}")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, _contents(chart, form, title), follow_links=follow_links)


def _contents(chart: Chart | page.Curves, form: str, title: str) -> bytes:
    if isinstance(chart, page.Curves) or form == "html":
        block = chart if isinstance(chart, page.Curves) else page.Figure(title, chart)
        return page.render(title, "", [page.Section("", [block], is_alone=True)]).encode()
    spec = {**chart.to_dict(), "width": WIDTH, "background": "white", "title": title}
    if form == "svg":
        return svg(spec)
    return vl_convert.vegalite_to_png(spec, scale=2)
