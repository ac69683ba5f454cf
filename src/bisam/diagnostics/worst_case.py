"""Worst-case sharpness: how far the loss rises in a ball around the weights, and whose labels flip on the way."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bisam.diagnostics.arguments import Data, Progress, check_count, check_radius
from bisam.diagnostics.passes import PassResult, Probe, length, unit
from bisam.objectives import Objective


@dataclass(frozen=True)
class Sharpness:
    """The loss and the 0-1 error at w and at w + ε. Errors and flips are None where nothing is classified."""

    loss: float
    perturbed_loss: float
    value: float
    """L(w + ε) − L(w)."""
    error: float | None
    perturbed_error: float | None
    flips: int | None
    """How many samples are right at w and wrong at w + ε."""
    bound: float | None
    """Q − log(K)/μ at w + ε, never above the 0-1 error there (of the same class weights), if Q is maximised. None for
    probabilities as targets: it is below the error of a label drawn from them, and errors are of the likeliest."""
    norm: float
    """‖T⁻¹ε‖."""


def sharpness(
    model: nn.Module,
    data: Data,
    rho: float,
    *,
    adaptive: bool = False,
    eta: float = 0.0,
    steps: int = 1,
    objective: Objective | None = None,
    ascent: Objective | None = None,
    train_mode: bool = False,
    progress: Progress | None = None,
) -> Sharpness:
    """Worst-case sharpness, L(w + ε) − L(w), with the 0-1 error at both ends.

    One step is SAM's own perturbation, even if the loss falls there. More steps are projected gradient ascent in the
    same ball, and the highest point counts:

        ε = ρ T² g/‖T g‖      or      u ← Π_ρ(u + α T g/‖T g‖),   ε = T u,   u = 0 and α = 2ρ at first

    with α falling evenly to 2ρ/steps. The first of these points is SAM's too, so more steps never end lower. Together
    the steps are long enough to get around the ball; constant steps of 2ρ/steps would not be.

    Args:
        rho: the radius.
        adaptive: T = |w| + η instead of 1.
        eta: that η.
        steps: gradients to follow; the data is passed over once more.
        ascent: the objective to maximise, which decides which point is the highest. Default: `objective`. With
            a `LowerBound` the result has the value of the bound too.

    Examples:
        >>> x, y = torch.eye(3), torch.tensor([0, 1, 2])
        >>> model = torch.nn.Linear(3, 3, bias=False)
        >>> _ = model.weight.data.copy_(torch.eye(3))
        >>> found = sharpness(model, (x, y), rho=2.0, ascent=bisam.LowerBound())
        >>> found.error, found.perturbed_error, found.flips, round(found.norm, 4)
        (0.0, 1.0, 3, 2.0)
        >>> found.bound <= found.perturbed_error
        True
    """
    check_radius("rho", rho)
    check_radius("eta", eta)
    check_count("steps", steps, 1)
    with Probe(model, data, objective, ascent, train_mode, progress, passes=steps + 1) as probe:
        scale = probe.scale(adaptive, eta)
        before = here = worst = probe.look(gradient=True)
        point = where = torch.zeros_like(before.gradient)
        for left in range(steps, 0, -1):
            point = _into_ball(point + 2 * rho * left / steps * unit(scale * here.gradient), rho)
            here = probe.look(scale * point, gradient=left > 1)
            if steps == 1 or not here.ascended <= worst.ascended:
                worst, where = here, point
            if not math.isfinite(here.ascended):  # no step leads on from here
                break
    return Sharpness(
        loss=before.loss,
        perturbed_loss=worst.loss,
        value=worst.loss - before.loss,
        error=before.error,
        perturbed_error=worst.error,
        flips=_count_flips(before, worst),
        bound=worst.bound,
        norm=length(where).item(),
    )


def flips(
    model: nn.Module,
    data: Data,
    rho: float,
    *,
    adaptive: bool = False,
    eta: float = 0.0,
    steps: int = 1,
    objective: Objective | None = None,
    ascent: Objective | None = None,
    train_mode: bool = False,
    progress: Progress | None = None,
) -> int:
    """How many samples the perturbation of `sharpness` turns from right to wrong."""
    found = sharpness(
        model,
        data,
        rho,
        adaptive=adaptive,
        eta=eta,
        steps=steps,
        objective=objective,
        ascent=ascent,
        train_mode=train_mode,
        progress=progress,
    )
    if found.flips is None:
        raise ValueError("flips need a classification: logits (N, K, ...) and labels (N, ...)")
    return found.flips


def _into_ball(point: Tensor, rho: float) -> Tensor:
    norm = length(point)
    return point * torch.where(norm > rho, rho / norm, 1.0)


def _count_flips(before: PassResult, after: PassResult) -> int | None:
    if before.right is None or after.right is None or before.labels is None or after.labels is None:
        return None
    if not torch.equal(before.labels, after.labels):
        raise ValueError(
            "the data gave other samples, or another order, the second time, so flips cannot be counted. Pass a list "
            "of batches, or a DataLoader that does not shuffle"
        )
    return int((before.right & ~after.right).sum())
