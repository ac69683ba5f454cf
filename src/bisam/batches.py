"""What a batch is: a tensor, a tuple or a dict of inputs, and how it is fed to a model and cut into pieces."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from bisam.objectives import Objective, divisor


def forward(model: nn.Module, x: Any) -> Any:
    """model(x), model(*x) for a tuple or list, model(**x) for a mapping, as Hugging Face models take their inputs."""
    if isinstance(x, Mapping):
        return model(**x)
    if isinstance(x, (tuple, list)):
        return model(*x)
    return model(x)


def split(x: Any, y: Tensor, pieces: int) -> list[tuple[Any, Tensor]]:
    """The batch in up to `pieces` parts along the first dimension; what is not per sample goes to every part.

    >>> [(a.tolist(), b.tolist()) for a, b in split(torch.arange(3), torch.arange(3), 2)]
    [([0, 1], [0, 1]), ([2], [2])]
    """
    ys = list(y.chunk(pieces)) if pieces > 1 else [y]
    ends = torch.tensor([len(part) for part in ys]).cumsum(0).tolist()
    ranges = list(zip([0, *ends[:-1]], ends, strict=True))
    return [(_piece(x, slice(start, end), len(y)), part) for (start, end), part in zip(ranges, ys, strict=True)]


def share(objective: Objective, part: Tensor, whole: Tensor) -> float | Tensor:
    """What the loss of a part counts for, so that the parts' losses, so weighted, add up to the whole batch's.

    >>> share(torch.nn.CrossEntropyLoss(), torch.tensor([0, -100]), torch.tensor([0, -100, 1, 2, 3])).item()
    0.25
    """
    return divisor(objective, part) / divisor(objective, whole)


def _piece(x: Any, rows: slice, size: int) -> Any:
    if isinstance(x, Mapping):
        return {key: _piece(value, rows, size) for key, value in x.items()}
    if isinstance(x, (tuple, list)):
        return tuple(_piece(value, rows, size) for value in x)
    if isinstance(x, Tensor) and x.dim() > 0 and len(x) == size:
        return x[rows]
    return x
