"""The command that puts two runs, or two groups of seeds, side by side: compare."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Annotated

import typer

from bisam.lab import records
from bisam.lab.cli import options as cli_options
from bisam.lab.cli.options import Partial, errors_in_one_line
from bisam.lab.cli.output import console, counting, drawing_module, print_line, write_text
from bisam.lab.compare import comparison
from bisam.lab.compare import tables as comparison_tables
from bisam.lab.compare.inspection import InspectionPlan
from bisam.lab.data.pools import Pool, open_pool

RHO, SAMPLES = InspectionPlan().rho, InspectionPlan().samples
PAGE = Path("compare.html")

Data = Annotated[
    Path | None,
    typer.Option(
        "--data",
        metavar="PATH",
        parser=cli_options.folder,
        help="Where the data are; without it, where they were, or the hub.",
    ),
]


def compare(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Folders of two runs, or of the seeds of two groups.")
    ],
    folder: Data = None,
    partial_data: Partial = False,
    device: Annotated[str, typer.Option(metavar="auto|cpu|cuda", help="Where to diagnose the weights.")] = "auto",
    samples: Annotated[int, typer.Option(min=1, help="Training samples to diagnose them on.")] = SAMPLES,
    rho: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Radius of the perturbations, the same for both.",
            show_default=f"that of the runs, if they have the same, else {RHO}",
        ),
    ] = None,
    weights: Annotated[bool, typer.Option("--weights/--no-weights", help="Diagnose the weights too.")] = True,
    run_code: Annotated[
        bool, typer.Option("--run-code", help="Run the Python files that the records name as model or data.")
    ] = False,
    out: Annotated[Path, typer.Option(help="The page.")] = PAGE,
) -> None:
    """Two runs or two groups of seeds: how their configurations, results and the sharpness of their minima differ."""
    with errors_in_one_line():
        torch_device = cli_options.device(device)
        shared = comparison.shared_rho(runs) if rho is None else rho
        plan = InspectionPlan(rho=RHO if shared is None else shared, samples=samples) if weights else None
        errors = console(stderr=True)

        @cache
        def load(name: str, part: bool) -> Pool:
            log = partial(errors.print, soft_wrap=True)
            return open_pool(name, part or partial_data, folder=folder, log=log, run_code=run_code)

        first, second = comparison.groups(runs)
        models = [str(records.read(run).config.get("model")) for run in runs]
        with cli_options.threads_for(torch_device, models), counting(errors) as progress:
            found = comparison.compare(first, second, load, torch_device, plan, progress, run_code=run_code)
        write_text(out, drawing_module("compare.page").write(found), given=out != PAGE)
        _show(found)
        print_line(f"wrote {out}")


def _show(found: comparison.RunComparison) -> None:
    here = console()
    for side in found.members:
        print_line(f"{side.name}: {side.record.folder}")
    for note in found.notes:
        print_line(note)
    for sheet in comparison_tables.sheets(found):
        here.print()
        here.print(sheet)
