"""Our results beside the paper's, tables of differences, and how both look in a terminal and in Markdown."""

import io
import re
from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from rich.console import Console

from bisam.lab.methods import METHODS, title_of
from bisam.lab.recipes import RECIPES, find_recipe
from bisam.lab.records import Record
from bisam.lab.tables import published
from bisam.lab.tables.cells import collect, fill
from bisam.lab.tables.sheets import sheets
from bisam.lab.tables.summary import OPEN, Sheet, comparisons, left_out, sheet, sheet_of_comparisons

IN_THE_PAPER = [name for name, make in RECIPES.items() if make().published]


def only_table(records):
    (table,) = collect(records).tables
    return table


def by_row(table):
    """The cells by the texts of the first column and of the head."""
    assert all(len(row) == len(table.head) for row in table.rows)
    return {row[0]: dict(zip(table.head[1:], row[1:], strict=True)) for row in table.rows}


def printed(cell):
    return f"{cell.mean:.2f}" if cell.std is None else f"{cell.mean:.2f} ± {cell.std:.2f}"


# The paper's layout.


@pytest.mark.parametrize("name", IN_THE_PAPER)
def test_every_published_number_is_shown_below_ours(name, recorded):
    """One run is enough for the whole table, with open cells."""
    recipe = find_recipe(name)
    row, method = next(iter(recipe.cells))
    table = sheet(only_table([recorded(f"{name}/{row}/{method}")]))
    assert table.head == ["", *(title_of(method) for method in recipe.methods)]
    shown, paper = by_row(table), published.of(recipe)
    for label, cells in paper.cells.items():
        for column, cell in cells.items():
            ours, theirs = shown[label][title_of(column)].split("\n")
            assert theirs == printed(cell)
            has_run = (label, column) in [(row, method), ("top1", method)]  # a run of cola lacks the correlation
            assert ours == ("90.00, n = 1" if has_run else OPEN)
    for column, cell in paper.average.items():
        assert shown["average"][title_of(column)] == f"{OPEN}\n{printed(cell)}"
    assert ("average" in shown) == bool(paper.average)
    what = "results" if name == "glue" else "accuracy"
    assert table.title == f"{recipe.title}: test {what} in per cent, the paper's below"


def test_with_a_stand_in_model_the_paper_s_is_named_and_other_changes_hide_the_published_numbers(recorded):
    table = sheet(only_table([recorded("finetune/pets/sam", model="net.py:small")]))
    assert table.title.endswith("with model=net.py:small: test accuracy in per cent, the paper's (vit-b16) below")
    assert (
        by_row(table)["pets"]["SAM"]
        == f"90.00, n = 1\n{printed(published.of(find_recipe('finetune')).cells['pets']['sam'])}"
    )
    for changed in (recorded("finetune/pets/sam", rho=0.3), recorded("cifar10/resnet56/sam", model="net.py:small")):
        table = sheet(only_table([changed]))
        assert table.title.endswith(": test accuracy in per cent")
        assert "\n" not in "".join(cell for row in table.rows for cell in row)


def test_published_numbers_match_two_copied_from_the_paper(recorded):
    """Copied by hand, so that not all tests rely on one file."""
    table = by_row(sheet(only_table([recorded("cifar10/resnet56/sam", accuracy=94.0)])))
    assert table["resnet56"]["BiSAM (tanh)"] == "–\n94.87 ± 0.34"
    assert table["resnet56"]["SAM"] == "94.00, n = 1\n94.09 ± 0.26"


def test_imagenet_has_a_row_for_top_1_and_one_for_top_5(recorded):
    runs = [
        recorded("imagenet/resnet50/sam", seed, 76.0 + seed, result={"test_top5_accuracy": 93.0}) for seed in (0, 1)
    ]
    runs += [recorded("imagenet/resnet50/bisam-log", 0, 77.0)]
    result_table = only_table(runs)
    table = by_row(sheet(result_table))
    assert [*table][:2] == ["top1", "top5"]
    assert table["top1"]["SAM"].startswith("76.50 ± 0.71, n = 2\n")
    assert table["top5"]["SAM"].startswith("93.00 ± 0.00, n = 2\n")
    assert table["top5"]["BiSAM (-log)"].startswith("–\n")  # an older result without it
    (found,) = comparisons(result_table)
    assert (found.row, found.method, found.found.mean) == ("top1", "bisam-log", pytest.approx(0.5))


def test_a_table_that_is_not_in_the_paper_has_no_published_numbers(recorded):
    table = sheet(only_table([recorded("demo/40%/sam")]))
    assert by_row(table)["40%"] == {"SGD": "–", "SAM": "90.00, n = 1", "BiSAM (-log)": "–", "BiSAM (tanh)": "–"}
    assert table.title == "Handwritten digits, 40 % of the labels wrong: test accuracy in per cent"


def test_a_changed_table_has_no_published_numbers(recorded):
    runs = [recorded(f"cifar10/resnet56/{method}", lr=0.01) for method in ("sgd", "sam")]
    result_table = only_table(runs)
    table = sheet(result_table)
    assert "paper" not in table.title
    assert {*by_row(table)} & {*find_recipe("cifar10").rows} == {
        "resnet56"
    }  # an empty row has no published number to show
    assert not any("\n" in cell for row in table.rows for cell in row)
    (found,) = comparisons(result_table)
    assert found.published is None


# Our results.


def test_a_cell_has_mean_standard_deviation_and_the_number_of_runs(recorded):
    runs = [recorded("demo/40%/sam", seed, accuracy) for seed, accuracy in enumerate([90.0, 91.0, 93.5])]
    assert by_row(sheet(only_table(runs)))["40%"]["SAM"] == "91.50 ± 1.80, n = 3"


@pytest.mark.parametrize(
    ("statuses", "words"),
    [
        (["done", "diverged"], "90.00, n = 1, 1 diverged"),
        (["done", "done", "diverged", "diverged"], "90.00 ± 0.00, n = 2, 2 diverged"),
        (["under way"], "–, 1 not finished"),
        (["diverged"], "–, 1 diverged"),
        (["diverged", "under way", "under way"], "–, 1 diverged, 2 not finished"),
        (["done", "under way"], "90.00, n = 1, 1 not finished"),
    ],
)
def test_diverged_and_unfinished_runs_are_counted_beside_the_mean(statuses, words, recorded):
    runs = [
        recorded("demo/40%/sam", seed, None if status == "under way" else 90.0, status=status)
        for seed, status in enumerate(statuses)
    ]
    assert by_row(sheet(only_table(runs)))["40%"]["SAM"] == words


def test_only_columns_in_which_every_row_has_a_result_have_an_average(recorded):
    rows = find_recipe("cifar10").rows
    runs = [recorded(f"cifar10/{row}/sam", 0, 90.0 + place) for place, row in enumerate(rows)]
    runs += [recorded(f"cifar10/{rows[0]}/sam", 1, 95.0)]  # the mean of the row counts, not each run
    runs += [recorded(f"cifar10/{row}/sgd", 0, 90.0) for row in rows[1:]]
    runs += [recorded(f"cifar10/{rows[0]}/sgd", 0, 90.0, status="diverged")]
    averages = by_row(sheet(only_table(runs)))["average"]
    assert averages["SAM"].split("\n")[0] == "92.50"  # of 92.5, 91, 92, 93, 94
    assert averages["SGD"].split("\n")[0] == averages["BiSAM (-log)"].split("\n")[0] == OPEN


def test_flips_and_step_time_are_shown_if_the_table_has_one_row(recorded):
    table = by_row(sheet(only_table([recorded("label_noise/20%/sam"), recorded("label_noise/20%/sgd")])))
    assert table["flips per batch, last epoch"]["SAM"] == "1.5"
    assert table["flips per batch, last epoch"]["SGD"] == OPEN
    assert table["ms per step, last epoch"]["SAM"] == "128.0"
    two = by_row(sheet(only_table([recorded("label_noise/20%/sam"), recorded("label_noise/40%/sam")])))
    assert [*two] == find_recipe("label_noise").rows


def test_the_step_time_is_shown_with_the_number_of_runs_that_share_the_device(recorded):
    def run(method, seed, together):
        record = recorded(f"label_noise/20%/{method}", seed)
        record.metrics[-1]["together"] = together
        return record

    unlike = run("sgd", 1, 2)
    unlike.metrics[-1]["alike"] = False
    runs = [
        run("sgd", 0, 4),
        unlike,
        run("sam", 0, 2),
        run("sam", 1, 8),
        run("bisam-log", 0, 1),
        run("bisam-log", 1, 2),
    ]
    speeds = by_row(sheet(only_table(runs)))["ms per step, last epoch"]
    assert [speeds[name] for name in ("SGD", "SAM", "BiSAM (-log)", "BiSAM (tanh)")] == [
        "32.0, 4 at once", "64.0, 2 at once", "128.0", OPEN,
    ]  # fmt: skip


# Differences.


def test_every_method_is_compared_with_its_baseline(recorded):
    runs = [
        recorded(f"{name}/{row}/{method}", seed)
        for name in ("demo", "adaptive", "efficient", "frontier_digits")
        for row, method in find_recipe(name).cells
        for seed in (0, 1)
    ]
    compared = {(one.method, one.baseline) for table in collect(runs).tables for one in comparisons(table)}
    assert compared == {(one.name, one.baseline) for one in METHODS.values() if one.baseline}
    labels = {one.label for table in collect(runs).tables for one in comparisons(table)}
    assert {"SAM − SGD", "BiSAM (tanh) − SAM", "A-BiSAM (-log) − ASAM", "E-BiSAM (tanh) − ESAM"} <= labels


def test_a_difference_is_shown_beside_the_published_one(recorded):
    values = {"sam": [94.0, 94.2, 94.1], "bisam-log": [94.3, 94.4, 94.4]}
    runs = [recorded(f"cifar10/resnet56/{m}", seed, a) for m, found in values.items() for seed, a in enumerate(found)]
    table = sheet_of_comparisons(only_table(runs))
    assert table.head == ["difference", "ours", "95 % interval", "n", "sign resolved?", "paper's"]
    assert table.rows == [
        ["resnet56: BiSAM (-log) − SAM", "+0.27", "+0.12 to +0.41", "3 pairs", "yes", "+0.19"],
    ]
    assert [note.split(":")[0] for note in table.notes] == ["Student's t over training seeds, on this test set"]
    (found,) = comparisons(only_table(runs))
    assert found.describe().startswith("BiSAM (-log) is better than SAM by 0.27")


def test_a_difference_without_an_interval_has_a_dash_and_a_negative_one_a_minus_sign(recorded):
    runs = [
        recorded("demo/40%/sgd", 0, 92.0),
        recorded("demo/40%/sam", 0, 91.0),
        recorded("demo/40%/bisam-log", 1, 93.0),
    ]
    table = sheet_of_comparisons(only_table(runs))
    assert table.rows == [
        ["40%: SAM − SGD", "−1.00", OPEN, "1 run each", "no"],
        ["40%: BiSAM (-log) − SAM", "+2.00", OPEN, "1 run each", "no"],
    ]


def test_several_intervals_come_with_a_note_on_multiple_comparisons(recorded):
    accuracies = {"sgd": (1, 2), "sam": (2, 4), "bisam-log": (3, 6), "bisam-tanh": (3, 9)}
    runs = [recorded(f"demo/40%/{m}", seed, a) for m, of_seeds in accuracies.items() for seed, a in enumerate(of_seeds)]
    table = sheet_of_comparisons(only_table(runs))
    assert table.notes[1:] == [
        "Each of the 3 intervals is a 95 % interval by itself: one in twenty misses the true value."
    ]


def test_a_difference_reports_the_number_of_diverged_runs_that_it_excludes(recorded):
    runs = [recorded("demo/40%/sgd", seed, 80.0 + seed) for seed in (0, 1, 2)]
    runs += [recorded("demo/40%/sam", seed, 85.0 + seed**2) for seed in (0, 1)]
    runs.append(recorded("demo/40%/sam", 2, status="diverged"))
    table = only_table(runs)
    (found,) = comparisons(table)
    assert found.describe().endswith("; 1 of 3 SAM runs diverged and are left out")
    assert sheet_of_comparisons(table).notes[0] == "40%: 1 of 3 SAM runs diverged and are left out."


def test_a_part_of_a_table_has_no_row_of_averages(recorded):
    runs = [recorded("cifar10/resnet56/sam", 0)]
    part = sheet(fill(find_recipe("cifar10/resnet56"), runs))
    assert [row[0] for row in part.rows][:1] == ["resnet56"]
    assert "average" not in [row[0] for row in part.rows]
    assert "average" in [row[0] for row in sheet(only_table(runs)).rows]


def test_without_results_of_two_methods_there_is_no_table_of_differences(recorded):
    runs = [
        recorded("demo/40%/sam"),
        recorded("demo/40%/sgd", status="diverged"),
        recorded("demo/40%/bisam-log", 0, None),
    ]
    assert sheet_of_comparisons(only_table(runs)) is None
    assert [table.title.split(": ")[1] for table in sheets(collect(runs).tables)] == ["test accuracy in per cent"]


# Excluded runs.


def test_each_damaged_or_uncounted_run_folder_is_listed_with_the_reason(recorded):
    damaged = recorded("demo/40%/sam", folder=Path("a"))
    damaged.problems.append("metrics.jsonl: line 2 is not a JSON object")
    runs = [
        damaged,
        recorded("demo/40%/sam", folder=Path("b")),
        recorded("demo/40%/sam", recipe="own", folder=Path("c")),
        recorded("demo/40%/sam", recipe="later", folder=Path("d")),
        recorded("demo/40%/sam", method="asam", folder=Path("e")),
        Record(Path("f"), problems=["config.json: it is half-written"]),
        recorded("demo/40%/sam", 1, folder=Path("g")),
    ]
    assert left_out(collect(runs)) == [
        "f: config.json: it is half-written",
        "b: a second run of this cell and seed 0: not counted",
        "c: no table is called 'own' here: if a Python file adds it, name that with --load",
        "d: no table is called 'later' here: if a Python file adds it, name that with --load",
        "e: the table demo has no such row and method",
        "a: metrics.jsonl: line 2 is not a JSON object",
    ]


# On a terminal and in Markdown.


STRANGE = Sheet(
    "a|b [bold] [/x] <i>",
    ["", "x|y", "[red]"],
    [["r|1", "1 ± 2\n3 | 4", "–"], ["[/]", "\\|", "<b>"]],
    ["[/] a|b"],
)


def on_a_terminal(table, width=120):
    console = Console(file=io.StringIO(), width=width)
    console.print(table)
    return console.file.getvalue()


def test_on_a_narrow_terminal_rows_become_columns_and_numbers_are_not_truncated():
    wide = Sheet("Results", ["", *(f"measure {name}" for name in "abcdefgh")], [["SGD", *["96.76 ± 0.51"] * 8]] * 3)
    assert "│ SGD │" in on_a_terminal(wide)
    turned = on_a_terminal(wide, width=60)
    assert "│ measure a │ 96.76 ± 0.51 │ 96.76 ± 0.51 │ 96.76 ± 0.51 │" in turned
    assert "…" not in turned + on_a_terminal(wide, width=30)


def test_a_terminal_shows_texts_with_markup_characters_verbatim():
    shown = on_a_terminal(STRANGE)
    for text in ("a|b [bold] [/x] <i>", "x|y", "[red]", "r|1", "1 ± 2", "3 | 4", "[/]", "[/] a|b"):
        assert text in shown


def test_a_terminal_shows_every_cell_of_a_real_table(recorded):
    runs = [recorded(f"cifar10/resnet56/{method}", seed) for method in ("sgd", "sam") for seed in (0, 1)]
    for table in sheets(collect(runs).tables):
        shown = on_a_terminal(table, 200)
        for text in [
            table.title,
            *table.head,
            *(line for row in table.rows for c in row for line in c.split("\n")),
        ]:
            assert text in shown
        assert " ".join(table.notes) in " ".join(shown.split())  # notes may be broken into lines


def rendered(table):
    """The HTML that the table's Markdown renders to, and the cells in it."""
    html = MarkdownIt("commonmark", {"html": True}).enable("table").render(table.markdown())
    rows = re.findall(r"<tr>(.*?)</tr>", html, re.DOTALL)
    return html, [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, re.DOTALL) for row in rows]


def test_rendered_markdown_has_the_same_title_cells_and_notes(recorded):
    runs = [recorded(f"cifar10/resnet56/{method}", seed) for method in ("sgd", "sam") for seed in (0, 1)]
    for table in sheets(collect(runs).tables):
        html, (head, *rows) = rendered(table)
        assert head == table.head
        assert rows == [[cell.replace("\n", "<br>") for cell in row] for row in table.rows]
        assert f"<strong>{table.title}</strong>" in html
        for note in table.notes:
            assert f"<p>{note}</p>" in html


def test_bars_and_tags_in_texts_are_escaped_in_markdown():
    html, (head, *rows) = rendered(STRANGE)
    assert head == ["", "x|y", "[red]"]
    assert rows[0] == ["r|1", "1 ± 2<br>3 | 4", "–"]
    assert len(rows[1]) == 3
    assert rows[1][2] == "&lt;b&gt;"
    assert "<strong>a|b [bold] [/x] &lt;i&gt;</strong>" in html
    assert "<p>[/] a|b</p>" in html


def test_a_note_names_rows_where_sgd_did_not_have_twice_the_epochs(recorded):
    runs = [recorded(f"demo/40%/{method}", epochs=30) for method in ("sgd", "sam")]
    assert sheet(fill(find_recipe("demo"), runs)).notes == ["40%: SGD did not have twice the epochs of the others."]
    assert sheet(fill(find_recipe("demo"), [recorded("demo/40%/sgd"), recorded("demo/40%/sam")])).notes == []


def test_a_custom_table_has_no_note_on_the_epochs_of_sgd(recorded):
    own = {"recipe": "mine", "title": "Mine", "row": "net", "epochs": 30}
    (table,) = collect([recorded(f"demo/40%/{method}", **own) for method in ("sgd", "sam")]).tables
    assert sheet(table).notes == []


def test_a_note_reports_runs_trained_on_data_with_different_checksums(recorded):
    sums = ["a" * 64, "a" * 64, "b" * 64, None]
    runs = [recorded("demo/40%/sam", n, receipt={"data_checksum": digest}) for n, digest in enumerate(sums)]
    assert sheet(only_table(runs)).notes == [
        "Not all of these runs were trained on the same digits: its sha256 is aaaaaaaaaaaa in 2, bbbbbbbbbbbb in 1 of "
        "the receipts."
    ]
    assert sheet(only_table([runs[0], runs[1], runs[3]])).notes == []
    on_disk = [recorded("imagenet/resnet50/sam", n, receipt={"data_checksum": digest}) for n, digest in enumerate(sums)]
    assert sheet(only_table(on_disk)).notes == []  # whose checksums are of names and sizes alone
    other = recorded("cifar10/resnet56/sam", data="digits", receipt={"data_checksum": "c" * 64})
    assert (
        sheet(fill(find_recipe("cifar10"), [recorded("cifar10/vgg19bn/sam", receipt=runs[0].receipt), other])).notes
        == []
    )


def test_a_table_whose_rows_have_different_methods_has_a_line_for_each_cell(recorded):
    cells = {"resnet32/sam": [94.0, 94.2], "resnet32/msam": [94.5], "resnet32-late10/sam": [93.0, 93.1]}
    runs = [recorded(f"frontier/{cell}", seed, x) for cell, of in cells.items() for seed, x in enumerate(of)]
    table = sheet(only_table(runs))
    assert table.head == ["row", "method", "test accuracy"]
    assert table.rows == [
        ["resnet32", "SAM", "94.10 ± 0.14, n = 2"],
        ["resnet32", "MSAM", "94.50, n = 1"],
        ["resnet32-late10", "SAM", "93.05 ± 0.07, n = 2"],
    ]
