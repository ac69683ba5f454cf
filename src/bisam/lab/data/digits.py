"""Handwritten digits, 8×8, that come with scikit-learn."""

from __future__ import annotations

import torch
from torch import Tensor

from bisam.lab.data.images import DataError, Images
from bisam.lab.data.randomness import generator

TEST_SAMPLES = 600


def digits() -> tuple[Images, Images]:
    """1197 digits for training and 600 for the test, always the same ones, classes in the same proportions.

    Their 17 grey levels, 0 … 16, are stretched to 0 … 255.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise DataError("digits come with scikit-learn, which is not installed: pip install scikit-learn") from None
    found = load_digits()
    pixels = torch.tensor(found.images).mul(255 / 16).round().to(torch.uint8).unsqueeze(1)
    labels = torch.tensor(found.target, dtype=torch.int64)
    train, test = every_nth(labels, TEST_SAMPLES)
    return Images(pixels[train], labels[train]), Images(pixels[test], labels[test])


def every_nth(labels: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Indices of the others and of `count` samples at equal distances in the list sorted by class: ascending, fixed."""
    shuffled = torch.randperm(len(labels), generator=generator("digits", 0))
    by_class = shuffled[labels[shuffled].sort(stable=True).indices]
    chosen = torch.zeros(len(labels), dtype=torch.bool)
    chosen[by_class[torch.arange(count) * len(labels) // count]] = True
    return (~chosen).nonzero().flatten(), chosen.nonzero().flatten()
