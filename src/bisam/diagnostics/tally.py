"""What adds up over batches to that of all samples together: objectives, and which samples are classified correctly."""

from __future__ import annotations

import torch
from torch import Tensor

from bisam.objectives import Objective, check_classification, correct, divisor


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
        return 1.0 if getattr(self._objective, "reduction", "mean") == "sum" else self._weight

    @property
    def value(self) -> float:
        return self._sum / self.divisor


def scalar(value: Tensor) -> Tensor:
    if value.dim() != 0:
        raise ValueError(f"an objective must return a scalar, the mean over the batch, got shape {tuple(value.shape)}")
    return value


def is_classification(output: Tensor, target: Tensor) -> bool:
    try:
        check_classification(output, target)
    except (TypeError, ValueError):
        return False
    if not target.is_floating_point():
        return True
    total = target.sum(0 if target.dim() == 1 else 1)
    return bool((target >= 0).all()) and torch.allclose(total, torch.ones_like(total), atol=1e-2)


def predictions(logits: Tensor, target: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Which of the samples that count are right, and their labels, flat."""
    right = correct(logits, target, ignore_index=ignore_index)
    labels = target.argmax(0 if target.dim() == 1 else 1) if target.is_floating_point() else target
    counted = torch.ones_like(right) if target.is_floating_point() else target != ignore_index
    return right[counted], labels[counted]
