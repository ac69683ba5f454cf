"""The weights of the closures of a list."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bisam.engine.criterion import Criterion
from bisam.numbers import is_number
from bisam.tensors import gradients
from bisam.tensors.gradients import Gradients


class ClosureWeights:
    """What each closure of a list counts for: the samples, or tokens, that its criterion did not ignore.

    The mean of means would weigh a token of a short closure more. Sums add up, as those of parts of a batch do. If no
    closure calls the criterion, all count alike.
    """

    def __init__(self, criterion: Criterion) -> None:
        self._criterion = criterion
        self._found: list[float | Tensor | None] = []
        self._unit = 1.0
        self._are_sums = False

    def begin_closure(self) -> None:
        self._criterion.label_counts = []

    def end_closure(self, found: Gradients) -> Gradients:
        counts, self._criterion.label_counts = self._criterion.label_counts or [], None
        if counts and not self._found:
            self._unit = counts[0].labels  # weights near 1: gradients in half precision overflow easily
        self._are_sums = any(count.is_sum for count in counts)
        weight = sum(count.kept for count in counts) / len(counts) / self._unit if counts else None
        self._found.append(weight)
        return found if weight is None else gradients.scale_(found, weight)

    def finish(self, total: Gradients) -> None:
        known = [weight for weight in self._found if weight is not None]
        if known and len(known) < len(self._found):
            raise RuntimeError(
                f"{len(known)} of the {len(self._found)} closures of a list called the criterion: the weights of the "
                "others are unknown. Call optimizer.criterion in all of them, or in none"
            )
        gradients.scale_(total, self._share)

    @property
    def _share(self) -> float | Tensor:
        """1 ÷ the sum of the weights; 0 if every label was ignored. Sums add up to that of the whole."""
        if self._are_sums:
            return 1.0
        known = [weight for weight in self._found if weight is not None]
        whole = sum(known) if known else float(len(self._found))
        return torch.where(whole == 0, 0.0, 1 / whole) if isinstance(whole, Tensor) else 1 / whole

    def mean(self, values: list[Any]) -> list[Any]:
        """The weighted mean, or sum, of what the closures returned, in a list; the first if they are no numbers."""
        if not all(is_number(value) or getattr(value, "ndim", None) == 0 for value in values):
            return values[:1]
        values = [value if isinstance(value, Tensor) else float(value) for value in values]
        factors = [1.0 if weight is None else weight for weight in self._found]
        weighted = [
            # the mean of a closure whose labels were all ignored is 0/0, and counts for nothing
            torch.where(factor == 0, 0.0, factor * value) if isinstance(factor, Tensor) else factor * value
            for factor, value in zip(factors, values, strict=True)
        ]
        mean = sum(weighted) * self._share
        return [torch.as_tensor(mean, dtype=values[0].dtype) if isinstance(values[0], Tensor) else float(mean)]
