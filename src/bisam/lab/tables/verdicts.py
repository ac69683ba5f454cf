"""How many differences between methods are resolved: one verdict for each pair of methods that are compared."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from bisam.lab.methods import METHODS, title_of
from bisam.lab.tables.cells import ResultTable
from bisam.lab.tables.summary import MethodDifference, comparisons


@dataclass(frozen=True)
class Verdict:
    """The differences of one kind, such as all of BiSAM − SAM, in all tables."""

    name: str
    """The methods that are compared, such as "BiSAM"."""
    baseline: str
    """What they are compared with, such as "SAM"."""
    placed: tuple[tuple[ResultTable, MethodDifference], ...]
    """Each difference with its table."""

    @property
    def differences(self) -> list[MethodDifference]:
        return [one for _, one in self.placed]

    @property
    def title(self) -> str:
        return f"{self.name} vs {self.baseline}"

    @property
    def measure(self) -> str:
        """What the tables compare: "test accuracy", or "test results" where they compare several measures."""
        found = {table.recipe.first_measure for table, _ in self.placed}
        return found.pop() if len(found) == 1 else "test results"

    @property
    def resolved(self) -> int:
        return sum(one.found.resolved for one in self.differences)

    @property
    def better(self) -> int:
        """Resolved differences in favour of the method."""
        return sum(one.found.resolved and one.found.mean > 0 for one in self.differences)

    @property
    def above(self) -> int:
        return sum(one.found.mean > 0 for one in self.differences)

    @property
    def below(self) -> int:
        return sum(one.found.mean < 0 for one in self.differences)

    @property
    def headline(self) -> str:
        count = len(self.differences)
        return f"{self.resolved} of {count} difference{'s' * (count != 1)} resolved"

    @property
    def conclusion(self) -> str:
        """In whose favour the resolved ones are."""
        if not self.resolved:
            return f"{self.name} and {self.baseline} cannot be separated yet"
        return f"{self.better} in favour of {self.name}, {self.resolved - self.better} of {self.baseline}"

    @property
    def details(self) -> str:
        """Such as "7 above, 5 below; 8 without an interval: too few seeds"."""
        reasons = Counter(one.found.why_no_interval for one in self.differences if one.found.low is None)
        level = len(self.differences) - self.above - self.below
        places = [f"{self.above} above", f"{self.below} below", *([f"{level} level"] * bool(level))]
        return "; ".join([
            ", ".join(places), *(f"{count} without an interval: {why}" for why, count in reasons.items()),
        ])  # fmt: skip


def verdicts(tables: Iterable[ResultTable]) -> list[Verdict]:
    """Those of BiSAM and its adaptive and efficient kin against what each adds Q to; then the others by method.

    The first measure of a row counts alone: the others are of the same pairs of runs.
    """
    found: dict[tuple[str, str], list[tuple[ResultTable, MethodDifference]]] = defaultdict(list)
    for table in tables:
        for one in comparisons(table):
            if one.row in table.recipe.first_lines:
                found[_family(one)].append((table, one))
    order = sorted(found, key=lambda key: key != ("BiSAM", "SAM"))
    return [Verdict(*key, tuple(found[key])) for key in order]


def _family(one: MethodDifference) -> tuple[str, str]:
    """With Q in the ascent, whatever the ball, it is BiSAM against SAM."""
    has_q = one.method in METHODS and METHODS[one.method].phi is not None
    return ("BiSAM", "SAM") if has_q else (title_of(one.method), title_of(one.baseline))
