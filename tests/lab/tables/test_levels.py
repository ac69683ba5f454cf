"""How far our accuracies are from the paper's."""

import math
import statistics

import pytest
from scipy.stats import t

from bisam.lab.tables.cells import collect
from bisam.lab.tables.levels import levels, sheet_of_levels
from bisam.lab.tables.sheets import sheets


def table_of(recorded, accuracies, row="cifar10/vgg19bn", **changes):
    runs = [recorded(f"{row}/{m}", seed, x, **changes) for m, xs in accuracies.items() for seed, x in enumerate(xs)]
    (table,) = collect(runs).tables
    return table


def test_a_level_is_our_mean_minus_the_paper_s_with_welch_s_interval(recorded):
    values = [94.80, 94.96, 94.64]
    (one,) = levels(table_of(recorded, {"sam": values}))  # the paper: 95.09 ± 0.12, six runs
    squares = statistics.variance(values) / 3, 0.12**2 / 6
    freedom = sum(squares) ** 2 / (squares[0] ** 2 / 2 + squares[1] ** 2 / 5)
    half = t.ppf(0.975, freedom) * math.sqrt(sum(squares))
    assert (one.row, one.method, one.found.runs) == ("vgg19bn", "sam", (3, 6))
    assert one.found.mean == pytest.approx(94.80 - 95.09)
    assert (one.found.low, one.found.high) == pytest.approx((one.found.mean - half, one.found.mean + half))


def test_the_table_has_a_row_for_each_cell_with_runs_and_marks_those_apart_from_the_paper(recorded):
    accuracies = {"sgd": [90.0, 90.1, 90.2], "sam": [95.0, 95.2, 95.1], "bisam-log": [95.2]}
    made = sheet_of_levels(table_of(recorded, accuracies))
    assert [(row[0], row[-1]) for row in made.rows] == [
        ("vgg19bn: SGD", "yes"), ("vgg19bn: SAM", "no"), ("vgg19bn: BiSAM (-log)", "–"),
    ]  # fmt: skip
    assert made.rows[0][1:4] == ["90.10 ± 0.10, n = 3", "94.76 ± 0.10, n = 6", "−4.66"]
    assert made.rows[2][1:5] == ["95.20, n = 1", "95.22 ± 0.13, n = 6", "−0.02", "–"]


@pytest.mark.parametrize(
    ("row", "changes"),
    [("demo/40%", {}), ("cifar10/vgg19bn", {"epochs": 100}), ("glue/cola", {"model": "perceptron"})],
    ids=["not the paper's", "changed", "another network stands in"],
)
def test_runs_of_another_experiment_have_no_distance_from_the_paper(row, changes, recorded):
    table = table_of(recorded, {"sam": [90.0, 91.0]}, row, **changes)
    assert levels(table) == []
    assert sheet_of_levels(table) is None


def test_the_distances_from_the_paper_follow_the_table_of_differences(recorded):
    table = table_of(recorded, {"sgd": [94.0, 94.1], "sam": [95.0, 95.2]})
    names = [each.title.split(": ")[1].split(" in ")[0] for each in sheets([table])]
    assert names == ["test accuracy", "differences", "distance from the paper"]
