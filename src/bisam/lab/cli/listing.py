"""The command `bisam list`: a line for each recipe, or the rows and methods of one."""

from __future__ import annotations

import textwrap
from typing import Annotated

import typer
from rich.table import Table

from bisam.lab.cli import options as cli_options
from bisam.lab.cli.options import RECIPE, errors_in_one_line
from bisam.lab.cli.output import console, print_line
from bisam.lab.recipes import RECIPES, Recipe
from bisam.lab.tables import costs
from bisam.lab.tables.summary import OPEN

INDENT = len("methods  ")


def list_recipes(
    name: Annotated[str, typer.Argument(metavar="[RECIPE]", help=RECIPE, show_default=False)] = "",
) -> None:
    """All recipes in a line each, or the rows and methods of one."""
    with errors_in_one_line():
        if name:
            _show_one(cli_options.recipe(name))
        else:
            _show_all()


def _show_all() -> None:
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    for column in ("recipe", "size", "time"):
        table.add_column(column, no_wrap=True)
    table.add_column("title")
    for name, make in RECIPES.items():
        recipe = make()
        time = OPEN if costs.describe(recipe) == costs.NOT_MEASURED else costs.describe(recipe).partition(",")[0]
        table.add_row(name, _size(recipe), time, recipe.title)
    here = console()
    here.print(table)
    here.print(
        "\nbisam list RECIPE shows the rows and methods of one, and bisam train RECIPE trains it; a part of it is "
        "RECIPE/ROW/METHOD, such as label_noise/80%/bisam-log. The size is rows × methods × seeds, with ≤ if some rows "
        f"do not have all methods. Times are those of all runs, one after the other ({OPEN}: not measured). Hours "
        "are of one H200, from the measured milliseconds of a step with --set compile=true (densenet121 without), "
        "minutes of a CPU."
    )


def _size(recipe: Recipe) -> str:
    """
    >>> _size(RECIPES["cifar10"]()), _size(RECIPES["frontier"]())
    ('5×4×6', '≤64×8×3')
    """
    mark = "" if recipe.is_complete else "≤"
    return f"{mark}{len(recipe.rows)}×{len(recipe.methods)}×{recipe.seeds}"


def _show_one(recipe: Recipe) -> None:
    """Rows that have the same methods are shown together. No name is broken, however narrow the terminal is."""
    count = len(recipe.cells)
    print_line(f"{recipe.name}: {recipe.title}")
    print_line(f"{count} cell{'s' * (count != 1)} × {recipe.seeds} seeds; {costs.describe(recipe)}")
    rows_of: dict[tuple[str, ...], list[str]] = {}
    for row in recipe.rows:
        rows_of.setdefault(tuple(method for one, method in recipe.cells if one == row), []).append(row)
    for methods, rows in rows_of.items():
        print_line("")
        _show_names("methods", methods)
        _show_names("rows", rows)


def _show_names(title: str, names: list[str] | tuple[str, ...]) -> None:
    wrapped = textwrap.wrap(" ".join(names), console().width - INDENT, break_long_words=False, break_on_hyphens=False)
    for number, line in enumerate(wrapped):
        print_line(f"{'' if number else title:<{INDENT}}{line}")
