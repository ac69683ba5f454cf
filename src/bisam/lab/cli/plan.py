"""The command `bisam plan`: what a table costs, and what a budget resolves of it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bisam.lab import recipe_files
from bisam.lab.cli import options as cli_options
from bisam.lab.cli.options import Methods, Name, Rows, errors_in_one_line
from bisam.lab.cli.output import console, find_runs, print_line
from bisam.lab.tables import gpus as gpu_measurements
from bisam.lab.tables import plan_sheets, planning
from bisam.lab.tables.cells import collect

LEDGERS = (Path("results"), Path("runs"))


def plan(
    recipe: Name,
    gpus: Annotated[int, typer.Option(help="GPUs to train on.")] = 1,
    gpu: Annotated[
        str, typer.Option(metavar="NAME|FILE", help="h200, or the result of bisam bench on another GPU.")
    ] = "h200",
    hours: Annotated[float, typer.Option(help="Hours that they are there for.")] = 24.0,
    models: Rows = "",
    methods: Methods = "",
    runs: Annotated[
        list[Path] | None,
        typer.Option("--runs", help="Folder of finished runs; again for more.", show_default="results and runs"),
    ] = None,
    effect: Annotated[
        float | None, typer.Option(metavar="POINTS", help="Difference to resolve.", show_default="the paper's")
    ] = None,
) -> None:
    """Runs, GPU hours and memory of a table, and which differences between methods a budget resolves."""
    with errors_in_one_line():
        wanted = cli_options.recipe(recipe).only(cli_options.names(models), cli_options.names(methods))
        budget = planning.Budget(gpu_measurements.find_gpu(gpu), gpus, hours)
        folders = runs if runs is not None else [folder for folder in LEDGERS if folder.is_dir()]
        tables = collect(record for folder in folders for record in find_runs(folder)).tables
        made = planning.plan(wanted, tables, budget, effect)
        here = console()
        here.print(plan_sheets.sheet_of_runs(made))
        choices = plan_sheets.sheet_of_choices(made)
        if choices is None:
            print_line("the paper has no differences for this table: give one to resolve, as in --effect 0.5")
        else:
            here.print(choices)
        file = recipe_files.split(recipe)[0] if recipe_files.is_file(recipe) else None
        for command in plan_sheets.commands(made, file):
            print_line(f"  {command}")
