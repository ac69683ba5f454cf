"""Sweeps over hyperparameters: the runs of a grid, the chosen point, and the command line."""

import io
import json
import math
import os
import signal
import statistics
from contextlib import redirect_stdout
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st
from rich.console import Console
from torch import nn
from typer.testing import CliRunner

from bisam.lab import methods
from bisam.lab.cli import app
from bisam.lab.cli.sweep import _label_of
from bisam.lab.config import Config
from bisam.lab.recipes import find_recipe
from bisam.lab.records import Record
from bisam.lab.tables import sweeps as sweep
from bisam.lab.tables.cells import Run, collect
from bisam.lab.tables.sweeps import GridPoint, Sweep, outcome
from bisam.lab.training.grids import NOT_SWEPT, cell_grids
from bisam.lab.training.progress import Progress
from bisam.lab.training.run import TrainingRun

TANH = find_recipe("cifar10/resnet56/bisam-tanh")
OWN = TANH.cells["resnet56", "bisam-tanh"]


# The runs of a grid.


def plan(name, *fields, seeds=(0,), **options):
    (found,) = cell_grids(find_recipe(name), fields, seeds, Path("runs"), **options)
    return found


def grid(name, field):
    (axis,) = plan(name, field).axes
    return axis


def test_alpha_and_mu_have_the_grids_of_the_paper():
    assert grid("cifar10/resnet56/bisam-tanh", "alpha").values == (0.01, 0.1, 1, 10, 100)
    mu = grid("cifar10/resnet56/bisam-log", "mu")
    assert mu.description == "mu over 0.1, 0.5, 1, 2, 4 (the paper's grid)"


def test_a_value_of_the_recipe_that_is_not_in_the_grid_is_added_to_it():
    mu = grid("cifar10/resnet56/bisam-tanh", "mu")
    assert mu.values == (0.1, 0.5, 1, 2, 4, 10)
    assert mu.origin == "the paper's grid, and the recipe's own 10"
    assert grid("imagenet/resnet50/bisam-log", "mu").values == (0.1, 0.5, 1, 2, 4, 5)


@pytest.mark.parametrize("method", ["asam", "abisam-log", "abisam-tanh"])
def test_rho_has_the_grid_of_the_paper_for_adaptive_methods(method):
    rho = grid(f"adaptive/resnet56/{method}", "rho")
    assert (rho.values, rho.origin) == ((0.1, 0.5, 1, 2, 3), "the paper's grid")


@pytest.mark.parametrize("name", ["cifar10/resnet56/sam", "cifar10/resnet56/bisam-log", "efficient/resnet56/esam"])
def test_rho_of_other_methods_has_a_grid_that_is_marked_as_ours(name):
    rho = grid(name, "rho")
    assert (rho.values, rho.origin) == ((0.01, 0.02, 0.05, 0.1, 0.2), "our grid: the paper has none")


def test_several_fields_are_swept_over_their_product():
    found = plan("cifar10/resnet56/bisam-tanh", "alpha", "mu", seeds=[0, 1])
    points = [(job.config.alpha, sweep.value_of(job.config, "mu")) for job in found.jobs if job.config.seed == 0]
    assert len(points) == len({*points}) == 5 * 6
    assert len(found.jobs) == 2 * 5 * 6


def test_all_points_of_a_seed_are_trained_before_the_next_seed():
    found = plan("cifar10/resnet56/bisam-tanh", "alpha", seeds=[3, 4])
    assert [job.config.seed for job in found.jobs] == [3] * 5 + [4] * 5


def folders(name, field, *values, **options):
    found = plan(name, field, values={field: values}, **options)
    return [job.folder.name for job in found.jobs]


def test_a_point_with_the_recipe_s_values_has_the_folder_of_the_recipe_s_run():
    assert folders("cifar10/resnet56/bisam-tanh", "alpha", "0.10", "1") == [
        "resnet56-bisam-tanh-seed0", "resnet56-bisam-tanh-seed0+alpha=1.0",
    ]  # fmt: skip
    changed = folders("cifar10/resnet56/sam", "rho", "0.05", "0.1", changes={"epochs": "3"})
    assert changed == ["resnet56-sam-seed0+epochs=3", "resnet56-sam-seed0+epochs=3+rho=0.1"]


@pytest.mark.parametrize(("method", "default"), [("bisam-log", "1"), ("bisam-tanh", "10")])
def test_a_point_with_the_paper_s_mu_has_the_folder_of_the_recipe_s_run(method, default):
    own, other = sorted(folders(f"cifar10/resnet56/{method}", "mu", default, "3"))
    assert own == f"resnet56-{method}-seed0"
    assert other == f"resnet56-{method}-seed0+mu=3.0"


def test_a_micro_batch_of_the_size_of_the_batch_counts_as_no_micro_batch():
    assert folders("cifar10/resnet56/sam", "micro_batch", "128", "32")[1] == "resnet56-sam-seed0"
    both = plan("cifar10/resnet56/sam", "batch", "micro_batch", values={"batch": ["64"], "micro_batch": ["64", "128"]})
    assert [(job.config.batch, job.config.micro_batch) for job in both.jobs] == [(64, None), (64, 128)]


@pytest.mark.parametrize("method", ["sam", "bisam-tanh"])
def test_no_finite_value_of_clip_norm_counts_as_none(method):
    """1 and 10 are values that None stands for in mu."""
    found = plan(f"cifar10/resnet56/{method}", "clip_norm", values={"clip_norm": ["1", "10"]})
    assert [job.config.clip_norm for job in found.jobs] == [1.0, 10.0]
    assert sweep.value_of(found.own, "clip_norm") == math.inf


def test_every_swept_field_that_may_be_none_has_a_number_that_stands_for_none():
    nullable = [name for name in sweep.NUMBERS if getattr(Config(), name) is None]
    swept = [name for name in nullable if name not in NOT_SWEPT]
    assert [sweep.value_of(Config(), name) for name in swept] == [math.inf, 1.0, 128, 1]


def test_given_values_are_sorted_without_duplicates():
    (axis,) = plan("cifar10/resnet56/sam", "batch", values={"batch": ["256", "64", "64"]}).axes
    assert (axis.values, axis.origin) == ((64, 256), "as given")


PAIRS = {
    "rho": (0.05, 0.5), "micro_batch": (None, 4), "mu": (1.0, 3.0), "alpha": (0.1, 2.0), "eta": (0.0, 0.5),
    "beta": (0.5, 0.9), "gamma": (0.5, 0.25), "every": (1, 2), "start": (0.0, 0.4), "stop": (1.0, 0.4),
}  # fmt: skip


def weights_after_steps(config):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
    optimizer = methods.optimizer(model, config, steps=5)
    for _ in range(3):  # the first step of MSAM does not perturb: there is no momentum yet
        optimizer.minimize(torch.randn(8, 6), torch.arange(8) % 4)
    return [param.tolist() for param in model.parameters()]


@pytest.mark.parametrize("method", methods.METHODS)
def test_the_fields_of_a_method_are_exactly_those_that_change_its_steps(method):
    optimizer = method if method in methods.BASES else "sgd"
    config = Config(method=method, optimizer=optimizer, precision="fp32")
    steps = {
        field: [weights_after_steps(replace(config, **{field: value})) for value in pair]
        for field, pair in PAIRS.items()
    }
    assert {field for field, (one, other) in steps.items() if one != other} == {*methods.METHODS[method].fields}


# The chosen point.


def run(values=None, accuracy=90.0, seed=0, status="done", metrics=(), **others):
    config = replace(OWN, seed=seed, **(values or {}), **others)
    result = {"status": status, "validation_accuracy": accuracy, "test_accuracy": 50.0} if status else None
    return Run(Record(Path("runs"), config.as_dict(), list(metrics), result), config)


def runs_of(field, accuracies):
    """Runs from the accuracies of seeds 0, 1, … of each value; None is a run that diverged."""
    return [
        run({field: value}, -1.0 if accuracy is None else accuracy, seed, "diverged" if accuracy is None else "done")
        for value, of_seeds in accuracies.items()
        for seed, accuracy in enumerate(of_seeds)
    ]


def swept(field, accuracies):
    (found,) = outcome(TANH, [field], runs_of(field, accuracies))
    return found


def test_the_point_with_the_best_mean_validation_accuracy_is_chosen():
    found = swept("alpha", {1.0: [90, 94], 0.1: [91, 92], 10.0: [95, 80]})
    assert found.name == "cifar10/resnet56/bisam-tanh"
    assert [point.values for point in found.points] == [(0.1,), (1.0,), (10.0,)]
    assert found.chosen == GridPoint((1.0,), {0: 90, 1: 94})
    assert found.own == (0.1,)
    assert found.own_point.accuracies == {0: 91, 1: 92}


def test_among_equal_points_the_recipe_s_is_chosen_and_else_the_smallest_value():
    assert swept("alpha", {0.01: [91], 0.1: [91], 1.0: [91]}).chosen.values == (0.1,)
    assert swept("alpha", {0.01: [92], 0.1: [91], 1.0: [92]}).chosen.values == (0.01,)


@given(
    right=st.lists(st.integers(0, 5000), min_size=3, max_size=3),
    moved=st.integers(-200, 200),
)
@example(right=[4640, 4001, 4626], moved=52)
def test_points_with_equal_counts_are_ties_whatever_their_rounding_errors(right, moved):
    others = [right[0] + moved, right[1] - moved, right[2]]
    assume(all(0 <= count <= 5000 for count in others))
    found = swept("alpha", {0.01: [count / 50 for count in others], 0.1: [count / 50 for count in right]})
    assert found.chosen.values == (0.1,)


def test_a_point_with_a_diverged_run_is_not_chosen():
    found = swept("alpha", {0.01: [99, None], 0.1: [90, 91], 1.0: [89, 88]})
    assert found.chosen.values == (0.1,)
    assert found.points[0] == GridPoint((0.01,), {0: 99}, diverged=(1,))
    assert "Points with a run that diverged are not chosen: 1 of 3." in found.conclusions


def test_a_point_with_a_diverged_run_is_not_marked_as_indistinguishable_from_the_choice():
    found = swept("alpha", {0.01: [90, 91.5, None], 0.1: [90, 91, 92], 1.0: [90, 90.5, 92]})
    assert [row[-1] for row in sweep.sheet(found).rows] == ["", "chosen, the recipe's", " ~"]


def test_the_tried_runs_of_a_sweep_are_those_with_other_values_than_the_recipe():
    (found,) = sweep.sweeps(TANH, runs_of("alpha", {0.01: [90], 0.1: [91], 1.0: [89]}))
    assert [run.config.alpha for run in found.tried] == [0.01, 1.0]


def test_choosing_no_clipping_is_not_reported_as_an_edge_of_the_grid():
    found = swept("clip_norm", {1.0: [90], 2.0: [91], None: [95]})
    assert found.chosen.values == (math.inf,)
    assert found.edges == []


def test_if_every_point_has_a_diverged_run_nothing_is_chosen():
    found = swept("alpha", {0.1: [90, None], 1.0: [None, None]})
    assert found.chosen is None
    assert found.edges == []
    assert found.conclusions == ["Nothing is chosen: every point has a run that diverged."]
    assert [row[1:4] for row in sweep.sheet(found).rows] == [["90.00", "1", "1"], ["–", "0", "2"]]


def test_the_accuracy_in_the_result_counts_rather_than_that_of_the_best_epoch():
    """If a recipe selects the last weights, the result has the last validation accuracy."""
    epochs = [{"epoch": 0, "validation_accuracy": 99.0}, {"epoch": 1, "validation_accuracy": 80.0}]
    (found,) = outcome(TANH, ["alpha"], [run({"alpha": 1.0}, 80.0, metrics=epochs), run(accuracy=85.0)])
    assert found.chosen.values == (0.1,)


def test_a_value_with_other_seeds_than_the_rest_is_excluded_and_named():
    runs = [run({"alpha": alpha}, 90.0, seed=seed) for alpha in (0.1, 1.0, 10.0) for seed in (0, 1)]
    (found,) = outcome(TANH, ["alpha"], [*runs, run({"alpha": 5.0}, 99.0, seed=7)])
    assert [point.values for point in found.points] == [(0.1,), (1.0,), (10.0,)]
    assert found.conclusions[-1] == "Left out, since they lack the seeds of the others: alpha = 5."


def test_seeds_that_at_most_half_of_the_points_have_are_excluded_and_named():
    found = swept("alpha", {0.1: [90, 91, 92, 93], 1.0: [89, 90, 91], 10.0: [88, 89], 100.0: [87, 88]})
    assert [point.accuracies.keys() for point in found.points] == [{0, 1}] * 4
    assert found.seeds_left_out == (2, 3)
    assert found.conclusions[-1] == "Left out, since at most half of the points have them: seeds 2, 3."
    assert "Left out" not in "".join(swept("alpha", {0.1: [90, 91], 1.0: [89, 90]}).conclusions)


def test_sweeps_are_found_among_runs_with_the_same_other_changes():
    own = {"alpha": (0.1, 1.0, 10.0)}
    runs = [run({"alpha": alpha}, 90.0 + alpha, epochs=3) for alpha in own["alpha"]]
    (found,) = sweep.sweeps(TANH, [*runs, run({"alpha": 100.0}, 99.0), run({"mu": 1.0}, 99.0)])
    assert (found.fields, found.changes) == (("alpha",), "epochs=3")
    assert [point.values for point in found.points] == [(alpha,) for alpha in own["alpha"]]
    assert sweep.sweeps(TANH, runs[:2]) == []  # two values make no sweep


def test_runs_of_a_sweep_appear_in_no_table_of_test_accuracies(recorded):
    records = [run({"alpha": alpha}, 90.0).record for alpha in (0.1, 1.0, 10.0)]
    baselines = [recorded(f"cifar10/resnet56/{method}", 0, 94.0) for method in ("sgd", "sam")]  # which have no alpha
    tables, found = sweep.sort_out(collect(records + baselines))
    assert [table.changes for table in tables] == [""]
    assert len(found) == 1


def test_a_changed_table_that_is_not_a_sweep_is_kept(recorded):
    changed = [recorded(f"cifar10/resnet56/{method}", 0, 94.0, epochs=3) for method in ("sgd", "sam")]
    tables, found = sweep.sort_out(collect(changed))
    assert ([table.changes for table in tables], found) == (["epochs=3"], [])


def test_runs_of_a_sweep_may_differ_in_compile():
    runs = [run({"alpha": alpha}, 90.0, compile=alpha > 1) for alpha in (0.1, 1.0, 10.0)]
    (found,) = sweep.sweeps(TANH, runs)
    assert (len(found.points), found.changes) == (3, "")


def test_a_value_that_lacks_a_seed_of_the_others_is_excluded():
    found = swept("alpha", {0.1: [90, 91], 1.0: [89, 90], 10.0: [99]})
    assert [point.values for point in found.points] == [(0.1,), (1.0,)]
    assert found.left_out == ((10.0,),)


def test_where_every_is_not_set_its_value_is_the_default_of_the_method():
    assert [sweep.value_of(Config(method=method), "every") for method in ("sam", "looksam")] == [1, 5]


def test_the_point_is_chosen_by_the_first_measure_of_the_recipe():
    recipe = find_recipe("glue/cola/bisam-log")
    (own,) = recipe.cells.values()
    results = {1.0: {"mcc": -3.0, "accuracy": 99.0}, 2.0: {"mcc": 5.0, "accuracy": 1.0}}
    runs = []
    for mu, values in results.items():
        config, result = replace(own, mu=mu), {f"validation_{name}": value for name, value in values.items()}
        runs.append(Run(Record(Path("runs"), config.as_dict(), [], {"status": "done", **result}), config))
    (found,) = outcome(recipe, ["mu"], runs)
    assert (found.chosen.values, found.points[0].mean) == ((2.0,), -3.0)
    assert found.measure == "validation Matthews correlation"


def test_only_seeds_common_to_all_values_count():
    (found,) = outcome(TANH, ["alpha"], [run(accuracy=90), run(accuracy=99, seed=1), run({"alpha": 1.0}, 91)])
    assert [point.accuracies for point in found.points] == [{0: 90}, {0: 91}]
    assert outcome(TANH, ["alpha"], [run(), run({"alpha": 1.0}, seed=1)]) == []


def test_runs_that_differ_in_another_field_are_ignored():
    own, other = run(), run({"alpha": 1.0}, 95.0, epochs=3)
    assert outcome(TANH, ["alpha"], [own, other]) == []
    (found,) = outcome(TANH, ["alpha"], [own, run({"alpha": 1.0}), other])
    assert found.points[1].accuracies == {0: 90.0}


def test_compile_and_deterministic_do_not_separate_the_points_of_a_sweep():
    (found,) = outcome(TANH, ["alpha"], [run(compile=True), run({"alpha": 1.0}, deterministic=True)])
    assert len(found.points) == 2


def test_runs_without_a_result_or_a_validation_accuracy_are_ignored():
    (found,) = outcome(
        TANH, ["alpha"], [run(), run({"alpha": 1.0}), run({"alpha": 10.0}, status=None), run({"alpha": 5.0}, None)]
    )
    assert [point.values for point in found.points] == [(0.1,), (1.0,)]


def test_mu_of_none_and_the_number_that_it_stands_for_are_one_point():
    found = swept("mu", {None: [90], 10.0: [95], 4.0: [80]})
    assert [(point.values, point.accuracies) for point in found.points] == [((4.0,), {0: 80}), ((10.0,), {0: 90})]
    assert found.own == (10.0,)


def test_a_method_that_does_not_use_the_field_has_no_sweep():
    sam = replace(OWN, method="sam")
    recipe = replace(TANH, cells={("resnet56", "sam"): sam, **TANH.cells})
    runs = [Run(each.record, replace(each.config, method="sam")) for each in runs_of("alpha", {0.1: [90], 1.0: [91]})]
    assert outcome(recipe, ["alpha"], runs) == []
    assert [found.cell for found in outcome(recipe, ["alpha"], [*runs, run(), run({"alpha": 1.0})])] == [
        ("resnet56", "bisam-tanh")
    ]


# Conclusions.


def sweep_of(accuracies, own=(0.1,)):
    points = [GridPoint(values, dict(enumerate(of_seeds))) for values, of_seeds in accuracies.items()]
    return Sweep("cifar10", ("resnet56", "bisam-tanh"), ("alpha", "mu")[: len(own)], own, points)


def test_the_choice_is_compared_with_the_recipe_in_pairs_of_equal_seeds():
    found = sweep_of({(0.1,): [80, 85, 90], (1.0,): [81, 86.1, 91], (10.0,): [0, 0, 0]})
    assert found.conclusions == [
        "Chosen: alpha = 1. alpha = 1 is better than the recipe's alpha = 0.1 by 1.03 points, 95 % interval +0.89 to "
        "+1.18: resolved with 3 pairs. The interval does not account for the choice among 3 points."
    ]


def test_an_unresolved_difference_to_the_recipe_is_reported():
    words, level = sweep_of({(0.1,): [80, 85], (1.0,): [81, 87], (10.0,): [0, 1]}).conclusions
    assert words.startswith("Chosen: alpha = 1. alpha = 1 is above the recipe's alpha = 0.1 by 1.50 points, 95 % inter")
    assert level == "~: not distinguishable from the choice with these seeds."
    assert words.endswith("not resolved with 2 pairs.")
    (words,) = sweep_of({(0.1,): [80], (1.0,): [81], (10.0,): [0]}).conclusions
    assert words.endswith("not resolved, the scatter cannot be estimated from 1 run each.")


def test_a_choice_equal_to_the_recipe_s_is_reported_as_such():
    found = sweep_of({(0.01,): [1], (0.1,): [2], (1.0,): [1]})
    assert found.conclusions == ["Chosen: alpha = 0.1, as in the recipe."]
    assert found.gain is None


def test_without_results_of_the_recipe_s_value_the_reason_for_no_comparison_is_reported():
    assert sweep_of({(0.01,): [1], (1.0,): [2], (10.0,): [1]}).conclusions == [
        "Chosen: alpha = 1. The grid lacks the recipe's alpha = 0.1: add it to the values to compare with it."
    ]
    assert sweep_of({(0.5,): [1], (1.0,): [2]}, own=(math.inf,)).conclusions[0] == (
        "Chosen: alpha = 1. The recipe has alpha = inf: bisam train cifar10/resnet56/bisam-tanh trains it, to compare "
        "with."
    )
    assert swept("alpha", {0.01: [1], 0.1: [None], 1.0: [2], 10.0: [1]}).conclusions[0] == (
        "Chosen: alpha = 1. Every run of the recipe's alpha = 0.1 diverged."
    )


def test_a_choice_at_the_edge_of_the_grid_is_reported():
    found = sweep_of({(0.1, 1.0): [1], (0.1, 2.0): [1], (1.0, 1.0): [2], (1.0, 2.0): [1]}, own=(0.1, 1.0))
    assert found.edges == [("alpha", "largest"), ("mu", "smallest")]
    assert found.conclusions[1:] == [
        "It is the largest alpha of the grid: the best may lie beyond.",
        "It is the smallest mu of the grid: the best may lie beyond.",
    ]


def test_an_edge_that_is_not_resolved_as_better_than_the_recipe_is_not_reported():
    found = sweep_of({(0.1,): [80, 85], (1.0,): [81, 87]})
    assert found.edges == [("alpha", "largest")]
    assert "beyond" not in "".join(found.conclusions)


def test_a_field_with_one_value_has_no_edge():
    assert sweep_of({(0.1, 1.0): [1], (1.0, 1.0): [2], (10.0, 1.0): [1]}, own=(0.1, 1.0)).edges == []


def test_the_table_has_a_line_for_each_point():
    sheet = sweep.sheet(sweep_of({(0.1, 10.0): [80, 82], (1.0, 10.0): [83, 83]}, own=(0.1, 10.0)))
    assert sheet.title == "cifar10/resnet56/bisam-tanh: validation accuracy in per cent"
    assert sheet.head == ["alpha", "mu", "validation accuracy", "n", "diverged", ""]
    assert sheet.rows == [
        ["0.1", "10", "81.00 ± 1.41", "2", "0", "the recipe's ~"], ["1", "10", "83.00 ± 0.00", "2", "0", "chosen"],
    ]  # fmt: skip
    assert sheet.notes[0].startswith("Chosen: alpha = 1, mu = 10.")


# The command.


def bisam(*arguments, runs):
    return CliRunner().invoke(app, [*arguments, "--runs", str(runs), "--device", "cpu"], env={"COLUMNS": "200"})


def results(runs):
    return {path.parent.name: json.loads(path.read_text()) for path in runs.rglob("result.json")}


SHORT = ["--set", "epochs=1", "--seeds", "0,1"]
OVER_ALPHA = ["sweep", "demo/40%/bisam-tanh", "--over", "alpha", "--values", "0.1,1", *SHORT]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a sweep that found a run of the recipe finished, and what the sweep printed."""
    runs = tmp_path_factory.mktemp("runs")
    bisam("train", "demo/40%/bisam-tanh", *SHORT, "--seeds", "0", runs=runs)
    (before,) = runs.rglob("result.json")
    time = before.stat().st_mtime_ns
    done = bisam(*OVER_ALPHA, "--together", "2", runs=runs)
    assert done.exit_code == 0, done.stderr or done.exception
    assert before.stat().st_mtime_ns == time
    return runs, done.stdout


def test_the_cells_of_a_sweep_have_separate_runs(tmp_path):
    recipe = find_recipe("demo/40%").only([], ["sam", "bisam-log"])
    found = cell_grids(recipe, ["rho"], [0, 1], tmp_path, values={"rho": ["0.05", "0.2"]})
    assert [grid.description.partition(":")[2] for grid in found] == [" rho over 0.05, 0.2 (as given), 4 runs"] * 2
    for grid in found:
        points = [(job.config.seed, job.config.rho) for job in grid.jobs]
        assert points == [(0, 0.05), (0, 0.2), (1, 0.05), (1, 0.2)]  # all values of a seed first
        assert {job.config.method for job in grid.jobs} == {grid.cell[1]}
    assert len({job.folder for grid in found for job in grid.jobs}) == 8


def test_a_sweep_trains_every_value_with_every_seed_and_no_run_twice(trained):
    runs, printed = trained
    name = "noise40-bisam-tanh-seed"
    assert {*results(runs)} == {f"{name}{seed}+epochs=1{alpha}" for seed in (0, 1) for alpha in ("", "+alpha=1.0")}
    assert "demo/40%/bisam-tanh: alpha over 0.1, 1 (as given), 4 runs" in printed
    assert "1 of 4 runs are done already" in printed
    assert "4 of 4 runs are done already" in bisam(*OVER_ALPHA, runs=runs).stdout


def test_the_table_shows_the_validation_accuracies_of_the_runs(trained):
    runs, printed = trained
    found = results(runs)
    means = {}
    for alpha, end in {"0.1": "", "1": "+alpha=1.0"}.items():
        values = [found[f"noise40-bisam-tanh-seed{seed}+epochs=1{end}"]["validation_accuracy"] for seed in (0, 1)]
        means[alpha] = statistics.mean(values)
        (line,) = (line for line in printed.splitlines() if line.startswith(f"│ {alpha} "))
        assert f"{statistics.mean(values):.2f} ± {statistics.stdev(values):.2f} │ 2 │        0 │" in line
    best = max(means, key=means.get)
    assert f"Chosen: alpha = {best}" in printed
    (line,) = (line for line in printed.splitlines() if "chosen" in line)
    assert line.startswith(f"│ {best} ")


def test_a_sweep_does_not_print_test_accuracies(tmp_path, monkeypatch):
    monkeypatch.setattr(TrainingRun, "test_accuracies", lambda _: {"test_accuracy": 77.77})
    done = bisam(*OVER_ALPHA, runs=tmp_path)
    assert done.exit_code == 0, done.stderr
    assert [each["test_accuracy"] for each in results(tmp_path).values()] == [77.77] * 4
    assert "alpha = 0.1  validation accuracy" in done.stdout
    assert "77.77" not in done.stdout
    assert "test" not in done.stdout


def test_each_cell_is_swept_separately(tmp_path):
    over = ["--methods", "sam,bisam-log", "--over", "weight-decay", "--values", "0,0.0005"]
    done = bisam("sweep", "demo", *over, *SHORT, "--seeds", "0", runs=tmp_path)
    assert done.exit_code == 0, done.stderr
    for method in ("sam", "bisam-log"):
        assert f"demo/40%/{method}, with epochs=1: validation accuracy in per cent" in done.stdout
        assert f"noise40-{method}-seed0+epochs=1+weight_decay=0.0" in results(tmp_path)
    assert done.stdout.count("Chosen: weight_decay = ") == 2


def test_giving_values_for_one_field_keeps_the_grids_of_the_others(tmp_path, monkeypatch):
    planned = []
    monkeypatch.setattr("bisam.lab.training.jobs.run", lambda jobs, *_, **_options: planned.extend(jobs))
    done = bisam("sweep", "demo/40%/bisam-tanh", "--over", "alpha,mu", "--values", "mu=1,10", runs=tmp_path)
    assert done.exit_code == 0, done.stderr
    assert "alpha over 0.01, 0.1, 1, 10, 100 (the paper's grid), mu over 1, 10 (as given), 30 runs" in done.stdout
    assert len(planned) == 5 * 2 * 3


def test_a_run_that_diverges_is_counted_and_not_chosen(tmp_path):
    over = ["--over", "lr", "--values", "0.05,1000", "--set", "momentum=1", "--set", "epochs=3"]
    done = bisam("sweep", "demo/40%/sam", *over, "--seeds", "0", runs=tmp_path)
    assert done.exit_code == 0, done.stderr
    assert "lr = 1000  diverged" in done.stdout
    assert "│ 1000 │                   – │ 0 │        1 │" in done.stdout
    assert "Chosen: lr = 0.05, as in the recipe." in done.stdout


def test_a_sweep_continues_if_stdout_is_a_pipe_closed_by_its_reader(tmp_path):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as unread, redirect_stdout(unread):
        app([*OVER_ALPHA, "--seeds", "0", "--runs", str(tmp_path), "--device", "cpu"], standalone_mode=False)
    assert len(results(tmp_path)) == 2


def test_an_interrupted_sweep_is_resumed_by_the_same_command(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(Progress, "step", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
        done = bisam(*OVER_ALPHA, runs=tmp_path)
    assert done.exit_code == 130
    assert "the same command resumes" in done.stderr
    assert results(tmp_path) == {}
    done = bisam(*OVER_ALPHA, runs=tmp_path)
    assert "resumes at epoch 1, batch 2" in done.stdout
    assert len(results(tmp_path)) == 4


def test_the_options_together_and_checkpoint_seconds_are_passed_to_the_training(tmp_path, monkeypatch):
    passed = {}
    monkeypatch.setattr("bisam.lab.training.jobs.run", lambda *_, **options: passed.update(options))
    bisam(*OVER_ALPHA, "--together", "3", "--checkpoint-seconds", "7", runs=tmp_path)
    assert (passed["together"], passed["checkpoint_seconds"]) == (3, 7.0)


def test_a_sweep_accepts_partial_data_only_if_requested(tmp_path, hub_layout, monkeypatch):
    monkeypatch.setenv("BISAM_CACHE", str(tmp_path / "cache"))
    pixels = np.random.default_rng(0).integers(0, 256, (60, 3, 32, 32), np.uint8)
    for split, count in {"train": 60, "test": 12}.items():
        path = tmp_path / "cifar10" / f"{split}-00000-of-00001.parquet"
        hub_layout.write_file(path, [hub_layout.encoded(image) for image in pixels[:count]], np.arange(count) % 10)
    over = ["sweep", "cifar10/resnet56/sam", "--over", "rho", "--values", "0.05,0.1", *SHORT, "--seeds", "0"]
    small = ["--set", "model=resnet20", "--set", "batch=16", "--data", str(tmp_path / "cifar10")]
    refused = bisam(*over, *small, runs=tmp_path)
    assert "60 samples" in refused.stderr
    done = bisam(*over, *small, "--partial-data", runs=tmp_path)
    assert done.exit_code == 0, done.stderr
    assert all("+partial_data=True" in name for name in results(tmp_path))
    assert "Chosen: rho = " in done.stdout


def test_a_progress_bar_is_labelled_with_the_swept_values_of_its_run():
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=True, width=200)
    with Progress(console, label=partial(_label_of, fields=["alpha", "mu"])) as progress:
        progress.begin({OWN: 0}, batches=3)
    assert "BiSAM (tanh) seed 0 resnet56, alpha = 0.1, mu = 10" in shown.getvalue()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["demo/40%/sam", "--over", "mu"],
            "SAM does not use mu: its own fields are rho, micro_batch, every, start, stop. Sweep another",
        ),
        (["demo/40%/sgd", "--over", "rho"], "SGD does not use rho: it has no own fields."),
        (["demo/40%/bisam-log", "--over", "alpha"], "BiSAM (-log) does not use alpha: its own fields are rho, micro_"),
        (
            ["efficient/resnet56/esam", "--over", "eta"],
            "its own fields are rho, micro_batch, every, start, stop, beta, gamma",
        ),
        (["demo", "--over", "rho"], "SGD does not use rho"),
        (["demo", "--over", "alfa"], "unknown field 'alfa': the nearest names are alpha"),
        (["demo", "--over", "model"], "model is not a number, and only numbers can be swept"),
        (["demo", "--over", "flip"], "flip is not a number"),
        (
            ["demo", "--over", "seed", "--values", "1,2"],
            "seed cannot be swept: it is not a hyperparameter: use --seeds",
        ),
        (["demo", "--over", "noise", "--values", "0,1"], "noise cannot be swept: it changes the validation data"),
        (["demo", "--over", "validation", "--values", "0.1,0.2"], "validation cannot be swept: it changes"),
        (["demo", "--over", "epoch_steps", "--values", "1,2"], "epoch_steps cannot be swept: it may be none"),
        (["demo", "--over", ","], "no field in --over: name one or more, such as --over alpha,mu"),
        (["demo", "--over", "lr"], "lr has no grid in the paper: give its values, such as --values lr="),
        (["demo/40%/sam", "--over", "rho", "--set", "rho=1"], "rho is both swept and set: remove --set rho=1"),
        (["demo/40%/sam", "--over", "rho", "--values", "0.1"], "a sweep compares two values or more, got rho = 0.1"),
        (["demo/40%/sam", "--over", "rho", "--values", "0.1,0.10"], "two values or more, got rho = 0.1"),
        (["demo/40%/sam", "--over", "rho", "--values", "0.1,x"], "rho is a number, got 'x'"),
        (["demo/40%/sam", "--over", "rho", "--values", "0.1,-1"], "rho must lie between 0 and 1000, got -1"),
        (["demo/40%/sam", "--over", "batch", "--values", "8,9.5"], "batch is a whole number, got '9.5'"),
        (["demo/40%/bisam-log", "--over", "mu", "--values", "1,none"], "mu is swept over numbers, got 'none'"),
        (["demo/40%/sam", "--over", "rho", "--values", ","], "no numbers in --values ',': give some such as rho=0.1,1"),
        (["demo/40%/sam", "--over", "rho", "--values", "lr=1,2"], "--values has lr, which is not swept"),
        (["demo/40%/sam", "--over", "rho", "--values", "1", "--values", "2"], "--values has rho twice"),
        (
            ["demo/40%/bisam-tanh", "--over", "alpha,mu", "--values", "1,2"],
            "name that of the values 1,2, as in alpha=1,2",
        ),
        (["demo/40%/sam", "--over", "rho", "--set", "method=sgd"], "method is part of a run's name"),
        (
            ["demo/40%/sam", "--over", "rho", "--set", "partial_data=1"],
            "use --partial-data instead of --set partial_data=",
        ),
        (["demo/40%/sam", "--over", "rho", "--seeds", "a"], "seeds are numbers such as 0,1,2 or 0-5, got 'a'"),
        (["demo/40%/sam", "--over", "rho", "--data", "here"], "digits is not read from files: remove --data, got here"),
        (["demo", "--methods", "sem", "--over", "rho"], "unknown method 'sem' of demo"),
        (["demi", "--over", "rho"], "unknown recipe 'demi'"),
    ],
)
def test_invalid_arguments_are_refused_with_a_message_and_nothing_is_trained(arguments, message, tmp_path):
    done = bisam("sweep", "--set", "epochs=1", "--seeds", "0", *arguments, runs=tmp_path)
    assert done.exit_code == 1, done.exception
    assert message in " ".join(done.stderr.split())
    assert results(tmp_path) == {}


def test_the_option_over_is_required(tmp_path):
    done = bisam("sweep", "demo", runs=tmp_path)
    assert done.exit_code == 2
    assert "--over" in done.stderr


def test_an_unknown_device_is_refused(tmp_path):
    done = CliRunner().invoke(app, [*OVER_ALPHA, "--runs", str(tmp_path), "--device", "tpu"])
    assert done.exit_code == 1
    assert "auto, cpu or cuda, got 'tpu'" in done.stderr
