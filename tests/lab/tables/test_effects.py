"""The paper's differences, and how many seeds would resolve them."""

import math
import shlex
import statistics
from dataclasses import replace

import pytest
from scipy.stats import t

from bisam.lab.cli import app
from bisam.lab.recipes import find_recipe
from bisam.lab.tables import effects
from bisam.lab.tables.cells import collect
from bisam.lab.tables.costs import PLAIN_STEP_MS
from bisam.lab.tables.effects import paper_difference, seed_plans, sheet_of_plans
from bisam.lab.tables.power import deviation_range, seeds_to_resolve


def test_the_interval_of_a_published_difference_is_that_of_welch_s_t_test():
    found = paper_difference(
        find_recipe("cifar10"), "vgg19bn", "bisam-log", "sam"
    )  # 95.22 ± 0.13 and 95.09 ± 0.12, six each
    error = math.sqrt(0.13**2 / 6 + 0.12**2 / 6)
    freedom = error**4 / ((0.13**2 / 6) ** 2 / 5 + (0.12**2 / 6) ** 2 / 5)
    half = t.ppf(0.975, freedom) * error
    assert found.mean == pytest.approx(0.13)
    assert (found.low, found.high) == pytest.approx((0.13 - half, 0.13 + half))


def test_there_is_no_published_difference_unless_both_methods_are_published():
    assert paper_difference(find_recipe("cifar10"), "vgg19bn", "bisam-log", "asam") is None
    assert paper_difference(find_recipe("demo"), "40%", "sam", "sgd") is None


@pytest.fixture
def plans(recorded):
    accuracies = {"sgd": [94.0], "sam": [94.5, 94.9, 94.6], "bisam-log": [94.8, 94.9, 95.1], "bisam-tanh": [94.0, 95.0]}
    runs = [recorded(f"cifar10/vgg19bn/{m}", seed, x) for m, xs in accuracies.items() for seed, x in enumerate(xs)]
    return seed_plans(collect(runs).tables)


def test_a_plan_gives_the_scatter_of_pairs_the_seeds_needed_and_the_remaining_gpu_hours(plans):
    log, tanh = plans  # SAM − SGD has one pair, from which no scatter can be estimated
    assert (log.method, log.pairs, log.effect) == ("bisam-log", 3, pytest.approx(0.13))
    assert log.deviation == pytest.approx(statistics.stdev([0.3, 0.0, 0.5]))
    assert log.needed == seeds_to_resolve(0.13, log.deviation) > 3
    assert log.needed_range == tuple(seeds_to_resolve(0.13, x) for x in deviation_range(log.deviation, 3))
    assert log.needed_range[0] < log.needed < log.needed_range[1]
    steps = 200 * math.floor(45_000 / 128)
    milliseconds = steps * PLAIN_STEP_MS["vgg19bn"] * 2  # two passes a step
    assert log.hours == pytest.approx((log.needed - 3) * 2 * milliseconds / 3.6e6)
    assert tanh.present == 2
    assert replace(log, effect=50.0).hours == 0.0  # it needs two pairs and has three


@pytest.mark.parametrize("gap", [0.5, 0.38])  # two floats may differ: 93.68 − 93.3 and 94.64 − 94.26
def test_there_is_no_plan_for_pairs_without_scatter(gap, recorded):
    sam = [recorded("cifar10/vgg19bn/sam", seed, x) for seed, x in enumerate((93.3, 94.26))]
    log = [recorded("cifar10/vgg19bn/bisam-log", seed, round(x + gap, 2)) for seed, x in enumerate((93.3, 94.26))]
    assert seed_plans(collect([*sam, *log]).tables) == []


def test_the_command_of_a_plan_requests_its_cells_seeds_and_changes(plans, monkeypatch):
    requested = []
    monkeypatch.setattr("bisam.lab.cli.runs._run", lambda wanted, changes, *rest, **more: requested.extend(
        ([*recipe.cells], seeds, changes) for recipe, seeds in wanted
    ))  # fmt: skip
    app(shlex.split(plans[0].command)[1:], standalone_mode=False)
    cells = [("vgg19bn", "sam"), ("vgg19bn", "bisam-log")]
    assert requested == [(cells, f"0-{plans[0].needed - 1}", {"compile": "true"})]


def test_without_unchanged_runs_the_scatter_of_changed_runs_is_used_and_named(recorded):
    changed = [
        recorded(f"cifar10/vgg19bn/{method}", seed, 94 + seed * place, cutout=0)
        for place, method in enumerate(("sam", "bisam-log"))
        for seed in (0, 1)
    ]
    (plan,) = seed_plans(collect(changed).tables)
    assert (plan.present, plan.pairs) == (0, 2)
    assert "with cutout=0" in sheet_of_plans([plan]).rows[0][2]
    own = [
        recorded(f"cifar10/vgg19bn/{method}", seed, 94 + seed * place / 10)
        for place, method in enumerate(("sam", "bisam-log"))
        for seed in (0, 1)
    ]
    (plan,) = seed_plans(collect([*changed, *own]).tables)
    assert (plan.present, plan.table.changes) == (2, "")


def test_the_table_of_plans_lists_the_pairs_needed_the_gpu_hours_and_the_command(plans):
    sheet = sheet_of_plans(plans, "macro F1")
    assert [*sheet.head][-3:] == ["pairs needed", "GPU hours", "command"]
    assert sheet.rows[0][0] == "cifar10, vgg19bn: BiSAM (-log) − SAM"
    assert sheet.rows[0][-1] == plans[0].command
    few, many = plans[0].needed_range
    assert sheet.rows[0][1:6] == [
        "+0.13", "0.25, from 3", "3", f"{plans[0].needed:,}\n95 %: {few:,} to {many:,}", f"{plans[0].hours:.1f}",
    ]  # fmt: skip
    assert plans[0].hours < 100 < replace(plans[0], effect=0.02).hours
    assert sheet_of_plans([replace(plans[0], effect=0.02)]).rows[0][5] == f"{replace(plans[0], effect=0.02).hours:,.0f}"
    assert sheet_of_plans([replace(plans[0], effect=0.0)]).rows[0][4:] == ["too many", "–", "–"]
    assert sheet_of_plans([replace(plans[0], effect=50.0)]).rows[0][-1] == "–"  # it has enough
    assert "macro F1" in sheet.notes[0]
    assert sheet_of_plans([]) is None
    assert effects.seed_plans([]) == []
