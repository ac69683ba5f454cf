"""The command `bisam`, outside of the package: importing that imports torch, which takes a second or more.

So the version is printed at once, and everything else begins with a line that something is happening.
"""

from __future__ import annotations

import sys
from importlib.metadata import version

LOADING = "loading torch …"


def main() -> None:
    if sys.argv[1:] == ["--version"]:
        print(f"bisam {version('bisam')}")
        return
    shown = sys.stderr.isatty()
    if shown:
        print(LOADING, end="\r", file=sys.stderr, flush=True)
    from bisam.__main__ import main as run

    if shown:
        print(" " * len(LOADING), end="\r", file=sys.stderr, flush=True)
    run()
