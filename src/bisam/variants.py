"""The family: each variant is a composition of an objective and a perturbation.

    SAM   = round ball · cross entropy        BiSAM  = round ball · Q
    ASAM  = adaptive   · cross entropy        ABiSAM = adaptive   · Q

Any of them takes any objective: `ascent=` is what the perturbation climbs, `descent=` what the update minimises.
Options that all share are those of `SharpnessAware`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from bisam.objectives import LowerBound, Objective, Phi
from bisam.optimizer import Options, SharpnessAware
from bisam.perturbation import Ball

if TYPE_CHECKING:
    from typing_extensions import Unpack


class SAM(SharpnessAware):
    """Sharpness-aware minimization: ε = ρ ∇L/‖∇L‖, update with ∇L(w + ε).

    Foret, Kleiner, Mobahi, Neyshabur: Sharpness-Aware Minimization for Efficiently Improving Generalization, 2021.

    >>> model = nn.Linear(4, 3)
    >>> optimizer = SAM(torch.optim.SGD(model.parameters(), lr=0.1), model)
    >>> loss = optimizer.minimize(torch.randn(8, 4), torch.randint(3, (8,)))
    """

    def __init__(
        self,
        base: torch.optim.Optimizer,
        model: nn.Module | None = None,
        *,
        rho: float = 0.05,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(base, model, perturbation=Ball(rho), **options)


class ASAM(SharpnessAware):
    """Adaptive SAM: ε = ρ T²∇L/‖T∇L‖ with T = |w| + η, a ball that scales with the weights.

    Kwon, Kim, Park, Choi: ASAM: Adaptive Sharpness-Aware Minimization for Scale-Invariant Learning, 2021. ρ = 2 is what
    the BiSAM paper uses; ASAM's has 0.5 with η = 0.01. A parameter group with `"adaptive": False` has T = 1.

    >>> model = nn.Linear(4, 3)
    >>> base = torch.optim.SGD([{"params": [model.weight]}, {"params": [model.bias], "adaptive": False}], lr=0.1)
    >>> loss = ASAM(base, model).minimize(torch.randn(8, 4), torch.randint(3, (8,)))
    """

    def __init__(
        self,
        base: torch.optim.Optimizer,
        model: nn.Module | None = None,
        *,
        rho: float = 2.0,
        eta: float = 0.0,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(base, model, perturbation=Ball(rho, adaptive=True, eta=eta), **options)


class BiSAM(SharpnessAware):
    """Bilevel SAM: ε = ρ ∇Q/‖∇Q‖ climbs a lower bound of the 0-1 error, the update descends cross entropy at w + ε.

    Xie, Latorre, Antonakopoulos, Pethick, Cevher: Improving SAM Requires Rethinking its Optimization Formulation, 2024.
    `phi`, `mu` and `alpha` are those of `bisam.LowerBound`; the defaults are what the paper recommends. What `descent`
    ignores (`ignore_index`) and how it weights classes (`weight`) holds for Q too.

    >>> model = nn.Linear(4, 3)
    >>> optimizer = BiSAM(torch.optim.SGD(model.parameters(), lr=0.1), model, phi="tanh")
    >>> loss = optimizer.minimize(torch.randn(8, 4), torch.randint(3, (8,)))
    """

    def __init__(
        self,
        base: torch.optim.Optimizer,
        model: nn.Module | None = None,
        *,
        rho: float = 0.05,
        phi: str | Phi = "log",
        mu: float | None = None,
        alpha: float = 0.1,
        **options: Unpack[Options],
    ) -> None:
        options["ascent"] = _lower_bound(phi, mu, alpha, options)
        super().__init__(base, model, perturbation=Ball(rho), **options)


class ABiSAM(SharpnessAware):
    """Adaptive BiSAM: ε = ρ T²∇Q/‖T∇Q‖ with T = |w| + η; the paper has η = 0 and ρ = 2.

    >>> model = nn.Linear(4, 3)
    >>> optimizer = ABiSAM(torch.optim.SGD(model.parameters(), lr=0.1), model)
    >>> loss = optimizer.minimize(torch.randn(8, 4), torch.randint(3, (8,)))
    """

    def __init__(
        self,
        base: torch.optim.Optimizer,
        model: nn.Module | None = None,
        *,
        rho: float = 2.0,
        eta: float = 0.0,
        phi: str | Phi = "log",
        mu: float | None = None,
        alpha: float = 0.1,
        **options: Unpack[Options],
    ) -> None:
        options["ascent"] = _lower_bound(phi, mu, alpha, options)
        super().__init__(base, model, perturbation=Ball(rho, adaptive=True, eta=eta), **options)


def _lower_bound(phi: str | Phi, mu: float | None, alpha: float, options: Options) -> Objective:
    """Q on the samples and by the class weights of the descent; or the ascent that was given in its place."""
    ascent, descent = options.get("ascent"), options.get("descent")
    if ascent is None:
        weight, ignore_index = getattr(descent, "weight", None), getattr(descent, "ignore_index", -100)
        return LowerBound(phi, mu, alpha, weight=weight, ignore_index=ignore_index)
    if (phi, mu, alpha) != ("log", None, 0.1):
        raise ValueError(
            f"give phi, mu and alpha, or an ascent of your own, not both: got {phi=}, {mu=}, {alpha=}, {ascent=}"
        )
    return ascent
