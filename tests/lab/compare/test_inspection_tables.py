"""Tables and charts of invented diagnoses: each number appears in the right row, column and position."""

import math
from pathlib import Path

import pytest

from bisam.diagnostics import Estimate, Sharpness, Surface
from bisam.lab.compare.comparison import RunComparison, Side
from bisam.lab.compare.inspection import Inspection, InspectionPlan, LossAndError, WorstCase
from bisam.lab.compare.surroundings import along, plane_rows, worst_cases
from bisam.lab.compare.tables import sheets
from bisam.lab.config import Config
from bisam.lab.records import Record

PLANE = Surface([-1.0, 1.0], [[10.0, 100.0], [1000.0, 0.0]], [[0.1, 0.2], [0.3, 0.4]])


def diagnosed(factor):
    """Diagnoses that mostly differ in their numbers, so that a mix-up is noticed."""
    worst = [
        WorstCase("cross entropy", False, 1, Sharpness(1.0, 1.5, 0.5 * factor, 0.1, 0.25, 1, None, 0.05)),
        WorstCase("Q (−log)", False, 1, Sharpness(1.0, 1.25, 0.25 * factor, 0.1, 0.3, 7, 0.2, 0.05)),
        WorstCase("Q (tanh)", False, 1, Sharpness(1.0, 1.25, 0.125 * factor, 0.1, 0.35, 8, -0.2, 0.05)),
    ]
    return Inspection(
        plan=InspectionPlan(points=5, eigenvalues=2, span=2.0),
        parameters=1234,
        samples=40,
        few=10,
        test_samples=600,
        train=LossAndError(1.0 * factor, 0.1),
        test=LossAndError(2.0 * factor, 0.2),
        worst=worst,
        average=Estimate(0.01 * factor, 0.001),
        adaptive_average=Estimate(0.02 * factor, 0.002),
        eigenvalues=[30.0 * factor],
        trace=Estimate(90.0 * factor, 3.0),
        line=Surface([-2.0, -1.0, 0.0, 1.0, 2.0], [5.0, 4.0, 1.0, 3.0, 6.0], [0.5, 0.4, 0.1, 0.3, 0.6]),
        plane=PLANE,
    )


def side(name, factor, **others):
    config = Config(method=name, epochs=3)
    metrics = [{"epoch": epoch, "seconds": 2.5, "loss": 1.0, "error": 0.25} for epoch in range(2)]
    record = Record(Path(name), config.as_dict(), metrics, **others)
    return Side(name, record, config, diagnosed(factor), missing=None)


@pytest.fixture
def comparison():
    result = {"status": "done", "test_accuracy": 90.0, "validation_accuracy": 101.0, "best_epoch": 1, "seconds": 7.0}
    return RunComparison(side("sam", 1.0), side("sgd", 2.0, result=result), [])


def lines_of(comparison):
    return {sheet.title: {line[0]: line[1:] for line in sheet.rows} for sheet in sheets(comparison)}


def test_each_diagnosis_has_a_row_with_the_values_of_both_sides_and_their_difference(comparison):
    found = lines_of(comparison)
    assert found["At the weights"] == {
        "parameters": ["1,234", "1,234", "–"],
        "training loss": ["1.00", "2.00", "+1.00"],
        "training error": ["10.0 %", "10.0 %", "+0.0 %"],
        "test loss": ["2.00", "4.00", "+2.00"],
        "test error": ["20.0 %", "20.0 %", "+0.0 %"],
        "training samples": ["40", "40", "–"],
        "test samples": ["600", "600", "–"],
    }
    assert found["How far the loss rises within ρ = 0.05"] == {
        "cross entropy, L2, 1 step": ["0.500", "1.00", "+0.500"],
        "Q (−log), L2, 1 step": ["0.250", "0.500", "+0.250"],
        "Q (tanh), L2, 1 step": ["0.125", "0.250", "+0.125"],
        "average, L2": ["0.0100 ± 0.00100", "0.0200 ± 0.00100", "+0.0100"],
        "average, adaptive": ["0.0200 ± 0.00200", "0.0400 ± 0.00200", "+0.0200"],
    }
    assert found["Training error after the perturbation, ρ = 0.05"] == {
        "at w": ["10.0 %", "10.0 %", "+0.0 %"],
        "cross entropy, L2, 1 step": ["25.0 %, 1 flip"] * 2 + ["+0.0 %"],
        "Q (−log), L2, 1 step": ["30.0 % ≥ 20.0 %, 7 flips"] * 2 + ["+0.0 %"],
        "Q (tanh), L2, 1 step": ["35.0 %, 8 flips"] * 2 + ["+0.0 %"],  # a bound below 0 is not shown
    }
    assert found["Curvature: the Hessian of the training loss"] == {
        "eigenvalue 1": ["30.0", "60.0", "+30.0"],
        "trace": ["90.0 ± 3.00", "180 ± 3.00", "+90.0"],
        "training samples": ["10", "10", "–"],
    }


def test_the_table_along_a_line_has_its_ends_its_centre_and_the_points_between(comparison):
    assert {name: cells[0] for name, cells in lines_of(comparison)["Along a random direction"].items()} == {
        "a = −2.00": "5.00, 50.0 %",
        "a = −1.00": "4.00, 40.0 %",
        "a = +0.00": "1.00, 10.0 %",
        "a = +1.00": "3.00, 30.0 %",
        "a = +2.00": "6.00, 60.0 %",
    }


def test_accuracies_are_shown_of_finished_runs_only_and_seconds_of_all_runs(comparison):
    results = lines_of(comparison)["Results"]
    assert results["test accuracy, per cent"] == ["–", "90.00", "–"]
    assert "validation accuracy, per cent" not in results  # 101 is not a valid percentage
    assert results["tested epoch"] == ["–", "2", "–"]
    assert results["epochs"] == ["2 of 3", "2 of 3", "–"]
    assert results["seconds"] == ["5.0", "7.0", "+2.0"]
    last = lines_of(comparison)["Last epoch of the training"]
    assert (last["epoch"], last["training error at w"]) == (["2", "2", "–"], ["25.0 %", "25.0 %", "+0.0 %"])


def test_a_single_run_is_compared_with_the_mean_of_a_group():
    alone, first, second = (side(name, factor) for name, factor in (("sam", 1.0), ("sgd", 2.0), ("sgd", 4.0)))
    second.record.config["seed"] = 1
    first.others = [second]
    found = lines_of(RunComparison(alone, first, []))
    assert found["At the weights"]["training loss"] == ["1.00", "3.00 ± 1.41, n = 2", "+2.00"]
    swapped = lines_of(RunComparison(first, alone, []))
    assert swapped["At the weights"]["training loss"] == ["3.00 ± 1.41, n = 2", "1.00", "−2.00"]


def test_rows_of_a_plane_have_the_coordinates_a_and_b_and_the_decimal_logarithm_of_the_loss():
    assert plane_rows(PLANE) == [
        {"a": -1.0, "b": -1.0, "loss": 10.0, "error": 0.1, "log": 1.0},
        {"a": -1.0, "b": 1.0, "loss": 100.0, "error": 0.2, "log": 2.0},
        {"a": 1.0, "b": -1.0, "loss": 1000.0, "error": 0.3, "log": 3.0},
        {"a": 1.0, "b": 1.0, "loss": 0.0, "error": 0.4},  # 0 has no logarithm
    ]
    assert plane_rows(Surface([0.0], [[math.inf]], None)) == [{"a": 0.0, "b": 0.0}]


def test_charts_contain_the_losses_the_errors_and_the_rises_of_each_side(comparison):
    for name, values in (("loss", [5.0, 4.0, 1.0, 3.0, 6.0]), ("error", [0.5, 0.4, 0.1, 0.3, 0.6])):
        (rows,) = along(comparison, name).data.values()
        ours = [(row["distance"], row["value"]) for row in rows if row["side"] == "sam"]
        assert ours == [*zip([-2.0, -1.0, 0.0, 1.0, 2.0], values, strict=True)]
    (rows,) = worst_cases(comparison).data.values()
    assert [(row["side"], row["rise"]) for row in rows] == [
        *[("sam", 0.5), ("sam", 0.25), ("sam", 0.125)],
        *[("sgd", 1.0), ("sgd", 0.5), ("sgd", 0.25)],
    ]
