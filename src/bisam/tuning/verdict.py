"""The result of a sweep: the curve, the choice, and which values cannot be distinguished from it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bisam.tuning.student import quantile
from bisam.tuning.training import Outcome

LEVEL = 0.95


@dataclass(frozen=True)
class RhoPoint:
    """One ρ of the grid. Accuracies are parts of 1, on the validation data, one for each repeat; so are losses."""

    rho: float
    accuracies: tuple[float, ...]
    losses: tuple[float, ...]
    diverged: bool
    """Whether a training with it was cut short, its weights or validation loss not finite any more."""
    behind: float | None
    """By how much the mean accuracy is below that of the choice; None if it diverged."""
    margin: float | None
    """How far the true value may be from `behind`, with a probability of 95 %; None if that is not known."""

    @property
    def accuracy(self) -> float:
        """The mean over the repeats, NaN if there are none."""
        return statistics.fmean(self.accuracies) if self.accuracies else math.nan

    @property
    def loss(self) -> float:
        """The mean over the repeats, NaN if there are none."""
        return statistics.fmean(self.losses) if self.losses else math.nan

    @property
    def is_distinguishable(self) -> bool | None:
        """Whether it is worse than the choice by more than chance explains; None if that is not known."""
        return None if self.behind is None or self.margin is None else self.behind > self.margin


@dataclass(frozen=True)
class RhoSweep:
    """What `find_rho` found. Print it for a table and its meaning in words."""

    rho: float
    """The choice."""
    points: tuple[RhoPoint, ...]
    """By ascending ρ."""
    steps: int
    """How long each training was."""
    repeats: int

    @property
    def best(self) -> RhoPoint:
        """The point of the choice."""
        return next(point for point in self.points if point.rho == self.rho)

    @property
    def indistinguishable(self) -> tuple[float, ...] | None:
        """Every other ρ that cannot be distinguished from the choice; None if the scatter is unknown."""
        others = [point for point in self.points if point is not self.best and not point.diverged]
        if any(point.is_distinguishable is None for point in others):
            return None
        return tuple(point.rho for point in others if not point.is_distinguishable)

    @property
    def remarks(self) -> tuple[str, ...]:
        """What matters before the choice is used, a sentence or two each."""
        remarks = [self._choice(), self._scatter(), self._plain_training(), self.edge, self._diverged()]
        return (*(remark for remark in remarks if remark), SHORT_TRAINING)

    def __str__(self) -> str:
        return "\n".join([*self._table(), "", *self.remarks])

    def _choice(self) -> str:
        best, times = _percent(self.best.accuracy), "1 repeat" if self.repeats == 1 else f"{self.repeats} repeats"
        choice = f"ρ = {self.rho:g} has the best mean accuracy, {best} %, after {self.steps} steps, {times}"
        others = [point for point in self.points if point is not self.best and not point.diverged]
        ties = [point.rho for point in others if _rounded(point) == _rounded(self.best)]
        return f"{choice}. ρ = {_listed(ties)} had the same accuracy, and no lower loss." if ties else f"{choice}."

    def _scatter(self) -> str:
        if self.repeats == 1:
            return (
                "With one repeat the scatter is unknown, so no two values can be distinguished: give repeats=3 or more."
            )
        equal = self.indistinguishable
        if equal is None:
            return (
                "All repeats gave the same results, so the scatter is unknown. If nothing in them was random, pass "
                "a DataLoader that shuffles, or a function that makes the model."
            )
        if equal:
            return f"~ ρ = {_listed(equal)} cannot be distinguished from it."
        if all(point.diverged for point in self.points if point is not self.best):
            return ""
        return "It is better than every other ρ by more than chance explains."

    def _plain_training(self) -> str:
        if self.rho == 0:
            return "ρ = 0 is plain training: no perturbation did better."
        if 0.0 in (self.indistinguishable or ()):
            return "Plain training (ρ = 0) is among them: this sweep does not show that perturbing helps."
        return ""

    @property
    def edge(self) -> str:
        """A sentence where ρ is at an end of the grid: what to try beside it. Else empty."""
        smallest, largest = self.points[0].rho, self.points[-1].rho
        if self.rho == largest:
            return f"ρ = {largest:g} is the largest of the grid: try {_listed(_beyond(largest, up=True))} too."
        if self.rho == smallest > 0:
            return (
                f"ρ = {smallest:g} is the smallest of the grid: try {_listed([*_beyond(smallest, up=False), 0])} too."
            )
        return ""

    def _diverged(self) -> str:
        lost = [point.rho for point in self.points if point.diverged]
        return f"ρ = {_listed(lost)} diverged: weights or loss were not finite any more." if lost else ""

    def _table(self) -> list[str]:
        rows = [["", "ρ", "accuracy, %", "loss", "behind, %"]]
        rows += [[self._mark(point), f"{point.rho:g}", *_cells(point, self.best)] for point in self.points]
        widths = [max(len(row[column]) for row in rows) for column in range(5)]
        lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        return [line.rstrip() for line in lines]

    def _mark(self, point: RhoPoint) -> str:
        if point is self.best:
            return "→"
        return "~" if point.is_distinguishable is False else ""


SHORT_TRAINING = "This ranks ρ after a short training; for a long one the best may be larger or smaller."


def judge(outcomes: Mapping[float, Sequence[Outcome | None]], steps: int) -> RhoSweep:
    """From what the trainings of each ρ, in ascending order, came to; None is one that diverged."""
    finished = {rho: [one for one in every if one is not None] for rho, every in outcomes.items()}
    survivors = {rho: every for rho, every in finished.items() if len(every) == len(outcomes[rho])}
    if not survivors:
        raise RuntimeError(
            f"training diverged at every rho, {_listed(outcomes)}: weights or loss were not finite any more. Lower the "
            "learning rate, or give the optimizer clip_norm=1.0, in make_optimizer"
        )
    points = {rho: _point(rho, every, rho not in survivors) for rho, every in finished.items()}
    chosen = min(survivors, key=lambda rho: (-_rounded(points[rho]), points[rho].loss, rho))
    repeats = len(survivors[chosen])
    scatter_is_known = any(len({one.loss for one in every}) > 1 for every in survivors.values())
    for rho, every in survivors.items():
        gaps = torch.stack([best.shares - one.shares for best, one in zip(survivors[chosen], every, strict=True)])
        margin = _margin(gaps) if scatter_is_known else None
        points[rho] = _point(rho, every, diverged=False, behind=gaps.mean().item(), margin=margin)
    return RhoSweep(chosen, tuple(points.values()), steps, repeats)


def _point(
    rho: float, every: Sequence[Outcome], diverged: bool, behind: float | None = None, margin: float | None = None
) -> RhoPoint:
    accuracies, losses = tuple(one.accuracy for one in every), tuple(one.loss for one in every)
    return RhoPoint(rho, accuracies, losses, diverged, behind, margin)


def _margin(gaps: Tensor) -> float:
    """Half of the 95 % interval of the mean of these differences, (repeats, samples).

    Their means over the samples scatter by repeat, and their means over the repeats by sample. Both variances count,
    which is rather too much than too little; the degrees of freedom are Welch's.
    """
    repeats, samples = gaps.shape
    by_repeat = gaps.mean(1).var().item() / repeats
    by_sample = gaps.mean(0).var().item() / samples if samples > 1 else 0.0
    total = by_repeat + by_sample
    if total == 0:
        return 0.0
    freedom = total**2 / (by_repeat**2 / (repeats - 1) + by_sample**2 / max(samples - 1, 1))
    return quantile(LEVEL, freedom) * math.sqrt(total)


def _rounded(point: RhoPoint) -> float:
    """The mean accuracy, without what its arithmetic rounded: equal counts are equal."""
    return round(point.accuracy, 12)


def _beyond(rho: float, *, up: bool) -> list[float]:
    """The next two numbers of 1, 2, 5, 10, … .

    >>> _beyond(0.5, up=True), _beyond(0.01, up=False)
    ([1.0, 2.0], [0.005, 0.002])
    """
    decade = math.floor(math.log10(rho))
    series = [float(f"{digit}e{decade + shift}") for shift in (-2, -1, 0, 1, 2) for digit in (1, 2, 5)]
    if up:
        return [value for value in series if value > rho * (1 + 1e-9)][:2]
    return [value for value in reversed(series) if value < rho * (1 - 1e-9)][:2]


def _cells(point: RhoPoint, best: RhoPoint) -> list[str]:
    if point.behind is None:
        return ["diverged", "", ""]
    accuracy, behind = _percent(point.accuracy), _percent(point.behind)
    if len(point.accuracies) > 1:
        accuracy += f" ± {_percent(statistics.stdev(point.accuracies))}"
    if point.margin is not None:
        behind += f" ± {_percent(point.margin)}"
    return [accuracy, f"{point.loss:.3f}", "" if point is best else behind]


def _percent(part: float) -> str:
    return f"{100 * part:.1f}"


def _listed(values: Sequence[float] | Mapping[float, object]) -> str:
    """
    >>> _listed([0.01, 0.02, 0.05])
    '0.01, 0.02 and 0.05'
    """
    words = [f"{value:g}" for value in values]
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
