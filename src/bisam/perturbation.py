"""From the ascent gradient g to the perturbation ε.

    ε = ρ T² g / ‖T g‖,      T = 1 (SAM, BiSAM),   |w| + η (ASAM, A-BiSAM)   or   1/√(1 + η g²) (Fisher SAM)

The norm runs over all perturbed parameters; ρ, T and η may differ between parameter groups. The other perturbations
here change what goes into this ball or what comes out of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from bisam import numbers
from bisam.tensors.buckets import Bucket, is_zero, norm_of, widest
from bisam.tensors.memory import Memory

_LEAST_NORM = 1e-30
"""A gradient with a smaller norm counts as zero: ρ divided by it could be infinite."""


class Perturbation:
    """Turns ascent gradients into ε. Subclass it, or go `Around` a ball, for a perturbation of your own.

    The engine calls, in a step that perturbs: `begin_step`, `check` and `radius` of each parameter group,
    `before_ascent` and `after_ascent` around the ascent pass if `acts_before_ascent`, and the object itself with
    buckets of parameters and gradients. docs/extending.md has an example.
    """

    defaults: dict[str, Any]
    """Options that each parameter group may set for itself, with their default values. One is `rho`."""

    radius_options: frozenset[str] = frozenset({"rho"})
    """The options that change only the radius. A captured step receives the radius instead of these options."""

    needs_ascent = True
    """Whether it needs the gradient of an ascent pass. Without one, a step is one pass, at w + ε."""

    reads_base_state = False
    """Whether it needs what the base optimizer keeps for each parameter, such as its momentum."""

    acts_before_ascent = False
    """Whether `before_ascent` does something, so that the passes cannot be run by hand."""

    ascends_from_weights = True
    """Whether the ascent pass is at w, not at a random start near it."""

    alike_on_all_ranks = True
    """Whether it gives equal ε for equal gradients: one that draws random numbers does not."""

    memory: Memory | None = None
    """What it keeps from step to step, and in checkpoints."""

    @property
    def acts_before_first_pass(self) -> bool:
        """Whether the first pass of a step finds the parameters changed: moved, or some of them frozen."""
        return self.acts_before_ascent or not self.needs_ascent

    def check(self, group: dict[str, Any]) -> None:
        """Raise if the options of a group cannot be used."""

    def radius(self, options: dict[str, Any]) -> float | Tensor:
        """The radius of a group in this step, from its options: arithmetic of the host, once a step."""
        return options["rho"]

    def begin_step(self) -> None:
        """Called on the host when a step that perturbs begins, also for a captured step."""

    def generators(self) -> list[torch.Generator]:
        """The random generators, on their devices, that a step draws from beside torch's own."""
        return []

    def before_ascent(self, buckets: Sequence[Bucket], *, may_freeze: bool, captured: bool) -> None:
        """Before the ascent pass: buckets hold all parameters to perturb, no gradients.

        `may_freeze` is whether it may set `requires_grad` to False for the pass: a compiled model computes all
        gradients anyway, and a reentrant checkpoint none if no input requires one. A captured step can decide nothing
        on the host.
        """

    def after_ascent(self) -> None:
        """After the ascent pass, also when it raised: undo what is not to last."""

    def __call__(self, buckets: Sequence[Bucket]) -> Tensor:
        """Replace the gradients by ε, in place or by `Bucket.multiply`; return the norm that they were divided by."""
        raise NotImplementedError


class Ball(Perturbation):
    """The farthest point of a ball along the gradient: round (SAM) or, with `adaptive`, scaled by the weights (ASAM).

    ε = ρ T² g / ‖T g‖ with T = |w| + η in adaptive groups and T = 1 in the others, so that ‖T⁻¹ε‖ = ρ over all groups
    of one ρ. The paper's A-BiSAM has η = 0 and every parameter adaptive. ASAM's authors leave biases out, also those of
    normalisation layers, which is `{"params": …, "adaptive": False}` in a parameter group, and then have ρ = 0.5.
    """

    def __init__(self, rho: float | Tensor = 0.05, *, adaptive: bool = False, eta: float = 0.0) -> None:
        self.defaults: dict[str, Any] = {"rho": rho, "adaptive": adaptive, "eta": eta}
        self.check(self.defaults)

    def check(self, group: dict[str, Any]) -> None:
        for name in ("rho", "eta"):
            _check_radius(name, group[name])
        if group.get("adaptive", False) not in (True, False):
            raise TypeError(f"adaptive must be True or False, got {group['adaptive']!r}")

    def __call__(self, buckets: Sequence[Bucket]) -> Tensor:
        scaled = [bucket for bucket in buckets if self.scales(bucket.options)]
        for bucket in scaled:
            self._write_scale(bucket)
            torch._foreach_mul_(bucket.gradients, bucket.params)
        norm = norm_of([bucket.whole_gradients for bucket in buckets])
        # the host need not read the norm. If infinite, 1/norm is 0, and 0 g is 0 where g is finite (its square was
        # too large) and NaN where it is not; then the second pass is NaN too, and a GradScaler skips the update
        unit = torch.where(norm < _LEAST_NORM, 0.0, 1 / norm)
        for bucket in buckets:
            bucket.multiply(bucket.radius * unit)
        for bucket in scaled:
            torch._foreach_mul_(bucket.gradients, bucket.params)
            torch._foreach_copy_(bucket.params, bucket.weights)
        return norm

    def scales(self, options: dict[str, Any]) -> bool:
        """Whether T differs from 1 in a group of these options."""
        return bool(options["adaptive"])

    def _write_scale(self, bucket: Bucket) -> None:
        """Write T into the parameters' own storage: they are saved, and a third copy is not needed."""
        if bucket.params[0].is_complex():
            raise TypeError("an adaptive ball is not defined for complex parameters: set adaptive=False in their group")
        torch._foreach_abs_(bucket.params)
        if not is_zero(bucket.options["eta"]):
            torch._foreach_add_(bucket.params, bucket.options["eta"])


class FisherBall(Ball):
    """A ball in the metric of the Fisher information: Fisher SAM, with T = 1/√F and F = 1 + η g².

    ε = ρ F⁻¹g / √(gᵀF⁻¹g), so that √(εᵀFε) = ρ over all groups of one ρ. F is diagonal and empirical: the squared
    gradient of all samples that share one ε, not the mean of their squared gradients. The 1 keeps F⁻¹ finite where
    the gradient is small. η = 0 is the round ball, bit for bit. Unlike other balls this one depends on the scale of
    the loss: twice the loss is four times the η.
    """

    def __init__(self, rho: float | Tensor = 0.1, eta: float = 1.0) -> None:
        self.defaults: dict[str, Any] = {"rho": rho, "eta": eta}
        self.check(self.defaults)

    def scales(self, options: dict[str, Any]) -> bool:
        return not is_zero(options["eta"])

    def _write_scale(self, bucket: Bucket) -> None:
        if bucket.params[0].is_complex():
            raise TypeError("Fisher SAM is not defined for complex parameters: set eta=0.0 in their group")
        torch._foreach_copy_(bucket.params, bucket.gradients)
        torch._foreach_mul_(bucket.params, bucket.gradients)
        torch._foreach_mul_(bucket.params, bucket.options["eta"])
        torch._foreach_add_(bucket.params, 1.0)
        torch._foreach_sqrt_(bucket.params)
        torch._foreach_reciprocal_(bucket.params)  # 0 where g² overflows, and F⁻¹g is nearly 0


class BallFollowingLearningRate(Ball):
    """A ball whose radius goes with the learning rate, as in GSAM: ρ at a group's largest rate, `rho_min` at its least.

    ρ_t = ρ_min + (ρ − ρ_min) (lr_t − lr_min)/(lr_max − lr_min), with `rho_min` = None for half of the group's ρ. The
    largest rate is that of the group (`lr_max`, or a scheduler's `max_lr` or `initial_lr`), or the largest seen.
    """

    radius_options = frozenset({"rho", "rho_min", "lr_min", "lr_max"})

    def __init__(self, rho: float, rho_min: float | None = None, lr_min: float = 0.0) -> None:
        super().__init__(rho)
        self.defaults.update(rho_min=rho_min, lr_min=lr_min, lr_max=None)
        self.check(self.defaults)

    def check(self, group: dict[str, Any]) -> None:
        super().check(group)
        if group.get("rho_min") is not None:
            _check_radius("rho_min", group["rho_min"])
        _check_radius("lr_min", group.get("lr_min", 0.0))

    def radius(self, options: dict[str, Any]) -> float | Tensor:
        rate, high = options["lr"], options["rho"]
        low = high / 2 if options["rho_min"] is None else options["rho_min"]
        if options["lr_max"] is None:  # the group's first step; from now on it is in the checkpoint
            options["lr_max"] = options.get("max_lr", options.get("initial_lr", rate))
        largest, least = options["lr_max"], options["lr_min"]
        if isinstance(rate, Tensor) or isinstance(largest, Tensor):
            device = rate.device if isinstance(rate, Tensor) else largest.device
            rate = torch.as_tensor(rate, device=device)
            options["lr_max"] = torch.maximum(torch.as_tensor(largest, device=device), rate)  # a tensor of its own
            reach = options["lr_max"] - least
            return low + (high - low) * torch.where(reach > 0, (rate - least).clamp(min=0.0) / reach, 0.0)
        options["lr_max"] = max(largest, rate)
        reach = options["lr_max"] - least
        return low + (high - low) * (max(rate - least, 0.0) / reach if reach > 0 else 0.0)


class Around(Perturbation):
    """A perturbation that changes the gradients that go into another, or the ε that comes out of it."""

    def __init__(self, inner: Perturbation) -> None:
        if isinstance(inner, Around):  # both may act before the ascent, and leave out parameters
            raise TypeError(f"{type(self).__name__} goes around a ball, not around {type(inner).__name__}")
        self.inner = inner
        self.defaults, self.radius_options = inner.defaults, inner.radius_options
        self.memory: Memory | None = Memory()

    def check(self, group: dict[str, Any]) -> None:
        self.inner.check(group)

    def radius(self, options: dict[str, Any]) -> float | Tensor:
        return self.inner.radius(options)

    def begin_step(self) -> None:
        self.inner.begin_step()

    def generators(self) -> list[torch.Generator]:
        return self.inner.generators()

    def __call__(self, buckets: Sequence[Bucket]) -> Tensor:
        return self.inner(buckets)


class Drawing(Around):
    """A perturbation that draws random numbers, from generators that every step seeds anew.

    So one generator is all it has to remember, whatever devices it draws on, and a captured step draws in its graph.
    """

    alike_on_all_ranks = False

    def __init__(self, inner: Perturbation) -> None:
        super().__init__(inner)
        self._seed: int | None = None
        self._generators: dict[torch.device, torch.Generator] = {}

    def begin_step(self) -> None:
        super().begin_step()
        self._seed = None
        for generator in self._generators.values():
            generator.manual_seed(self._seed_of_step())

    def generators(self) -> list[torch.Generator]:
        return [*self._generators.values(), *super().generators()]

    def _generator(self, device: torch.device) -> torch.Generator:
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self._seed_of_step())
        return self._generators[device]

    def __getstate__(self) -> dict[str, Any]:
        """Without the generators: the next step makes them anew, on the devices that there are."""
        return {**self.__dict__, "_generators": {}, "_seed": None}

    def _seed_of_step(self) -> int:
        if self._seed is None:
            assert self.memory is not None
            (self._seed,) = torch.randint(2**62, (1,), generator=self.memory.generator, device="cpu").tolist()
        return self._seed


class RandomTensors(Drawing):
    """ESAM's stochastic weight perturbation: each parameter tensor is kept with probability β, and those that are go to
    1/β of the radius, ε = (ρ/β) g/‖g‖ of the kept.

    At least one tensor is kept. The others take no part in the ascent, and their weight gradients are not computed,
    except
    - in a compiled model: its graph computes all of its gradients
    - with reentrant checkpoints: kept tensors would lose theirs if all before them were frozen
    - in a captured step: the choice is made in the graph
    - in the first step, which shows whether there are checkpoints.
    """

    acts_before_ascent = True

    def __init__(self, inner: Perturbation, beta: float) -> None:
        super().__init__(inner)
        self.beta = numbers.fraction("beta", beta, zero=False)
        self._captured = False
        self._dropped: list[Tensor] = []
        self._frozen: list[Tensor] = []

    def before_ascent(self, buckets: Sequence[Bucket], *, may_freeze: bool, captured: bool) -> None:
        self._dropped, self._captured = [], captured
        if self.beta == 1 or captured:
            return
        owners = [param for bucket in buckets for param in bucket.owners if param.requires_grad]
        if not owners:
            return
        kept = self._choice(len(owners), torch.device("cpu")).tolist()
        self._dropped = [param for param, keep in zip(owners, kept, strict=True) if not keep]
        self._frozen = self._dropped if may_freeze else []
        for param in self._frozen:
            param.requires_grad_(False)

    def after_ascent(self) -> None:
        for param in self._frozen:
            param.requires_grad_(True)
        self._frozen = []

    def __call__(self, buckets: Sequence[Bucket]) -> Tensor:
        if self._captured and self.beta != 1:
            self._drop_on_device(buckets)
        device = buckets[0].params[0].device
        for bucket in buckets:
            bucket.leave_out(self._dropped)
        left = [bucket for bucket in buckets if bucket.owners]
        if not left:  # the tensors that were kept have no gradient
            return torch.zeros((), device=device)
        norm = self.inner(left)
        if self.beta != 1:
            for bucket in left:
                bucket.multiply(1 / self.beta)
        return norm

    def _choice(self, count: int, device: torch.device) -> Tensor:
        """Which of `count` tensors to keep."""
        draws = torch.rand(count, device=device, generator=self._generator(device))
        return (draws < self.beta) | (draws == draws.min())

    def _drop_on_device(self, buckets: Sequence[Bucket]) -> None:
        gradients = [gradient for bucket in buckets for gradient in bucket.gradients]
        kept = self._choice(len(gradients), gradients[0].device)
        for gradient, dropped in zip(gradients, kept.logical_not().unbind(), strict=True):  # this has no foreach form
            gradient.masked_fill_(dropped, 0.0)


class RandomStart(Drawing):
    """R-SAM's random smoothing: ascend from w + δ, so that ε = δ + ρ g(w + δ)/‖g(w + δ)‖.

    δ is Gaussian, with standard deviation σ times the norm of its filter (the rows of a weight along its first
    dimension; a bias or scale is one filter) over the square root of the filter's size, so that ‖δ‖ ≈ σ‖filter‖.
    """

    acts_before_ascent = True
    ascends_from_weights = False

    def __init__(self, inner: Perturbation, sigma: float) -> None:
        super().__init__(inner)
        self.sigma = numbers.non_negative("sigma", sigma)

    def check(self, group: dict[str, Any]) -> None:
        super().check(group)
        if isinstance(self.inner, Ball) and self.inner.scales(group):  # T would be written over w + δ
            raise ValueError(
                "a random start and a ball that scales the gradient cannot be combined: set adaptive=False in the "
                "group or, for the ball of Fisher SAM, eta=0.0"
            )

    def before_ascent(self, buckets: Sequence[Bucket], *, may_freeze: bool, captured: bool) -> None:
        for bucket in buckets:
            generator = self._generator(bucket.params[0].device)
            for param in bucket.params:  # random numbers have no foreach form
                noise = torch.empty_like(param).normal_(generator=generator)
                rows = param.flatten(1) if param.dim() > 1 else param.reshape(1, -1)
                scale = torch.linalg.vector_norm(rows, dim=1) * (self.sigma / math.sqrt(max(rows.shape[1], 1)))
                param.add_(noise * (scale.view(-1, *[1] * (param.dim() - 1)) if param.dim() > 1 else scale[0]))


class WithMean(Around):
    """A perturbation that keeps a running mean of the ascent gradients, m ← (1 − θ) m + θ g.

    The mean begins as a parameter's first gradient. A gradient whose norm is not finite is not remembered. After a
    step whose second pass raised, the mean includes the gradient of the first: to take it back exactly would take one
    more copy of the weights.
    """

    def __init__(self, inner: Perturbation, theta: float) -> None:
        super().__init__(inner)
        self._theta = theta

    def __call__(self, buckets: Sequence[Bucket]) -> Tensor:
        assert self.memory is not None
        finite = norm_of([bucket.whole_gradients for bucket in buckets]).isfinite()
        for bucket in buckets:
            means, counts = self.memory.of("mean", bucket.owners), self.memory.counts("finite", bucket.owners)
            here = finite.to(means[0].device)
            seen = torch.stack(counts)
            thetas = torch.full_like(seen, self._theta).masked_fill_(seen == 0, 1.0)  # the first gradient is whole
            torch._foreach_add_(counts, [here.to(seen.dtype)] * len(counts))
            self._redirect(bucket.gradients, means, [*thetas.unbind()], here)
        return self.inner(buckets)

    def _redirect(self, gradients: list[Tensor], means: list[Tensor], shares: list[Tensor], finite: Tensor) -> None:
        """Replace the gradients by the direction of the ascent and, if they are finite, update their means.

        `shares` are θ for each parameter: 1 for its first gradient. A gradient that is not finite must stay so.
        """
        raise NotImplementedError


class MinusMean(WithMean):
    """Friendly SAM: ascend the gradient without the running mean of those before it, g − σ m; then m ← λ m + (1 − λ) g.

    The mean follows the gradients themselves, not their differences. A parameter's first gradient is used whole.
    """

    def __init__(self, inner: Perturbation, sigma: float, decay: float) -> None:
        self.decay = numbers.fraction("decay", decay, zero=True)
        self.sigma = numbers.non_negative("sigma", sigma)
        super().__init__(inner, 1 - self.decay)

    def _redirect(self, gradients: list[Tensor], means: list[Tensor], shares: list[Tensor], finite: Tensor) -> None:
        torch._foreach_sub_(gradients, means, alpha=self.sigma)
        # λ m + (1 − λ) g, from g − σ m, which is all that is left of g; an overflow is not remembered
        kept = self.decay + (1 - self.decay) * self.sigma
        factor = torch.full_like(finite, kept, dtype=widest(finite.device)).masked_fill_(~finite, 1.0)
        torch._foreach_mul_(means, factor)
        for mean, gradient, share in zip(means, gradients, shares, strict=True):  # `where` has no foreach form
            mean.addcmul_(torch.where(finite, gradient, 0.0), share)


class AlongMean(WithMean):
    """VaSSO: ascend the running mean of the gradients, d ← (1 − θ) d + θ g; ε = ρ d/‖d‖. θ = 1 is SAM, bit for bit."""

    def __init__(self, inner: Perturbation, theta: float) -> None:
        self.theta = numbers.fraction("theta", theta, zero=False)
        super().__init__(inner, self.theta)

    def _redirect(self, gradients: list[Tensor], means: list[Tensor], shares: list[Tensor], finite: Tensor) -> None:
        torch._foreach_mul_(gradients, shares)
        torch._foreach_add_(gradients, means, alpha=1 - self.theta)
        for mean, gradient in zip(means, gradients, strict=True):  # `where` has no foreach form
            torch.where(finite, gradient, mean, out=mean)


class AlongMomentum(Around):
    """MSAM: ε = −ρ v/‖v‖, with v the momentum that the base optimizer keeps; there is no ascent pass.

    `keys` are the names of the momentum in the base optimizer's state. Parameters without one are not perturbed.
    """

    needs_ascent = False
    reads_base_state = True

    def __init__(self, inner: Perturbation, keys: Sequence[str] = ("momentum_buffer", "exp_avg")) -> None:
        super().__init__(inner)
        self.memory = None
        self.keys = tuple(keys)

    def check(self, group: dict[str, Any]) -> None:
        super().check(group)
        if not is_zero(group["rho"]) and not group.get("momentum") and "betas" not in group:
            raise ValueError(
                "the perturbation follows the momentum of the base optimizer, which keeps none: give it one, such as "
                "torch.optim.SGD(params, lr=0.1, momentum=0.9)"
            )

    def __call__(self, buckets: Sequence[Bucket]) -> Tensor:
        device = buckets[0].params[0].device
        found = [bucket.states for bucket in buckets]
        for bucket, states in zip(buckets, found, strict=True):
            momenta = [self._momentum(state) for state in states]
            bucket.leave_out([owner for owner, v in zip(bucket.owners, momenta, strict=True) if v is None])
            bucket.use([-v for v in momenta if v is not None])  # of their own: ε is computed in place
        left = [bucket for bucket in buckets if bucket.owners]
        if left:
            return self.inner(left)
        self._refuse_other_names({name for states in found for state in states for name in state})
        return torch.zeros((), device=device)

    def _refuse_other_names(self, names: set[str]) -> None:
        """Where the base optimizer keeps something, and none of it is called as the momentum is."""
        if names and names.isdisjoint(self.keys):
            raise ValueError(
                f"the perturbation follows the momentum of the base optimizer, {' or '.join(self.keys)} in its state, "
                f"which has {', '.join(sorted(names))} only: take a base optimizer that keeps a momentum, or "
                "build SharpnessAware with perturbation=AlongMomentum(Ball(rho), keys=[…]), which names its momentum"
            )

    def _momentum(self, state: Mapping[str, Any]) -> Tensor | None:
        return next((state[key] for key in self.keys if isinstance(state.get(key), Tensor)), None)


def _check_radius(name: str, value: Any) -> None:
    if isinstance(value, Tensor):  # only its shape: reading it would wait for the device
        if value.dim() != 0:
            raise ValueError(f"{name} must be a number or a tensor with no dimensions, got {tuple(value.shape)}")
    else:
        numbers.non_negative(name, value)
