"""The progress of runs: a live table in a terminal, a line now and then elsewhere."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, ProgressColumn, Task, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars
from rich.table import Column
from rich.text import Text

from bisam.lab.config import Config
from bisam.lab.files import printable
from bisam.lab.measures import MEASURES
from bisam.lab.measures import title_of as title_of_measure
from bisam.lab.methods import title_of
from bisam.lab.training.overall import Overall

SECONDS_BETWEEN_LINES = 10.0
SECONDS_WITHOUT_LINE = 60.0
"""At most, within a long epoch, where there is no terminal."""
ROWS_BELOW_BARS = 12
"""Lines of a terminal that are kept for the results by method and the line about all runs."""


class Tracker(Protocol):
    """A place that keeps curves: TensorBoard, Weights & Biases, trackio."""

    def log(self, folder: Path, config: Config, metrics: dict[str, Any]) -> None: ...
    def close(self) -> None: ...


class ClippedText(TextColumn):
    """Text without markup, cut where a line is too narrow, so that columns that may not wrap keep their width."""

    def __init__(self, text_format: str) -> None:
        super().__init__(text_format, markup=False, table_column=Column())

    def render(self, task: Task) -> Text:
        text = super().render(task)
        text.no_wrap, text.overflow = True, "ellipsis"
        return text


class LiveBars(Bars):
    """A bar for each run, and below them how far all runs are and their results."""

    def __init__(self, overall: Overall, score: str, *columns: ProgressColumn, console: Console) -> None:
        self.overall, self.score, self._screen = overall, score.replace("_", " "), console
        super().__init__(*columns, console=console)

    def get_renderables(self) -> Iterable[RenderableType]:
        room = max(self._screen.height - ROWS_BELOW_BARS, 1)
        yield self.make_tasks_table(self.tasks[:room])
        if len(self.tasks) > room:
            yield Text(f"and {len(self.tasks) - room} more", style="dim")
        table = self.overall.table(self.score)
        if table is not None:
            yield table
        if self.overall.line:
            yield Text(self.overall.line, style="bold")


class Progress:
    """Shows steps, epochs and results, and passes epochs to the trackers."""

    def __init__(
        self,
        console: Console | None = None,
        trackers: Sequence[Tracker] = (),
        *,
        label: Callable[[Config], str] | None = None,
        outcome: Callable[[dict[str, Any]], str] | None = None,
        score: str = "test_accuracy",
    ) -> None:
        """`label` returns the name of a run, `outcome` the text for the result of a finished one.

        `score` is the number of a result that the live table has.
        """
        self.label, self.outcome, self.score = label or name_of, outcome or _tested, score
        self.overall = Overall()
        self.console = Console() if console is None else console
        self.trackers = list(trackers)
        self._bars: LiveBars | None = None
        self._tasks: dict[Config, TaskID] = {}
        self._line = 0.0
        self._printed_at = 0.0
        """When the last line was printed."""
        self._last_line = ""
        """The last line about all runs."""
        self._begun: set[Config] = set()
        self._crew: list[Config] = []
        self._epochs: dict[Config, int] = {}
        self._batches: dict[Config, int] = {}
        self._shown = 0.0

    def __enter__(self) -> Progress:
        if self.console.is_terminal:
            self._bars = LiveBars(
                self.overall,
                self.score,
                ClippedText("{task.description}"),
                BarColumn(min(40, self.console.width // 5), table_column=Column(no_wrap=True)),
                MofNCompleteColumn(table_column=Column(no_wrap=True)),
                TimeRemainingColumn(table_column=Column(no_wrap=True)),
                ClippedText("{task.fields[status]}"),
                console=self.console,
            )
            self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bars is not None:
            self._bars.stop()
            self._bars = None
        for tracker in [*self.trackers]:
            self._try(tracker, tracker.close)

    def begin(self, epochs: Mapping[Config, int], batches: int) -> None:
        """These runs step together from now on; `epochs` is how many each has finished."""
        self._crew = [*epochs]
        self._epochs.update(epochs)
        self._batches.update(dict.fromkeys(epochs, batches))
        self.overall.begin(epochs)
        if self._bars is not None:
            for config, epoch in epochs.items():
                if config not in self._tasks:
                    self._tasks[config] = self._bars.add_task(
                        self.label(config), total=config.epochs * batches, completed=epoch * batches, status=""
                    )
            return
        for config in (config for config in epochs if config not in self._begun):
            length = f"{_counted(config.epochs, 'epoch')} of {_counted(batches, 'step')}"
            self.note(f"{self.label(config)}  begins: {length}")
        self._begun.update(epochs)

    def expect(self, configs: Iterable[Config]) -> None:
        """All runs that are to be trained."""
        self.overall.expect(configs)

    def step(self, number: int) -> None:
        """The runs that began last have done the first `number` batches of their epoch."""
        if time.monotonic() - self._shown > 0.1:
            self._shown = time.monotonic()
            self.steps(dict.fromkeys(self._crew, number))

    def steps(self, numbers: Mapping[Config, int]) -> None:
        """Each of these runs has done that many batches of its epoch."""
        if self._bars is not None:
            for config in (config for config in numbers if config in self._tasks):
                done = self._epochs[config] * self._batches[config] + numbers[config]
                self._bars.update(self._tasks[config], completed=done)
        elif numbers and time.monotonic() - self._printed_at > SECONDS_WITHOUT_LINE:
            for config, number in numbers.items():
                self.overall.epoch(config, self._epochs[config] + number / self._batches[config])
            config, number = next(iter(numbers.items()))
            place = f"epoch {self._epochs[config] + 1}/{config.epochs}, step {number}/{self._batches[config]}"
            self.note(f"{self.label(config)}  {place}  {self.overall.line or self.overall.left}")

    def epoch(self, config: Config, folder: Path, metrics: dict[str, Any]) -> None:
        epoch = self._epochs[config] = metrics["epoch"] + 1
        status = _status(metrics)
        self.overall.epoch(config, epoch)
        for tracker in [*self.trackers]:
            self._try(tracker, partial(tracker.log, folder, config, metrics))
        if self._bars is not None:
            with suppress(KeyError):
                self._bars.update(self._tasks[config], completed=epoch * self._batches[config], status=status)
        elif time.monotonic() - self._line > SECONDS_BETWEEN_LINES or epoch == config.epochs:
            self._line = time.monotonic()
            self.note(f"{self.label(config)}  epoch {epoch}/{config.epochs}  {status}")

    def saved(self, config: Config) -> None:
        """A checkpoint of the run is written."""

    def finish(self, config: Config, result: dict[str, Any]) -> None:
        if result["status"] == "done":
            text = f"{self.outcome(result)}, of epoch {result['best_epoch'] + 1}"
        else:
            text = f"{result['status']}: weights were not finite after epoch {result['epochs']}"
        self._epochs.pop(config, None)
        if self._bars is not None and config in self._tasks:
            self._bars.remove_task(self._tasks.pop(config))
        self.note(f"{self.label(config)}  {text}, {_time(result['seconds'])}")
        self.overall.finish(config, self.group(config), result.get(self.score))
        if self._bars is None and not self.overall.is_over and self.overall.line != self._last_line:
            self._last_line = self.overall.line  # of runs that end at the same time once
            self.note(self._last_line)

    def group(self, config: Config) -> str:
        """The name of a run without its seed."""
        return self.label(config).replace(f" seed {config.seed}", "")

    def note(self, text: str) -> None:
        """Print a line: brackets in the name of a folder are no markup.

        A closed pipe and a full disk are ignored: a training does not stop because its log cannot be written.
        """
        self._printed_at = time.monotonic()
        with suppress(SystemExit, OSError):  # rich raises SystemExit where a pipe was closed
            self.console.print(printable(text), markup=False, emoji=False, highlight=False, soft_wrap=True)

    def _try(self, tracker: Tracker, call: Callable[[], None]) -> None:
        """Drop a tracker that fails and continue: the curves are in the run's folder too."""
        try:
            call()
        except Exception as error:  # any error of a network or of another library
            self.trackers.remove(tracker)
            name = type(tracker).__name__
            self.note(f"{name} failed and gets no more curves ({type(error).__name__}: {error}). Training continues")


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what}{'s' * (count != 1)}"


def name_of(config: Config) -> str:
    """
    >>> name_of(Config(noise=0.4))
    'BiSAM (-log) seed 0 resnet56 40% noise'
    """
    noise = f" {config.noise:.0%} noise" if config.noise else ""  # the method first: a narrow terminal cuts the end
    return f"{title_of(config.method)} seed {config.seed} {config.model}{noise}"


def _tested(result: dict[str, Any]) -> str:
    """
    >>> _tested({"test_accuracy": 90.0, "test_macro_f1": 88.5, "test_top5_accuracy": 99.0})
    'test accuracy 90.00 %, macro F1 88.50 %'
    """
    shown = ((name, f"test_{name}") for name in MEASURES)
    return "test " + ", ".join(f"{title_of_measure(name)} {result[key]:.2f} %" for name, key in shown if key in result)


def _status(metrics: dict[str, Any]) -> str:
    """
    >>> _status({"validation_accuracy": 90.0, "perturbed_loss": 0.5, "samples_per_second": 1e4})
    'validation 90.00 %  loss 0.500  10,000 samples/s'
    """
    parts = [
        f"validation {metrics['validation_accuracy']:.2f} %",
        f"loss {metrics.get('loss', metrics.get('perturbed_loss', math.nan)):.3f}",  # MSAM's is at w + ε alone
        f"flips {metrics['flips']:.1f}" if "flips" in metrics else "",
        f"{metrics['samples_per_second']:,.0f} samples/s",
    ]
    return "  ".join(part for part in parts if part)


def _time(seconds: float) -> str:
    """
    >>> _time(70.9), _time(3599), _time(3600), _time(2 * 3600 + 125)
    ('1 min 10 s', '59 min 59 s', '1 h 0 min', '2 h 2 min')
    """
    minutes, rest = divmod(math.floor(seconds), 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min {rest} s"
