"""Curvature: the largest eigenvalues and the trace of the Hessian, from its products with vectors."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from bisam.diagnostics.arguments import Data, Progress, check_count
from bisam.diagnostics.estimates import Estimate, estimate
from bisam.diagnostics.passes import Probe, length, unit
from bisam.objectives import Objective


def hessian_eigenvalues(
    model: nn.Module,
    data: Data,
    k: int = 1,
    *,
    iterations: int = 100,
    tolerance: float = 1e-4,
    seed: int = 0,
    objective: Objective | None = None,
    train_mode: bool = False,
    progress: Progress | None = None,
) -> list[float]:
    """The k largest eigenvalues of H, in descending order, by Lanczos with full reorthogonalisation.

    An iteration is one product H v over all data. Iterations end when ‖H v − θ v‖ ≤ tolerance · max|θ| for each of the
    k pairs; a warning appears if that takes more than `iterations`. Eigenvalues are ordered by value, not by magnitude:
    1 comes before −2. Copies of an exactly repeated eigenvalue may be missed. The basis takes `iterations` times the
    memory of the weights.
    """
    check_count("k", k, 1)
    check_count("iterations", iterations, 1)
    if not 0 < tolerance < 1:
        raise ValueError(f"tolerance must lie between 0 and 1, got {tolerance}")
    with Probe(model, data, objective, None, train_mode, progress, passes=iterations) as probe:
        if k > probe.size:
            raise ValueError(f"k must be at most the number of parameters, {probe.size}, got {k}")
        if k > iterations:
            raise ValueError(f"k must be at most iterations, {iterations}, got {k}: give more iterations")
        random = torch.Generator().manual_seed(seed)
        values, residual = _lanczos(probe, random, k, iterations, tolerance)
        probe.finish()
    if residual > tolerance:
        warnings.warn(
            f"the eigenvalues did not converge in {iterations} iterations: the residual is {residual:.1e} of the "
            f"largest, the tolerance {tolerance:.1e}. Give more iterations",
            RuntimeWarning,
            stacklevel=2,
        )
    return values


def hessian_trace(
    model: nn.Module,
    data: Data,
    *,
    samples: int = 100,
    seed: int = 0,
    objective: Objective | None = None,
    train_mode: bool = False,
    progress: Progress | None = None,
) -> Estimate:
    """The trace of H by Hutchinson's estimator, the mean of zᵀ H z over signs z = ±1: exact where H is diagonal."""
    check_count("samples", samples, 1)
    with Probe(model, data, objective, None, train_mode, progress, passes=samples) as probe:
        random, values = torch.Generator().manual_seed(seed), []
        for _ in range(samples):
            signs = probe.signs(random)
            values.append(signs.dot(probe.hessian_times(signs)).item())
    return estimate(values)


def _lanczos(
    probe: Probe, random: torch.Generator, k: int, iterations: int, tolerance: float
) -> tuple[list[float], float]:
    """The k largest eigenvalues, and the largest of their residuals relative to the largest eigenvalue found.

    H V = V A + β v eᵀ with orthonormal V and tridiagonal A, whose eigenpairs (θ, s) have the residuals β |s_last|.
    """
    basis = [unit(probe.normal(random))]
    diagonal: list[float] = []
    beside: list[float] = []
    exhausted = False
    while True:
        vector = probe.hessian_times(basis[-1])
        diagonal.append(vector.dot(basis[-1]).item())
        if not math.isfinite(diagonal[-1]):
            raise ValueError("the Hessian is not finite at these weights: it has no eigenvalues")
        vector, left = _orthogonal(vector, basis)
        tridiagonal = torch.diag(torch.tensor(diagonal, dtype=torch.float64, device="cpu"))
        for index, entry in enumerate(beside):
            tridiagonal[index, index + 1] = tridiagonal[index + 1, index] = entry
        values, vectors = torch.linalg.eigh(tridiagonal)
        largest = values.abs().max().item()
        residual = left * vectors[-1, -k:].abs().max().item() / (largest or 1.0)
        # what a start vector reaches may end early, with one copy of each eigenvalue: others need another start
        ends = left <= 100 * torch.finfo(vector.dtype).eps * largest
        exhausted |= ends
        done = len(diagonal) >= k and residual <= tolerance and not (exhausted and k > 1)
        if len(diagonal) == probe.size:
            residual = 0.0  # A is H in another basis
            done = True
        if done or len(diagonal) == iterations:
            return values[-k:].flip(0).tolist(), residual
        if ends:
            vector, _ = _orthogonal(probe.normal(random), basis)
            left = 0.0
        beside.append(left)
        basis.append(unit(vector))


def _orthogonal(vector: Tensor, basis: Sequence[Tensor]) -> tuple[Tensor, float]:
    """What is left of a vector beside the basis, and its length."""
    for _ in range(2):  # once leaves rounding errors, twice is enough
        for other in basis:
            vector = vector - other.dot(vector) * other
    return vector, length(vector).item()
