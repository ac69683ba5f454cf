"""Progress of commands: a bar in a terminal, lines elsewhere."""

import io

from rich.console import Console
from typer.testing import CliRunner

from bisam.lab.cli import app
from bisam.lab.cli.output import SEARCH_SHOWN_EVERY, counting, searching


def test_a_terminal_shows_a_progress_bar():
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    with counting(console) as progress:
        progress("sam: plane", 3, 10)
    assert "sam: plane" in console.file.getvalue()
    assert "30%" in console.file.getvalue()


def test_brackets_in_the_description_of_a_progress_bar_are_not_interpreted_as_markup():
    console = Console(file=io.StringIO(), force_terminal=True, width=80)
    with counting(console) as progress:
        progress("[b]sam[/]: curvature", 1, 2)
    assert "[b]sam[/]: curvature" in console.file.getvalue()


def test_without_a_terminal_one_line_is_printed_when_a_new_task_begins():
    console = Console(file=io.StringIO(), width=80)
    with counting(console, "searching ") as progress:
        for what, done in (("sam", 1), ("sam", 2), ("bisam-log", 1)):
            progress(what, done, 2)
    assert console.file.getvalue() == "searching sam\nsearching bisam-log\n"


def test_a_long_search_for_runs_reports_its_progress_on_stderr(tmp_path, monkeypatch):
    monkeypatch.setitem(SEARCH_SHOWN_EVERY, False, 10)
    for number in range(4):
        folder = tmp_path / f"photos{number}"
        folder.mkdir()
        for name in range(4):
            (folder / f"{name}.jpg").touch()
    done = CliRunner().invoke(app, ["report", str(tmp_path)])
    lines = [f"looking for runs in {tmp_path}: {seen} files and folders so far, runs: 0" for seen in (11, 21)]
    *shown, error = done.stderr.splitlines()
    assert shown == lines
    assert "has no runs" in error


def test_in_a_terminal_a_long_search_shows_one_line_that_is_erased_at_the_end(tmp_path):
    console = Console(file=io.StringIO(), force_terminal=True, width=200)
    every = SEARCH_SHOWN_EVERY[True]
    with searching(console, tmp_path / "[b]") as progress:
        progress(every - 1, 0)
        assert console.file.getvalue() == ""
        progress(every, 2)
    assert f"[b]: {every:,} files and folders so far, runs: 2" in console.file.getvalue()
    assert console.file.getvalue().endswith("\x1b[2K")  # erased
