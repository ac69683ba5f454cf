"""Tables as LaTeX and CSV."""

import csv
import io
import re

import pytest
from typer.testing import CliRunner

from bisam.lab.cli import app
from bisam.lab.tables.exports import csv_text, file_name, latex
from bisam.lab.tables.summary import Sheet

SHEET = Sheet("A & B", ["", "x_1 %"], [["40%", "94.20 ± 0.10\n93 ± 1"], ["a{b}\\", "−1"]], ["50 % of #1"])


def test_latex_has_a_row_for_each_line_of_a_cell_and_escapes_special_characters():
    assert latex(SHEET).splitlines() == [
        "% A & B",
        r"\begin{tabular}{lr}",
        r"\toprule",
        r" & x\_1 \% \\",
        r"\midrule",
        r"40\% & 94.20 $\pm$ 0.10 \\",
        r" & 93 $\pm$ 1 \\",
        r"a\{b\}\textbackslash{} & $-$1 \\",
        r"\bottomrule",
        r"\end{tabular}",
        "% 50 % of #1",
    ]


def test_line_breaks_in_titles_and_notes_do_not_end_a_latex_comment():
    text = latex(Sheet("one\n\\input{/etc/passwd}", ["a"], [["b"]], ["c\nd"]))
    assert [line for line in text.splitlines() if line.startswith("%")] == ["% one \\input{/etc/passwd}", "% c d"]


def read(sheet):
    return [*csv.reader(io.StringIO(csv_text(sheet)))]


def test_csv_cells_hold_single_numbers_with_published_ones_in_separate_columns():
    cells = ["mean", "standard deviation", "published mean", "published standard deviation"]
    assert read(SHEET) == [
        ["", *(f"x_1 % {cell}" for cell in cells)],
        ["40%", "94.20", "0.10", "93", "1"],
        ["a{b}\\", "-1", "", "", ""],
    ]


def test_csv_splits_the_cells_of_a_report_into_columns_of_plain_numbers():
    rows = [
        ["0.2", "94.20 ± 0.10, n = 3, 1 diverged", "+0.50", "−0.03 to +1.03", "3 pairs", "no", "1 to 8"],
        ["0.3", "–, 2 diverged", "–", "–", "1 run each", "–", "6"],
    ]
    assert read(Sheet("", ["row", "SAM", "ours", "95 % interval", "n", "resolved", "at once"], rows)) == [
        ["row", "SAM mean", "SAM standard deviation", "SAM n", "SAM note", "ours", "95 % interval low",
         "95 % interval high", "n", "n note", "resolved", "at once"],
        ["0.2", "94.20", "0.10", "3", "1 diverged", "+0.50", "-0.03", "+1.03", "3", "pairs", "no", "1 to 8"],
        ["0.3", "", "", "", "2 diverged", "", "", "", "1", "run each", "–", "6"],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "written"), [("=1+1", "'=1+1"), ("@x", "'@x"), ("+cmd|x", "'+cmd|x"), ("+0.5", "+0.5")]
)
def test_csv_text_that_a_spreadsheet_would_evaluate_is_prefixed_with_an_apostrophe(text, written):
    ((cell,),) = [*csv.reader(io.StringIO(csv_text(Sheet("", [text], []))))]
    assert cell == written


def test_file_names_have_at_most_120_plain_characters():
    assert file_name("../../x: y" + "z" * 300) == ("x-y" + "z" * 300)[:120]
    assert file_name("±") == "table"


def test_the_report_command_writes_latex_and_csv(tmp_path, recorded, write_run):
    for method in ("sgd", "sam"):
        write_run(tmp_path / "runs" / method, recorded(f"demo/40%/{method}", trained=0))
    arguments = ["report", tmp_path / "runs", "--latex", tmp_path / "tables.tex", "--csv", tmp_path / "csv"]
    done = CliRunner().invoke(app, [*map(str, arguments)], env={"COLUMNS": "300"})
    assert done.exit_code == 0, done.output
    assert f"wrote {tmp_path / 'tables.tex'}" in done.output
    assert f"wrote 2 tables to {tmp_path / 'csv'}" in done.output
    text = (tmp_path / "tables.tex").read_text()
    assert text.count(r"\begin{tabular}") == text.count(r"\end{tabular}") == 2
    assert re.search(r"40\\% & 90.00, n = 1 & 90.00, n = 1 & -- & -- \\\\", text)
    files = sorted((tmp_path / "csv").iterdir())
    assert [path.name for path in files] == [
        "handwritten-digits-40-of-the-labels-wrong-differences-in-points-of-test-accuracy.csv",
        "handwritten-digits-40-of-the-labels-wrong-test-accuracy-in-per-cent.csv",
    ]
    (row,) = csv.DictReader(io.StringIO(files[0].read_text()))
    assert row["ours"] == "+0.00"
