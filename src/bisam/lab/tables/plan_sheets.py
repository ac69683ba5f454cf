"""A plan as text: its tables and commands."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence

from bisam.lab.config import Config
from bisam.lab.tables.footprint import estimated_mib
from bisam.lab.tables.gpus import Gpu
from bisam.lab.tables.planning import Comparison, RankedComparison, TablePlan, end_of, hours_on, missing_seeds
from bisam.lab.tables.power import MOST_SEEDS, POWER, count_text
from bisam.lab.tables.statistics import signed
from bisam.lab.tables.summary import OPEN, Sheet

USABLE = 0.9
"""Part of a GPU's memory that runs may fill: the rest is for its context and the libraries' workspaces."""

GPUS_OF_A_MACHINE = 8
"""More are on several machines, which Ray joins; those of one machine share a table without an option."""


def sheet_of_runs(made: TablePlan) -> Sheet:
    """Runs, hours and memory of the whole table, with the recipe's number of seeds."""
    recipe, budget = made.recipe, made.budget
    rows, total, count, runs = [], 0.0, 0, []
    for row in recipe.rows:
        cells = {cell: config for cell, config in recipe.cells.items() if cell[0] == row}
        missing = {cell: missing_seeds(made.finished[cell], recipe.seeds) for cell in cells}
        hours = {cell: hours_on(config, budget.gpu) or 0.0 for cell, config in cells.items()}
        spent = sum(hours[cell] * missing[cell] for cell in cells)
        total, count = total + spent, count + sum(missing.values())
        runs += [(hours[cell], missing[cell]) for cell in cells]
        largest = max(cells.values(), key=lambda config: _memory(config, budget.gpu)[0] or 0.0)
        rows.append([
            row, str(sum(missing.values())), *_times(made, [60 * each for each in hours.values()], spent),
            *_memory_texts(largest, budget.gpu), _sharing(largest, budget.gpu),
        ])  # fmt: skip
    end = end_of(runs, budget.gpus)
    verdict = "within" if end <= budget.hours else "more than"
    rows.append(["all", str(count), "", OPEN if made.unmeasured else _hours_text(total), "", "", ""])
    head = ["row", "runs", "minutes a run", "GPU hours", "memory of a run", "runs that fit", "in one graph"]
    of_cells = f"{recipe.seeds} seeds of each cell, as the recipe has, without those that are trained."
    if made.unmeasured:
        notes = [
            f"{of_cells} No step of {', '.join(made.unmeasured)} was measured on {budget.gpu.title}, so the hours are "
            f"not known, and the budget leaves nothing out. Measured are {', '.join(budget.gpu.plain_ms)}."
        ]
        return Sheet(f"{recipe.title} on {budget.gpus} {budget.gpu.title}", head, rows, notes)
    notes = [
        f"{of_cells} On {budget.gpus} "
        f"{budget.gpu.title} they take {_hours_text(end)} hours: {verdict} the {budget.hours:g} of the budget.",
        "Hours are from measured steps, captured and compiled (densenet121 not compiled), without evaluation. "
        "~ marks memory that is counted from weights and saved activations; the other was measured. Runs that fit are "
        f"those of {100 * USABLE:.0f} % of the GPU's memory. In one graph (--together): how many runs were measured "
        "at once, and the time of each as a part of its time alone; the hours here are those of runs alone.",
    ]
    return Sheet(f"{recipe.title} on {budget.gpus} {budget.gpu.title}", head, rows, notes)


def _times(made: TablePlan, minutes: Sequence[float], hours: float) -> list[str]:
    """Minutes of a run and GPU hours of all; open where a model of the table has no measured step."""
    return [OPEN] * 2 if made.unmeasured else [" to ".join(_span(minutes)), _hours_text(hours)]


def sheet_of_choices(made: TablePlan) -> Sheet | None:
    """The comparisons in the order to train them; None if the table has none."""
    if not made.choices and not made.unknown:
        return None
    head = ["difference", "effect", "scatter of a pair", "seeds", "more runs", "GPU hours", "done after"]
    rows = [[*_described(c.comparison), *_effort(c), _outcome(c)] for c in made.choices]
    if made.unmeasured:
        rows = [
            [*_described(c.comparison), _effort(c)[0], OPEN, "resolved" if c.comparison.is_resolved else OPEN]
            for c in made.choices
        ]
    rows += [[*_described(one), OPEN, OPEN, "unknown"] for one in made.unknown]
    few = made.affordable
    count = len(made.choices) + len(made.unknown)
    spent = sum(choice.gpu_hours for choice in few)
    more = f"{sum(choice.runs for choice in few)} more runs"
    within = f" within {made.budget.gpu_hours:g} GPU hours: {more}, {_hours_text(spent)} GPU hours."
    notes = [
        f"{len(few)} of {count} difference{'s' * (count != 1)}{f': {more}.' if made.unmeasured else within}",
        f"Seeds of both methods with which the 95 % interval of a paired t test excludes 0 with a chance of "
        f"{100 * POWER:.0f} %, if the effect is the true one. * marks a scatter that is not of pairs of runs here: it "
        "is that of the paper's two standard deviations, as if pairs had nothing in common.",
    ]
    if made.unknown:
        notes.append("unknown: for a scatter train two seeds or more of both methods, and name their folder by --runs.")
    return Sheet("Differences, cheapest first", head, rows, notes)


def commands(made: TablePlan, file: str | None = None) -> list[str]:
    """Those that train what the budget allows, in order; finished runs are skipped by them. `file` has the table."""
    table, found = file or made.recipe.name, []
    for one in (choice.comparison for choice in made.affordable if choice.runs):
        parts = ["bisam", "reproduce", f"{table}/{one.row}", "--methods", f"{one.baseline},{one.method}"]
        parts += ["--seeds", f"0-{one.seeds - 1}"]
        model = made.recipe.cells[one.row, one.method].model
        if model != "densenet121" and not made.unmeasured:  # whose hours are those without
            parts += ["--set", "compile=true"]
        if (sharing := made.budget.gpu.sharing(model)) is not None and sharing[1] < 1:
            parts += ["--together", str(sharing[0])]
        if made.budget.gpus > GPUS_OF_A_MACHINE:
            parts += ["--on", "ray"]
        found.append(shlex.join(parts))
    return found


def _described(one: Comparison) -> list[str]:
    source = f", {one.pairs} pairs" if one.pairs else " *"
    scatter = OPEN if one.deviation is None else f"{one.deviation:.2f}{source}"
    needed = OPEN if one.deviation is None else count_text(one.needed)
    return [one.name, signed(one.effect), scatter, needed]


def _effort(choice: RankedComparison) -> list[str]:
    """More runs and GPU hours."""
    if not choice.comparison.is_resolved and choice.comparison.needed >= MOST_SEEDS:
        return [OPEN, OPEN]
    return [str(choice.runs), _hours_text(choice.gpu_hours)]


def _outcome(choice: RankedComparison) -> str:
    if choice.comparison.is_resolved:
        return "resolved"
    return "beyond" if choice.end is None else f"{_hours_text(choice.end)} h"


def _memory(config: Config, gpu: Gpu) -> tuple[float | None, bool]:
    """MiB of a run, and whether they were measured."""
    measured = gpu.measured_mib(config)
    return (estimated_mib(config), False) if measured is None else (measured, True)


def _memory_texts(config: Config, gpu: Gpu) -> list[str]:
    mib, is_measured = _memory(config, gpu)
    if mib is None:
        return [OPEN, OPEN]
    fit = OPEN if gpu.memory_gb is None else str(math.floor(USABLE * gpu.memory_gb * 1e9 / (mib * 2**20)))
    return [f"{'' if is_measured else '~'}{mib / 1024:.2f} GiB", fit]


def _sharing(config: Config, gpu: Gpu) -> str:
    found = gpu.sharing(config.model)
    return OPEN if found is None else f"{found[0]}: {found[1]:.2f}"


def _span(values: Sequence[float]) -> list[str]:
    return list(dict.fromkeys(f"{value:.0f}" for value in (min(values), max(values))))


def _hours_text(hours: float) -> str:
    return f"{hours:,.0f}" if hours >= 100 else f"{hours:.1f}"
