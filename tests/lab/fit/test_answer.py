"""The answer from made-up records: verdicts, missing seeds, costs."""

import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from bisam.lab.config import Config
from bisam.lab.fitting.code import lines
from bisam.lab.methods import METHODS
from bisam.lab.recipes import Recipe
from bisam.lab.records import Record
from bisam.lab.tables import cells
from bisam.lab.tables.answer import answer
from bisam.lab.tables.power import seeds_to_resolve

OWN = Config(recipe="mine", title="Mine", row="net", data="a.csv", model="perceptron", epochs=1, batch=10)


def table(accuracies, validation=None, measures="accuracy"):
    """A table of test values by method and seed; validation values by method, one for all seeds or one for each."""
    own = replace(OWN, measures=measures)
    recipe = Recipe("mine", "Mine", None, 3, {("net", method): replace(own, method=method) for method in accuracies})
    name = own.primary
    records = []
    for method, values in accuracies.items():
        for seed, value in enumerate(values):
            config = replace(own, method=method, seed=seed)
            result = {
                "status": "done",
                "epochs": 1,
                "best_epoch": 0,
                "validation_accuracy": 50.0,
                "test_accuracy": 50.0,
            }
            validated = (validation or {}).get(method, 50.0)
            validated = validated[seed] if isinstance(validated, list) else validated
            result |= {f"test_{name}": value, f"validation_{name}": validated}
            metrics = [{"epoch": 0, "samples_per_second": 100.0, "together": 1}]
            records.append(Record(Path(f"net-{method}-seed{seed}"), config.as_dict(), metrics, result))
    return cells.fill(recipe, records)


@pytest.mark.parametrize(
    ("sam", "verdict"),
    [([91.0, 92.1, 93.2], "Yes"), ([89.0, 90.1, 91.2], "No"), ([90.5, 90.0, 93.0], "Inconclusive")],
)
def test_the_verdict_follows_from_the_confidence_interval(sam, verdict):
    found = answer(table({"sgd": [90.0, 91.0, 92.0], "sam": sam}))
    assert found.sentence.startswith(f"{verdict}: in test accuracy, SAM with ρ = 0.05 is ")
    assert ("would resolve a difference of this size" in found.sentence) == (verdict == "Inconclusive")
    assert found.sheet.rows[0][0] == "SGD"
    assert found.sheet.rows[1][-1] == "100.0"  # milliseconds of a step of 10 samples at 100 a second


PAIRS = "Differences and intervals are of pairs with the same seed: Student's t, each 95 % by itself."
NO_SCATTER = "Without an interval the scatter is not known: it takes two seeds or more that differ."


def test_the_table_has_the_difference_of_each_method_to_the_base_in_any_order_of_rows():
    found = answer(table({"sam": [90.5, 90.0, 94.0], "sgd": [90.0, 91.0, 92.0], "bisam-log": [91.0]}))
    # differences of SAM: 0.5, −1 and 2, of deviation 1.5, and t of two degrees of freedom is 4.303
    assert found.sheet.head == [
        "", "ρ", "seeds", "accuracy", "− SGD", "95 % interval", "resolved", "more seeds", "ms per step",
    ]  # fmt: skip
    assert found.sheet.rows == [
        ["SAM", "0.05", "3", "91.50 ± 2.18", "+0.50", "−3.23 to +4.23", "no", "70", "100.0"],
        ["SGD", "–", "3", "91.00 ± 1.00", "–", "–", "–", "–", "100.0"],
        ["BiSAM (-log)", "0.05", "1", "91.00", "+0.00", "–", "no", "?", "100.0"],
    ]
    assert found.sheet.notes == [PAIRS, NO_SCATTER]


def test_without_a_base_there_is_no_answer():
    found = answer(table({"sam": [90.5, 90.0, 94.0], "bisam-log": [91.0]}))
    assert found.sentence.startswith("No answer: ")
    assert found.sheet.head[4] == "difference"
    assert [row[4:8] for row in found.sheet.rows] == [["–"] * 4] * 2
    assert found.sheet.notes == []


def test_the_method_is_chosen_by_validation_and_not_by_test_values():
    values = {"sgd": [90.0, 91.0], "sam": [95.0, 97.0], "bisam-log": [80.0, 82.0]}
    found = answer(table(values, validation={"sam": 70.0, "bisam-log": 71.0}))
    assert found.method == "bisam-log"
    assert "BiSAM (-log)" in found.sentence


def test_the_best_run_is_chosen_by_validation_and_not_by_test_values():
    values = {"sgd": [90.0, 91.0, 92.0], "sam": [97.0, 93.0, 95.0]}
    found = answer(table(values, validation={"sgd": [99.0, 99.0, 99.0], "sam": [60.0, 72.0, 70.0]}))
    assert (found.best.config.method, found.best.config.seed) == ("sam", 1)


def test_a_base_run_with_a_better_validation_value_is_reported():
    values = {"sgd": [90.0, 91.0, 92.0], "sam": [93.0, 94.0, 95.0]}
    better = answer(table(values, validation={"sgd": [71.0, 73.0, 72.0], "sam": [60.0, 79.0, 70.0]}))
    assert (better.better_base.config.method, better.better_base.config.seed) == ("sgd", 1)
    assert (better.best.config.method, better.best.config.seed) == ("sam", 1)
    equal = answer(table(values, validation={"sgd": [70.0] * 3, "sam": [69.0, 70.0, 71.0]}))
    assert equal.better_base is None
    assert answer(table({"sgd": [90.0]})).better_base is None


def test_the_answer_is_about_the_first_measure():
    found = answer(table({"sgd": [-5.0, 1.0, 3.0], "sam": [20.0, 27.0, 29.0]}, measures="mcc"))
    assert found.sentence.startswith("Yes: in test Matthews correlation, SAM")
    assert found.sheet.rows[0][3] == "−0.33 ± 4.16"


def test_one_seed_or_equal_differences_give_no_interval():
    assert "two seeds or more that differ are needed" in answer(table({"sgd": [90.0], "sam": [91.0]})).sentence
    same = answer(table({"sgd": [90.0, 91.0], "sam": [91.0, 92.0]}))
    assert "two seeds or more that differ are needed" in same.sentence


def test_with_equal_results_for_every_seed_the_answer_suggests_other_test_samples():
    found = answer(table({"sgd": [100.0, 100.0], "sam": [100.0, 100.0]}))
    assert "both have the same result with every seed: if it is that of always naming one class" in found.sentence
    assert "else more test samples, or harder ones" in found.sentence


def test_sentence_and_table_give_the_number_of_seeds_that_would_resolve_the_difference():
    """As in `bisam plan` and in the report: for a chance of 80 %."""
    sgd, sam = [90.0, 91.0, 92.0], [90.5, 90.0, 94.0]
    gaps = [ours - theirs for ours, theirs in zip(sam, sgd, strict=True)]
    more = seeds_to_resolve(statistics.fmean(gaps), statistics.stdev(gaps)) - 3
    found = answer(table({"sgd": sgd, "sam": sam}))
    assert f"; about {more} more seeds would resolve a difference of this size with a chance of 80 %." in found.sentence
    assert found.sheet.rows[1][-2] == str(more)


@pytest.mark.parametrize(
    ("sam", "advice"),
    [
        ([91.0, 89.0, 90.001], "; the difference is too small to be resolved by any practical number of seeds."),
        ([91.0, 89.0, 90.0], "; the difference is 0, which no number of seeds resolves."),
    ],
)
def test_a_difference_of_0_or_far_below_its_scatter_gets_no_number_of_seeds(sam, advice):
    found = answer(table({"sgd": [90.0, 90.0, 90.0], "sam": sam}))
    assert found.sentence.endswith(f"not resolved with 3 pairs{advice}")
    assert found.sheet.rows[1][-2] == "too many"


def test_runs_without_common_seeds_get_a_remedy_instead_of_a_number_of_seeds():
    own = table({"sgd": [90.0, 91.0], "sam": [90.5, 93.0]})
    shifted = {
        cell: {seed + 2 * (cell[1] == "sam"): run for seed, run in runs.items()} for cell, runs in own.runs.items()
    }
    found = answer(replace(own, runs=shifted))
    assert "train both with the same seeds" in found.sentence
    assert found.sheet.rows[1][-2] == "?"
    assert found.sheet.notes == [
        "Runs without common seeds are compared as two groups: Welch's t, each 95 % by itself."
    ]


@pytest.mark.parametrize("method", [name for name, method in METHODS.items() if method.perturbs])
def test_the_generated_code_of_every_method_builds_the_optimizer_of_the_lab(method):
    import torch
    from torch import nn

    from bisam.lab import methods

    config = Config(
        method=method, epochs=1, optimizer="adamw", lr=0.01, rho=0.3, mu=3.0 if "bisam" in method else None, alpha=0.2,
        eta=0.1, beta=0.7, gamma=0.4, micro_batch=None, clip_norm=2.0, label_smoothing=0.2, precision="fp32",
    )  # fmt: skip

    def weights_after_a_step(make):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
        batch = torch.randn(8, 6), torch.arange(8) % 4
        torch.manual_seed(1)
        make(model, batch)
        return [param.tolist() for param in model.parameters()]

    ours = weights_after_a_step(lambda model, batch: methods.optimizer(model, config).minimize(*batch))
    theirs = weights_after_a_step(lambda model, batch: exec(lines(config), {"model": model, "loader": [batch]}))
    assert ours == theirs


def test_the_generated_code_keeps_start_stop_every_and_micro_batch():
    import torch
    from torch import nn

    config = Config(method="sam", epochs=3, start=0.5, every=4, micro_batch=2, precision="fp32", label_smoothing=0.0)
    names = {"model": nn.Linear(6, 4), "loader": [(torch.randn(8, 6), torch.arange(8) % 4)] * 8}
    exec(lines(config), names)
    assert names["optimizer"].start == 12
    start = "min(round(0.5 * 3 * len(loader)), 3 * len(loader) - 1)"
    assert f"rho=0.05, micro_batch=2, every=4, start={start})" in lines(config)
    stop = "max(round(0.5 * 3 * len(loader)), 1)"
    assert f"every=4, stop={stop})" in lines(replace(config, start=0.0, stop=0.5))
    assert "SAM(base, model, rho=0.05)" in lines(replace(config, start=0.0, every=None, micro_batch=None))
