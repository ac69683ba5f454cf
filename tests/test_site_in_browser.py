"""The site of the docs in a real browser: how tables, code and pictures appear."""

import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from browser import chromium, needs_a_browser

pytestmark = needs_a_browser

ROOT = Path(__file__).parent.parent
SCREENS = {"large": (1440, 900), "small": (1024, 768), "phone": (390, 844)}
TOO_WIDE = """() => [...document.querySelectorAll("article .md-typeset__scrollwrap, article pre > code")]
    .filter((one) => one.scrollWidth > one.clientWidth + 1).map((one) => one.textContent.trim().slice(0, 60))"""
BROKEN_NAMES = """() => [...document.querySelectorAll("article td code, article th code")]
    .map((one) => [one.textContent, one.getClientRects().length])
    .filter(([text, lines]) => lines > 1 && !/[\\s-]/.test(text))"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    pytest.importorskip("mkdocs", reason="mkdocs is not installed: make check installs it")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--no-strict", "--site-dir", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=300)
    return folder


@pytest.fixture(scope="module")
def browser():
    with chromium() as opened:
        yield opened


@pytest.fixture(scope="module")
def opened(browser, site):
    """A page of the site on a screen: `opened(name, screen)`."""
    pages = {}

    def open_(name, screen="large", scheme="light"):
        if (screen, scheme) not in pages:
            width, height = SCREENS[screen]
            pages[screen, scheme] = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
        page = pages[screen, scheme]
        page.goto((site / name / "index.html").as_uri())
        return page

    return open_


def names():
    return ["", *sorted(path.stem for path in (ROOT / "docs").glob("*.md") if path.stem not in ("index", "changelog"))]


LONG_LINES = {"results": "bisam fit flowers102"}
"""Code that is longer than a large screen is wide, by page."""


def test_tables_and_code_fit_on_a_large_screen_and_names_are_not_wrapped(opened):
    for name in names():
        page = opened(name)
        allowed = LONG_LINES.get(name, "\n")
        assert [text for text in page.evaluate(TOO_WIDE) if allowed not in text] == [], name
        assert page.evaluate(BROKEN_NAMES) == [], name


@pytest.mark.parametrize("screen", ["small", "phone"])
def test_no_page_is_wider_than_the_screen(screen, opened):
    for name in names():
        page = opened(name, screen)
        assert page.evaluate("document.documentElement.scrollWidth") <= SCREENS[screen][0], name


def test_single_line_rows_are_compact_and_table_heads_without_text_are_hidden(opened):
    page = opened("runs")
    heights = page.eval_on_selector_all("article tbody tr", "rows => rows.map((row) => row.offsetHeight)")
    assert len(heights) > 500
    assert statistics.median(heights) <= 32
    page = opened("lab")
    heads = page.eval_on_selector_all(
        "article thead", "heads => heads.map((head) => [head.textContent.trim(), head.offsetHeight > 0])"
    )
    assert all(bool(text) == is_shown for text, is_shown in heads)
    assert ["", False] in heads


def test_pictures_are_dark_on_a_dark_page_and_keep_a_readable_width_on_a_phone(opened):
    def shown(page):
        style = "images => images.map((one) => [getComputedStyle(one).filter !== 'none', one.clientWidth])"
        return page.eval_on_selector_all("article img[src$='.svg']", style)

    assert [is_dark for is_dark, _ in shown(opened("idea", scheme="dark"))] == [True, True]
    assert [is_dark for is_dark, _ in shown(opened("idea"))] == [False, False]
    page = opened("", "phone")
    widths = [width for _, width in shown(page)]
    assert min(widths) > 600
    scrolls = "image => image.parentElement.scrollWidth > image.parentElement.clientWidth"
    assert page.eval_on_selector("article img[src$='.svg']", scrolls)


LABELS = """() => {
    const sheet = document.documentElement.getBoundingClientRect();
    const boxes = [...document.querySelectorAll("text")].map((one) => [one.textContent, one.getBoundingClientRect()]);
    const cut = boxes.filter(([_, box]) => box.width && (box.left < sheet.left || box.right > sheet.right));
    const over = boxes.flatMap(([text, a], place) => boxes.slice(place + 1)
        .filter(([_, b]) => Math.min(a.right, b.right) > Math.max(a.left, b.left) + 1
            && Math.min(a.bottom, b.bottom) > Math.max(a.top, b.top) + 4)
        .map(([other]) => `${text} / ${other}`));
    return [cut.map(([text]) => text), over];
}"""


def test_no_label_of_a_picture_is_cut_or_covers_another(browser):
    """With the wide letters of this system; the pictures were laid out with those of another."""
    page = browser.new_page()
    for path in sorted((ROOT / "docs/images").glob("*.svg")):
        page.goto(path.as_uri())
        assert page.evaluate(LABELS) == [[], []], path.name
