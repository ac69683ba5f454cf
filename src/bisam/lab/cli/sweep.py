"""The command `bisam sweep`: train a grid, and choose by the validation data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

import torch
import typer

from bisam.lab import records
from bisam.lab.cli import options as cli_options
from bisam.lab.cli.groups import Spread, UnderTorchrun, Where, with_groups
from bisam.lab.cli.options import (
    AT_RUNS,
    Changes,
    Every,
    Folder,
    Methods,
    Name,
    Partial,
    Rows,
    RunsAt,
    Seeds,
    errors_in_one_line,
)
from bisam.lab.cli.output import console, quiet_console
from bisam.lab.config import Config
from bisam.lab.data.sources import open_source
from bisam.lab.tables import cells
from bisam.lab.tables.sweeps import label, outcome, sheet, value_of
from bisam.lab.training.grids import cell_grids
from bisam.lab.training.loop import SECONDS_BETWEEN_CHECKPOINTS
from bisam.lab.training.progress import Progress, name_of
from bisam.lab.training.ranks import device_of_rank, unlike_fields
from bisam.lab.workers import watch as workers_watch

Over = Annotated[
    str,
    typer.Option(
        metavar="FIELDS",
        help="What is swept: alpha, mu or rho over their grids, any other number over --values. With commas "
        "between, over all combinations.",
    ),
]
GivenValues = Annotated[
    list[str] | None,
    typer.Option(
        "--values",
        metavar="[FIELD=]NUMBERS",
        help="Values in place of a field's grid, as in 0.1,1 or, of several fields, mu=0.1,1; again for more.",
    ),
]


@with_groups
def sweep(
    recipe: Name,
    over: Over,
    values: GivenValues = None,
    models: Rows = "",
    methods: Methods = "",
    seeds: Seeds = "0-2",
    changes: Changes = None,
    root: RunsAt = AT_RUNS,
    folder: Folder = None,
    partial_data: Partial = False,
    *,
    where: Where,
    every: Every = SECONDS_BETWEEN_CHECKPOINTS,
    torchrun: UnderTorchrun,
    spread: Spread,
) -> None:
    """Train every cell over a grid, and choose by validation accuracy; test accuracy is not shown.

    Finished runs are skipped, the recipe's own too, and interrupted ones resumed. The paper has grids for alpha and
    mu, and for rho of the adaptive methods; that for rho of the others is ours. Without --values a grid has the
    recipe's own value too.
    """
    with errors_in_one_line():
        fields = list(dict.fromkeys(name.replace("-", "_") for name in cli_options.names(over)))
        if not fields:
            raise ValueError("no field in --over: name one or more, such as --over alpha,mu")
        wanted = cli_options.recipe(recipe).only(cli_options.names(models), cli_options.names(methods))
        workers = spread.backend_of(where, root)
        device = device_of_rank(cli_options.device(where.device)) if workers is None else torch.device("cpu")
        with torchrun.joined(device) as ranks:
            planned = cell_grids(
                wanted,
                fields,
                cli_options.numbers(seeds),
                root.folder,
                values=_given(values or [], fields),
                changes=cli_options.changes_of(changes, partial_data=partial_data),
                ranks=ranks,
            )
            here = console() if ranks.is_first else quiet_console()
            jobs = [job for plan in planned for job in plan.jobs]
            ranks.refuse_unlike(unlike_fields([job.config for job in jobs], ranks.options))
            name = partial(_label_of, fields=fields)
            shown = Progress(here, label=name, outcome=_validated, score="validation_accuracy")
            with cli_options.threads_for(device, {job.config.model for job in jobs}), shown as progress:
                for plan in planned:
                    progress.note(plan.description)
                load = partial(open_source, folder=folder, partial=partial_data)
                workers_watch.train(
                    jobs, load, workers, progress, device=device, root=root.folder, storage=root.storage,
                    together=where.together, checkpoint_seconds=every, ranks=ranks,
                )  # fmt: skip
        if not ranks.is_first:
            return
        changed = replace(wanted, cells={plan.cell: plan.own for plan in planned})
        finished = cells.collect(records.read(job.folder) for job in jobs).runs
        for found in outcome(changed, fields, finished):
            here.print(sheet(replace(found, changes=", ".join(changes or []))))


def _validated(result: dict[str, Any]) -> str:
    """Without the test accuracy, by which no value may be chosen."""
    return f"validation accuracy {result['validation_accuracy']:.2f} %"


def _label_of(config: Config, fields: Sequence[str]) -> str:
    return f"{name_of(config)}, {label(fields, [value_of(config, field) for field in fields])}"


def _given(texts: Sequence[str], fields: Sequence[str]) -> dict[str, list[str]]:
    """The values of each field, as text.

    >>> _given(["mu=1,10"], ["alpha", "mu"])
    {'mu': ['1', '10']}
    """
    found: dict[str, list[str]] = {}
    for text in texts:
        if "=" in text:
            field, numbers = cli_options.change(text)
        elif len(fields) == 1:
            field, numbers = fields[0], text
        else:
            raise ValueError(f"--over has several fields: name that of the values {text}, as in {fields[0]}={text}")
        if field not in fields:
            raise ValueError(f"--values has {field}, which is not swept: add it to --over {','.join(fields)}")
        if field in found:
            raise ValueError(f"--values has {field} twice: give all its numbers at once, with commas between")
        found[field] = cli_options.names(numbers)
        if not found[field]:
            raise ValueError(f"no numbers in --values {text!r}: give some such as {field}=0.1,1")
    return found
