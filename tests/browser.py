"""Chromium for tests of pages: one browser for a module, and pages that record their requests and messages."""

import os
import shutil
from contextlib import contextmanager

import pytest

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_a_browser = pytest.mark.skipif(BROWSER is None, reason="there is no Chromium here: apt install chromium")

ALL_DRAWN = """() => [...document.querySelectorAll('main figure')]
    .every((one) => one.offsetParent === null || one.dataset.drawn === 'yes')"""


@contextmanager
def chromium():
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as started:
        sandbox = [] if os.getuid() else ["--no-sandbox"]  # Chromium has no sandbox for root
        opened = started.chromium.launch(executable_path=BROWSER, args=sandbox)
        yield opened
        opened.close()


class Opened:
    """An open page, with the URLs it requested and the messages and errors of its console."""

    def __init__(self, browser, path, link="", script="", wait_until="load", **options):
        self.context = browser.new_context(**{"viewport": {"width": 1200, "height": 900}, **options})
        self.page = self.context.new_page()
        self.requests, self.complaints = [], []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        if script:
            self.page.add_init_script(script)
        self.page.goto(path.as_uri() + link, wait_until=wait_until)

    def drawn(self):
        """Wait until every figure that can be seen is drawn; returns the page."""
        self.page.wait_for_function(ALL_DRAWN)
        return self.page

    def is_quiet(self):
        """Whether it requested nothing but itself and logged nothing."""
        own = [url for url in self.requests if not url.startswith(("blob:", "data:"))]
        return len(own) == 1 and self.complaints == []
