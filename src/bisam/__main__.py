"""`bisam`, or `python -m bisam`: the command line of the lab, which is an extra."""

from __future__ import annotations

import io
import os
import sys
from contextlib import suppress


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
    try:
        app(prog_name="bisam")
    except OSError as error:  # of a command that only prints
        with suppress(OSError):
            print(f"Error: cannot write the output: {error.strerror}.", file=sys.stderr)
        sys.exit(1)
    finally:
        _drop_unwritten()


def _drop_unwritten() -> None:
    """Discard output that a full disk did not take: the interpreter would print an error of its own as it ends."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    main()
