"""`bisam`, or `python -m bisam`: the command line of the lab, which is an extra."""

from __future__ import annotations

import io
import sys


def main() -> None:
    try:
        from bisam.lab.cli import app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        sys.exit(f"the command line needs {error.name}, which is not installed: pip install 'bisam[lab]'")
    for stream in (sys.stdout, sys.stderr):  # a minus sign that the encoding lacks must not end a command
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    app(prog_name="bisam")


if __name__ == "__main__":
    main()
