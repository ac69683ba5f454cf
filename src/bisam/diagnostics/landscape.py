"""Surfaces: losses and errors on a grid around the weights, along random filter-normalised directions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from bisam.diagnostics.arguments import Data, Progress, check_count
from bisam.diagnostics.passes import PassResult, Probe
from bisam.objectives import Objective

Values = list[float] | list[list[float]]


@dataclass(frozen=True)
class Surface:
    """Losses and errors on a grid around w, its centre: `losses[i]` at `coordinates[i]`; in two dimensions
    `losses[i][j]` at `coordinates[i]` of the first and `coordinates[j]` of the second direction."""

    coordinates: list[float]
    losses: Values
    errors: Values | None
    """None where nothing is classified."""


def surface(
    model: nn.Module,
    data: Data,
    *,
    span: float = 1.0,
    points: int = 21,
    dimensions: int = 1,
    seed: int = 0,
    objective: Objective | None = None,
    train_mode: bool = False,
    progress: Progress | None = None,
) -> Surface:
    """L and the 0-1 error at w + a d or w + a d + b d′, with a and b evenly from −span to span.

    The directions are random and filter-normalised: each filter d_i, what belongs to one index of a parameter's first
    dimension, is normal noise scaled to ‖d_i‖ = ‖w_i‖. Parameters of one dimension, which biases and normalisation
    layers have, stay where they are. An odd number of points has w itself in the centre.

    Examples:
        >>> model, batch = torch.nn.Linear(3, 2), (torch.eye(3), torch.tensor([0, 1, 1]))
        >>> surface(model, batch, points=5).coordinates
        [-1.0, -0.5, 0.0, 0.5, 1.0]
        >>> len(surface(model, batch, points=5, dimensions=2).losses[0])
        5
    """
    check_count("points", points, 2)
    if dimensions not in (1, 2):
        raise ValueError(f"dimensions must be 1 or 2, got {dimensions}")
    if not (span > 0 and math.isfinite(span)):
        raise ValueError(f"span must be positive and finite, got {span}")
    coordinates = [span * (2 * i / (points - 1) - 1) for i in range(points)]
    with Probe(model, data, objective, None, train_mode, progress, passes=points**dimensions) as probe:
        random = torch.Generator().manual_seed(seed)
        directions = [probe.filter_normalised(random) for _ in range(dimensions)]
        if dimensions == 1:
            line = [probe.look(a * directions[0]) for a in coordinates]
            return Surface(coordinates, [there.loss for there in line], _errors(line))
        lines = [[probe.look(a * directions[0] + b * directions[1]) for b in coordinates] for a in coordinates]
    errors = [_errors(line) for line in lines]
    return Surface(
        coordinates,
        [[there.loss for there in line] for line in lines],
        [line for line in errors if line is not None] if None not in errors else None,
    )


def _errors(line: Sequence[PassResult]) -> list[float] | None:
    errors = [there.error for there in line]
    return [error for error in errors if error is not None] if None not in errors else None
