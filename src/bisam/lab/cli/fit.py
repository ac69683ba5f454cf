"""The command `bisam fit`: does sharpness-aware training help on one's own data?"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, TypedDict

import typer

from bisam.lab import records, spec
from bisam.lab.cli import options as cli_options
from bisam.lab.cli import report as cli_report
from bisam.lab.cli.options import (
    AT_RUNS,
    RETRIES,
    Changes,
    Every,
    GpusPerRun,
    On,
    Perturb,
    Place,
    Retries,
    RunsAt,
    Shard,
    SyncBatchNorm,
    TensorBoard,
    Together,
    Track,
    Workers,
    errors_in_one_line,
)
from bisam.lab.cli.output import console, counting, print_line, quiet_console
from bisam.lab.config import Config
from bisam.lab.data.sources import own_data
from bisam.lab.fitting import defaults
from bisam.lab.fitting.plan import NAME as PLAN
from bisam.lab.fitting.plan import Plan
from bisam.lab.fitting.study import CODE, METHODS_OF_A_STUDY, Study
from bisam.lab.methods import find, title_of
from bisam.lab.records.storage import Storage
from bisam.lab.tables.answer import Answer
from bisam.lab.training.loop import SECONDS_BETWEEN_CHECKPOINTS
from bisam.lab.training.progress import Progress
from bisam.lab.training.ranks import device_of_rank, joined
from bisam.lab.training.trackers import trackers
from bisam.lab.workers.on_ray import RayCluster
from bisam.lab.workers.places import place as workplace

MODEL = "a ResNet for images, a perceptron for rows"


def fit(
    data: Annotated[
        str,
        typer.Argument(
            metavar="DATA",
            help="A folder of class folders, a CSV, Parquet or JSONL file, a folder of such files, an .npz, a name of "
            "the hub, or file.py:function.",
        ),
    ],
    model: Annotated[
        str,
        typer.Option(
            help="One of ours, timm:NAME, transformers:NAME-OR-FOLDER, or file.py:function.", show_default=MODEL
        ),
    ] = "",
    label: Annotated[str, typer.Option(metavar="COLUMN", help="The column of the classes.")] = "",
    text: Annotated[str, typer.Option(metavar="COLUMNS", help="The column of texts, or two with a comma.")] = "",
    image: Annotated[str, typer.Option(metavar="COLUMN", help="The column of images, or of their paths.")] = "",
    methods: Annotated[str, typer.Option(metavar="NAMES", help="Methods, with commas between.")] = ",".join(
        METHODS_OF_A_STUDY
    ),
    rho: Annotated[
        str, typer.Option(metavar="auto|NUMBER", help="The radius; auto chooses it on validation data.")
    ] = "auto",
    seeds: Annotated[
        str, typer.Option(metavar="NUMBERS", help="Seeds, as in 0,1,2 or 0-4.", show_default="0-2, or as time allows")
    ] = "",
    minutes: Annotated[
        float | None, typer.Option(min=0, help="Plan epochs, seeds and the search of the radius to fit.")
    ] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="Epochs of each run.")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Samples of a step.")] = None,
    lr: Annotated[float | None, typer.Option(min=0, help="The largest learning rate.")] = None,
    measure: Annotated[
        str, typer.Option(metavar="NAMES", help="Measures, with commas between; the first one counts.")
    ] = "",
    pretrained: Annotated[
        bool | None,
        typer.Option(
            "--pretrained/--from-scratch", help="Whether defaults are those of fine-tuning.", show_default="by model"
        ),
    ] = None,
    config: Annotated[str, typer.Option(help="The configuration of a data set of the hub.")] = "",
    test: Annotated[str, typer.Option(metavar="PART", help="The part of the data that is tested.")] = "",
    changes: Changes = None,
    name: Annotated[str, typer.Option(help="Folder of the results in the folder of runs.")] = "",
    root: RunsAt = AT_RUNS,
    device: Place = "auto",
    together: Together = 1,
    tensorboard: TensorBoard = False,
    track: Track = None,
    every: Every = SECONDS_BETWEEN_CHECKPOINTS,
    perturb: Perturb = "",
    sync_batchnorm: SyncBatchNorm = False,
    shard: Shard = False,
    on: On = "",
    workers: Workers = None,
    gpus_per_run: GpusPerRun = None,
    retries: Retries = RETRIES,
) -> None:
    """Does it help on my data? Trains with and without sharpness-aware methods, and answers in a sentence and a table.

    Finished runs are skipped, interrupted ones resumed: the same command resumes.
    """
    place_of_data = {"label": label, "text": text, "image": image, "config": config, "test": test}
    given = {"epochs": epochs, "batch": batch, "lr": lr, "measures": measure or None}
    set_by_option = {field: str(value) for field, value in given.items() if value is not None}
    with errors_in_one_line():
        choices = _choices(methods, rho, seeds, {**cli_options.changes_of(changes), **set_by_option})
        spread = workplace(
            on, workers=workers, gpus_per_run=gpus_per_run, retries=retries, device=device, together=together,
            stored=root.storage is not None,
        )  # fmt: skip
        chosen_device = cli_options.device("auto" if isinstance(spread, RayCluster) and device == "cuda" else device)
        place = device_of_rank(chosen_device)
        with joined(place, perturb=perturb, sync_batchnorm=sync_batchnorm, shard=shard) as ranks:
            ranks.refuse_together(together)
            note = print_line if ranks.is_first else _silent
            if not (Path(data).expanduser().exists() or spec.is_function(data) or Path(data).suffix):
                note(f"{data} is neither a file nor a folder here: looking for it on the hub")
            with ranks.first_before_others():
                source = own_data(spec.data_name(data, place_of_data))
            for line in source.described():
                note(line)
            chosen = model or defaults.model_for(source.task)
            study = Study(
                source, chosen, root.folder, place,
                minutes=minutes,
                name=name,
                pretrained=pretrained,
                ranks=ranks,
                **choices,
            )  # fmt: skip
            note(f"model: {chosen}; methods: {', '.join(study.methods)}; results: {study.folder}")
            note(f"settings (change them by --set): {', '.join(study.settings.lines)}")
            with cli_options.threads_for(place, [chosen]):
                plan = _decided(study, note, root.storage)
                at_once = together if spread is None else max(together, 2)
                shown = (
                    trackers(root.folder, tensorboard=tensorboard, service=track, together=at_once)
                    if ranks.is_first
                    else []
                )
                output = None if ranks.is_first else quiet_console()
                score = f"test_{study.settings.config.primary}"
                with Progress(output, trackers=shown, score=score) as progress:
                    study.train(
                        plan, progress, together=together, checkpoint_seconds=every, place=spread, storage=root.storage
                    )
        if ranks.is_first:
            found = study.conclude(plan)
            _write_page(study)
            _show(found, study)


def _decided(study: Study, note: Callable[[str], None], storage: Storage | None) -> Plan:
    """The plan of the study, also that which a storage has already."""
    if storage is not None:
        storage.fetch_files(study.name, study.folder)
    with counting(console(stderr=True) if study.ranks.is_first else quiet_console(), "searching ") as show:
        plan = study.decide(note, show)
    if storage is not None:
        storage.push_file(study.folder / PLAN, study.name)
    return plan


def _write_page(study: Study) -> None:
    """The page; a note where a library for charts is missing, since the answer does not need it."""
    try:
        cli_report.write_page([study.folder], study.folder / "report.html")
    except ValueError as error:
        print_line(f"no page: {error}")


def _show(found: Answer, study: Study) -> None:
    console().print(found.sheet.rich())
    if found.best is not None:
        best = title_of(found.best.config.method)
        print_line(f"weights of the best run of {best} on validation data: {study.folder / records.WEIGHTS}")
        print_line(f"to train in the same way ({study.folder / CODE}):")
        for line in (study.folder / CODE).read_text().splitlines():
            print_line(f"    {line}")
    print_line(found.sentence)


def _silent(line: str) -> None:
    """In the place of `print_line`, in a process beside the one that prints."""


class _Choices(TypedDict):
    """What a study needs beside data and model."""

    methods: list[str]
    rho: float | None
    seeds: list[int] | None
    changes: dict[str, str]


def _choices(methods: str, rho: str, seeds: str, changes: dict[str, str]) -> _Choices:
    """The options that can be checked before the data are read, which may take long."""
    names = cli_options.names(methods)
    for name in names:
        if name != "base":
            find(name)
    Config().with_changes(changes)
    return {
        "methods": names,
        "rho": _rho(rho),
        "seeds": cli_options.numbers(seeds) if seeds else None,
        "changes": changes,
    }


def _rho(text: str) -> float | None:
    if text == "auto":
        return None
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"--rho is auto or a number, got {text!r}") from None
