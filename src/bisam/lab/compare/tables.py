"""A comparison of two runs as tables of texts, for a terminal or a page."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from bisam.diagnostics import Estimate
from bisam.lab.compare.comparison import RunComparison, Side
from bisam.lab.compare.inspection import Inspection, InspectionPlan, WorstCase
from bisam.lab.tables.cells import number
from bisam.lab.tables.summary import OPEN, Sheet

CellText = Callable[[Side], str]
"""The text of a run in one line of a table; OPEN where it has none."""

ACCURACIES = {
    "test_accuracy": "test accuracy, per cent",
    "test_top5_accuracy": "test accuracy among five, per cent",
    "validation_accuracy": "validation accuracy, per cent",
}
METRICS = {
    "lr": "learning rate",
    "loss": "training loss at w",
    "perturbed_loss": "training loss at w + ε",
    "error": "training error at w",
    "perturbed_error": "training error at w + ε",
    "flips": "flips per batch",
    "ascent_norm": "norm of the ascent's gradient",
    "validation_accuracy": "validation accuracy, per cent",
    "samples_per_second": "samples per second",
    "together": "runs at once, each at that rate",
}
"""Titles of the metrics, by their names in a line of metrics."""


def sheets(comparison: RunComparison) -> list[Sheet]:
    """All tables that have something to show."""
    return [*sheets_of_records(comparison), *sheets_of_weights(comparison)]


def sheets_of_records(comparison: RunComparison) -> list[Sheet]:
    found = [_configuration(comparison), _results(comparison), _last_epoch(comparison)]
    return [sheet for sheet in found if sheet.rows]


def sheets_of_weights(comparison: RunComparison) -> list[Sheet]:
    inspections = [side.inspection for side in comparison.sides if side.inspection is not None]
    if not inspections:
        return []
    plan = inspections[0].plan
    found = [
        _weights(comparison),
        _rises(comparison, plan),
        _errors(comparison, plan),
        _curvature(comparison, plan),
        _line(comparison, plan),
    ]
    return [sheet for sheet in found if sheet.rows]


def _sheet(comparison: RunComparison, title: str, lines: Mapping[str, CellText], notes: Iterable[str] = ()) -> Sheet:
    """One line for each name; without those that neither run has."""
    rows = [[name, *(cell(side) for side in comparison.sides)] for name, cell in lines.items()]
    head = ["", *(side.name for side in comparison.sides)]
    return Sheet(title, head, [row for row in rows if row[1:] != [OPEN, OPEN]], [*notes])


def _configuration(comparison: RunComparison) -> Sheet:
    rows = [[change.name, change.a, change.b] for change in comparison.changes]
    return Sheet("Configuration: what differs", ["", *(side.name for side in comparison.sides)], rows)


def _results(comparison: RunComparison) -> Sheet:
    lines: dict[str, CellText] = {"status": lambda side: side.status}
    lines |= {words: partial(_accuracy, name=name) for name, words in ACCURACIES.items()}
    lines |= {"tested epoch": _best_epoch, "epochs": _epochs, "seconds": _seconds}
    lines |= {"hardware": lambda side: side.record.hardware or OPEN, "commit": lambda side: side.record.commits or OPEN}
    lines |= {name: partial(_receipt, name=name) for name in ("torch", "date")}
    lines["data, sha256"] = lambda side: _receipt(side, "data_checksum")[:12]
    return _sheet(comparison, "Results", lines)


def _last_epoch(comparison: RunComparison) -> Sheet:
    lines: dict[str, CellText] = {"epoch": lambda side: str(_last(side, "epoch") + 1) if side.record.metrics else OPEN}
    lines |= {words: partial(_metric, name=name) for name, words in METRICS.items()}
    return _sheet(comparison, "Last epoch of the training", lines)


def _weights(comparison: RunComparison) -> Sheet:
    lines = {
        "parameters": _of(lambda one: f"{one.parameters:,}"),
        "training loss": _of(lambda one: _digits(one.train.loss)),
        "training error": _of(lambda one: _percent(one.train.error)),
        "test loss": _of(lambda one: _digits(one.test.loss)),
        "test error": _of(lambda one: _percent(one.test.error)),
        "training samples": _of(lambda one: f"{one.samples:,}"),
        "test samples": _of(lambda one: f"{one.test_samples:,}"),
    }
    notes = ["Cross entropy and 0-1 error; training samples without augmentation, with the labels of the training."]
    return _sheet(comparison, "At the weights", lines, notes)


def _rises(comparison: RunComparison, plan: InspectionPlan) -> Sheet:
    lines = {
        **_worst_cases(comparison, lambda case: _digits(case.found.value)),
        "average, L2": _of(lambda one: _estimate(one.average)),
        "average, adaptive": _of(lambda one: _estimate(one.adaptive_average)),
    }
    notes = ["L(w + ε) − L(w) on these training samples; ε maximises what is named first. After ±: a standard error."]
    return _sheet(comparison, f"How far the loss rises within ρ = {plan.rho:g}", lines, notes)


def _errors(comparison: RunComparison, plan: InspectionPlan) -> Sheet:
    lines = {"at w": _of(lambda one: _percent(one.train.error)), **_worst_cases(comparison, _error)}
    notes = [
        "≥: where ε maximises Q, Q − log(K)/μ, which is never above the error; not shown where it is below 0. Flips: "
        "right at w, wrong there."
    ]
    return _sheet(comparison, f"Training error after the perturbation, ρ = {plan.rho:g}", lines, notes)


def _curvature(comparison: RunComparison, plan: InspectionPlan) -> Sheet:
    lines: dict[str, CellText] = {
        f"eigenvalue {place + 1}": _of(partial(_eigenvalue, place=place)) for place in range(plan.eigenvalues)
    }
    lines["trace"] = _of(lambda one: _estimate(one.trace))
    lines["training samples"] = _of(lambda one: f"{one.few:,}")
    notes = ["Its largest eigenvalues. They go to 0 where the loss does: memorised samples add little curvature."]
    return _sheet(comparison, "Curvature: the Hessian of the training loss", lines, notes)


def _line(comparison: RunComparison, plan: InspectionPlan) -> Sheet:
    last = plan.points - 1
    places = sorted({0, last // 4, last // 2, 3 * last // 4, last})
    lines = {
        f"a = {plan.span * (2 * place / last - 1):+.2f}".replace("-", "−"): _of(partial(_on_line, place=place))
        for place in places
    }
    notes = ["Training loss and error at w + a d: d is random, each of its filters as long as that of w."]
    return _sheet(comparison, "Along a random direction", lines, notes)


# Cells.


def _of(text: Callable[[Inspection], str]) -> CellText:
    return lambda side: OPEN if side.inspection is None else text(side.inspection)


def _worst_cases(comparison: RunComparison, text: Callable[[WorstCase], str]) -> dict[str, CellText]:
    names = [case.name for side in comparison.sides if side.inspection for case in side.inspection.worst]

    def cell(side: Side, name: str) -> str:
        cases = side.inspection.worst if side.inspection else []
        return next((text(case) for case in cases if case.name == name), OPEN)

    return {name: partial(cell, name=name) for name in names}


def _error(case: WorstCase) -> str:
    bound = f" ≥ {_percent(case.found.bound)}" if case.found.bound is not None and case.found.bound > 0 else ""
    flips = "1 flip" if case.found.flips == 1 else f"{case.found.flips} flips"
    return f"{_percent(case.found.perturbed_error)}{bound}, {flips}"


def _eigenvalue(one: Inspection, place: int) -> str:
    return _digits(one.eigenvalues[place]) if place < len(one.eigenvalues) else OPEN


def _on_line(one: Inspection, place: int) -> str:
    loss, error = one.line.losses[place], (one.line.errors or [])[place]
    assert isinstance(loss, float)  # in one dimension
    assert isinstance(error, float)
    return f"{_digits(loss)}, {_percent(error)}"


def _accuracy(side: Side, name: str) -> str:
    """Of finished runs only: a diverged one has no weights to test."""
    result = side.record.result or {}
    value = number(result.get(name)) if side.status == "done" else None
    return OPEN if value is None or not 0 <= value <= 100 else f"{value:.2f}"


def _best_epoch(side: Side) -> str:
    value = (side.record.result or {}).get("best_epoch")
    return str(value + 1) if isinstance(value, int) and value >= 0 else OPEN


def _epochs(side: Side) -> str:
    done = (side.record.result or {}).get("epochs", len(side.record.metrics))
    return f"{done} of {side.config.epochs}" if side.config else str(done)


def _seconds(side: Side) -> str:
    """Of unfinished runs too."""
    seconds = [value for row in side.record.metrics if (value := number(row.get("seconds"))) is not None]
    return _number((side.record.result or {}).get("seconds", sum(seconds) if seconds else None), "{:.1f}")


def _receipt(side: Side, name: str) -> str:
    value = (side.record.receipt or {}).get(name)
    return OPEN if value is None else str(value)


def _last(side: Side, name: str) -> Any:
    return side.record.metrics[-1].get(name) if side.record.metrics else None


def _metric(side: Side, name: str) -> str:
    value = _last(side, name)
    if name in ("samples_per_second", "together"):
        return _number(value, "{:,.0f}")
    if name in ("error", "perturbed_error"):
        return _percent(value) if isinstance(value, (int, float)) else OPEN
    return _number(value, "{:.2f}" if name == "validation_accuracy" else "{:.4g}")


def _number(value: object, form: str) -> str:
    """NaN and infinity are shown as they are."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return OPEN
    try:
        return form.format(float(value)).replace("-", "−")
    except OverflowError:  # a whole number that no float holds
        return OPEN


def _digits(value: float) -> str:
    """
    >>> _digits(16.0), _digits(152.7), _digits(0.00001234), _digits(-0.5), _digits(float("nan"))
    ('16.0', '153', '1.23e−05', '−0.500', 'nan')
    """
    return _number(value, "{:#.3g}").rstrip(".")


def _percent(value: float | None) -> str:
    return OPEN if value is None else _number(100 * value, "{:.1f} %")


def _estimate(found: Estimate) -> str:
    return f"{_digits(found.mean)} ± {_digits(found.standard_error)}"
