"""Which samples feed which gradient: what a batch is, how it is cut into parts, and which samples are chosen."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from bisam import numbers


@dataclass
class Batch:
    """Inputs, a tensor, a tuple or a dict of tensors, and their targets."""

    x: Any
    y: Tensor
    per_sample: Any = None
    """Which of the inputs have a row for each sample: decided once, by the whole batch."""

    def __post_init__(self) -> None:
        if self.per_sample is None:
            self.per_sample = _per_sample(self.x, len(self.y))

    def __len__(self) -> int:
        return len(self.y)

    def run(self, model: Callable[..., Any]) -> Any:
        """model(x), model(*x) for a tuple or list, model(**x) for a mapping, as Hugging Face models take them."""
        if isinstance(self.x, Mapping):
            return model(**self.x)
        if are_several(self.x):
            return model(*self.x)
        return model(self.x)

    def split(self, pieces: int) -> list[Batch]:
        """Up to `pieces` parts along the first dimension; what is not per sample goes to every part.

        Examples:
            >>> [part.y.tolist() for part in Batch(torch.arange(3), torch.arange(3)).split(2)]
            [[0, 1], [2]]
        """
        return self.cut(-(-len(self) // pieces))

    def cut(self, size: int) -> list[Batch]:
        """Parts of `size` samples, the last one smaller if need be.

        Examples:
            >>> [len(part) for part in Batch(torch.arange(5), torch.arange(5)).cut(2)]
            [2, 2, 1]
        """
        if size >= len(self):
            return [self]
        return [self.rows(slice(start, start + size)) for start in range(0, len(self), size)]

    def rows(self, rows: slice | Tensor) -> Batch:
        """Some of the samples."""
        if isinstance(self.x, PackedSequence):
            raise TypeError("a PackedSequence cannot be cut into parts: give padded sequences, and pack in the model")
        if not _any(self.per_sample):
            raise TypeError(
                f"the batch cannot be cut into parts: no tensor of x ({type(self.x).__name__}) has {len(self)} rows, "
                "as y has. Give a tensor, a tuple or a dict of tensors, or use step() with a list of closures, "
                "one for each part"
            )
        try:
            return Batch(_rows(self.x, rows, self.per_sample), self.y[rows], self.per_sample)
        except RuntimeError as error:  # NotImplementedError is one
            raise TypeError(
                f"the batch cannot be cut into parts ({str(error).splitlines()[0]:.100}): its tensors must be dense, "
                "not sparse or nested. Use step() with a list of closures, one for each part"
            ) from error


def are_several(x: Any) -> bool:
    """Whether these are several inputs, for `model(*x)`. A PackedSequence is a tuple, but one input."""
    return isinstance(x, (tuple, list)) and not isinstance(x, PackedSequence)


def stack(xs: Sequence[Any], per_sample: Any) -> tuple[Any, Any]:
    """Inputs of equally large batches along a new first dimension, and which of them have it, in the form of vmap."""
    first = xs[0]
    if isinstance(first, Mapping):
        both = {key: stack([x[key] for x in xs], per_sample[key]) for key in first}
        return {key: value for key, (value, _) in both.items()}, {key: axis for key, (_, axis) in both.items()}
    if are_several(first):
        pairs = [stack(values, mark) for values, mark in zip(zip(*xs, strict=True), per_sample, strict=True)]
        return tuple(value for value, _ in pairs), tuple(axis for _, axis in pairs)
    return (torch.stack(list(xs)), 0) if per_sample else (first, None)


Look = Callable[[Batch], Tensor]
"""Each sample's score at the weights as they are now, by a forward pass without gradients."""


class Plan:
    """All samples in both passes. Subclass it for your own plan: see docs/extending.md."""

    chooses = False
    """Whether it ever leaves samples out, so that it needs to see the batch (`minimize`)."""

    needs_scores_of_ascent = False
    """Whether `for_descent` compares with the ascent objective of each sample at w."""

    def for_ascent(self, batch: Batch, look: Look) -> Batch:
        """The samples for both passes; `look` gives the descent's loss at w."""
        return batch

    def for_descent(self, batch: Batch, before: Tensor | None, look: Look) -> Batch:
        """The samples for the descent, of those of the ascent; `look` gives the ascent's objective at w + ε."""
        return batch


class MostSensitive(Plan):
    """ESAM's sharpness-sensitive data selection: the ⌈γn⌉ samples whose ascent objective the perturbation raised most.

    The perturbed weights see all samples forward, without gradients; only the chosen ones are propagated back.
    """

    def __init__(self, gamma: float) -> None:
        self.gamma = numbers.fraction("gamma", gamma, zero=False)
        self.chooses = self.needs_scores_of_ascent = gamma < 1

    def for_descent(self, batch: Batch, before: Tensor | None, look: Look) -> Batch:
        if not self.chooses:
            return batch
        assert before is not None
        # rounded first, so that 0.28 · 25 = 7.000000000000001 keeps seven, not eight
        count = max(1, math.ceil(round(self.gamma * len(batch), 6)))
        return batch.rows((look(batch) - before).topk(count).indices)


class HighestLoss(Plan):
    """K-SAM: the k samples of highest loss at w, in both passes; k = None is half of the batch."""

    chooses = True

    def __init__(self, k: int | None) -> None:
        self.k = None if k is None else numbers.count("k", k, "samples")

    def for_ascent(self, batch: Batch, look: Look) -> Batch:
        k = math.ceil(len(batch) / 2) if self.k is None else min(self.k, len(batch))
        return batch if k == len(batch) else batch.rows(look(batch).topk(k).indices)


def _rows(x: Any, rows: slice | Tensor, per_sample: Any) -> Any:
    if isinstance(x, Mapping):
        return {key: _rows(value, rows, per_sample[key]) for key, value in x.items()}
    if are_several(x):
        return tuple(_rows(value, rows, mark) for value, mark in zip(x, per_sample, strict=True))
    return x[rows] if per_sample else x


def _any(per_sample: Any) -> bool:
    """Whether any of the inputs has a row for each sample."""
    if isinstance(per_sample, Mapping):
        return any(map(_any, per_sample.values()))
    return any(map(_any, per_sample)) if isinstance(per_sample, tuple) else bool(per_sample)


def _per_sample(x: Any, size: int) -> Any:
    if isinstance(x, Mapping):
        return {key: _per_sample(value, size) for key, value in x.items()}
    if are_several(x):
        return tuple(_per_sample(value, size) for value in x)
    return isinstance(x, Tensor) and x.dim() > 0 and len(x) == size
