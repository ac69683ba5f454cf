"""The family: each variant is a composition of four parts.

    variant       perturbation                       plan            merge
    SAM           Ball                               all samples     g(w + ε)
    ASAM          Ball(adaptive)                     all samples     g(w + ε)
    ESAM          RandomTensors(Ball)                MostSensitive   g(w + ε)
    KSAM          Ball                               HighestLoss     g(w + ε)
    RSAM          RandomStart(Ball)                  all samples     g(w + ε)
    GSAM          BallFollowingLearningRate          all samples     SurrogateGap
    LookSAM       Ball                               all samples     Reuse
    FriendlySAM   MinusMean(Ball)                    all samples     g(w + ε)
    VaSSO         AlongMean(Ball)                    all samples     g(w + ε)
    FisherSAM     FisherBall                         all samples     g(w + ε)
    MSAM          AlongMomentum(Ball)                all samples     g(w + ε)
    WSAM          Ball                               all samples     WeightedSharpness

The fourth part is the objective of the ascent: cross entropy, or Q, the lower bound of the 0-1 error, for `BiSAM`,
`ABiSAM` and `EBiSAM`; `ascent=bisam.LowerBound()` makes the others bilevel, and `micro_batch=m` makes them mSAM, except
`MSAM`, which has no ascent pass. `every=k` perturbs in every k-th step. Options that all share are those of
`SharpnessAware`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from bisam.engine.combined import Base
from bisam.engine.objective_options import class_weights, setting
from bisam.engine.optimizer import Options, SharpnessAware
from bisam.merge import Reuse, SurrogateGap, WeightedSharpness
from bisam.objectives import LowerBound, Objective, Phi
from bisam.perturbation import (
    AlongMean,
    AlongMomentum,
    Ball,
    BallFollowingLearningRate,
    FisherBall,
    MinusMean,
    RandomStart,
    RandomTensors,
)
from bisam.plan import HighestLoss, MostSensitive

if TYPE_CHECKING:
    from typing_extensions import Unpack


class SAM(SharpnessAware):
    """Sharpness-aware minimization: ε = ρ ∇L/‖∇L‖, update with ∇L(w + ε).

    Foret, Kleiner, Mobahi, Neyshabur: Sharpness-Aware Minimization for Efficiently Improving Generalization, 2021.
    Other options: see `SharpnessAware`.

    Examples:
        >>> model = nn.Linear(4, 3)
        >>> optimizer = SAM(torch.optim.SGD(model.parameters(), lr=0.1), model)
        >>> loss = optimizer.minimize(torch.randn(8, 4), torch.randint(3, (8,)))
    """

    def __init__(
        self,
        base: Base,
        model: nn.Module | None = None,
        *,
        rho: float = 0.05,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(base, model, perturbation=Ball(rho), **options)


class ASAM(SharpnessAware):
    """Adaptive SAM: ε = ρ T²∇L/‖T∇L‖ with T = |w| + η, a ball that scales with the weights.

    Kwon, Kim, Park, Choi: ASAM: Adaptive Sharpness-Aware Minimization for Scale-Invariant Learning, 2021. The
    BiSAM paper uses ρ = 2, the ASAM paper 0.5 with η = 0.01. A parameter group with `"adaptive": False` has T = 1.
    Other options: see `SharpnessAware`.

    Examples:
        >>> model = nn.Linear(4, 3)
        >>> base = torch.optim.SGD([{"params": [model.weight]}, {"params": [model.bias], "adaptive": False}], lr=0.1)
        >>> loss = ASAM(base, model).minimize(torch.randn(8, 4), torch.randint(3, (8,)))
    """

    def __init__(
        self,
        base: Base,
        model: nn.Module | None = None,
        *,
        rho: float = 2.0,
        eta: float = 0.0,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(base, model, perturbation=Ball(rho, adaptive=True, eta=eta), **options)


class BiSAM(SharpnessAware):
    """Bilevel SAM: ε = ρ ∇Q/‖∇Q‖ ascends a lower bound of the 0-1 error, the update descends cross entropy at w + ε.

    Xie, Latorre, Antonakopoulos, Pethick, Cevher: Improving SAM Requires Rethinking its Optimization Formulation, 2024.
    `phi`, `mu` and `alpha` are those of `bisam.LowerBound`; the defaults are what the paper recommends. Q uses the
    `ignore_index` and the class weights (`weight`) of `descent`. These are one tensor: change it in place, not for
    another. Other options: see `SharpnessAware`.

    Examples:
        >>> model = nn.Linear(4, 3)
        >>> optimizer = BiSAM(torch.optim.SGD(model.parameters(), lr=0.1), model, phi="tanh")
        >>> loss = optimizer.minimize(torch.randn(8, 4), torch.randint(3, (8,)))
    """

    def __init__(
        self,
        base: Base,
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

    Other options: see `SharpnessAware`.

    Examples:
        >>> model = nn.Linear(4, 3)
        >>> optimizer = ABiSAM(torch.optim.SGD(model.parameters(), lr=0.1), model)
        >>> loss = optimizer.minimize(torch.randn(8, 4), torch.randint(3, (8,)))
    """

    def __init__(
        self,
        base: Base,
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


class ESAM(SharpnessAware):
    """Efficient SAM: perturb a random part of the parameter tensors, descend on the samples that it hurts most.

    Each tensor is kept with probability β, and ‖ε‖ = ρ/β for the kept ones (stochastic weight perturbation); the
    update uses the ⌈γn⌉ samples whose ascent objective rose most (sharpness-sensitive data selection). β = γ = 1 is
    SAM, bit for bit. Needs `minimize`.

    Du, Yan, Feng, Zhou, Zhen, Goh, Tan: Efficient Sharpness-aware Minimization for Improved Training of Neural
    Networks, 2022. The BiSAM paper writes ρ/(1 − β); ESAM's code, and we, keep with probability β and divide by β.
    Other options: see `SharpnessAware`.

    Examples:
        >>> model = nn.Linear(4, 3)
        >>> optimizer = ESAM(torch.optim.SGD(model.parameters(), lr=0.1), model)
        >>> loss = optimizer.minimize(torch.randn(8, 4), torch.arange(8) % 3)
    """

    def __init__(
        self,
        base: Base,
        model: nn.Module | None = None,
        *,
        rho: float = 0.05,
        beta: float = 0.5,
        gamma: float = 0.5,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(base, model, perturbation=RandomTensors(Ball(rho), beta), plan=MostSensitive(gamma), **options)


class EBiSAM(ESAM):
    """Efficient BiSAM: ESAM with the lower bound Q as the ascent objective and as the score of samples.

    Other options: see `SharpnessAware`.

    Examples:
        >>> model = nn.Linear(4, 3)
        >>> optimizer = EBiSAM(torch.optim.SGD(model.parameters(), lr=0.1), model)
        >>> loss = optimizer.minimize(torch.randn(8, 4), torch.arange(8) % 3)
    """

    def __init__(
        self,
        base: Base,
        model: nn.Module | None = None,
        *,
        rho: float = 0.05,
        beta: float = 0.5,
        gamma: float = 0.5,
        phi: str | Phi = "log",
        mu: float | None = None,
        alpha: float = 0.1,
        **options: Unpack[Options],
    ) -> None:
        options["ascent"] = _lower_bound(phi, mu, alpha, options)
        super().__init__(base, model, rho=rho, beta=beta, gamma=gamma, **options)


class KSAM(SharpnessAware):
    """K-SAM: both passes on the k samples of highest loss at w; k = None is half of the batch. Needs `minimize`.

    Ni, Chiang, Geiping, Goldblum, Wilson, Goldstein: K-SAM: Sharpness-Aware Minimization at the Speed of SGD, 2022.
    The returned loss is that of the chosen samples. Other options: see `SharpnessAware`.

    Examples:
        >>> model = nn.Linear(4, 3)
        >>> optimizer = KSAM(torch.optim.SGD(model.parameters(), lr=0.1), model)
        >>> loss = optimizer.minimize(torch.randn(8, 4), torch.arange(8) % 3)
    """

    def __init__(
        self,
        base: Base,
        model: nn.Module | None = None,
        *,
        rho: float = 0.05,
        k: int | None = None,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(base, model, perturbation=Ball(rho), plan=HighestLoss(k), **options)


class RSAM(SharpnessAware):
    """R-SAM: ascend from a random start, ε = δ + ρ g/‖g‖ with g = ∇L(w + δ), δ Gaussian, ‖δ‖ ≈ σ‖w‖ for each filter.

    Liu, Mai, Cheng, Chen, Hsieh, You: Random Sharpness-Aware Minimization, 2022. Loss and errors reported for w are
    computed at w + δ. Other options: see `SharpnessAware`.

    Examples:
        >>> model = nn.Linear(4, 3)
        >>> optimizer = RSAM(torch.optim.SGD(model.parameters(), lr=0.1), model)
        >>> loss = optimizer.minimize(torch.randn(8, 4), torch.arange(8) % 3)
    """

    def __init__(
        self,
        base: Base,
        model: nn.Module | None = None,
        *,
        rho: float = 0.05,
        sigma: float = 0.01,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(base, model, perturbation=RandomStart(Ball(rho), sigma), **options)


class GSAM(SharpnessAware):
    """Surrogate-gap SAM: g ← g_p − α g_⊥, with g_p = ∇L(w + ε) and g_⊥ the part of ∇L(w) orthogonal to it.

    ρ follows the learning rate: ρ_t = ρ_min + (ρ − ρ_min) (lr_t − lr_min)/(lr_max − lr_min). `rho_min` defaults to half
    of ρ, the paper's value for ResNets. `lr_min` is the final rate of the schedule. lr_max is each group's `lr_max`,
    its scheduler's `max_lr` or `initial_lr`, or the largest rate seen.

    Zhuang, Gong, Yuan, Cui, Adam, Dvornek, Tatikonda, Duncan, Liu: Surrogate Gap Minimization Improves Sharpness-Aware
    Training, 2022. With another ascent objective, ∇L(w) needs a third pass. Other options: see `SharpnessAware`.

    Examples:
        >>> model = nn.Linear(4, 3)
        >>> optimizer = GSAM(torch.optim.SGD(model.parameters(), lr=0.1), model)
        >>> loss = optimizer.minimize(torch.randn(8, 4), torch.arange(8) % 3)
    """

    def __init__(
        self,
        base: Base,
        model: nn.Module | None = None,
        *,
        rho: float = 0.05,
        rho_min: float | None = None,
        lr_min: float = 0.0,
        alpha: float = 0.4,
        **options: Unpack[Options],
    ) -> None:
        ball = BallFollowingLearningRate(rho, rho_min, lr_min)
        merge = SurrogateGap(alpha)
        super().__init__(base, model, perturbation=ball, merge=merge, **options)


class LookSAM(SharpnessAware):
    """LookSAM: perturb in every k-th step, and reuse g_v, the part of ∇L(w + ε) orthogonal to g = ∇L(w), in between:
    g ← g + α (‖g‖/‖g_v‖) g_v.

    Liu, Mai, Chen, Hsieh, You: Towards Efficient and Scalable Sharpness-Aware Minimization, 2022. Norms and angles
    are computed over the whole model. With another ascent objective, ∇L(w) needs a third pass in the perturbed steps.
    Other options: see `SharpnessAware`.

    Examples:
        >>> model = nn.Linear(4, 3)
        >>> optimizer = LookSAM(torch.optim.SGD(model.parameters(), lr=0.1), model, every=2)
        >>> losses = [optimizer.minimize(torch.randn(8, 4), torch.arange(8) % 3) for _ in range(4)]
    """

    def __init__(  # type: ignore[misc]  # every has another default here
        self,
        base: Base,
        model: nn.Module | None = None,
        *,
        rho: float = 0.05,
        every: int = 5,
        alpha: float = 0.7,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(base, model, perturbation=Ball(rho), merge=Reuse(alpha), every=every, **options)


class FriendlySAM(SharpnessAware):
    """Friendly SAM: ascend g − σ m, the gradient without the running mean of those before it, m ← λ m + (1 − λ) g.

    m starts as the first gradient, as in the authors' code. The paper's m already includes g, which gives the same
    direction for σ = 1.

    Li, Zhou, He, Cheng, Huang: Friendly Sharpness-Aware Minimization, 2024. Other options: see `SharpnessAware`.

    Examples:
        >>> model = nn.Linear(4, 3)
        >>> optimizer = FriendlySAM(torch.optim.SGD(model.parameters(), lr=0.1), model)
        >>> loss = optimizer.minimize(torch.randn(8, 4), torch.arange(8) % 3)
    """

    def __init__(
        self,
        base: Base,
        model: nn.Module | None = None,
        *,
        rho: float = 0.05,
        sigma: float = 1.0,
        decay: float = 0.9,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(base, model, perturbation=MinusMean(Ball(rho), sigma, decay), **options)


class VaSSO(SharpnessAware):
    """Variance-suppressed SAM: ε = ρ d/‖d‖ with d ← (1 − θ) d + θ ∇L(w), a running mean of gradients; θ = 1 is SAM.

    d starts as the first gradient, as in the authors' code. The defaults are those of that code.

    Li, Giannakis: Enhancing Sharpness-Aware Optimization Through Variance Suppression, 2023.
    Other options: see `SharpnessAware`.

    Examples:
        >>> model = nn.Linear(4, 3)
        >>> optimizer = VaSSO(torch.optim.SGD(model.parameters(), lr=0.1), model)
        >>> loss = optimizer.minimize(torch.randn(8, 4), torch.arange(8) % 3)
    """

    def __init__(
        self,
        base: Base,
        model: nn.Module | None = None,
        *,
        rho: float = 0.05,
        theta: float = 0.9,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(base, model, perturbation=AlongMean(Ball(rho), theta), **options)


class FisherSAM(SharpnessAware):
    """Fisher SAM: ε = ρ F⁻¹g/√(gᵀF⁻¹g), a ball in the metric of the Fisher information F = 1 + ηg² with g = ∇L(w).

    F is diagonal, from the squared gradient of the batch. η = 0 is SAM. η assumes a loss that is a mean over samples:
    with a loss c times as large use η/c². With another ascent objective, g is its gradient.

    Kim, Li, Hu, Hospedales: Fisher SAM: Information Geometry and Sharpness Aware Minimisation, 2022. We found no
    code by its authors: the form 1 + ηg² and the defaults are those of public implementations.
    Other options: see `SharpnessAware`.

    Examples:
        >>> model = nn.Linear(4, 3)
        >>> optimizer = FisherSAM(torch.optim.SGD(model.parameters(), lr=0.1), model)
        >>> loss = optimizer.minimize(torch.randn(8, 4), torch.arange(8) % 3)
    """

    def __init__(
        self,
        base: Base,
        model: nn.Module | None = None,
        *,
        rho: float = 0.1,
        eta: float = 1.0,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(base, model, perturbation=FisherBall(rho, eta), **options)


class MSAM(SharpnessAware):
    """Momentum SAM: ε = −ρ v/‖v‖ with v the base optimizer's momentum, so that a step has one pass, at w + ε.

    Becker, Altrock, Risse: Momentum-SAM: Sharpness Aware Minimization without Computational Overhead, 2024. v is SGD's
    momentum or Adam's first moment; the first step, which has none yet, does not perturb. There is no ascent pass, so
    there is no bilevel form, and the returned loss is that at w + ε. Other options: see `SharpnessAware`.

    Examples:
        >>> model = nn.Linear(4, 3)
        >>> optimizer = MSAM(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model)
        >>> losses = [optimizer.minimize(torch.randn(8, 4), torch.arange(8) % 3) for _ in range(2)]
    """

    def __init__(
        self,
        base: Base,
        model: nn.Module | None = None,
        *,
        rho: float = 0.3,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(base, model, perturbation=AlongMomentum(Ball(rho)), **options)


class WSAM(SharpnessAware):
    """Weighted-sharpness SAM: g ← ∇L(w) + γ/(1 − γ) (∇L(w + ε) − ∇L(w)); γ = ½ is SAM, γ = 0 the base optimizer.

    Yue, Jiang, Ye, Gao, Liu, Zhang: Sharpness-Aware Minimization Revisited: Weighted Sharpness as a Regularization
    Term, 2023. This is the coupled form. The decoupled form adds the sharpness term to the weights, next to the base
    optimizer's update; for SGD without momentum both are equal. With another ascent objective, ∇L(w) needs a third
    pass.
    Other options: see `SharpnessAware`.

    Examples:
        >>> model = nn.Linear(4, 3)
        >>> optimizer = WSAM(torch.optim.SGD(model.parameters(), lr=0.1), model)
        >>> loss = optimizer.minimize(torch.randn(8, 4), torch.arange(8) % 3)
    """

    def __init__(
        self,
        base: Base,
        model: nn.Module | None = None,
        *,
        rho: float = 0.05,
        gamma: float = 0.9,
        **options: Unpack[Options],
    ) -> None:
        merge = WeightedSharpness(gamma)
        super().__init__(base, model, perturbation=Ball(rho), merge=merge, **options)


def _lower_bound(phi: str | Phi, mu: float | None, alpha: float, options: Options) -> Objective:
    """Q on the samples and by the class weights of the descent; or the ascent that was given in its place."""
    ascent, descent = options.get("ascent"), options.get("descent")
    if ascent is None:
        weight = None if descent is None else class_weights(descent)
        ignore_index = -100 if descent is None else setting(descent, "ignore_index", -100)
        return LowerBound(phi, mu, alpha, weight=weight, ignore_index=ignore_index)
    if (phi, mu, alpha) != ("log", None, 0.1):
        raise ValueError(
            f"give phi, mu and alpha, or an ascent of your own, not both: got {phi=}, {mu=}, {alpha=}, {ascent=}"
        )
    return ascent
