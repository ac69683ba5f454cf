"""A comparison as a page: results, curves, the loss around both minima, and all tables."""

from __future__ import annotations

from collections.abc import Sequence

from bisam.lab.compare import tables as comparison_tables
from bisam.lab.compare.comparison import RunComparison, Side
from bisam.lab.compare.inspection import Inspection
from bisam.lab.compare.surroundings import along, looks, plane, plane_rows, worst_cases
from bisam.lab.report import page
from bisam.lab.report.page import Block, Curves, Figure, Figures, Grid, Section, Sentences, Series
from bisam.lab.tables import curves

UNLIKE = 3.0
"""Training losses that differ by more than this factor make the rise of the loss misleading."""


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
    lead = ", ".join(f"{side.name} is {_folders(side)}" for side in comparison.sides)
    return page.render(f"{a.name} and {b.name}", f"{lead}.", [section for section in sections if section.blocks])


def _folders(side: Side) -> str:
    first = str(side.record.folder)
    more = len(side.others)
    return first if not more else f"{first} and {more} more seed{'s' * (more != 1)}"


def _curves(comparison: RunComparison) -> list[Block]:
    rows: curves.Rows = []
    for side in comparison.sides:
        for one in side.members:
            rows += curves.points_of(one.record.metrics, one.config, one.name, side.name)
    diverged = {one.name for one in comparison.members if one.status == "diverged"}
    series = Series(curves.mark_whole(rows, diverged), looks(comparison))
    return [Curves(series, {})] if series.names else []


def _surroundings(comparison: RunComparison) -> list[Block]:
    looked = [(one, one.inspection) for one in comparison.members if one.inspection is not None]
    if not looked:
        return []
    plan = looked[0][1].plan
    blocks: list[Block] = [
        Figures(
            [
                Figure(f"{words} along one random direction", along(comparison, name), _CAPTION)
                for name, words in (("loss", "Loss"), ("error", "0-1 error"))
            ]
        )
    ]
    balls = "What the perturbation maximises, in which ball, in how many steps. Radii of two balls do not compare."
    title = f"How far the loss rises within ρ = {plan.rho:g}"
    sentence = explanation(comparison)
    blocks += [Sentences([sentence], "warning")] if sentence else []
    blocks.append(Figure(title, worst_cases(comparison), balls))
    planes = [(side, plane_rows(side.inspection.plane)) for side in comparison.sides if side.inspection is not None]
    logs = [row["log"] for _, rows in planes for row in rows if "log" in row]
    if logs:
        titled = [(f"{_first(side)}: loss on a plane", rows) for side, rows in planes]
        blocks.append(Figures([Figure(name, plane(rows, [min(logs), max(logs)]), _CAPTION) for name, rows in titled]))
    return blocks


_CAPTION = "Filter-normalised: 1 is as far as a filter is long. The same directions for both."


def _first(side: Side) -> str:
    return f"{side.name}, seed {side.seed}" if side.others else side.name


def explanation(comparison: RunComparison) -> str:
    """Why the rise of the loss misleads where one of the training losses is near 0; empty where it does not."""
    means = {side.name: _losses(side) for side in comparison.sides}
    if not all(means.values()):
        return ""
    (low, (at, far)), (high, (others_at, others_far)) = sorted(
        ((name, found) for name, found in means.items() if found is not None), key=lambda item: item[1][0]
    )
    if others_at < UNLIKE * at:
        return ""
    further = "" if far < others_far else f"; at the ends of the line it is {far:.3g} against {others_far:.3g}"
    return (
        f"A small rise is no flat minimum here: the training loss of {low} is {at:.3g} at its weights and that of "
        f"{high} {others_at:.3g}, and where the loss is near 0 it hardly rises within a small radius{further}."
    )


def _losses(side: Side) -> tuple[float, float] | None:
    """The training loss at the weights and the larger one at the ends of the line: means of the runs."""
    found = [_ends(one.inspection) for one in side.members if one.inspection is not None]
    if not found:
        return None
    return sum(at for at, _ in found) / len(found), sum(far for _, far in found) / len(found)


def _ends(found: Inspection) -> tuple[float, float]:
    losses: Sequence[object] = found.line.losses
    return found.train.loss, max(float(losses[0]), float(losses[-1]))  # type: ignore[arg-type]
