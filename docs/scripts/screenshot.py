"""docs/images/report.png from docs/report.html: `make docs` runs it, with a Chromium that is installed."""

import os
import shutil
from pathlib import Path

from playwright.sync_api import sync_playwright

DOCS = Path(__file__).parents[1]
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
ALL_IN_SIGHT_ARE_DRAWN = """
[...document.querySelectorAll('figure')].every((one) => one.offsetParent === null || one.dataset.drawn === 'yes')
"""  # those of a row that is not chosen are drawn when it is


def main() -> None:
    executable = next(filter(None, map(shutil.which, BROWSERS)), None)
    if executable is None:
        raise SystemExit("there is no Chromium here to take the picture with: apt install chromium")
    with sync_playwright() as started:
        sandbox = [] if os.getuid() else ["--no-sandbox"]  # which root has to do without
        browser = started.chromium.launch(executable_path=executable, args=sandbox)
        page = browser.new_page(viewport={"width": 1100, "height": 1400})
        page.goto((DOCS / "report.html").as_uri())
        page.wait_for_function(ALL_IN_SIGHT_ARE_DRAWN)
        page.screenshot(path=DOCS / "images" / "report.png")
        browser.close()


if __name__ == "__main__":
    main()
