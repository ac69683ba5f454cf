"""The command line: each command is a function that reads its options and hands them to a module of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Annotated

import torch
import typer

import bisam
from bisam.lab.bench import suite as benchmark
from bisam.lab.bench import tables as bench_tables
from bisam.lab.cli import compare as cli_compare
from bisam.lab.cli import fit as cli_fit
from bisam.lab.cli import listing as cli_listing
from bisam.lab.cli import plan as cli_plan
from bisam.lab.cli import predict as cli_predict
from bisam.lab.cli import report as cli_report
from bisam.lab.cli import runs as cli_runs
from bisam.lab.cli import sweep as cli_sweep
from bisam.lab.files import refuse_foreign
from bisam.lab.models import build

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # plain text, which can be searched and copied
    pretty_exceptions_enable=False,
)


SECTIONS = ",".join(benchmark.SECTIONS)
MODELS = "the paper's five; resnet20 on a CPU"
BATCH = "128; 16 on a CPU"
BENCH_OUT = Path("bench.json")


class Device(str, Enum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class Compile(str, Enum):
    auto = "auto"
    always = "always"
    never = "never"


app.command(short_help="Does it help on your data? Train, and answer.")(cli_fit.fit)
app.command(short_help="Classes of new samples, by the weights of a fit.")(cli_predict.predict)
app.command("list", short_help="All recipes, or the rows and methods of one.")(cli_listing.list_recipes)
app.command(short_help="What a table costs, and what a budget resolves.")(cli_plan.plan)
app.command(short_help="Train every cell of a recipe, or a part of it.")(cli_runs.train)
app.command(short_help="Train what is missing of a table of the paper.")(cli_runs.reproduce)
app.command(short_help="Train over a grid, choose by validation accuracy.")(cli_sweep.sweep)
app.command(short_help="Noisy labels on small images, in two minutes.")(cli_runs.demo)
app.command(short_help="Prepare a data set, check it, describe it.")(cli_runs.data)
app.command(short_help="Two runs: settings, curves, sharpness, surfaces.")(cli_compare.compare)
app.command(short_help="Tables beside the paper's, and a page with curves.")(cli_report.report)
app.command(short_help="Draw a figure of the paper.")(cli_report.figure)
app.command(short_help="Check runs: files, digests, epochs, accuracy.")(cli_report.verify)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"bisam {bisam.__version__}")
        raise typer.Exit


@app.callback()
def options_of_all(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Sharpness-aware training: on your data, and the paper's experiments."""


@app.command(short_help="Measure the paper's timing tables on this machine.")
def bench(
    only: Annotated[str, typer.Option(metavar="SECTIONS", help="What to measure, with commas between.")] = SECTIONS,
    models: Annotated[str | None, typer.Option(metavar="NAMES", help="Models to train.", show_default=MODELS)] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Images in a step.", show_default=BATCH)] = None,
    device: Annotated[Device, typer.Option(help="Where to measure.")] = Device.auto,
    compiling: Annotated[
        Compile, typer.Option("--compile", help="Compile models; auto: where it pays.")
    ] = Compile.auto,
    loop: Annotated[bool, typer.Option("--loop", help="Train with the loop form of Q too, which is slow.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer rounds.")] = False,
    out: Annotated[Path, typer.Option(help="The result; one of this commit and machine is added to.")] = BENCH_OUT,
) -> None:
    """Measure the paper's two timing tables, and the other bars of speed and memory."""
    torch_device, sections, names = _device(device), _sections(only), _models(models)
    plan = benchmark.BenchmarkPlan(torch_device, sections, names, batch, compiling.value, loop=loop, quick=quick)
    console = bench_tables.console()
    if out == BENCH_OUT:
        with _refusing("--out", OSError):
            refuse_foreign(out, "remove it, or name another file")
    try:
        with bench_tables.progress(console) as (log, track):
            result = benchmark.run(plan, out, log, track)
    except benchmark.RefusedError as error:
        raise typer.BadParameter(str(error), param_hint=error.option) from None
    bench_tables.show(result, console)
    console.print(f"wrote {out}", markup=False, soft_wrap=True)


def _device(wanted: Device) -> torch.device:
    if wanted is Device.cuda and not torch.cuda.is_available():
        raise typer.BadParameter("torch finds no CUDA device here: use --device cpu", param_hint="--device")
    return torch.device("cuda" if wanted is not Device.cpu and torch.cuda.is_available() else "cpu")


def _sections(names: str) -> tuple[str, ...]:
    wanted = _split(names)
    for name in wanted:
        if name not in benchmark.SECTIONS:
            sections = ", ".join(f"{name} ({title})" for name, title in benchmark.SECTIONS.items())
            raise typer.BadParameter(f"unknown section {name!r}: choose from {sections}", param_hint="--only")
    return wanted


def _models(names: str | None) -> tuple[str, ...]:
    """Names of models for images of 3×32×32, of which no weights are drawn yet."""
    wanted = _split(names) if names is not None else ()
    for name in wanted:
        with torch.device("meta"), _refusing("--models", ValueError):
            model = build(name, 10)
        with torch.device("meta"), _refusing("--models", RuntimeError, f"{name} does not accept images of 3×32×32"):
            model(torch.empty(2, 3, 32, 32))
    return wanted


@contextmanager
def _refusing(option: str, kind: type[Exception], message: str | None = None) -> Iterator[None]:
    """Turn an error of that kind into one about the option."""
    try:
        yield
    except kind as error:
        raise typer.BadParameter(message or str(error), param_hint=option) from None


def _split(names: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in names.split(","))
