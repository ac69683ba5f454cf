"""`bisam.lab.fit`: the same comparison from Python, for one's own model and data in memory."""

from __future__ import annotations

import io
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from bisam.lab import records
from bisam.lab.config import Config
from bisam.lab.data.named import IN_MEMORY
from bisam.lab.data.own import from_parts, pair
from bisam.lab.data.own_source import OwnData
from bisam.lab.data.sources import Source
from bisam.lab.fitting.code import lines
from bisam.lab.fitting.plan import StudyPlan
from bisam.lab.fitting.study import METHODS_OF_A_STUDY, Study
from bisam.lab.models.from_file import called
from bisam.lab.records.checkpoint import unpack
from bisam.lab.tables import cells
from bisam.lab.tables.answer import Answer
from bisam.lab.training.first_sample import with_sizes
from bisam.lab.training.loop import Stopped
from bisam.lab.training.progress import Progress


@dataclass
class Fit:
    """The outcome of `fit`: print it for the sentence and the table."""

    answer: Answer
    folder: Path
    """The records of the runs."""
    plan: StudyPlan

    @property
    def sentence(self) -> str:
        return self.answer.sentence

    @property
    def rho(self) -> dict[str, float]:
        """ρ of each method."""
        return self.plan.rho

    @property
    def code(self) -> str:
        """Lines of Python that train in the same way."""
        return "" if self.answer.best is None else lines(self.answer.best.config)

    @property
    def weights(self) -> dict[str, Tensor]:
        """The best weights on validation data, of the method that the sentence is about."""
        if self.answer.best is None:
            raise ValueError("no run of a sharpness-aware method has weights: see the table for runs that diverged")
        tensors, _ = unpack((self.answer.best.record.folder / records.WEIGHTS).read_bytes())
        return tensors

    def curves(self, name: str = "validation_accuracy") -> Any:
        """A chart of a number over the epochs, such as "loss", which a notebook draws."""
        from bisam.lab.report.charts import for_notebook
        from bisam.lab.report.curves import drawn
        from bisam.lab.tables.curves import CURVES, points

        (table,) = cells.collect(records.find_records(self.folder)).tables
        if name not in CURVES:
            raise ValueError(f"unknown curve {name!r}: choose from {', '.join(CURVES)}")
        (row,) = table.rows
        rows = points(table.of_row(row))
        if not any(name in point for point in rows):
            raise ValueError(f"these runs have no {name}: it belongs to other methods or measures")
        return for_notebook(drawn(rows, name, table.recipe.methods))

    def __str__(self) -> str:
        console = Console(width=120, record=True, file=io.StringIO(), markup=False, highlight=False)
        console.print(self.answer.sheet)
        return f"{self.sentence}\n\n{console.export_text()}".rstrip()

    def _repr_html_(self) -> str:
        from html import escape

        sheet = self.answer.sheet
        head = "".join(f"<th>{escape(cell)}</th>" for cell in sheet.head)
        body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in sheet.rows)
        notes = "".join(f"<p>{escape(note)}</p>" for note in sheet.notes)
        return f"<p><b>{escape(self.sentence)}</b></p><table><tr>{head}</tr>{body}</table>{notes}"


def fit(
    model: Callable[..., nn.Module],
    train: Any,
    validation: Any = None,
    *,
    test: Any = None,
    methods: str | Sequence[str] = METHODS_OF_A_STUDY,
    rho: float | str = "auto",
    seeds: int | Sequence[int] = 3,
    minutes: float | None = None,
    pretrained: bool = False,
    device: str | torch.device = "cpu",
    runs: str | Path | None = None,
    quiet: bool = False,
    **settings: Any,
) -> Fit:
    """Train with and without sharpness-aware methods, with paired seeds, and compare on the test data.

    Args:
        model: a function that makes the network; it may take the number of classes.
        train, validation, test: (x, y), or a data set of torch whose items are (x, y), each read once. x are numbers of
            any shape, which the network gets as float32, a data frame, whose columns are read as those of a file, or
            images of type uint8. Without a test part the validation part is tested, and each seed validates on training
            samples; without both, a fifth of the training samples is held out.
        methods: one name, or several; "base" is the base optimizer alone, which is always among them.
        rho: the radius; "auto" chooses it on validation data.
        seeds: how many, or which.
        minutes: plan epochs, seeds and the search of ρ so that they fit.
        pretrained: whether the defaults are those of fine-tuning.
        runs: the folder of the records, to resume from; None keeps them as long as the result.
        quiet: whether to print nothing.
        settings: fields of `bisam.lab.config.Config`, such as epochs=20.

    >>> x, y = torch.randn(120, 4), torch.arange(120) % 2
    >>> x[:, 0] += 3 * y
    >>> found = fit(lambda: nn.Linear(4, 2), (x, y), methods=["sam"], rho=0.05, seeds=2, epochs=1, quiet=True)
    >>> found.rho, [row[0] for row in found.answer.sheet.rows]
    ({'sam': 0.05}, ['SGD', 'SAM'])
    """
    _check_model(model)
    chosen = _chosen(seeds)
    radius, torch_device = _radius(rho), torch.device(device)
    if torch_device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError('torch finds no CUDA device here: use device="cpu"')
    name = getattr(model, "__name__", "model").strip("<>")
    if train is None:
        raise ValueError("train is None: give (x, y), or a data set of torch whose items are (x, y)")
    given = {"train": train, "validation": validation, "test": test}
    parts = {part: pair(data, part) for part, data in given.items() if data is not None}
    source = OwnData(from_parts(IN_MEMORY, parts, "the data"))
    with _folder_of(runs) as root:
        study = Study(
            source, name, root, torch_device,
            methods=[methods] if isinstance(methods, str) else methods,
            rho=radius,
            seeds=chosen,
            minutes=minutes,
            changes=_texts(settings),
            pretrained=pretrained,
            build=_building(model),
            make=model,
        )  # fmt: skip
        console = Console(file=io.StringIO()) if quiet else Console()
        with Progress(console) as progress:
            for line in source.described():
                progress.note(line)
            plan = study.decide(progress.note)
            study.train(plan, progress)
        found = Fit(study.conclude(plan), study.folder, plan)
    if runs is None:
        weakref.finalize(found, shutil.rmtree, root, ignore_errors=True)
    return found


@contextmanager
def _folder_of(runs: str | Path | None) -> Iterator[Path]:
    """The folder of the records. After an error, a temporary one with runs in it stays, to be resumed from."""
    if runs is not None:
        yield Path(runs)
        return
    root = Path(tempfile.mkdtemp(prefix="bisam-"))
    try:
        yield root
    except Stopped as stop:
        raise Stopped(f"{stop}, with runs={str(root)!r}") from None
    finally:
        with suppress(OSError):
            root.rmdir()  # which takes an empty folder only


def _check_model(model: Any) -> None:
    if isinstance(model, nn.Module):
        raise TypeError(
            f"model must be a function that makes the network, because each run trains one of its own, got the network "
            f"{type(model).__name__} itself: give lambda: copy.deepcopy(model), or a function that draws new weights"
        )
    if not callable(model):
        raise TypeError(f"model must be a function that makes the network, got {model!r}")


def _chosen(seeds: int | Sequence[int]) -> Sequence[int]:
    chosen = range(seeds) if isinstance(seeds, int) else list(seeds) if isinstance(seeds, Iterable) else []
    if not chosen or not all(isinstance(seed, Integral) for seed in chosen):
        raise ValueError(f"seeds must be at least one, or a list of them, got {seeds!r}")
    return [int(seed) for seed in chosen]


def _radius(rho: float | str) -> float | None:
    """None is a search."""
    if isinstance(rho, str) and rho == "auto":
        return None
    try:
        return float(rho)
    except (TypeError, ValueError):
        raise ValueError(f'rho is "auto" or a number, got {rho!r}') from None


def _building(make: Callable[..., nn.Module]) -> Callable[[Config, Source], nn.Module]:
    return lambda config, source: with_sizes(called(make, source.classes, config.model), config, source)


def _texts(settings: Mapping[str, Any]) -> dict[str, str]:
    return {name: str(value) for name, value in settings.items()}
