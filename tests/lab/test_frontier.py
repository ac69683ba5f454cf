"""The frontier's table, advice and goal, computed from invented records and times."""

import re
import sys
from pathlib import Path

import pytest

from bisam.lab.recipes import find_recipe
from bisam.lab.tables.cells import collect

ROOT = Path(__file__).parents[2]
TIMES = {
    model: {"ratio": {name: {"median": ratio} for name, ratio in ratios.items()}}
    for model, ratios in {
        "resnet32": {"sgd": 1.0, "sam": 2.1, "sam every5": 1.3, "bisam-log": 2.2, "esam": 1.9},
        "vgg19bn": {"sgd": 1.0, "sam": 2.0},
    }.items()
}


@pytest.fixture(scope="module")
def frontier():
    sys.path.insert(0, str(ROOT / "docs/scripts"))
    try:
        import frontier
    finally:
        sys.path.pop(0)
    return frontier


@pytest.fixture(scope="module")
def found(recorded):
    """SAM of another table, a late SAM within its scatter, one far below it, and an unfinished run."""
    values = {
        "label_noise/0%/sam": [95.0, 95.2, 95.1],
        "frontier/resnet32-late10/sam": [95.0, 95.3, 94.9],
        "frontier/resnet32-late25/sam": [93.0, 93.1, 93.2],
        "frontier/resnet32-200epochs/sgd": [94.0, 94.1, 93.9],
        "frontier/resnet32-late50/sam": [96.0],
        "cifar10/vgg19bn/sam": [94.0, 94.1],
    }
    runs = [recorded(cell, seed, value) for cell, of_seeds in values.items() for seed, value in enumerate(of_seeds)]
    return collect([*runs, recorded("frontier/resnet32/msam", 0, None)])


def by_setting(table):
    head, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines())
    return {row[0]: dict(zip(head, row, strict=True)) for row in rows}


def test_the_relative_time_of_a_training_adds_its_shares_of_plain_and_perturbed_steps(frontier):
    cells, ratios = find_recipe("frontier").cells, TIMES["resnet32"]["ratio"]
    expected = {
        ("resnet32-200epochs", "sgd"): 1.0, ("resnet32", "sgd"): 2.0, ("resnet32", "sam"): 2.1,
        ("resnet32-every5", "sam"): 1.3, ("resnet32-late10", "sam"): 0.9 + 0.1 * 2.1,
        ("resnet32-late25", "bisam-log"): 0.75 + 0.25 * 2.2, ("resnet32-early50", "sam"): 0.5 * 2.1 + 0.5,
        ("resnet32-every5", "bisam-log"): None,
    }  # fmt: skip
    for cell, time in expected.items():
        assert frontier.relative_time(cells[cell], ratios) == (None if time is None else pytest.approx(time))


def test_settings_with_and_without_runs_have_separate_tables_sorted_by_flops(frontier, found):
    table, missing, summary, of_others, _ = frontier.table(found, TIMES).split("\n\n")
    assert "25 settings that have no run yet" in summary  # folded
    rows, others = by_setting(table), by_setting(of_others)
    assert {*rows} == {"MSAM", "SAM", "SGD, 200 epochs", "SAM, last 10 %", "SAM, last 25 %", "SAM, last 50 %"}
    assert len(others) == 25
    for part in (rows, others):
        work = [float(row["FLOPs ÷ SGD, ResNet-32"]) for row in part.values()]
        assert work == sorted(work)
    ours = "ResNet-32, 0 % wrong labels"
    assert rows["SAM"][ours] == "95.10 (94.85 to 95.35), n = 3"  # of label_noise
    assert rows["SAM, last 25 %"][ours].endswith("n = 3 ▼")
    assert rows["SAM, last 10 %"][ours].endswith("n = 3")
    assert rows["SAM, last 50 %"][ours] == "96.00, n = 1"
    assert rows["MSAM"][ours] == "under way"
    assert rows["MSAM"]["time ÷ SGD, ResNet-32"] == "not measured"
    assert rows["SAM, last 10 %"]["time ÷ SGD, ResNet-32"] == "1.11"
    assert rows["SAM, last 10 %"]["time ÷ SGD, VGG19-BN"] == "1.10"
    assert rows["SAM, last 10 %"]["FLOPs ÷ SGD, ResNet-32"] == "1.10"
    assert rows["SGD, 200 epochs"]["VGG19-BN, 0 % wrong labels"] == "–"
    assert ours not in others["K-SAM"]
    assert others["SAM, every fifth step"]["time ÷ SGD, ResNet-32"] == "1.30"
    assert missing.endswith(" Without any run: ResNet-32, 40 % wrong labels; VGG19-BN, 40 % wrong labels.")
    assert not any("40 % wrong" in name for row in rows.values() for name in row)


def test_the_advice_is_the_best_measured_setting_within_each_budget(frontier, found):
    rows = by_setting(frontier.advice(found, TIMES))
    ours = "ResNet-32, 0 % wrong labels"
    assert rows["1 × SGD"][ours].startswith("SGD, 200 epochs: 94.00, n = 3; − SAM: −1.10 (")
    assert rows["1.1 × SGD"][ours].startswith("SGD, 200 epochs: ")  # the last 10 % cost 1.11
    assert rows["1.15 × SGD"][ours].startswith("SAM, last 10 %: 95.07, n = 3; − SAM: −0.03 (")
    assert rows["2.1 × SGD"][ours] == "SAM, last 50 %: 96.00, n = 1"
    assert {*rows["1 × SGD"]} == {"to pay at most", ours}  # VGG19-BN has no setting cheaper than SAM
    just_above = {"resnet32": {"ratio": {"sgd": {"median": 1.0}, "sam": {"median": 2.04}}}}  # the last 10 %: 1.104
    assert by_setting(frontier.advice(found, just_above))["1.1 × SGD"][ours].startswith("SAM, last 10 %: ")
    without_times = by_setting(frontier.advice(found, {}))
    assert without_times["1.15 × SGD"][ours].startswith("SGD, 200 epochs: ")  # its time is 1 by definition


def test_the_goal_is_reached_if_a_cheap_setting_is_not_resolved_as_below_sam(frontier, found, recorded):
    lines = frontier.goal(found, TIMES).splitlines()[2:]
    assert lines[0].startswith("- ResNet-32, 0 % wrong labels: reached by SAM, last 10 % at 1.11 × SGD, −0.03 (")
    assert lines[0].endswith(" pairs). Shown to be about as good: SAM, last 10 %.")
    assert lines[1] == "- ResNet-32, 40 % wrong labels: not measured, SAM has no finished runs."
    assert lines[2].startswith("- VGG19-BN, 0 % wrong labels: not measured, no setting within 1.15 × SGD has both")
    below = [recorded("frontier/resnet32/sam", seed, 95.0 + seed / 10) for seed in range(3)]
    below += [recorded("frontier/resnet32-late10/sam", seed, 94.0 + seed / 9) for seed in range(3)]
    line = frontier.goal(collect(below), TIMES).splitlines()[2]
    assert line.startswith("- ResNet-32, 0 % wrong labels: not reached: SAM, last 10 % −0.99 (")
    scattered = below[:3] + [recorded("frontier/resnet32-late10/sam", seed, 94.0 + seed) for seed in range(3)]
    line = frontier.goal(collect(scattered), TIMES).splitlines()[2]
    assert " reached by SAM, last 10 % " in line
    assert line.endswith(". Shown to be about as good: none.")


def test_the_table_of_digits_has_costs_in_flops_and_differences_to_sam(frontier, recorded):
    place = "frontier_digits/digitsnet-noise40"
    values = {
        "demo/40%/sam": [94.0, 95.0, 93.0],
        f"{place}-late10/sam": [75.0, 75.5, 74.5],
        f"{place}-late10rho0.1/sam": [74.0, 74.5, 74.4],
        f"{place}/msam": [95.0, 96.0, 95.5],
        f"{place}-30epochs/sgd": [76.0],
    }
    runs = [recorded(cell, seed, value) for cell, of_seeds in values.items() for seed, value in enumerate(of_seeds)]
    runs += [recorded("demo/40%/sam", seed, value, rho=0.1) for seed, value in enumerate([96.0, 97.5])]
    table = frontier.digits(collect(runs))
    rows = by_setting(table)
    sam_with_larger_rho = "−2.25 (−5.43 to +0.93)"  # of the two seeds that both have
    assert [*rows["SAM"].values()] == ["SAM", "0.07", "2.00", "94.00 (91.52 to 96.48), n = 3", "–", sam_with_larger_rho]
    assert (rows["SAM, last 10 %"]["ρ"], rows["SAM, last 10 %"]["FLOPs ÷ SGD"]) == ("2.4", "1.10")
    assert rows["SAM, last 10 %, ρ = 0.1"]["test accuracy"].startswith("74.30 (")
    assert rows["SAM, last 10 %"]["test accuracy"].endswith("n = 3 ▼")
    assert rows["SAM, last 10 %"]["− SAM"].startswith("−19.00 (")
    assert rows["MSAM"]["FLOPs ÷ SGD"] == "1.00"
    assert rows["MSAM"]["− SAM"].startswith("+1.50 (")
    assert [*rows["SGD, 30 epochs"].values()] == ["SGD, 30 epochs", "–", "1.00", "76.00, n = 1", "–", "–"]
    assert rows["SGD, 60 epochs"]["FLOPs ÷ SGD"] == "2.00"
    costs = [float(line.split("|")[3]) for line in table.splitlines()[2:]]
    assert costs == sorted(costs)


def test_the_picture_has_a_line_for_each_setting_with_a_cost_and_runs_sorted_by_cost(frontier, found):
    drawn = frontier.picture(found, TIMES).decode()
    assert drawn.count('aria-roledescription="point"') == 5  # of ResNet-32: with VGG19-BN SAM alone has runs
    labels = ["SGD, 200 epochs: 1.00 ×", "SAM, last 10 %: 1.11 ×", "SAM, last 25 %: 1.27 ×", "SAM, last 50 %: 1.55 ×"]
    places = [drawn.index(f">{label}<") for label in [*labels, "SAM: 2.10 ×"]]
    assert places == sorted(places)
    assert "MSAM" not in drawn  # which is unfinished
    assert "CIFAR-10, ResNet-32, 0 % wrong labels, n = 1 to 3" in drawn
    assert len({shape for shape, _ in frontier.KINDS.values()}) == len(frontier.KINDS)
    assert "images/frontier.svg" in frontier.shown(found, TIMES)
    nothing = collect([])
    assert frontier.picture(nothing, TIMES) is None
    assert "no picture yet" in frontier.shown(nothing, TIMES)


def test_the_mark_of_a_setting_shows_whether_its_difference_to_sam_is_resolved(frontier, found):
    (settings,) = frontier.panels(found, TIMES).values()
    kinds = {one.title: frontier._row(one)["kind"] for one in settings}
    assert kinds == {
        "SAM": "SAM", "SAM, last 10 %": "not separated from SAM", "SAM, last 25 %": "below SAM",
        "SGD, 200 epochs": "below SAM", "SAM, last 50 %": "not separated from SAM",
    }  # fmt: skip


def test_the_picture_of_the_docs_is_up_to_date(frontier):
    """`make docs` draws it, once there is something to draw."""
    drawn = frontier.picture(frontier.ledger.read())
    there = frontier.PICTURE.read_bytes() if frontier.PICTURE.exists() else None
    # except for numbers that increase with each drawing in a process
    shown, made = (None if one is None else re.sub(rb"clip\d+", b"clip", one) for one in (there, drawn))
    assert shown == made
