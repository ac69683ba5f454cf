"""The command line, `bisam`: a module for each group of commands."""

from bisam.lab.cli.main import app

__all__ = ["app"]
