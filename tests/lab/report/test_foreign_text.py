"""Control characters in records and in names of folders, and files behind links."""

import pytest
from typer.testing import CliRunner

from bisam.lab.cli import app
from bisam.lab.tables.summary import Sheet

ESCAPE = "\x1b[2J\x1b]0;title\x07\u202e"


def bisam(*arguments):
    return CliRunner().invoke(app, [*map(str, arguments)], env={"COLUMNS": "400"})


def test_a_not_counted_file_that_is_a_link_is_reported_and_not_followed(tmp_path, recorded, write_run):
    (tmp_path / "secret").write_text("nobody may read this")
    folder = write_run(tmp_path / "runs" / "a", recorded("demo/40%/sam", trained=1))
    (folder / "not-counted.txt").symlink_to(tmp_path / "secret")
    done = bisam("report", tmp_path / "runs")
    assert done.exit_code == 0
    assert "not-counted.txt: it is a link, which is not followed" in done.output
    page = (tmp_path / "runs" / "report.html").read_text()
    assert "nobody may read" not in done.output + page
    assert "the reason cannot be read" in page


@pytest.fixture
def runs(tmp_path, recorded, write_run):
    names = ("data_checksum", "commit", "cpu", "torch", "date")
    receipts = [{name: f"{ESCAPE}{name}{seed}" for name in names} for seed in range(2)]
    folders = [tmp_path / "runs" / f"{ESCAPE}{seed}" for seed in range(2)]
    return [
        write_run(folder, recorded("demo/40%/sam", seed, trained=1, receipt=receipt))
        for seed, (folder, receipt) in enumerate(zip(folders, receipts, strict=True))
    ]


def test_control_characters_of_records_are_escaped_in_all_output(runs, tmp_path):
    markdown = tmp_path / "tables.md"
    (runs[1] / "not-counted.txt").write_text(f"because{ESCAPE}")
    results = [
        bisam("report", tmp_path / "runs", "--markdown", markdown),
        bisam("compare", *runs, "--device", "cpu", "--samples", "2", "--out", tmp_path / "page.html"),
        bisam("compare", runs[0], runs[0]),
    ]
    assert [done.exit_code for done in results] == [0, 0, 1]
    for text in (*(done.output for done in results), markdown.read_text()):
        assert all(one.isprintable() or one == "\n" for one in text)
    assert "x1b[2J" in results[0].output
    assert "x1b[2J" in results[1].output


def test_a_table_shows_control_characters_escaped():
    sheet = Sheet(ESCAPE, [ESCAPE], [[f"two\n{ESCAPE}"]], [ESCAPE])
    table = sheet.rich()
    texts = [table.title, table.caption, table.columns[0].header, *table.columns[0].cells]
    assert all(one.isprintable() or one == "\n" for text in texts for one in text.plain)
