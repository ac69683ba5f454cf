"""Totals over batches: the mean of an objective, and which samples are classified correctly."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bisam.engine.objective_options import divisor, is_of_labels, is_sum, setting
from bisam.objectives import Objective, as_target, check_classification, correct


class Mean:
    """The mean of an objective over all batches from its means, or its sum from its sums."""

    def __init__(self, objective: Objective) -> None:
        self._objective = objective
        self._sum = self._weight = 0.0

    def add(self, value: Tensor, target: Tensor) -> float:
        """Count a batch, and return what it counts for."""
        weight = float(divisor(self._objective, target))
        if weight:  # of a batch that is all ignored, the mean is 0/0
            self._sum += weight * value.item()
            self._weight += weight
        return weight

    @property
    def divisor(self) -> float:
        if not self._weight:
            raise ValueError("the data is empty: every sample is ignored or has no weight")
        return 1.0 if is_sum(self._objective) else self._weight

    @property
    def value(self) -> float:
        return self._sum / self.divisor


class CountedPredictions:
    """Which samples are right, and their labels, over all batches; None unless every batch is a classification."""

    def __init__(self, objectives: Sequence[Objective]) -> None:
        self._objectives = objectives
        self._batches: list[tuple[Tensor, Tensor]] = []
        self._all_classify = True

    def add(self, output: Tensor, target: Tensor) -> None:
        self._all_classify = self._all_classify and is_classification(self._objectives, output, target)
        if self._all_classify:
            self._batches.append(predictions(output, target, setting(self._objectives[0], "ignore_index", -100)))

    @property
    def right(self) -> Tensor | None:
        return torch.cat([right for right, _ in self._batches]) if self._all_classify else None

    @property
    def labels(self) -> Tensor | None:
        return torch.cat([labels for _, labels in self._batches]) if self._all_classify else None


def scalar(value: Tensor) -> Tensor:
    if value.dim() != 0:
        raise ValueError(f"an objective must return a scalar, the mean over the batch, got shape {tuple(value.shape)}")
    return value


def is_classification(objectives: Sequence[Objective], output: Tensor, target: Tensor) -> bool:
    """Whether errors can be counted. Numbers that add up to 1 are labels only if an objective is of labels."""
    try:
        check_classification(output, target)
    except (TypeError, ValueError):
        return False
    if not target.is_floating_point():
        return True
    if target.dim() == 1 or not any(map(is_of_labels, objectives)):
        return False
    total = target.sum(1)
    return bool((target >= 0).all()) and torch.allclose(total, torch.ones_like(total), atol=1e-2)


def predictions(logits: Tensor, target: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Which of the samples that count are right, and their labels, flat."""
    right = correct(logits, target, ignore_index=ignore_index)
    labels = target.argmax(1) if target.is_floating_point() else as_target(target)
    counted = torch.ones_like(right) if target.is_floating_point() else labels != ignore_index
    return right[counted], labels[counted]
