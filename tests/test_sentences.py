"""Numbers within sentences of README and docs: they are those of the ledger's runs."""

import importlib
import json
import statistics
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
T_OF_TWO_DEGREES = 4.302652729911275  # Student's t, 97.5 %


@pytest.fixture(scope="module")
def scripts():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "docs/scripts")
        yield {name: importlib.import_module(name) for name in ("sentences", "quantities", "ledger", "tables")}


@pytest.fixture(scope="module")
def filled(scripts):
    """A function that returns a page with the numbers of one sentence filled in."""
    found = scripts["ledger"].read()
    return lambda text, sentence: scripts["sentences"].fill(text, [sentence], found)


def results(method, name="test_accuracy", row="noise40"):
    """A result of the first three seeds of label_noise, from their files."""
    folders = [ROOT / f"results/label_noise/{row}-{method}-seed{seed}+compile=True" for seed in range(3)]
    return [json.loads((folder / "result.json").read_text())[name] for folder in folders]


def last_rows(method, name):
    """A metric of the last epoch of the same runs, from their files."""
    folders = [ROOT / f"results/label_noise/noise40-{method}-seed{seed}+compile=True" for seed in range(3)]
    return [json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])[name] for folder in folders]


def test_means_differences_and_intervals_are_computed_from_the_files_of_the_runs(filled):
    sam, sgd = results("sam"), results("sgd")
    gaps = [a - b for a, b in zip(sam, sgd, strict=True)]
    mean, half = statistics.fmean(gaps), T_OF_TWO_DEGREES * statistics.stdev(gaps) / 3**0.5
    made = filled(
        "SAM has 0 ± 0 %, 0 above SGD (0 to 1), which is −1 (0 to 1).",
        "SAM has {mean label_noise/40%/sam .2} ± {scatter .2} %, {above label_noise/40%/sam sgd .3} above SGD "
        "({interval .2}), which is {gap label_noise/40%/sgd sam .2} ({signed_interval .1}).",
    )
    assert made == (
        f"SAM has {statistics.fmean(sam):.2f} ± {statistics.stdev(sam):.2f} %, {mean:.3f} above SGD "
        f"({mean - half:.2f} to {mean + half:.2f}), which is −{mean:.2f} (−{mean + half:.1f} to −{mean - half:.1f})."
    )


def test_the_difference_of_a_group_of_rows_is_that_of_each_seeds_mean_over_them(filled):
    rows = ("noise20", "noise40", "noise60")
    gaps = [[a - b for a, b in zip(results("sam", row=row), results("sgd", row=row), strict=True)] for row in rows]
    of_seeds = [statistics.fmean(row[seed] for row in gaps) for seed in range(3)]
    mean, half = statistics.fmean(of_seeds), T_OF_TWO_DEGREES * statistics.stdev(of_seeds) / 3**0.5
    made = filled("0 (0 to 0)", "{above noisy_cifar/sam sgd .2} ({interval .2})")
    assert made == f"{mean:.2f} ({mean - half:.2f} to {mean + half:.2f})"


def test_pairs_are_counted_and_their_median_and_points_between_two_cells_are_filled_in(filled):
    sam, sgd = results("sam"), results("sgd")
    gaps = sorted(a - b for a, b in zip(sgd, sam, strict=True))
    made = filled(
        "None, 0, 0",
        "{pairs_below label_noise/40%/sgd sam}, {median_gap .2}, {between label_noise/40%/sam sgd 0.25 .2}",
    )
    quarter = 0.75 * statistics.fmean(sam) + 0.25 * statistics.fmean(sgd)
    assert made == f"Three, −{abs(gaps[1]):.2f}, {quarter:.2f}"


def test_what_a_choice_by_clean_labels_may_gain_is_read_off_smoothed_curves(filled):
    gains = []
    for seed in range(3):
        folder = ROOT / f"results/label_noise/noise40-sgd-seed{seed}+compile=True"
        noisy = [
            json.loads(line)["validation_accuracy"] for line in (folder / "metrics.jsonl").read_text().splitlines()
        ]
        clean = [(accuracy - 40 / 9) / (0.6 - 0.4 / 9) for accuracy in noisy]
        smooth = [statistics.fmean(clean[max(0, epoch - 5) : epoch + 6]) for epoch in range(len(clean))]
        gains.append(max(smooth) - smooth[json.loads((folder / "result.json").read_text())["best_epoch"]])
    assert filled("0", "{lost_by_choice label_noise/40%/sgd .2}") == f"{statistics.fmean(gains):.2f}"


def test_an_unsigned_interval_is_positive_and_ascending_and_one_around_zero_keeps_its_signs(filled):
    made = filled("0, 0 to 1", "{below label_noise/40%/sgd sam .0}, {interval .2}").split(", ")[1].split(" to ")
    assert 0 < float(made[0]) < float(made[1])
    assert filled("0 to 1", "{interval label_noise/40%/bisam-log sam}").startswith("−")


def test_last_and_validation_accuracies_single_seeds_and_the_lowest_of_a_cell_are_filled_in(filled):
    last, validation = results("sgd", "last_test_accuracy"), results("sgd", "validation_accuracy")
    best = results("sgd")
    made = filled(
        "0 0 0 0 0 0",
        "{mean label_noise/40%/sgd@last .2} {mean label_noise/40%/sgd@validation .2} "
        "{mean label_noise/40%/sgd@seed1 .2} {mean label_noise/40%/sgd@without1 .2} {lowest label_noise/40%/sgd .2} "
        "{gap label_noise/40%/sgd@last sgd@ .2}",
    )
    numbers = [
        statistics.fmean(last), statistics.fmean(validation), best[1], (best[0] + best[2]) / 2, min(best),
        statistics.fmean(last) - statistics.fmean(best),
    ]  # fmt: skip
    assert made == " ".join(f"{number:.2f}" for number in numbers).replace("-", "−")


def test_failed_runs_are_counted_separately_from_the_others(filled):
    folders = (ROOT / "results/frontier_digits").glob("digitsnet-noise40-asam-seed*")
    values = [json.loads((path / "result.json").read_text())["test_accuracy"] for path in folders]
    assert len(values) == 20
    assert sum(value < 30 for value in values) == 1
    made = filled(
        "Five of six failed, six have 0 %",
        "{seeds digits40/all/asam@below30} of {seeds digits40/all/asam} failed, {seeds digits40/all/asam@above30} have "
        "{mean} %",
    )
    assert made == f"One of twenty failed, nineteen have {statistics.fmean(v for v in values if v > 30):.1f} %"


def test_the_papers_numbers_and_the_gap_to_them_are_filled_in(filled):
    made = filled(
        "0 and 0 and 0",
        "{mean label_noise/40%/sam@paper .2} and {scatter .2} and {gap label_noise/40%/sam sam@paper .2}",
    )
    gap = f"{statistics.fmean(results('sam')) - 89.03:.2f}".replace("-", "−")
    assert made == f"89.03 and 0.09 and {gap}"


def test_values_of_measurement_files_are_filled_in(filled):
    epoch = json.loads((ROOT / "benchmarks/results/bench_h200.json").read_text())["epoch"]["resnet56"]
    made = filled(
        "no times, 0 s",
        "{times measured:bench_h200/epoch/resnet56/speed_up_over_authors} times, "
        "{mean measured:bench_h200/epoch/resnet56/seconds_of_epoch/sam .2} s",
    )
    assert 17.5 <= epoch["speed_up_over_authors"] < 18.5
    assert made == f"eighteen times, {epoch['seconds_of_epoch']['sam']:.2f} s"


def test_radii_losses_and_times_of_cells_are_filled_in(filled):
    made = filled(
        "0 and 0 and 0",
        "{radius digits40/all/msam sam .0} and {loss label_noise/40%/sam .3} and {time cifar40/late10/sam .2}",
    ).split(" and ")
    assert made[:2] == [f"{1.2 / 0.07:.0f}", f"{statistics.fmean(last_rows('sam', 'loss')):.3f}"]
    step = json.loads((ROOT / "benchmarks/results/frontier_h200.json").read_text())["models"]["resnet32"]["ratio"][
        "sam"
    ]
    assert made[2] == f"{0.9 + 0.1 * step['median']:.2f}"


def test_a_star_matches_every_key_and_an_underscore_matches_a_blank(filled):
    table = json.loads((ROOT / "benchmarks/results/autocast.json").read_text())["table"].values()
    cosines = [cell["cosine of the corrections"] for cell in table]
    made = filled("0 to 1", "{lowest measured:autocast/table/*/cosine_of_the_corrections .3} to {highest .3}")
    assert made == f"{min(cosines):.3f} to {max(cosines):.3f}"


def test_stuck_counts_the_epochs_before_the_loss_falls_below_that_of_equal_logits(filled):
    folder = ROOT / "results/label_noise/noise80-sam-seed1+compile=True"
    losses = [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    stuck = len(losses) - sum(1 for place in range(len(losses)) if min(losses[: place + 1]) < 2.3)
    assert filled("after 0", "after {stuck label_noise/80%/sam@seed1}") == f"after {stuck}"


def test_a_sentence_is_found_across_line_breaks_and_only_its_numbers_are_replaced(filled):
    page = "SAM is 99 points\n  above SGD (95 % interval 1.9\nto 5.6)."
    sentence = "SAM is {above label_noise/40%/sam sgd} points above\nSGD (95 % interval {interval})."
    assert filled(page, sentence) == "SAM is 3.8 points\n  above SGD (95 % interval 1.9\nto 5.6)."


def test_a_claim_adds_no_text_and_raises_if_it_is_false(filled):
    text = "They are apart, and these not."
    true = (
        "They are apart, {resolved label_noise/40%/sam sgd} and these not. {unresolved label_noise/40%/bisam-log sam}"
    )
    assert filled(text, true) == text
    with pytest.raises(ValueError, match=r"the difference is resolved: \+"):
        filled(text, "They are apart, {unresolved label_noise/40%/sam sgd}")
    with pytest.raises(ValueError, match=r"the difference is not resolved: −"):
        filled(text, "They are apart, {resolved label_noise/40%/bisam-log sam}")


@pytest.mark.parametrize(
    ("sentence", "message"),
    [
        ("another {mean label_noise/40%/sam}", "the page has this sentence 0 times, and should have it once: another"),
        ("SAM {mean label_noise/40%/sam}", "the page has this sentence 2 times"),
        ("SAM has {average label_noise/40%/sam}", "'average' of quantities.py: choose from mean, scatter"),
        ("SAM has {mean label_noises/40%/sam}", "the ledger has no table 'label_noises', but demo, cifar10"),
        ("SAM has {mean label_noise/41%/sam}", "label_noise has no cell 41%/sam: its rows are 0%, 20%"),
        ("SAM has {mean label_noise/40%/sam@best}", "unknown @best"),
        ("SAM has {mean label_noise/40%/sam@seed77}", "no run of label_noise/40%/sam@seed77 is finished"),
        ("SAM has {above label_noise/40%/sgd sam}", "the first is not above the second: -"),
        ("SAM has {below label_noise/40%/sam sgd}", r"the first is not below the second: \+"),
        ("SAM has {mean demo/40%/sam@paper}", "the paper does not print demo/40%/sam@paper"),
    ],
)
def test_a_sentence_that_cannot_be_filled_in_is_refused_with_the_reason(sentence, message, filled):
    with pytest.raises(ValueError, match=message):
        filled("SAM has 3 %, SAM 4", sentence)


def test_every_file_of_sentences_belongs_to_a_page_and_every_number_is_up_to_date(scripts):
    sentences, pages = scripts["sentences"], {page.stem: page for page in scripts["tables"].PAGES}
    files = sorted(sentences.FOLDER.iterdir())
    assert files
    assert {file.stem for file in files} <= {*pages}
    for file in files:
        text, filled_in = pages[file.stem].read_text(), sentences.of_page(pages[file.stem])
        assert filled_in, f"{file.name} is empty"
        assert sentences.fill(text, filled_in, scripts["ledger"].read()) == text, f"run make docs: {file.stem}"
