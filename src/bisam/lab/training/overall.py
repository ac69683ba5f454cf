"""How far all runs of a command are: which run, how long it still takes, and the results by method so far."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from statistics import mean, stdev

from rich.table import Table

from bisam.lab.config import Config
from bisam.lab.methods import passes_until


class Overall:
    """Counts finished runs and epochs. Time is estimated from epochs, each weighed by the passes of its method.

    The later half of what has been trained sets the pace, so that a slow start, or a machine that others use for a
    while, does not count for long.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._epochs: dict[Config, float] = {}
        self._before = 0.0
        """Passes that were not run here: of an earlier command, or of a run that diverged; without those run again."""
        self._marks: list[tuple[float, float]] = []
        """Times, and the passes that were run here until then."""
        self._scores: dict[str, list[float]] = defaultdict(list)

    def expect(self, configs: Iterable[Config]) -> None:
        """These runs are to be trained."""
        self._epochs.update(dict.fromkeys(configs, 0))

    def begin(self, epochs: Mapping[Config, int]) -> None:
        """These runs begin, or resume after that many epochs, which cost no time now."""
        for config, epoch in epochs.items():
            self._before += passes_until(config, epoch) - passes_until(config, self._epochs.get(config, 0))
            self._epochs[config] = epoch
        if not self._marks:
            self._mark()

    def epoch(self, config: Config, epochs: float) -> None:
        """A run has reached that many epochs, the last one perhaps in part."""
        self._epochs[config] = epochs
        self._mark()

    def finish(self, config: Config, name: str, score: float | None) -> None:
        """A run has ended; one that has diverged has no score."""
        self._before += passes_until(config, config.epochs) - passes_until(config, self._epochs.get(config, 0))
        self._epochs[config] = config.epochs
        if score is not None and math.isfinite(score):
            self._scores[name].append(score)

    @property
    def line(self) -> str:
        """Such as `run 3 of 12, 1:10 left`; empty for a single run, which has a bar of its own."""
        if len(self._epochs) < 2:
            return ""
        number = min(self._trained + 1, len(self._epochs))
        return ", ".join([f"run {number} of {len(self._epochs)}", *([self.left] if self.left else [])])

    @property
    def left(self) -> str:
        """Such as `1:10 left`, of all runs; empty where it cannot be estimated yet."""
        seconds = self._seconds_left()
        return "" if seconds is None else f"{clock_time(seconds)} left"

    @property
    def is_over(self) -> bool:
        """Whether all runs have reached their last epoch."""
        return self._trained == len(self._epochs)

    @property
    def _trained(self) -> int:
        """Runs that have reached their last epoch: those that train together do so at the same time."""
        return sum(epochs >= config.epochs for config, epochs in self._epochs.items())

    def table(self, title: str) -> Table | None:
        """Mean scores of what has finished, by method."""
        if not self._scores:
            return None
        table = Table("finished", title, "", box=None, padding=(0, 2, 0, 0), header_style="dim")
        for name, scores in self._scores.items():
            scatter = f" ± {stdev(scores):.2f}" if len(scores) > 1 else ""
            table.add_row(name, f"{mean(scores):.2f}{scatter}", f"n = {len(scores)}")
        return table

    def _mark(self) -> None:
        self._marks.append((self._clock(), self._done() - self._before))

    def _done(self) -> float:
        return sum(passes_until(config, epochs) for config, epochs in self._epochs.items())

    def _seconds_left(self) -> float | None:
        if not self._marks or self._marks[-1][1] <= 0:
            return None
        now, trained = self._marks[-1]
        then, half = next(mark for mark in reversed(self._marks) if mark[1] <= trained / 2)
        left = sum(passes_until(config, config.epochs) for config in self._epochs) - self._done()
        since = self._clock() - now  # in the epoch that is running
        return max(0.0, (now - then) / (trained - half) * left - since)


def clock_time(seconds: float) -> str:
    """
    >>> clock_time(0.2), clock_time(70), clock_time(3600), clock_time(3 * 3600 + 62)
    ('0:01', '1:10', '1:00:00', '3:01:02')
    """
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes}:{rest:02}"
