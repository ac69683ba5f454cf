"""Pictures of docs/report.html and of a comparison: `make docs` runs it, with a Chromium that is installed."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

from bisam.lab.cli import app

DOCS = Path(__file__).parents[1]
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
ALL_IN_SIGHT_ARE_DRAWN = """
[...document.querySelectorAll('figure')].every((one) => one.offsetParent === null || one.dataset.drawn === 'yes')
"""  # those of a row that is not chosen are drawn when it is


@contextmanager
def chromium() -> Iterator[Browser]:
    executable = next(filter(None, map(shutil.which, BROWSERS)), None)
    if executable is None:
        raise SystemExit("there is no Chromium here to take pictures with: make browser")
    with sync_playwright() as started:
        sandbox = [] if os.getuid() else ["--no-sandbox"]  # which root has to do without
        browser = started.chromium.launch(executable_path=executable, args=sandbox)
        yield browser
        browser.close()


def take(browser: Browser, source: Path, target: Path, heading: str = "", height: int = 900) -> None:
    """A picture of the window, from a heading on."""
    page = browser.new_page(viewport={"width": 1200, "height": height})
    page.goto(source.as_uri())
    page.wait_for_function(ALL_IN_SIGHT_ARE_DRAWN)
    if heading:
        page.locator("h2", has_text=heading).evaluate("heading => heading.scrollIntoView({behavior: 'instant'})")
    page.screenshot(path=target)
    page.close()


def comparison(folder: Path) -> Path:
    """The page of two runs of the demo, trained here since the ledger has no weights."""
    for method in ("sam", "sgd"):
        app(["train", f"demo/40%/{method}", "--runs", str(folder), "--device", "cpu"], standalone_mode=False)
    runs = [str(folder / "demo" / f"noise40-{method}-seed0") for method in ("sam", "sgd")]
    app(["compare", *runs, "--device", "cpu", "--out", str(folder / "compare.html")], standalone_mode=False)
    return folder / "compare.html"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder, chromium() as browser:
        take(browser, DOCS / "report.html", DOCS / "images" / "report.png")
        take(browser, comparison(Path(folder)), DOCS / "images" / "compare.png", "Around the minima", height=1400)
