"""Average sharpness: how far the loss rises in random directions."""

from __future__ import annotations

import torch
from torch import nn

from bisam.diagnostics.arguments import Data, Progress, check_count, check_radius
from bisam.diagnostics.estimates import Estimate, estimate
from bisam.diagnostics.passes import Probe, unit
from bisam.objectives import Objective


def average_sharpness(
    model: nn.Module,
    data: Data,
    rho: float,
    *,
    samples: int = 10,
    adaptive: bool = False,
    eta: float = 0.0,
    seed: int = 0,
    objective: Objective | None = None,
    train_mode: bool = False,
    progress: Progress | None = None,
) -> Estimate:
    """Average sharpness, E L(w + ε) − L(w), for ε = ρ T n/‖n‖ with n standard normal.

    T⁻¹ε is uniform on the sphere of radius ρ, so it is as long as that of `sharpness`. Gaussian noise of variance ρ²
    would be √P times longer, for P parameters.
    """
    check_radius("rho", rho)
    check_radius("eta", eta)
    check_count("samples", samples, 1)
    with Probe(model, data, objective, None, train_mode, progress, passes=samples + 1) as probe:
        scale, random = probe.scale(adaptive, eta), torch.Generator().manual_seed(seed)
        loss = probe.look().loss
        return estimate([probe.look(rho * scale * unit(probe.normal(random))).loss - loss for _ in range(samples)])
