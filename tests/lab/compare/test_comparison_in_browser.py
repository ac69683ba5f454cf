"""The page of a comparison in a real browser."""

import pytest
from typer.testing import CliRunner

from bisam.lab.cli import app
from bisam.lab.report.charts import COLOURS

from browser import Opened, chromium, needs_a_browser

pytestmark = needs_a_browser


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for method in ("sam", "sgd"):
        changes = ["--set", "epochs=2", "--runs", str(folder), "--device", "cpu"]
        assert CliRunner().invoke(app, ["train", f"demo/40%/{method}", *changes]).exit_code == 0
    runs = sorted(str(path.parent) for path in folder.rglob("config.json"))
    path = folder / "compare.html"
    done = CliRunner().invoke(app, ["compare", *runs, "--samples", "16", "--device", "cpu", "--out", str(path)])
    assert done.exit_code == 0, done.output
    with chromium() as browser:
        opened = Opened(browser, path)
        opened.drawn()
        yield opened
        assert opened.is_quiet(), (opened.requests, opened.complaints)


def test_all_figures_are_drawn_and_a_plane_has_tooltips_with_loss_and_error(opened):
    page = opened.page
    assert page.locator("main figure svg.marks").count() == 5 + 2 + 1 + 2  # curves, lines, worst cases, planes
    page.locator("main figure").last.locator(".mark-rect path").first.hover()
    tooltip = page.locator("#tip").text_content()
    assert "loss" in tooltip
    assert "error" in tooltip


def test_both_runs_have_the_colours_of_their_methods_everywhere(opened):
    expected = {COLOURS["sam"], COLOURS["plain"]}
    value = "(marks, name) => marks.map((mark) => mark.getAttribute(name))"
    assert {*opened.page.locator(".legend line").evaluate_all(value, "stroke")} == expected
    for selector, name in ((".mark-line path", "stroke"), (".mark-rect path", "fill")):
        figures = opened.page.locator("figure[data-chart]").filter(has_not_text="on a plane")
        assert {*figures.locator(selector).evaluate_all(value, name)} == expected, selector


def test_the_axes_of_a_plane_are_labelled_at_their_ends_and_their_centre(opened):
    figure = opened.page.locator("figure[data-chart]").filter(has_text="on a plane").first
    names = [axis.locator("text").all_text_contents() for axis in figure.locator(".role-axis-label").all()]
    assert sorted(map(sorted, names)) == [["0", "1", "−1"]] * 2


def test_no_label_is_cut_off_on_wide_or_narrow_screens(opened):
    page = opened.page
    for width in (1200, 390):
        page.set_viewport_size({"width": width, "height": 900})
        page.wait_for_timeout(100)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        for figure in page.locator("figure[data-chart]").all():
            frame = figure.locator(".chart").bounding_box()
            for text in figure.locator(".role-axis-label text, .role-legend-label text").all():
                box = text.bounding_box()
                assert frame["x"] - 1 <= box["x"], (width, text.text_content())
                assert box["x"] + box["width"] <= frame["x"] + frame["width"] + 1, (width, text.text_content())
    page.set_viewport_size({"width": 1200, "height": 900})
