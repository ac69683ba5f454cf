"""Planning a table before it is trained: the order of runs, and the comparisons that fit a budget."""

import itertools
import json
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from typer.testing import CliRunner

from bisam.lab.cli import app
from bisam.lab.models import MODELS
from bisam.lab.recipes import find_recipe
from bisam.lab.tables import gpus, plan_sheets, planning
from bisam.lab.tables.cells import collect
from bisam.lab.tables.costs import hours_of_run
from bisam.lab.tables.footprint import estimated_mib
from bisam.lab.tables.planning import Budget, Comparison
from bisam.lab.tables.power import seeds_to_resolve

RESULTS = Path(__file__).parents[3] / "benchmarks/results"
ROW = "cifar10/resnet56"


def plan(name=ROW, records=(), gpus_=8, hours=10.0, effect=None):
    return planning.plan(find_recipe(name), collect(records).tables, Budget(gpus.H200, gpus_, hours), effect)


SIZES = {3: 3.5, 4: 2.2, 5: 1.75, 6: 1.5, 10: 1.0}
"""By number of seeds, an effect that needs this many if the scatter is 1."""


def comparison(row, method, baseline, needed):
    one = Comparison(row, row, method, baseline, SIZES[needed], 1.0, 3, is_resolved=False)
    assert one.needed == needed
    return one


# The order of runs.


def test_comparisons_share_the_runs_of_their_baseline():
    compared = [comparison("r", "bisam-log", "sam", 10), comparison("r", "bisam-tanh", "sam", 6)]
    costs = {("r", "sam"): 1.0, ("r", "bisam-log"): 1.0, ("r", "bisam-tanh"): 1.0}
    finished = {cell: frozenset() for cell in costs} | {("r", "sam"): frozenset({0, 1, 7})}
    first, second = planning.greedy(compared, costs, finished, Budget(gpus.H200, 2, 100))
    assert (first.comparison.method, first.runs, first.gpu_hours) == ("bisam-tanh", 4 + 6, 10.0)  # of sam 2, 3, 4, 5
    assert (second.comparison.method, second.runs, second.gpu_hours) == ("bisam-log", 3 + 10, 13.0)  # 6, 8 and 9
    assert second.end == pytest.approx(math.ceil(23 / 2))


def test_comparisons_beyond_the_budget_leave_it_to_those_that_fit():
    compared = [comparison("a", "sam", "sgd", 5), comparison("b", "sam", "sgd", 4), comparison("c", "sam", "sgd", 3)]
    hours = {"a": 2.0, "b": 9.0, "c": 0.5}
    costs = {(row, method): hours[row] for row in hours for method in ("sam", "sgd")}
    choices = planning.greedy(compared, costs, {cell: frozenset() for cell in costs}, Budget(gpus.H200, 3, 7.8))
    assert [choice.comparison.row for choice in choices] == ["c", "a", "b"]
    assert [choice.end is not None for choice in choices] == [
        True,
        False,
        False,
    ]
    assert choices[1].gpu_hours == 20.0  # of 23.4 available, but one GPU would have four runs of two hours each


@given(
    runs=st.lists(st.tuples(st.sampled_from([0.25, 1.0, 1.5, 4.0]), st.integers(0, 6)), max_size=4),
    count=st.integers(1, 5),
)
def test_the_schedule_ends_within_the_bound_of_longest_first_scheduling(runs, count):
    each = [hours for hours, number in runs for _ in range(number)]
    least = max([sum(each) / count, *each, 0.0])
    assert least - 1e-12 <= planning.end_of(runs, count) <= (4 / 3) * _best(each, count) + 1e-12


def _best(each, count):
    """The shortest schedule of at most six runs, by trying all; of more, 3/4 of the bound of list scheduling."""
    if len(each) > 6:
        return 3 / 4 * (sum(each) / count + max(each))
    loads = ([sum(h for h, gpu in zip(each, places, strict=True) if gpu == g) for g in range(count)]
             for places in itertools.product(range(count), repeat=len(each)))  # fmt: skip
    return min((max(load) for load in loads), default=0.0)


# The plan of a table.


def test_existing_runs_give_the_scatter_and_are_not_trained_again(recorded):
    accuracies = {"sam": [94.0, 94.2, 94.1], "bisam-log": [94.1, 94.5, 94.2]}
    runs = [recorded(f"{ROW}/{m}", seed, a) for m, of_seed in accuracies.items() for seed, a in enumerate(of_seed)]
    made = plan(records=runs)
    (choice,) = (one for one in made.choices if one.comparison.method == "bisam-log")
    gaps = [0.1, 0.3, 0.1]
    assert choice.comparison.pairs == 3
    assert choice.comparison.deviation == pytest.approx(np.std(gaps, ddof=1))
    assert choice.comparison.needed == seeds_to_resolve(94.28 - 94.09, float(np.std(gaps, ddof=1)))
    others = max((c.comparison.needed for c in made.choices[: made.choices.index(choice)]), default=0)
    assert choice.runs == (choice.comparison.needed - 3) + max(0, choice.comparison.needed - max(3, others))


def test_gaps_that_are_equal_up_to_rounding_have_no_scatter(recorded):
    accuracies = {"sam": [93.90, 93.91], "bisam-log": [94.02, 94.03]}
    runs = [recorded(f"{ROW}/{m}", seed, a) for m, of_seed in accuracies.items() for seed, a in enumerate(of_seed)]
    (one,) = (one.comparison for one in plan(records=runs).choices if one.comparison.method == "bisam-log")
    assert (one.pairs, one.deviation) == (0, pytest.approx(math.hypot(0.31, 0.26)))


def test_without_runs_the_scatter_is_taken_from_the_published_standard_deviations():
    (one,) = (one.comparison for one in plan().choices if one.comparison.method == "bisam-log")
    assert one.pairs == 0
    assert one.deviation == pytest.approx(math.hypot(0.31, 0.26))


def test_a_resolved_difference_needs_no_more_runs(recorded):
    values = {"sam": [94.0, 94.1, 94.2], "bisam-log": [94.7, 95.1, 95.5]}  # the paper's 0.19 would need 22 pairs
    runs = [recorded(f"{ROW}/{m}", seed, a) for m, of_seed in values.items() for seed, a in enumerate(of_seed)]
    (choice,) = (one for one in plan(records=runs).choices if one.comparison.method == "bisam-log")
    assert (choice.runs, choice.gpu_hours, choice.comparison.is_resolved) == (0, 0.0, True)


def test_the_affordable_comparisons_end_within_the_budget():
    made = plan("cifar10", gpus_=8, hours=2.5)
    few = made.affordable
    assert few
    assert len(few) < len(made.choices)
    assert max(choice.end for choice in few) <= 2.5
    assert sum(choice.gpu_hours for choice in few) <= 8 * 2.5
    assert len(plan_sheets.commands(made)) == len(few)
    more = plan("cifar10", gpus_=8, hours=25)
    assert {c.comparison.name for c in few} < {c.comparison.name for c in more.affordable}


def test_commands_for_more_gpus_than_a_machine_has_run_on_ray():
    assert not any("--on" in command for command in plan_sheets.commands(plan("cifar10", gpus_=8, hours=25)))
    assert all(command.endswith(" --on ray") for command in plan_sheets.commands(plan("cifar10", gpus_=9, hours=25)))


def test_a_given_effect_replaces_the_published_ones():
    assert {one.comparison.effect for one in plan(effect=0.25).choices} == {0.25}


def test_for_an_effect_near_0_no_number_of_seeds_runs_or_hours_is_given():
    sheet = plan_sheets.sheet_of_choices(plan(effect=1e-9))
    assert {tuple(row[3:]) for row in sheet.rows} == {("too many", "–", "–", "beyond")}


# Measured step times and memory.


def test_the_numbers_of_the_h200_are_those_of_its_stored_measurement():
    record = json.loads((RESULTS / "bench_h200.json").read_text())
    assert {name: entry["peak_mib"] for name, entry in record["memory"].items()} == gpus.H200.peak_mib
    measured = gpus.find_gpu(str(RESULTS / "bench_h200.json"))
    assert measured.title == "H200"
    assert measured.together["resnet56"] == gpus.H200.together["resnet56"]
    times = gpus.H200.together["resnet56"]
    assert gpus.H200.sharing("resnet56") == (6, pytest.approx(times[6] / times[1]))
    assert {name: round(ms, 2) for name, ms in measured.plain_ms.items()}.items() <= gpus.H200.plain_ms.items()


def test_the_h200_times_of_resnet32_are_those_of_its_fused_kernels_alone_and_together():
    alone = json.loads((RESULTS / "frontier_h200.json").read_text())["models"]["resnet32"]["ms"]["bisam-log"]
    rows = json.loads((RESULTS / "fused_h200.json").read_text())["rows"]
    (row,) = (row for row in rows if row["model"] == "resnet32")
    at_once = row["kinds"]["fused"]["ms_per_model_and_step"]
    assert gpus.H200.together["resnet32"] == {1: alone, row["count"]: at_once}


def test_commands_train_as_many_runs_together_as_was_measured_to_be_faster():
    of_resnet32 = plan_sheets.commands(plan("label_noise", hours=3))
    assert of_resnet32
    assert all(command.endswith(" --set compile=true --together 6") for command in of_resnet32)
    assert not any("--together" in command for command in plan_sheets.commands(plan("cifar10/vgg19bn", hours=30)))
    slower = replace(gpus.H200, together={"resnet32": {1: 1.0, 6: 1.1}})
    made = planning.plan(find_recipe("label_noise"), [], Budget(slower, 1, 3))
    assert plan_sheets.commands(made)
    assert not any("--together" in command for command in plan_sheets.commands(made))


@pytest.mark.parametrize("method", ["sgd", "sam", "bisam-log"])
def test_estimated_memory_is_within_3_percent_of_the_measured_memory(method):
    """The estimate omits gradients of the first layers of the backward pass, and workspaces."""
    config = find_recipe(f"cifar10/wrn28-10/{method}").cells["wrn28-10", method]
    assert estimated_mib(config) == pytest.approx(gpus.H200.measured_mib(config), rel=0.03)


def test_estimated_memory_equals_a_count_by_hand(monkeypatch):
    def net(classes):
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, classes))

    monkeypatch.setitem(MODELS, "by hand", net)
    config = replace(find_recipe("demo/40%/sgd").cells["40%", "sgd"], model="by hand")
    weights = 4 * (64 * 32 + 32 + 32 * 10 + 10)
    images, hidden, log_softmax, labels, their_sum = 4 * 64 * 64, 4 * 64 * 32, 4 * 64 * 10, 8 * 64, 4
    saved = images + hidden + log_softmax + labels + their_sum  # saved weights take no more memory
    assert estimated_mib(config) == (2 * weights + saved) / 2**20
    assert estimated_mib(replace(config, method="sam")) == (3 * weights + saved) / 2**20


def test_memory_measured_with_one_batch_size_is_not_used_for_another():
    config = find_recipe("cifar10/wrn28-10/sam").cells["wrn28-10", "sam"]
    assert gpus.H200.measured_mib(replace(config, batch=64)) is None
    assert gpus.H200.measured_mib(replace(config, micro_batch=64)) is None
    assert estimated_mib(replace(config, batch=64)) < estimated_mib(config)


def test_hours_scale_with_the_step_time_of_the_planned_gpu():
    config = find_recipe(f"{ROW}/sam").cells["resnet56", "sam"]
    half_as_fast = {"resnet56": 2 * gpus.H200.plain_ms["resnet56"]}
    assert hours_of_run(config, half_as_fast) == pytest.approx(2 * hours_of_run(config))


# The command.


def command(*arguments):
    return CliRunner().invoke(app, ["plan", *map(str, arguments)], env={"COLUMNS": "150"})


def test_the_plan_command_prints_memory_pairs_the_budget_and_the_commands_to_run(tmp_path, recorded, write_run):
    for method, accuracy in {"sam": 94.0, "bisam-log": 94.3}.items():
        for seed in range(2):
            value = accuracy + 0.05 * seed * (method == "sam")
            write_run(tmp_path / f"{method}{seed}", recorded(f"{ROW}/{method}", seed, value))
    done = command(ROW, "--gpus", 2, "--hours", 2, "--runs", tmp_path)
    assert done.exit_code == 0, done.output
    assert "~0.27 GiB" in done.output
    assert "2 pairs" in done.output
    assert "within the 2 of the budget" in done.output
    assert (
        "bisam reproduce cifar10/resnet56 --methods sam,bisam-tanh --seeds 0-4 --set compile=true --together 6"
        in done.output
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([ROW, "--gpu", "a100"], "steps were measured on h200 only, got 'a100': run bisam bench --out bench.json"),
        ([ROW, "--gpu", "missing.json"], "missing.json"),
        ([ROW, "--gpus", "0"], "--gpus is at least 1, got 0"),
        ([ROW, "--hours", "nan"], "--hours is a positive number, got nan"),
        ([ROW, "--effect", "-1"], "--effect is a positive number of points, got -1"),
        (["cifar11"], "the nearest names are cifar10"),
    ],
)
def test_invalid_arguments_are_refused_with_a_message_of_one_line(arguments, message):
    done = command(*arguments)
    assert done.exit_code == 1
    assert message in done.output
    assert len(done.output.splitlines()) == 1


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        ("{", "is not a result of bisam bench"),
        ("[]", "is not a result of bisam bench"),
        ('{"receipt": {"gpu": null}}', "was measured on a CPU"),
        ('{"receipt": {"gpu": "NVIDIA X"}}', "has no steps of 128 images"),
    ],
)
def test_a_file_without_a_usable_measurement_is_refused(tmp_path, contents, message):
    (tmp_path / "bench.json").write_text(contents)
    done = command(ROW, "--gpu", tmp_path / "bench.json")
    assert (done.exit_code, len(done.output.splitlines())) == (1, 1)
    assert message in done.output


def test_a_table_without_a_measured_step_time_is_planned_without_hours(tmp_path, recorded, write_run):
    for method, accuracy in {"sgd": 90.0, "sam": 94.0}.items():
        for seed in range(3):
            value = accuracy + 3 * seed * (method == "sam")
            write_run(tmp_path / f"{method}{seed}", recorded(f"demo/40%/{method}", seed, value))
    done = command("demo", "--methods", "sgd,sam", "--effect", 3, "--runs", tmp_path)
    assert done.exit_code == 0, done.output
    assert "No step of digitsnet was measured on H200, so the hours are not known" in " ".join(done.output.split())
    (line,) = (line for line in done.output.splitlines() if "bisam reproduce" in line)
    assert re.fullmatch(r"  bisam reproduce '?demo/40%'? --methods sgd,sam --seeds 0-\d+", line)


def test_a_seed_that_diverged_for_one_method_makes_no_pair(recorded):
    """It is not trained again: another seed takes its place."""
    runs = [recorded(f"{ROW}/{method}", seed, 94.0 + seed * gap) for method, gap in (("sam", 0.1), ("bisam-log", 0.2))
            for seed in range(2)]  # fmt: skip
    runs += [recorded(f"{ROW}/sam", 2, 94.0), recorded(f"{ROW}/bisam-log", 2, status="diverged")]
    made = plan(records=runs)
    (choice,) = (one for one in made.choices if one.comparison.method == "bisam-log")
    assert choice.comparison.pairs == 2
    assert choice.comparison.seeds == choice.comparison.needed + 1
    (command,) = (one for one in plan_sheets.commands(made) if "sam,bisam-log" in one)
    assert f"--seeds 0-{choice.comparison.needed} " in command


def test_a_table_without_published_differences_requires_an_effect(monkeypatch):
    monkeypatch.setitem(gpus.GPUS, "h200", replace(gpus.H200, plain_ms={"digitsnet": 1.0}))
    assert "give one to resolve, as in --effect 0.5" in command("demo").output
    assert "resolved" in command("demo", "--effect", 5).output


def test_a_table_from_a_file_is_planned_and_its_commands_name_the_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.toml").write_text(
        'methods = ["sam", "bisam-log"]\n[settings]\nmodel = "resnet56"\n[rows.clean]\n[rows.noisy]\nnoise = 0.4\n'
    )
    done = command("mine.toml", "--effect", 1)
    assert done.exit_code == 0, done.output
    assert "unknown: for a scatter train two seeds or more of both methods" in done.output
    scatter = Comparison("clean", "clean", "bisam-log", "sam", 1.0, 0.4, 3, is_resolved=False)
    monkeypatch.setattr(planning, "comparisons", lambda *_: [scatter])
    assert "bisam reproduce mine.toml/clean --methods sam,bisam-log" in command("mine.toml/clean", "--effect", 1).output
