"""Lines of a table that compares two runs, or two groups of seeds: a cell for each side, and the difference."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from bisam.lab.compare.comparison import RunComparison, Side
from bisam.lab.tables.statistics import difference
from bisam.lab.tables.summary import OPEN, Sheet

Text = Callable[[Side], str]
"""The text of a run in one line of a table; OPEN where it has none."""


@dataclass(frozen=True)
class ComparedQuantity:
    """What a run has in one line of a table, as text, and as a number where it is one."""

    text: Text
    number: Callable[[Side], float | None] | None = None
    form: Callable[[float], str] = "{:.4g}".format

    def cell(self, side: Side) -> str:
        """Of a group: the mean and the standard deviation of its runs, or their texts."""
        if not side.others:
            return self.text(side)
        values = self.values(side)
        if not values:
            return "\n".join(dict.fromkeys(self.text(one) for one in side.members))
        spread = f" ± {self.form(statistics.stdev(values.values()))}" if len(values) > 1 else ""
        return f"{self.form(statistics.fmean(values.values()))}{spread}, n = {len(values)}"

    def difference(self, comparison: RunComparison) -> str:
        """The second − the first; of groups with the 95 % interval. OPEN where it is no number."""
        theirs, ours = (self.values(side) for side in comparison.sides)
        if not ours or not theirs:
            return OPEN
        if not comparison.a.others and not comparison.b.others:
            return self._signed(next(iter(ours.values())) - next(iter(theirs.values())))
        found = difference(ours, theirs)
        if found is None:
            return OPEN
        if found.low is None or found.high is None:
            return self._signed(found.mean)
        return f"{self._signed(found.mean)}\n{self._signed(found.low)} to {self._signed(found.high)}"

    def values(self, side: Side) -> dict[int, float]:
        """Finite numbers of the runs, by seed."""
        if self.number is None:
            return {}
        found = {one.seed: self.number(one) for one in side.members}
        return {seed: float(value) for seed, value in found.items() if value is not None and math.isfinite(value)}

    def _signed(self, value: float) -> str:
        text = self.form(value)
        return text if value < 0 else f"+{text}"


def sheet(
    comparison: RunComparison, title: str, lines: Mapping[str, ComparedQuantity], notes: Sequence[str] = ()
) -> Sheet:
    """One line for each name; without those that neither side has, and with the differences where there are some."""
    a, b = comparison.sides
    rows = [
        [name, line.cell(a), line.cell(b), line.difference(comparison)]
        for name, line in lines.items()
        if [line.cell(a), line.cell(b)] != [OPEN, OPEN]
    ]
    head = ["", a.name, b.name, f"{b.name} − {a.name}"]
    if all(row[-1] == OPEN for row in rows):
        head, rows = head[:-1], [row[:-1] for row in rows]
    return Sheet(title, head, rows, [*notes])
