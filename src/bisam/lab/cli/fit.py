"""The command `bisam fit`: does sharpness-aware training help on one's own data?"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypedDict

from bisam.lab import records, spec
from bisam.lab.cli import fit_options as own
from bisam.lab.cli import options as cli_options
from bisam.lab.cli import report as cli_report
from bisam.lab.cli.groups import Spread, Tracking, UnderTorchrun, Where, with_groups
from bisam.lab.cli.options import AT_RUNS, Changes, Every, RunsAt, errors_in_one_line
from bisam.lab.cli.output import console, counting, print_line, quiet_console
from bisam.lab.config import Config
from bisam.lab.data.own_source import OwnData
from bisam.lab.data.sources import own_data
from bisam.lab.fitting import defaults
from bisam.lab.fitting.plan import StudyPlan
from bisam.lab.fitting.study import CODE, METHODS_OF_A_STUDY, Study, check_changes
from bisam.lab.methods import find_method
from bisam.lab.records.storage import Storage
from bisam.lab.tables.answer import Answer
from bisam.lab.training.loop import SECONDS_BETWEEN_CHECKPOINTS
from bisam.lab.training.progress import Progress
from bisam.lab.training.ranks import Ranks, device_of_rank
from bisam.lab.workers.on_ray import RayCluster
from bisam.lab.workers.processes import Processes
from bisam.lab.workers.watch import WorkerBackend

DEFAULT_METHODS = ",".join(METHODS_OF_A_STUDY)


@with_groups
def fit(
    data: own.Data,
    model: own.Model = "",
    label: own.Label = "",
    text: own.Text = "",
    image: own.Image = "",
    columns: own.Columns = "",
    methods: own.Methods = DEFAULT_METHODS,
    rho: own.Rho = "auto",
    seeds: own.Seeds = "",
    minutes: own.Minutes = None,
    epochs: own.Epochs = None,
    batch: own.Batch = None,
    lr: own.LearningRate = None,
    measure: own.Measure = "",
    pretrained: own.Pretrained = None,
    config: own.HubConfig = "",
    test: own.TestPart = "",
    changes: Changes = None,
    name: own.Name = "",
    root: RunsAt = AT_RUNS,
    *,
    where: Where,
    tracking: Tracking,
    every: Every = SECONDS_BETWEEN_CHECKPOINTS,
    torchrun: UnderTorchrun,
    spread: Spread,
) -> None:
    """Does it help on my data? Trains with and without sharpness-aware methods, and answers in a sentence and a table.

    Finished runs are skipped, interrupted ones resumed: the same command resumes.
    """
    place_of_data = {
        "label": label, "text": text, "image": image, "columns": columns, "config": config, "test": test,
    }  # fmt: skip
    fields = {
        "--epochs": ("epochs", epochs), "--batch": ("batch", batch), "--lr": ("lr", lr),
        "--measure": ("measures", measure),
    }  # fmt: skip
    with errors_in_one_line():
        choices = _choices(methods, rho, seeds, cli_options.changes_of(changes, options=fields))
        workers = spread.backend_of(where, root)
        on_ray = isinstance(workers, RayCluster) and where.device == "cuda"
        device = device_of_rank(cli_options.device("auto" if on_ray else where.device))
        with torchrun.joined(device) as ranks:
            ranks.refuse_together(where.together)
            note = print_line if ranks.is_first else _silent
            source = _opened(data, place_of_data, ranks, note)
            study = Study(
                source, model or defaults.model_for(source.dataset), root.folder, device,
                minutes=minutes,
                name=name,
                pretrained=pretrained,
                ranks=ranks,
                **choices,
            )  # fmt: skip
            note(f"model: {study.model}; methods: {', '.join(study.methods)}; results: {study.folder}")
            note(f"settings (change them by --set): {', '.join(study.settings.lines)}")
            with cli_options.threads_for(device, [study.model]):
                plan = _decided(study, note, root.storage, _uncounted(where.together, workers))
                shown = tracking.trackers(root, where, workers, ranks)
                output = None if ranks.is_first else quiet_console()
                with Progress(output, trackers=shown, score=f"test_{study.settings.config.primary}") as progress:
                    study.train(
                        plan, progress, together=where.together, checkpoint_seconds=every, backend=workers,
                        storage=root.storage,
                    )  # fmt: skip
        if ranks.is_first:
            found = study.conclude(plan)
            _write_page(study)
            _show(found, study)


def _opened(data: str, place_of_data: Mapping[str, str], ranks: Ranks, note: Callable[[str], None]) -> OwnData:
    """The data, with lines that describe them."""
    if not (Path(data).expanduser().exists() or spec.is_function(data) or Path(data).suffix):
        note(f"{data} is neither a file nor a folder here: looking for it on the hub")
    with ranks.first_before_others():
        source = own_data(spec.data_name(data, place_of_data))
    for line in source.described():
        note(line)
    return source


def _uncounted(together: int, workers: WorkerBackend | None) -> str:
    """What trains several runs at once, which the estimated time does not count; empty if nothing does.

    >>> _uncounted(3, None), _uncounted(1, Processes(2)), _uncounted(1, None)
    ('--together 3', '2 workers', '')
    """
    found = [f"--together {together}"] if together > 1 else []
    if isinstance(workers, Processes) and workers.workers > 1:
        found.append(f"{workers.workers} workers")
    elif isinstance(workers, RayCluster):
        found.append("the workers of Ray")
    return " and ".join(found)


def _decided(study: Study, note: Callable[[str], None], storage: Storage | None, uncounted: str) -> StudyPlan:
    """The plan of the study, also that which a storage has already."""
    if storage is not None:
        storage.fetch_files(study.name, study.folder)
    with counting(console(stderr=True) if study.ranks.is_first else quiet_console(), "searching ") as show:
        try:
            plan = study.decide(note, show, uncounted=uncounted)
        except KeyboardInterrupt:
            note(_stopped_by_ctrl_c(study))
            raise
    if storage is not None:
        storage.push_file(study.folder / records.PLAN, study.name)
    return plan


def _stopped_by_ctrl_c(study: Study) -> str:
    if study.searched:
        return "stopped in the search of ρ: the same command repeats the search for this method, and resumes"
    return "stopped before the first run: the same command starts over"


def _write_page(study: Study) -> None:
    """The page; a note where a library for charts is missing, since the answer does not need it."""
    try:
        cli_report.write_page([study.folder], study.folder / "report.html")
    except ValueError as error:
        print_line(f"no page: {error}")


def _show(found: Answer, study: Study) -> None:
    console().print(found.sheet)
    if found.best is not None:
        for line in found.to_predict(study.folder):
            print_line(line)
        print_line(f"to train in the same way ({study.folder / CODE}):")
        for line in (study.folder / CODE).read_text(encoding="utf-8").splitlines():
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
            find_method(name)
    Config().with_changes(changes)
    check_changes(changes)
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
        value = float(text)
    except ValueError:
        raise ValueError(f"--rho is auto or a number, got {text!r}") from None
    return Config(rho=value).rho  # which refuses numbers that are no radius
