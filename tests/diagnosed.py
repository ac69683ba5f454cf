"""What diagnostics are tested on: quadratics, whose closed forms are known, and a call of every diagnostic."""

import pytest
import torch
from torch import nn

import bisam
from bisam.diagnostics import average_sharpness, flips, hessian_eigenvalues, hessian_trace, sharpness, surface

DUMMY = (torch.zeros(1), torch.zeros(1))  # a quadratic has no data


class Weights(nn.Module):
    """A model whose output is its weights, so that an objective may be any function of them."""

    def __init__(self, values):
        super().__init__()
        self.w = nn.Parameter(values.clone())

    def forward(self, x):
        return self.w


class Quadratic:
    """L = ½ wᵀ A w + bᵀ w; records the weights at which it was evaluated."""

    def __init__(self, matrix, linear):
        self.matrix, self.linear, self.seen = matrix, linear, []

    def __call__(self, w, _):
        self.seen.append(w.detach().clone())
        return self.at(w)

    def at(self, w):
        return w @ self.matrix @ w / 2 + self.linear @ w


def quadratic(eigenvalues=(3.0, 1.0, 0.5, -0.2, -2.0), seed=0):
    generator = torch.Generator().manual_seed(seed)
    n = len(eigenvalues)
    rotation, _ = torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=torch.float64))
    matrix = rotation @ torch.diag(torch.tensor(eigenvalues, dtype=torch.float64)) @ rotation.T
    draw = torch.randn(2, n, generator=generator, dtype=torch.float64)
    return Weights(draw[0]), Quadratic((matrix + matrix.T) / 2, draw[1])


CALLS = {
    "sharpness": lambda *args, **options: sharpness(*args, 0.3, ascent=bisam.LowerBound(), **options),
    "sharpness(adaptive, steps)": lambda *args, **options: sharpness(*args, 0.3, adaptive=True, steps=3, **options),
    "flips": lambda *args, **options: flips(*args, 0.3, **options),
    "average_sharpness": lambda *args, **options: average_sharpness(*args, 0.3, samples=2, **options),
    "hessian_eigenvalues": lambda *args, **options: hessian_eigenvalues(*args, 2, tolerance=0.1, **options),
    "hessian_trace": lambda *args, **options: hessian_trace(*args, samples=2, **options),
    "surface": lambda *args, **options: surface(*args, points=3, **options),
    "surface(2)": lambda *args, **options: surface(*args, points=3, dimensions=2, **options),
}
every_call = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
