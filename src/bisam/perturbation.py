"""From the ascent gradient g to the perturbation ε.

    ε = ρ T² g / ‖T g‖,      T = 1 (SAM, BiSAM)   or   T = |w| + η (ASAM, A-BiSAM)

The norm runs over all perturbed parameters; ρ, T and η may differ between parameter groups. The other perturbations
here change what goes into this ball or what comes out of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from bisam import sharding
from bisam.memory import Memory


@dataclass
class Bucket:
    """Parameters of one group that share device and type, with their ascent gradients; together one foreach call.

    `params`, `gradients` and `weights`, the saved copies of the parameters, are this rank's shards where there are
    shards; `whole_gradients` are what a norm has to see, `owners` whom memory belongs to. The parameters are free to be
    written to: whatever a perturbation leaves in them is where ε is added.
    """

    options: dict[str, Any]
    radius: float | Tensor
    owners: list[Tensor] = field(default_factory=list)
    params: list[Tensor] = field(default_factory=list)
    unsettled: list[Tensor] = field(default_factory=list)
    whole_gradients: list[Tensor] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)
    factor: Tensor | None = None
    """What `unsettled` is still to be multiplied by to be the gradients: where ε is added, that costs nothing."""

    def add(self, param: Tensor, gradient: Tensor | None) -> None:
        self.owners.append(param)
        self.params.append(sharding.local(param))
        if gradient is not None:
            self.unsettled.append(sharding.local(gradient))
            self.whole_gradients.append(gradient)

    def multiply(self, factor: float | Tensor) -> None:
        """Multiply the gradients, when they are read."""
        if self.factor is not None:
            self.factor = self.factor * factor
        elif isinstance(factor, Tensor):
            self.factor = factor
        else:  # made on the device: a graph cannot copy it there
            self.factor = torch.full((), factor, dtype=torch.float64, device=self.params[0].device)

    def settle(self) -> None:
        """Multiply the gradients by what was left to multiply them by."""
        if self.factor is not None and self.unsettled:
            torch._foreach_mul_(self.unsettled, self.factor.to(self.unsettled[0].device))
        self.factor = None

    @property
    def gradients(self) -> list[Tensor]:
        """Settled."""
        self.settle()
        return self.unsettled

    def move(self) -> None:
        """Add the gradients to the parameters: ε to w."""
        if not self.params:
            return
        if self.factor is None or not self._is_one_kernel():
            torch._foreach_add_(self.params, self.gradients)
        else:  # a step of plain gradient ascent reads and writes everything once
            torch._fused_sgd_(
                self.params,
                self.unsettled,
                [],
                lr=self.factor.to(self.params[0].device, torch.float32),
                weight_decay=0.0,
                momentum=0.0,
                dampening=0.0,
                nesterov=False,
                maximize=True,
                is_first_step=False,
            )

    def _is_one_kernel(self) -> bool:
        """Whether torch's fused kernel takes them: CUDA, not float64, each gradient laid out as its parameter."""
        first = self.params[0]
        return (
            first.is_cuda
            and first.dtype in (torch.float32, torch.float16, torch.bfloat16)
            and all(
                p.stride() == g.stride() and p.dtype == g.dtype
                for p, g in zip(self.params, self.unsettled, strict=True)
            )
        )

    def leave_out(self, params: Sequence[Tensor]) -> None:
        """Perturb these no more."""
        out = {id(param) for param in params}
        keep = [id(owner) not in out for owner in self.owners]
        for name in ("owners", "params", "unsettled", "whole_gradients", "weights"):
            setattr(self, name, [item for item, kept in zip(getattr(self, name), keep, strict=False) if kept])


def into_buckets(
    groups: Sequence[dict[str, Any]],
    radii: Sequence[float | Tensor],
    gradient_of: Callable[[Tensor], Tensor | None] | None,
) -> list[Bucket]:
    """The parameters of the groups that are perturbed, cut so that each bucket is one foreach call; with their
    gradients, where they have one, or all of them without."""
    buckets: dict[tuple[Any, ...], Bucket] = {}
    for index, (group, radius) in enumerate(zip(groups, radii, strict=True)):
        if is_zero(group["rho"]):
            continue
        for param in group["params"]:
            gradient = None if gradient_of is None else gradient_of(param)
            if gradient is None and (gradient_of is not None or not param.requires_grad):
                continue
            if gradient is not None and gradient.layout is not torch.strided:
                raise RuntimeError(
                    f"a parameter of shape {tuple(param.shape)} in group {index} has a sparse gradient, which "
                    "cannot be perturbed. Build its layer with sparse=False, or put it into a group with rho=0."
                )
            key = (index, *sharding.kind(param))
            if key not in buckets:
                buckets[key] = Bucket(group, radius)
            buckets[key].add(param, gradient)
    return list(buckets.values())


class Perturbation(Protocol):
    """Turns ascent gradients into ε."""

    defaults: dict[str, Any]
    """Options that each parameter group may set for itself, with their values where it does not."""

    radius_options: frozenset[str]
    """Those of them that lead to the radius and to nothing else: a captured step is told the radius, not them."""

    acts_before_ascent: bool
    """Whether it has something to do before the ascent pass, so that the passes cannot be run by hand."""

    alike_on_all_ranks: bool
    """Whether it gives equal ε for equal gradients: what draws random numbers does not."""

    memory: Memory | None

    def check(self, group: dict[str, Any]) -> None:
        """Raise if a parameter group's options cannot be used."""

    def radius(self, options: dict[str, Any]) -> float | Tensor:
        """The radius of a group in this step, from its options. The host asks once a step, also of a captured one."""

    def begin_step(self) -> None:
        """A step that perturbs begins: what the host has to do for it, also for a captured one."""

    def generators(self) -> list[torch.Generator]:
        """The random generators, on their devices, that a step draws from beside torch's own."""

    def before_ascent(self, buckets: Sequence[Bucket], *, compiled: bool, captured: bool) -> None:
        """Before the ascent pass: buckets hold all parameters to perturb, no gradients.

        Of a compiled model the pass gives all gradients, whatever `requires_grad` says; of a captured step only the
        device can decide anything.
        """

    def after_ascent(self) -> None:
        """After the ascent pass, also when it raised: undo what is not to last."""

    def __call__(self, buckets: Sequence[Bucket]) -> Tensor:
        """Replace the gradients by ε, in place or but for a factor, and return the norm that they were divided by."""


class Ball:
    """The farthest point of a ball along the gradient: round (SAM) or, with `adaptive`, scaled by the weights (ASAM).

    ε = ρ T² g / ‖T g‖ with T = |w| + η in adaptive groups and T = 1 in the others, so that ‖T⁻¹ε‖ = ρ over all groups
    of one ρ. The paper's A-BiSAM has η = 0 and every parameter adaptive. ASAM's authors leave biases out, also those of
    normalisation layers, which is `{"params": …, "adaptive": False}` in a parameter group, and then have ρ = 0.5.
    """

    radius_options = frozenset({"rho"})
    acts_before_ascent = False
    alike_on_all_ranks = True
    memory: Memory | None = None

    def __init__(self, rho: float | Tensor = 0.05, *, adaptive: bool = False, eta: float = 0.0) -> None:
        self.defaults: dict[str, Any] = {"rho": rho, "adaptive": adaptive, "eta": eta}
        self.check(self.defaults)

    def check(self, group: dict[str, Any]) -> None:
        for name in ("rho", "eta"):
            _check_radius(name, group[name])

    def before_ascent(self, buckets: Sequence[Bucket], *, compiled: bool, captured: bool) -> None:
        pass

    def after_ascent(self) -> None:
        pass

    def radius(self, options: dict[str, Any]) -> float | Tensor:
        return options["rho"]

    def begin_step(self) -> None:
        pass

    def generators(self) -> list[torch.Generator]:
        return []

    def __call__(self, buckets: Sequence[Bucket]) -> Tensor:
        for bucket in buckets:
            if bucket.options["adaptive"]:
                _scale_by_weights(bucket)
        norm = sharding.norm(bucket.whole_gradients for bucket in buckets)
        # ε is 0 where the gradient is, and all NaN where it is not finite: then the second pass is not finite either,
        # and whoever guards the update (a GradScaler) skips it, with no need to look at the norm on the host
        unit = torch.where(norm == 0, 0.0, torch.where(norm.isfinite(), 1 / norm, math.nan))
        for bucket in buckets:
            bucket.multiply(bucket.radius * unit)
            if bucket.options["adaptive"]:
                torch._foreach_mul_(bucket.gradients, bucket.params)
                torch._foreach_copy_(bucket.params, bucket.weights)
        return norm


class BallFollowingLearningRate(Ball):
    """A ball whose radius goes with the learning rate, as in GSAM: ρ at a group's largest rate, `rho_min` at its least.

    ρ_t = ρ_min + (ρ − ρ_min) (lr_t − lr_min)/(lr_max − lr_min), with `rho_min` = None for half of the group's ρ. The
    largest rate is what the group says (`lr_max`, or a scheduler's `max_lr` or `initial_lr`), or the largest seen.
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


class Around:
    """A perturbation that changes what goes into another, or what comes out of it."""

    acts_before_ascent = False
    alike_on_all_ranks = True

    def __init__(self, inner: Perturbation) -> None:
        if isinstance(inner, Around):  # which would have to act before the ascent too, and to know whom to leave out
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

    def before_ascent(self, buckets: Sequence[Bucket], *, compiled: bool, captured: bool) -> None:
        pass

    def after_ascent(self) -> None:
        pass

    def __call__(self, buckets: Sequence[Bucket]) -> Tensor:
        return self.inner(buckets)


class Drawing(Around):
    """One that draws random numbers, from generators that every step seeds anew.

    So the memory is one generator, whatever devices the numbers are drawn on, and a captured step draws in its graph.
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

    The others take no part in the ascent: their weight gradients are not computed, but where the model is compiled, for
    a compiled graph has its gradients built in and does not ask again, or where the step is captured, for the choice is
    made in the graph. At least one tensor is kept.
    """

    acts_before_ascent = True

    def __init__(self, inner: Perturbation, beta: float) -> None:
        super().__init__(inner)
        if not 0 < beta <= 1:
            raise ValueError(f"beta must lie in (0, 1], got {beta}")
        self.beta = beta
        self._captured = False
        self._dropped: list[Tensor] = []
        self._frozen: list[Tensor] = []

    def before_ascent(self, buckets: Sequence[Bucket], *, compiled: bool, captured: bool) -> None:
        self._dropped, self._captured = [], captured
        if self.beta == 1 or captured:
            return
        owners = [param for bucket in buckets for param in bucket.owners if param.requires_grad]
        if not owners:
            return
        kept = self._choice(len(owners), torch.device("cpu")).tolist()
        self._dropped = [param for param, keep in zip(owners, kept, strict=True) if not keep]
        self._frozen = [] if compiled else self._dropped
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
        if not left:  # who was kept has no gradient
            return torch.zeros((), device=device)
        norm = self.inner(left)
        if self.beta != 1:
            for bucket in left:
                bucket.multiply(1 / self.beta)
        return norm

    def _choice(self, count: int, device: torch.device) -> Tensor:
        """Whom to keep, of so many."""
        draws = torch.rand(count, device=device, generator=self._generator(device))
        return (draws < self.beta) | (draws == draws.min())

    def _drop_on_device(self, buckets: Sequence[Bucket]) -> None:
        gradients = [gradient for bucket in buckets for gradient in bucket.gradients]
        kept = self._choice(len(gradients), gradients[0].device)
        for gradient, dropped in zip(gradients, kept.logical_not().unbind(), strict=True):  # this has no foreach form
            gradient.masked_fill_(dropped, 0.0)


class RandomStart(Drawing):
    """R-SAM's random smoothing: climb from w + δ, so that ε = δ + ρ g(w + δ)/‖g(w + δ)‖.

    δ is Gaussian, with standard deviation σ times the norm of its filter (the rows of a weight along its first
    dimension; a bias or scale is one filter) over the square root of the filter's size, so that ‖δ‖ ≈ σ‖filter‖.
    """

    acts_before_ascent = True

    def __init__(self, inner: Perturbation, sigma: float) -> None:
        super().__init__(inner)
        _check_radius("sigma", sigma)
        self.sigma = sigma

    def check(self, group: dict[str, Any]) -> None:
        super().check(group)
        if group["adaptive"]:
            raise ValueError("a random start and an adaptive ball cannot be combined: set adaptive=False in the group")

    def before_ascent(self, buckets: Sequence[Bucket], *, compiled: bool, captured: bool) -> None:
        for bucket in buckets:
            generator = self._generator(bucket.params[0].device)
            for param in bucket.params:  # random numbers have no foreach form
                noise = torch.empty_like(param).normal_(generator=generator)
                rows = param.flatten(1) if param.dim() > 1 else param.reshape(1, -1)
                scale = torch.linalg.vector_norm(rows, dim=1) * (self.sigma / math.sqrt(max(rows.shape[1], 1)))
                param.add_(noise * (scale.view(-1, *[1] * (param.dim() - 1)) if param.dim() > 1 else scale[0]))


class MinusMean(Around):
    """Friendly SAM: climb the gradient without the running mean of those before it, g − σ m; then m ← λ m + (1 − λ) g.

    The mean follows the gradients themselves, not what was climbed. It begins as a parameter's first gradient, which is
    climbed whole.
    """

    def __init__(self, inner: Perturbation, sigma: float, decay: float) -> None:
        super().__init__(inner)
        if not 0 <= decay < 1:
            raise ValueError(f"decay must lie in [0, 1), got {decay}")
        _check_radius("sigma", sigma)
        self.sigma, self.decay = sigma, decay

    def __call__(self, buckets: Sequence[Bucket]) -> Tensor:
        assert self.memory is not None
        finite = sharding.norm(bucket.whole_gradients for bucket in buckets).isfinite()
        for bucket in buckets:
            means, gradients = self.memory.of("mean", bucket.owners), bucket.gradients
            counts = self.memory.counts("finite", bucket.owners)
            here = finite.to(means[0].device)
            seen = torch.stack(counts)
            shares = torch.full_like(seen, 1 - self.decay).masked_fill_(seen == 0, 1.0)  # the first gradient is whole
            torch._foreach_add_(counts, [here.to(seen.dtype)] * len(counts))
            for gradient, mean in zip(gradients, means, strict=True):  # an overflow is not to be remembered
                gradient.copy_(torch.where(here, gradient, mean))
            torch._foreach_sub_(gradients, means, alpha=self.sigma)
            # λ m + (1 − λ) g, from g − σ m, which is all that is left of g
            torch._foreach_mul_(means, self.decay + (1 - self.decay) * self.sigma)
            torch._foreach_addcmul_(means, gradients, shares.unbind())
            torch._foreach_mul_(gradients, torch.where(here, 1.0, math.nan))  # but to be noticed
        return self.inner(buckets)


def _scale_by_weights(bucket: Bucket) -> None:
    """g ← T g, with T = |w| + η left in the parameters' own storage: they are saved, and a third copy is not needed."""
    if bucket.params[0].is_complex():
        raise TypeError("an adaptive ball is not defined for complex parameters: set adaptive=False in their group")
    torch._foreach_abs_(bucket.params)
    if isinstance(bucket.options["eta"], Tensor) or bucket.options["eta"] != 0:
        torch._foreach_add_(bucket.params, bucket.options["eta"])
    torch._foreach_mul_(bucket.gradients, bucket.params)


def is_zero(rho: float | Tensor) -> bool:
    """Whether a group is left out. A tensor is not asked: that would wait for the device."""
    return not isinstance(rho, Tensor) and rho == 0


def _check_radius(name: str, value: Any) -> None:
    if isinstance(value, Tensor):  # only its shape: reading it would wait for the device
        if value.dim() != 0:
            raise ValueError(f"{name} must be a number or a tensor with no dimensions, got {tuple(value.shape)}")
    elif not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, got {value!r}")
    elif not (value >= 0 and math.isfinite(value)):
        raise ValueError(f"{name} must be non-negative and finite, got {value}")
