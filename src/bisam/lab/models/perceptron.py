"""A perceptron for rows of numbers."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor, nn

WIDTHS = (64, 64)


class Perceptron(nn.Module):
    """Hidden layers with ReLU. Batch norm in front brings columns of any scale to mean 0 and deviation 1."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.normalize = nn.BatchNorm1d(features, affine=False)
        self.hidden = nn.Sequential()
        for inputs, outputs in pairwise((features, *WIDTHS)):
            self.hidden.extend([nn.Linear(inputs, outputs), nn.ReLU()])
        self.classifier = nn.Linear(WIDTHS[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.hidden(self.normalize(x.flatten(1))))
