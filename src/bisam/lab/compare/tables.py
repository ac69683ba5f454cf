"""A comparison of two runs as tables of texts, for a terminal or a page."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from bisam.diagnostics import Estimate
from bisam.lab.compare.comparison import RunComparison, Side, rho_of
from bisam.lab.compare.inspection import Inspection, InspectionPlan, WorstCase
from bisam.lab.compare.lines import ComparedQuantity, sheet
from bisam.lab.tables.cells import number, text_of
from bisam.lab.tables.summary import OPEN, Sheet

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
    return [one for one in found if one.rows]


def sheets_of_weights(comparison: RunComparison) -> list[Sheet]:
    inspections = [side.inspection for side in comparison.members if side.inspection is not None]
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
    return [one for one in found if one.rows]


def _configuration(comparison: RunComparison) -> Sheet:
    rows = [[change.name, change.a, change.b] for change in comparison.changes]
    return Sheet("Configuration: what differs", ["", *(side.name for side in comparison.sides)], rows)


def _results(comparison: RunComparison) -> Sheet:
    lines = {"status": ComparedQuantity(lambda side: side.status), "ρ of the training": ComparedQuantity(_rho)}
    lines |= {words: _plain(partial(_accuracy, name=name), "{:.2f}") for name, words in ACCURACIES.items()}
    lines |= {"tested epoch": ComparedQuantity(_best_epoch), "epochs": ComparedQuantity(_epochs)}
    lines["seconds"] = ComparedQuantity(_seconds, _seconds_number, partial(_number, form="{:.1f}"))
    lines["hardware"] = ComparedQuantity(lambda side: side.record.hardware or OPEN)
    lines["commit"] = ComparedQuantity(lambda side: side.record.commits or OPEN)
    lines |= {name: ComparedQuantity(partial(_receipt, name=name)) for name in ("torch", "date")}
    lines["data, sha256"] = ComparedQuantity(lambda side: _receipt(side, "data_checksum")[:12])
    return sheet(comparison, "Results", lines)


def _rho(side: Side) -> str:
    rho = rho_of(side.record)
    return OPEN if rho is None else text_of(rho)


def _last_epoch(comparison: RunComparison) -> Sheet:
    lines = {"epoch": ComparedQuantity(lambda side: str(_last(side, "epoch") + 1) if side.record.metrics else OPEN)}
    for name, words in METRICS.items():
        form = _percent if name in ("error", "perturbed_error") else partial(_number, form=_FORMS.get(name, "{:.4g}"))
        lines[words] = ComparedQuantity(partial(_metric, name=name), partial(_last_number, name=name), form)
    return sheet(comparison, "Last epoch of the training", lines)


def _weights(comparison: RunComparison) -> Sheet:
    lines = {
        "parameters": _of(lambda one: f"{one.parameters:,}"),
        "training loss": _measured(lambda one: one.train.loss, _digits),
        "training error": _measured(lambda one: one.train.error, _percent),
        "test loss": _measured(lambda one: one.test.loss, _digits),
        "test error": _measured(lambda one: one.test.error, _percent),
        "training samples": _of(lambda one: f"{one.samples:,}"),
        "test samples": _of(lambda one: f"{one.test_samples:,}"),
    }
    notes = ["Cross entropy and 0-1 error; training samples without augmentation, with the labels of the training."]
    return sheet(comparison, "At the weights", lines, notes)


def _rises(comparison: RunComparison, plan: InspectionPlan) -> Sheet:
    lines = {
        **_worst_cases(comparison, lambda case: _digits(case.found.value), lambda case: case.found.value, _digits),
        "average, L2": _of(lambda one: _estimate(one.average), lambda one: one.average.mean),
        "average, adaptive": _of(lambda one: _estimate(one.adaptive_average), lambda one: one.adaptive_average.mean),
    }
    of_seeds = any(side.others for side in comparison.sides)
    notes = [
        "L(w + ε) − L(w) on these training samples; ε maximises what is named first. After ±: a standard "
        f"{'deviation over the runs of a group' if of_seeds else 'error'}."
    ]
    return sheet(comparison, f"How far the loss rises within ρ = {plan.rho:g}", lines, notes)


def _errors(comparison: RunComparison, plan: InspectionPlan) -> Sheet:
    lines = {
        "at w": _measured(lambda one: one.train.error, _percent),
        **_worst_cases(comparison, _error, lambda case: case.found.perturbed_error, _percent),
    }
    notes = [
        "≥: where ε maximises Q, Q − log(K)/μ, which is never above the error; not shown where it is below 0. Flips: "
        "right at w, wrong there."
    ]
    return sheet(comparison, f"Training error after the perturbation, ρ = {plan.rho:g}", lines, notes)


def _curvature(comparison: RunComparison, plan: InspectionPlan) -> Sheet:
    lines = {
        f"eigenvalue {place + 1}": _measured(partial(_eigenvalue, place=place), _digits)
        for place in range(plan.eigenvalues)
    }
    lines["trace"] = _of(lambda one: _estimate(one.trace), lambda one: one.trace.mean)
    lines["training samples"] = _of(lambda one: f"{one.few:,}")
    notes = ["Its largest eigenvalues. They go to 0 where the loss does: memorised samples add little curvature."]
    return sheet(comparison, "Curvature: the Hessian of the training loss", lines, notes)


def _line(comparison: RunComparison, plan: InspectionPlan) -> Sheet:
    last = plan.points - 1
    places = sorted({0, last // 4, last // 2, 3 * last // 4, last})
    lines = {
        f"a = {plan.span * (2 * place / last - 1):+.2f}".replace("-", "−"): _of(
            partial(_on_line, place=place), partial(_loss_on_line, place=place)
        )
        for place in places
    }
    notes = ["Training loss and error at w + a d: d is random, each of its filters as long as that of w."]
    return sheet(comparison, "Along a random direction", lines, notes)


# Cells.


def _of(text: Callable[[Inspection], str], number_of: Callable[[Inspection], float] | None = None) -> ComparedQuantity:
    """A line about the weights, with the number that its text begins with."""

    def shown(side: Side) -> str:
        return OPEN if side.inspection is None else text(side.inspection)

    def value(side: Side) -> float | None:
        return None if side.inspection is None or number_of is None else number_of(side.inspection)

    return ComparedQuantity(shown, value, _digits)


def _measured(number_of: Callable[[Inspection], float | None], form: Callable[[float], str]) -> ComparedQuantity:
    """A line about the weights that is a number."""

    def value(side: Side) -> float | None:
        return None if side.inspection is None else number_of(side.inspection)

    def shown(side: Side) -> str:
        found = value(side)
        return OPEN if found is None else form(found)

    return ComparedQuantity(shown, value, form)


def _plain(number_of: Callable[[Side], float | None], form: str) -> ComparedQuantity:
    """A line of a record that is a number."""

    def shown(side: Side) -> str:
        found = number_of(side)
        return OPEN if found is None else form.format(found)

    return ComparedQuantity(shown, number_of, partial(_number, form=form))


def _worst_cases(
    comparison: RunComparison,
    text: Callable[[WorstCase], str],
    number_of: Callable[[WorstCase], float | None],
    form: Callable[[float], str],
) -> dict[str, ComparedQuantity]:
    names = [case.name for side in comparison.members if side.inspection for case in side.inspection.worst]

    def case_of(side: Side, name: str) -> WorstCase | None:
        return next((case for case in (side.inspection.worst if side.inspection else []) if case.name == name), None)

    def shown(side: Side, name: str) -> str:
        case = case_of(side, name)
        return OPEN if case is None else text(case)

    def value(side: Side, name: str) -> float | None:
        case = case_of(side, name)
        return None if case is None else number_of(case)

    return {
        name: ComparedQuantity(partial(shown, name=name), partial(value, name=name), form)
        for name in dict.fromkeys(names)
    }


def _error(case: WorstCase) -> str:
    bound = f" ≥ {_percent(case.found.bound)}" if case.found.bound is not None and case.found.bound > 0 else ""
    flips = "1 flip" if case.found.flips == 1 else f"{case.found.flips} flips"
    return f"{_percent(case.found.perturbed_error)}{bound}, {flips}"


def _eigenvalue(one: Inspection, place: int) -> float | None:
    return one.eigenvalues[place] if place < len(one.eigenvalues) else None


def _on_line(one: Inspection, place: int) -> str:
    error = (one.line.errors or [])[place]
    assert isinstance(error, float)  # in one dimension
    return f"{_digits(_loss_on_line(one, place))}, {_percent(error)}"


def _loss_on_line(one: Inspection, place: int) -> float:
    loss = one.line.losses[place]
    assert isinstance(loss, float)
    return loss


def _accuracy(side: Side, name: str) -> float | None:
    """Of finished runs only: a diverged one has no weights to test."""
    result = side.record.result or {}
    value = number(result.get(name)) if side.status == "done" else None
    return None if value is None or not 0 <= value <= 100 else value


def _best_epoch(side: Side) -> str:
    value = (side.record.result or {}).get("best_epoch")
    return str(value + 1) if isinstance(value, int) and value >= 0 else OPEN


def _epochs(side: Side) -> str:
    done = (side.record.result or {}).get("epochs", len(side.record.metrics))
    return f"{done} of {side.config.epochs}" if side.config else str(done)


def _seconds(side: Side) -> str:
    """Of unfinished runs too."""
    return _number(_spent(side), "{:.1f}")


def _seconds_number(side: Side) -> float | None:
    return number(_spent(side))


def _spent(side: Side) -> Any:
    seconds = [value for row in side.record.metrics if (value := number(row.get("seconds"))) is not None]
    return (side.record.result or {}).get("seconds", sum(seconds) if seconds else None)


def _receipt(side: Side, name: str) -> str:
    value = (side.record.receipt or {}).get(name)
    return OPEN if value is None else str(value)


def _last(side: Side, name: str) -> Any:
    return side.record.metrics[-1].get(name) if side.record.metrics else None


_FORMS = {"samples_per_second": "{:,.0f}", "together": "{:,.0f}", "validation_accuracy": "{:.2f}"}


def _metric(side: Side, name: str) -> str:
    value = _last(side, name)
    if name in ("error", "perturbed_error"):
        return _percent(value) if isinstance(value, (int, float)) else OPEN
    return _number(value, _FORMS.get(name, "{:.4g}"))


def _last_number(side: Side, name: str) -> float | None:
    return number(_last(side, name))


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
