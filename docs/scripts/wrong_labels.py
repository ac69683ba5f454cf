"""The picture of README: test accuracy against the share of wrong training labels, from the ledger.

python docs/scripts/wrong_labels.py    # draws docs/images/wrong-labels.svg
"""

import statistics
from typing import Any

import altair as alt
import ledger

from bisam.lab.files import write_atomically
from bisam.lab.methods import title_of
from bisam.lab.recipes import FOUR_METHODS
from bisam.lab.report.charts import COLOURS, svg
from bisam.lab.tables.cells import Collection
from bisam.lab.tables.statistics import interval_of_mean

PICTURE = ledger.ROOT / "docs/images/wrong-labels.svg"
PANELS = {
    "Digits, small network, last weights": ("label_noise_digits", "demo"),
    "CIFAR-10, ResNet-32, best weights": ("label_noise",),
}
"""The tables that each panel is of, and which weights they test: the last, or the best on validation data."""
APART = 1.1
"""Between the marks of one rate, in per cent of wrong labels."""


def rows(found: Collection, tables: tuple[str, ...]) -> list[dict[str, Any]]:
    """A row for each rate and method with runs, and the 95 % interval of its mean if it has one."""
    made = []
    for table in (table for table in found.tables if table.name in tables):
        for place, method in enumerate(FOUR_METHODS):
            for row in table.rows:
                accuracies = [*table.measured(row, method).values()]
                if accuracies:
                    low, high = interval_of_mean(accuracies)
                    span = {} if low is None else {"low": max(low, 0.0), "high": min(high, 100.0)}
                    rate = float(row.rstrip("%"))
                    x = rate + APART * (place - 1.5)
                    mean = statistics.fmean(accuracies)
                    made.append({"x": x, "mean": mean, "method": title_of(method), "n": len(accuracies), **span})
    return made


def picture(found: Collection) -> bytes:
    """As SVG, a panel for each network."""
    panels = [_panel(rows(found, tables), title) for title, tables in PANELS.items()]
    return svg(alt.hconcat(*panels).properties(background="white").to_dict())


def _panel(points: list[dict[str, Any]], title: str) -> alt.LayerChart:
    base = alt.Chart(alt.Data(values=points))
    scale = alt.Scale(
        domain=[*map(title_of, FOUR_METHODS)], range=[COLOURS[one] for one in ("plain", "sam", "log", "tanh")]
    )
    x = alt.X("x:Q", title="wrong training labels, per cent", axis=alt.Axis(values=[0, 20, 40, 60, 80], grid=False))
    y = alt.Y("mean:Q", title="test accuracy, per cent", scale=alt.Scale(domain=[0, 100]))
    legend = alt.Legend(symbolOpacity=1, symbolSize=60)
    colour = alt.Color("method:N", title=None, scale=scale, legend=legend)
    shapes = alt.Scale(domain=scale.domain, range=["circle", "square", "triangle-up", "diamond"])
    shape = alt.Shape("method:N", title=None, scale=shapes, legend=legend)
    spans = base.transform_filter("isValid(datum.low)").mark_rule(strokeWidth=2)
    layers = alt.layer(
        base.mark_line(strokeWidth=1.5, opacity=0.6).encode(x=x, y=y, color=colour),
        spans.encode(x=x, y=alt.Y("low:Q", title="test accuracy, per cent"), y2="high:Q", color=colour),
        base.mark_point(filled=True, size=45, opacity=1).encode(x=x, y=y, color=colour, shape=shape),
    )
    seeds = sorted({point["n"] for point in points})
    title += f", n = {' to '.join(map(str, dict.fromkeys((seeds[0], seeds[-1]))))}" if seeds else ""
    return layers.properties(title=title, width=300, height=230)


if __name__ == "__main__":
    write_atomically(PICTURE, picture(ledger.read()))
    print(f"wrote {PICTURE.relative_to(ledger.ROOT)}")
