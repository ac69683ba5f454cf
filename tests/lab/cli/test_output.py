"""Bars and lines of commands that count what they do."""

import io

from rich.console import Console

from bisam.lab.cli.output import counting


def test_a_terminal_has_a_bar():
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    with counting(console) as progress:
        progress("sam: plane", 3, 10)
    assert "sam: plane" in console.file.getvalue()
    assert "30%" in console.file.getvalue()


def test_brackets_beside_a_bar_are_no_markup():
    console = Console(file=io.StringIO(), force_terminal=True, width=80)
    with counting(console) as progress:
        progress("[b]sam[/]: curvature", 1, 2)
    assert "[b]sam[/]: curvature" in console.file.getvalue()


def test_without_a_terminal_there_is_a_line_when_something_new_begins():
    console = Console(file=io.StringIO(), width=80)
    with counting(console, "searching ") as progress:
        for what, done in (("sam", 1), ("sam", 2), ("bisam-log", 1)):
            progress(what, done, 2)
    assert console.file.getvalue() == "searching sam\nsearching bisam-log\n"
