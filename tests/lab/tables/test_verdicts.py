"""Counts of resolved differences over all tables."""

import pytest

from bisam.lab.tables.cells import collect
from bisam.lab.tables.verdicts import verdicts


def verdicts_of(recorded, **accuracies):
    """Verdicts of a row whose methods have these accuracies, by seed."""
    names = {name.replace("_", "-"): values for name, values in accuracies.items()}
    runs = [recorded(f"cifar10/resnet56/{m}", seed, x) for m, values in names.items() for seed, x in enumerate(values)]
    return {one.title: one for one in verdicts(collect(runs).tables)}


def test_better_worse_and_unresolved_differences_are_counted(recorded):
    found = verdicts_of(
        recorded,
        sgd=[90.0, 91.0, 92.0],
        sam=[90.8, 91.9, 92.7],  # above by about 0.8 with every seed
        bisam_log=[90.0, 91.0, 92.0],  # below by 0.8
        bisam_tanh=[95.0, 90.0, 94.0],
    )
    assert [*found] == ["BiSAM vs SAM", "SAM vs SGD"]
    bisam, sam = found.values()
    assert (bisam.resolved, bisam.better, bisam.above, bisam.below) == (1, 0, 1, 1)
    assert bisam.headline == "1 of 2 differences resolved"
    assert bisam.conclusion == "0 in favour of BiSAM, 1 of SAM"
    assert bisam.details == "1 above, 1 below"
    assert (sam.headline, sam.conclusion) == ("1 of 1 difference resolved", "1 in favour of SAM, 0 of SGD")


@pytest.mark.parametrize(("accuracy", "details"), [(91.0, "1 above, 0 below"), (90.0, "0 above, 0 below, 1 level")])
def test_a_difference_of_one_run_each_is_counted_as_without_an_interval(accuracy, details, recorded):
    (found,) = verdicts_of(recorded, sgd=[90.0], sam=[accuracy]).values()
    assert found.headline == "0 of 1 difference resolved"
    assert found.conclusion == "SAM and SGD cannot be separated yet"
    assert found.details == f"{details}; 1 without an interval: too few seeds"


def test_equal_pairs_are_named_as_the_reason_for_a_missing_interval(recorded):
    (found,) = verdicts_of(recorded, sgd=[90.0, 91.0, 92.0], sam=[90.0, 91.0, 92.0]).values()
    assert found.details == "0 above, 0 below, 1 level; 1 without an interval: all pairs are equal"


def test_only_the_first_measure_of_a_row_is_counted(recorded):
    """Other measures are of the same pairs of runs: a difference is counted once."""
    own = {"recipe": "mine", "title": "Mine", "row": "net", "measures": "accuracy,macro_f1"}
    runs = [
        recorded(f"demo/40%/{method}", seed, 90.0 + gap + seed, result={"test_macro_f1": 50.0 + seed}, **own)
        for method, gap in (("sgd", 0.0), ("sam", 1.0))
        for seed in range(2)
    ]
    (found,) = verdicts(collect(runs).tables)
    assert [one.row for one in found.differences] == ["net, accuracy"]
    assert (found.measure, found.above) == ("test accuracy", 1)


def test_adaptive_and_efficient_bisam_methods_count_for_bisam(recorded):
    runs = [recorded(f"adaptive/resnet56/{method}") for method in ("asam", "abisam-log", "abisam-tanh")]
    runs += [recorded(f"efficient/resnet56/{method}") for method in ("esam", "ebisam-log")]
    (found,) = verdicts(collect(runs).tables)
    assert found.title == "BiSAM vs SAM"
    assert len(found.differences) == 3
    assert [table.recipe.name for table, _ in found.placed] == ["adaptive", "adaptive", "efficient"]


def test_the_measure_is_named_if_all_tables_have_the_same(recorded):
    images = [recorded(f"cifar10/resnet56/{method}") for method in ("sam", "bisam-log")]
    texts = [recorded(f"glue/sst2/{method}") for method in ("sam", "bisam-log")]
    (of_images,), (of_both,) = verdicts(collect(images).tables), verdicts(collect([*images, *texts]).tables)
    assert (of_images.measure, of_both.measure) == ("test accuracy", "test results")


def test_without_two_methods_there_are_no_verdicts(recorded):
    assert verdicts(collect([recorded("demo/40%/sam")]).tables) == []
