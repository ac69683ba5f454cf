"""What README and docs show of the ledger, from invented records; and checks of the ledger itself."""

import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from bisam.lab.data import DATA_SETS
from bisam.lab.recipes import RECIPES, find_recipe
from bisam.lab.tables.cells import collect, command
from bisam.lab.training.jobs import jobs_of

sys.path.insert(0, str(Path(__file__).parents[2] / "docs/scripts"))
import ledger
import wrong_labels

sys.path.pop(0)


WITHOUT_CUTOUT = ledger.ROOT / "results/without-cutout"


def lines(records):
    """The verdicts, by their titles."""
    rows = ledger.verdicts(collect(records)).splitlines()
    return {
        title: text.removesuffix(".") for title, _, text in (row.removeprefix("- **").partition("**: ") for row in rows)
    }


def runs(recorded, cell, accuracies):
    return [recorded(cell, seed, accuracy) for seed, accuracy in enumerate(accuracies)]


def test_an_empty_ledger_lists_every_table_of_the_paper_as_not_run():
    (confirmed, first), (contradicted, second), (title, missing) = lines([]).items()
    assert (confirmed, contradicted) == ("Resolved, with the paper's sign", "Resolved, with the other sign")
    assert first == second == "nothing yet"
    assert title == "Not run"
    names = ["cifar10", "cifar100", "imagenet", "adaptive", "efficient", "label_noise", "finetune", "glue"]
    number = "together 123 of the 123 cells of the paper's tables"
    assert missing == "; ".join([*(f"{name}, all of it" for name in names), number])


@pytest.mark.parametrize(
    ("gaps", "kind"),
    [
        ((0.4, 0.5, 0.6), "Resolved, with the paper's sign"),
        ((-0.4, -0.5, -0.6), "Resolved, with the other sign"),
        ((-0.4, 0.5, 0.6), "Not resolved at this n"),
        ((0.5,), "Not resolved at this n"),
    ],
)
def test_a_difference_is_confirmed_reversed_or_not_resolved(gaps, kind, recorded):
    sam = runs(recorded, "cifar10/resnet56/sam", [94.0, 94.2, 94.1][: len(gaps)])
    other = runs(
        recorded,
        "cifar10/resnet56/bisam-log",
        [one.result["test_accuracy"] + gap for one, gap in zip(sam, gaps, strict=True)],
    )
    shown = lines([*sam, *other])
    count = "3 pairs" if len(gaps) == 3 else "1 run each"
    assert shown.pop(kind) == f"cifar10, resnet56: BiSAM (-log) − SAM ({count})"
    del shown["Not run"]
    assert set(shown.values()) == {"nothing yet"}


def test_the_differences_of_a_row_are_listed_together(recorded):
    cells = {"sam": 94.0, "bisam-log": 94.2, "bisam-tanh": 94.1}
    of_resnet = [recorded(f"cifar10/resnet56/{method}", 0, accuracy) for method, accuracy in cells.items()]
    of_vgg = [recorded(f"cifar10/vgg19bn/{method}", 0, accuracy) for method, accuracy in cells.items()]
    more = [recorded("cifar10/vgg19bn/sam", 1, 94.1)]
    assert lines(of_resnet + of_vgg + more)["Not resolved at this n"] == (
        "cifar10, resnet56: BiSAM (-log) − SAM, BiSAM (tanh) − SAM (1 run each); "
        "cifar10, vgg19bn: BiSAM (-log) − SAM, BiSAM (tanh) − SAM (1 and 2 runs)"
    )


@pytest.mark.parametrize("sign", [1, -1])
def test_resolved_differences_are_listed_separately_where_the_paper_has_none(sign, recorded):
    plain = runs(recorded, "adaptive/resnet56/asam", [94.0, 94.2, 94.1])
    other = runs(recorded, "adaptive/resnet56/abisam-tanh", [94.0 + sign * 0.4, 94.2 + sign * 0.5, 94.1 + sign * 0.6])
    shown = lines([*plain, *other])
    assert shown["Resolved, where the paper has no difference"].startswith("adaptive, resnet56: ")


def test_diverged_runs_are_listed_and_counted_beside_their_difference(recorded):
    sam = runs(recorded, "cifar10/resnet56/sam", [94.0, 94.2, 94.1])
    some = runs(recorded, "cifar10/resnet56/bisam-log", [94.4, 94.7])
    some.append(recorded("cifar10/resnet56/bisam-log", 2, status="diverged", trained=7))
    all_ = [recorded("cifar10/resnet56/bisam-tanh", 0, status="diverged", trained=3)]
    shown = lines([*sam, *some, *all_])
    assert shown["Diverged"] == (
        "cifar10, resnet56: 1 of 3 BiSAM (-log) runs diverged and are left out, 1 of 1 BiSAM (tanh) runs diverged and "
        "are left out"
    )
    (difference,) = (shown[kind] for kind in shown if "BiSAM (-log) − SAM" in shown[kind])
    assert "1 of 3 BiSAM (-log) runs diverged and are left out" in difference


def test_an_uncounted_run_is_listed_with_the_first_sentence_of_the_reason(recorded):
    reason = "The labels were wrong. It is run again."
    faulty = replace(recorded("cifar10/resnet56/sam", 1, 99.0), not_counted=reason)
    shown = lines([*runs(recorded, "cifar10/resnet56/sam", [94.0]), faulty])
    assert shown["Not counted"] == "`bisam train cifar10/resnet56/sam --seeds 1` (The labels were wrong)"
    assert "| not counted | – | – |" in ledger.all_runs(collect([faulty]))


def test_an_empty_ledger_has_a_table_of_flips_without_rows():
    assert len(ledger.flips_table(collect([])).splitlines()) == 2


def test_flips_are_averaged_over_finished_runs_for_each_quarter_of_the_training(recorded):
    def run(method, seed, first, rest, model="vgg19bn", **options):
        found = recorded(f"cifar10/{model}/{method}", seed, trained=200, **options)
        metrics = [{**row, "flips": first if row["epoch"] < 50 else rest} for row in found.metrics]
        return replace(found, metrics=metrics)

    records = [
        run("sam", 0, 4.0, 2.0), run("sam", 1, 5.0, 1.0), run("sam", 2, 90.0, 90.0, status="diverged"),
        run("bisam-log", 0, 3.0, 0.5), recorded("cifar10/vgg19bn/sgd", 0, trained=200),
        run("sam", 0, 2.0, 3.0, model="resnet56"),
    ]  # fmt: skip
    head, _, *rows = ledger.flips_table(collect(records)).splitlines()
    assert head == "| model | method | epochs 1 to 50 | epochs 51 to 100 | epochs 101 to 150 | epochs 151 to 200 | n |"
    assert rows == [
        "| resnet56 | SAM | 2.00 | 3.00 | 3.00 | 3.00 | 1 |",
        "| vgg19bn | SAM | 4.50 | 1.50 | 1.50 | 1.50 | 2 |",
        "| vgg19bn | BiSAM (-log) | 3.00 | 0.50 | 0.50 | 0.50 | 1 |",
    ]


def test_missing_cells_and_unfinished_runs_of_a_table_are_summarized(recorded):
    done = runs(recorded, "cifar10/resnet56/sam", [94.0])
    begun = [recorded("cifar10/vgg19bn/sam", seed, accuracy=None, trained=7 - seed) for seed in range(2)]
    shown = lines([*done, *begun])
    assert shown["Unfinished"] == "cifar10, vgg19bn with SAM: 2 runs, up to 7 of 200 epochs"
    cifar10, *_, together = shown["Not run"].split("; ")
    assert together == "together 121 of the 123 cells of the paper's tables"
    assert cifar10 == (
        "cifar10, densenet121, resnet56 with SGD, BiSAM (-log), BiSAM (tanh), vgg19bn with SGD, BiSAM (-log), "
        "BiSAM (tanh), wrn28-2, wrn28-10"
    )


def test_a_run_with_changed_settings_does_not_count_for_the_paper_s_table(recorded):
    shown = lines([recorded("cifar10/resnet56/sam", rho=0.1)])
    assert shown["Not run"].startswith("cifar10, all of it")
    assert len(ledger.paper_table(collect([recorded("cifar10/resnet56/sam", rho=0.1)])).splitlines()) == 2


def test_the_published_number_is_shown_beside_ours(recorded):
    records = runs(recorded, "cifar10/resnet56/sam", [94.0, 94.2]) + runs(
        recorded, "cifar10/resnet56/bisam-log", [94.5, 94.6]
    )
    _, _, sam, log = ledger.paper_table(collect(records)).replace("\u00a0", " ").splitlines()
    assert sam == "| cifar10, resnet56 | SAM | 94.10 ± 0.14, n = 2 | 94.09 ± 0.26 | – | – |"
    assert log.startswith("| cifar10, resnet56 | BiSAM (-log) | 94.55 ± 0.07, n = 2 | 94.28 ± 0.31 | +0.45 (")
    assert log.endswith(") | +0.19 |")


def test_differences_whose_interval_excludes_zero_are_bold_in_the_table_of_evidence(recorded):
    values = {"sgd": [90.0, 90.1, 90.2], "sam": [92.0, 92.0, 92.3], "bisam-log": [92.0, 92.4, 91.0]}
    found = [one for method, some in values.items() for one in runs(recorded, f"label_noise/40%/{method}", some)]
    found += runs(recorded, "demo/40%/sam", [90.0]) + runs(recorded, "demo/40%/bisam-tanh", [91.0])
    table, counts = ledger.evidence_table(collect(found)).replace("\u00a0", " ").split("\n\n")
    _, _, demo, noise = table.splitlines()
    assert demo == "| Digits, 40 % | – | – | +1.00 | 1 |"  # no interval from one seed
    title, sam, log, tanh, seeds = noise.strip("| ").split(" | ")
    assert (title, tanh, seeds) == ("CIFAR-10, ResNet-32, 40 %", "–", "3")
    assert sam.startswith("**+2.00** (+1.")
    assert log.startswith("−0.30 (−")
    bisam, sam_with_base = counts.splitlines()
    assert bisam.startswith("- **BiSAM with SAM**: 0 of 1 intervals exclude 0; if")
    assert bisam.endswith("allows for that: none.")
    assert sam_with_base.endswith("allows for that: CIFAR-10, ResNet-32, 40 %: SAM above.")


def test_the_picture_of_wrong_labels_has_a_mark_for_each_rate_and_method_with_runs(recorded):
    found = runs(recorded, "demo/40%/sam", [90.0, 92.0]) + runs(recorded, "label_noise_digits/80%/sgd", [30.0])
    sgd, sam = sorted(wrong_labels.rows(collect(found), ("demo", "label_noise_digits")), key=lambda row: row["mean"])
    assert (sgd["method"], sgd["mean"], "low" in sgd) == ("SGD", 30.0, False)
    assert abs(sgd["x"] - 80) < 2
    assert (sam["method"], sam["mean"], sam["high"]) == ("SAM", 91.0, 100.0)  # an interval ends at 100
    assert 0 < sam["low"] < 91
    drawn, there = wrong_labels.picture(ledger.read()), wrong_labels.PICTURE.read_bytes()
    assert re.sub(rb"clip\d+", b"clip", drawn) == re.sub(rb"clip\d+", b"clip", there), "run make docs"


def test_an_unfinished_run_is_listed_with_its_progress(recorded):
    shown = ledger.all_runs(collect([recorded("cifar10/vgg19bn/sam", accuracy=None, trained=7)]))
    assert "| 7 of 200 epochs | – | – | – | 1 | – | – |" in shown
    assert shown.endswith("    bisam train cifar10/vgg19bn/sam --seeds 0")


def test_runs_are_listed_below_their_table_and_seeds_of_a_cell_share_a_command(recorded):
    found = [*runs(recorded, "demo/40%/sam", [90.0, 91.0, 92.0]), recorded("demo/40%/sam", 7, 93.0)]
    found += runs(recorded, "cifar10/vgg19bn/sgd", [94.0])
    shown = ledger.all_runs(collect(found))
    assert re.findall(r"^## (.*)$", shown, re.MULTILINE) == ["cifar10", "demo"]
    commands = [line.strip() for line in shown.splitlines() if line.startswith("    ")]
    assert commands == ["bisam train cifar10/vgg19bn/sgd --seeds 0", "bisam train demo/40%/sam --seeds 0-2,7"]
    assert sum(line.startswith("| ") for line in shown.splitlines()) == 5 + 2 * 2


def test_no_two_runs_on_the_page_have_the_same_name():
    for table in ledger.all_runs(ledger.read()).split("## ")[1:]:
        names = re.findall(r"^\| (\S*seed\S*) ", table, re.MULTILINE)
        assert names
        assert len(names) == len({*names})


def finished_runs():
    return [run for run in ledger.read().runs if run.record.result is not None]


@pytest.mark.parametrize("run", finished_runs(), ids=lambda run: run.record.folder.name)
def test_every_run_of_the_ledger_records_its_origin_and_can_be_run_again(run, tmp_path):
    receipt, result = run.record.receipt, run.record.result
    assert run.record.commits not in ("", "unknown")
    assert "dirty" not in run.record.commits
    assert receipt["gpu"] or receipt["cpu"]
    assert len(receipt["data_checksum"]) == 64
    if run.config.data in DATA_SETS and run.config.data != "digits":
        assert receipt["data_checksum"] == DATA_SETS[run.config.data].checksum
    assert result["seconds"] > 0
    assert result["epochs"] == len(run.record.metrics)
    assert run.status == "diverged" or result["epochs"] == run.config.epochs
    assert not run.record.problems
    if run.config.recipe not in RECIPES:
        return  # on custom data: docs/results.md has the command
    _, _, name, _, seed, *options = shlex.split(command(run))
    changes = dict(option.split("=") for option in options if option != "--set")
    (job,) = jobs_of(find_recipe(name), [int(seed)], changes, tmp_path)
    assert job.config == run.config
    if WITHOUT_CUTOUT not in run.record.folder.parents:  # whose folders are named as by the version that trained them
        assert job.folder.name == run.record.folder.name


def test_runs_trained_without_cutout_are_in_separate_tables():
    for table in ledger.read().tables:
        for run in (run for runs in table.runs.values() for run in runs.values()):
            is_old = WITHOUT_CUTOUT in run.record.folder.parents
            assert (table.changes == "label_smoothing=0.1, cutout=0") == is_old


def test_the_validation_result_of_a_run_is_that_of_its_selected_epoch():
    for run in (run for run in finished_runs() if run.status == "done"):
        name = f"validation_{run.config.primary}"
        values = [row[name] for row in run.record.metrics]
        best = max(values) if run.config.select == "best" else values[-1]
        assert run.measured(name) == best == values[run.record.result["best_epoch"]]


def test_levels_are_listed_as_apart_from_the_paper_or_not(recorded):
    found = runs(recorded, "cifar10/vgg19bn/sgd", [90.0, 90.1, 90.2])  # 94.76 ± 0.10 in the paper
    found += runs(recorded, "cifar10/vgg19bn/sam", [95.0, 95.2, 95.1])  # 95.09 ± 0.12
    found += runs(recorded, "label_noise/80%/sam", [40.0])
    apart, level, single = ledger.levels_list(collect(found)).splitlines()
    assert apart.startswith("- **Apart from the paper**: cifar10, vgg19bn: SGD −4.66 (−4.8")
    assert level.startswith("- **Not apart**: cifar10, vgg19bn: SAM +0.01 (")
    assert single == "- **One run, no interval**: label_noise, 80%: SAM −4.68."
