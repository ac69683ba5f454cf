"""What a page is made of: a list of sections, each a list of blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bisam.lab.report.charts import Chart
from bisam.lab.report.page.series import Series
from bisam.lab.tables.summary import Sheet
from bisam.lab.tables.verdicts import Verdict


@dataclass
class Sentences:
    """Sentences, as a list."""

    lines: Sequence[str]
    kind: str = "plain"
    """ "plain", "warning" for what is wrong, or "answer" for the sentence that a page is about."""
    title: str = ""


@dataclass
class Cards:
    """The verdicts, one card each."""

    verdicts: Sequence[Verdict]


@dataclass
class Grid:
    """A table, with buttons that copy it. A cell in a column called "command" has a button that copies it."""

    sheet: Sheet
    title: str = ""
    """Instead of the sheet's, where the page says a part of it already."""


@dataclass
class Figure:
    title: str
    chart: Chart
    caption: str = ""


@dataclass
class Figures:
    """Several, side by side where there is room."""

    figures: Sequence[Figure]
    kind: str = ""
    """ "forest" for a wide and a narrow column, "whole" for one column."""


@dataclass
class Curves:
    """The curves of some runs, which share an axis, a zoom and a legend."""

    series: Series
    captions: Mapping[str, str]
    """Further words on a curve, by its name."""


@dataclass
class Runs:
    """The list of runs: it sorts and filters, and each run has a drawer."""

    runs: Sequence[Mapping[str, object]]
    sheet: Sheet
    """The same with all columns, to be copied."""


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


Block = Sentences | Cards | Grid | Figure | Figures | Curves | Runs | Choice | Fold


@dataclass
class Section:
    title: str
    blocks: Sequence[Block]
    short: str = ""
    """The title in the page's navigation; the whole one if empty."""
    is_alone: bool = False
    """Whether its only figure is the page: then it is as large as the window, and has the page's title."""
