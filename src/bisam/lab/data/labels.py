"""The split into training and validation samples, and label noise."""

from __future__ import annotations

from collections.abc import Sized

import torch
from torch import Tensor

from bisam.lab.data.randomness import generator


def split(labels: Sized, fraction: float = 0.1, *, seed: int) -> tuple[Tensor, Tensor]:
    """Indices of training and validation samples, each in ascending order.

    round(fraction · N) samples, drawn without looking at their classes, validate.

    >>> train, validation = split(torch.zeros(50), 0.1, seed=0)
    >>> len(train), len(validation)
    (45, 5)
    """
    if not 0 <= fraction < 1:
        raise ValueError(f"fraction must be in [0, 1), got {fraction}")
    count = round(fraction * len(labels))
    order = torch.randperm(len(labels), generator=generator("split", seed))
    return order[count:].sort().values, order[:count].sort().values


def with_noise(labels: Tensor, rate: float, classes: int, *, seed: int) -> Tensor:
    """Labels of which exactly round(rate · N) were moved to another class, each of the others as likely.

    What is moved at one rate is moved to the same class at every higher rate of the same seed.

    >>> clean = torch.arange(1000) % 10
    >>> int(with_noise(clean, 0.4, 10, seed=0).ne(clean).sum())
    400
    """
    if not 0 <= rate <= 1:
        raise ValueError(f"rate must be in [0, 1], got {rate}")
    if labels.dtype != torch.int64 or labels.ndim != 1:
        raise ValueError(f"labels must be int64 (N), got {labels.dtype} {tuple(labels.shape)}")
    if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < classes:
        raise ValueError(f"labels must be in 0 … {classes - 1}, got {int(labels.min())} … {int(labels.max())}")
    count = round(rate * len(labels))
    if count == 0:
        return labels.clone()
    if classes < 2:
        raise ValueError(f"with {classes} class there is no other to move labels to")
    draws = generator("noise", seed)
    moved = torch.randperm(len(labels), generator=draws)[:count].to(labels.device)
    steps = torch.randint(1, classes, (len(labels),), generator=draws)[:count].to(labels.device)
    noisy = labels.clone()
    noisy[moved] = (labels[moved] + steps) % classes
    return noisy
