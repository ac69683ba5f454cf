"""Which gradient reaches the base optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto

import torch
from torch import Tensor

from bisam import numbers
from bisam.tensors import buckets, gradients
from bisam.tensors.gradients import Gradients
from bisam.tensors.memory import Memory


class Turn(Enum):
    """Whether a step perturbs, is left out by `every`, or is the base optimizer's."""

    PERTURBED = auto()
    BETWEEN = auto()
    """`every` leaves it out: it does not perturb, and a merge may use what it remembers."""
    PLAIN = auto()
    """The base optimizer's: before `start`, from `stop` on, or where no group has a radius."""


class Merge:
    """The gradient at w + ε as it is; the plain gradient in steps that do not perturb.

    Subclass it for a merge of your own: docs/extending.md has an example.
    """

    needs_gradient_at_weights = False
    """Whether perturbed steps need the descent's gradient at w beside that at w + ε; then `perturbed` is called."""

    memory: Memory | None = None
    """What it keeps from step to step, and in checkpoints."""

    def perturbed(self, params: Sequence[Tensor], at_weights: Gradients) -> None:
        """After a perturbed step: `.grad` holds the gradient at w + ε; leave there what the update is to use."""

    def plain(self, params: Sequence[Tensor]) -> None:
        """After the pass of a step that `every` leaves out: `.grad` holds the gradient at w."""

    def begin_step(self, turn: Turn) -> None:
        """Called on the host when a step begins, also a captured one."""


class SurrogateGap(Merge):
    """GSAM: g ← g_p − α g_⊥, with g_⊥ the part of ∇L(w) orthogonal to g_p = ∇L(w + ε).

    The update still descends the perturbed loss; along g_⊥ it ascends the loss at w, which does not change the
    perturbed loss to first order and so narrows the gap between the two.
    """

    needs_gradient_at_weights = True

    def __init__(self, alpha: float) -> None:
        self.alpha = numbers.non_negative("alpha", alpha)

    def perturbed(self, params: Sequence[Tensor], at_weights: Gradients) -> None:
        _, at_perturbed, plain = _both_gradients(params, at_weights)
        if not plain:
            return
        along = _finite_ratio(buckets.dot(plain, at_perturbed), buckets.norm(at_perturbed).square())
        # g_p − α(g − c g_p) = (1 + αc) g_p − α g, in place
        gradients.scale_([*at_perturbed], 1 + self.alpha * along)
        torch._foreach_sub_(_local(at_perturbed), _local(plain), alpha=self.alpha)


class WeightedSharpness(Merge):
    """WSAM: g ← ∇L(w) + γ/(1 − γ) (∇L(w + ε) − ∇L(w)), the gradient of the loss plus weighted sharpness.

    γ = ½ is SAM, γ = 0 the plain gradient.
    """

    needs_gradient_at_weights = True

    def __init__(self, gamma: float) -> None:
        self.gamma = numbers.fraction("gamma", gamma, zero=True)

    def perturbed(self, params: Sequence[Tensor], at_weights: Gradients) -> None:
        _, at_perturbed, plain = _both_gradients(params, at_weights)
        if plain:
            weight = self.gamma / (1 - self.gamma)
            torch._foreach_mul_(_local(at_perturbed), weight)
            torch._foreach_add_(_local(at_perturbed), _local(plain), alpha=1 - weight)


class Reuse(Merge):
    """LookSAM: keep g_v of a perturbed step, the part of g_s = ∇L(w + ε) orthogonal to g = ∇L(w); in the steps that
    `every` leaves out use g + α (‖g‖/‖g_v‖) g_v in place of g_s.

    Lengths and angles are those of the whole model's gradient, as in the paper's equations.
    """

    needs_gradient_at_weights = True
    _cleared: Memory | None = None
    """The memory that steps of the base optimizer alone have cleared, until it is written to again."""

    def __init__(self, alpha: float) -> None:
        self.alpha = numbers.non_negative("alpha", alpha)
        self.memory: Memory | None = Memory()

    def begin_step(self, turn: Turn) -> None:
        """A direction from before steps of the base optimizer alone is not used after them."""
        if turn is not Turn.PLAIN:
            self._cleared = None
        elif self._cleared is not self.memory:
            assert self.memory is not None
            for tensor in self.memory.tensors.get("orthogonal", {}).values():
                tensor.zero_()  # in its storage, where a captured step finds it
            self._cleared = self.memory

    def perturbed(self, params: Sequence[Tensor], at_weights: Gradients) -> None:
        assert self.memory is not None
        owners, at_perturbed, plain = _both_gradients(params, at_weights)
        before = self.memory.tensors.get("orthogonal", {})
        # in the same storage as ever, so that a captured step finds it
        remembered = {p: before[p] if p in before else torch.empty_like(g) for p, g in zip(owners, plain, strict=True)}
        self.memory.tensors["orthogonal"] = remembered
        if not plain:
            return
        along = _ratio(buckets.dot(at_perturbed, plain), buckets.norm(plain).square())
        # g_s − c g, in the storage of g, which is not needed any more
        orthogonal = _local(plain)
        gradients.scale_([*plain], -along)
        torch._foreach_add_(orthogonal, _local(at_perturbed))
        overflowed = ~along.isfinite()
        for tensor in orthogonal:  # not to be remembered: steps until the next perturbed one use plain gradients
            tensor.masked_fill_(overflowed.to(tensor.device), 0.0)
        torch._foreach_copy_(_local([*remembered.values()]), orthogonal)

    def plain(self, params: Sequence[Tensor]) -> None:
        assert self.memory is not None
        table = self.memory.tensors.get("orthogonal", {})
        known = [(p.grad, table[p]) for p in params if p.grad is not None and p in table]
        if not known:
            return
        plain, orthogonal = [g for g, _ in known], [v for _, v in known]
        factor = self.alpha * _finite_ratio(buckets.norm(plain), buckets.norm(orthogonal))
        pairs = [*zip(_local(plain), _local(orthogonal), strict=True)]
        for device in {gradient.device for gradient, _ in pairs}:
            on_device, remembered = zip(*(pair for pair in pairs if pair[0].device == device), strict=True)
            torch._foreach_add_(on_device, torch._foreach_mul(remembered, factor.to(device)))


def _both_gradients(params: Sequence[Tensor], at_weights: Gradients) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """The parameters that have a gradient at w + ε, that gradient, and that at w: 0 where its pass does not use them.

    The others are left as they are, as with SAM.
    """
    owners, at_perturbed, plain = list[Tensor](), list[Tensor](), list[Tensor]()
    for param, gradient in zip(params, at_weights, strict=True):
        if param.grad is not None:
            owners.append(param)
            at_perturbed.append(param.grad)
            plain.append(torch.zeros_like(param.grad) if gradient is None else gradient)
    for param, *both in zip(owners, at_perturbed, plain, strict=True):
        if any(gradient.layout is not torch.strided for gradient in both):
            raise RuntimeError(
                f"a parameter of shape {tuple(param.shape)} has a sparse gradient, and this variant computes with the "
                "gradients at w and at w + ε of all parameters, also of those with rho=0. Build its layer with "
                "sparse=False, or use a variant that leaves gradients as they are, such as SAM"
            )
    return owners, at_perturbed, plain


def _local(tensors: Sequence[Tensor]) -> list[Tensor]:
    return buckets.locals_of(tensors)


def _ratio(a: Tensor, b: Tensor) -> Tensor:
    """a/b, and 0 where b is: a direction that does not exist takes no part."""
    return torch.where(b == 0, 0.0, a / b)


def _finite_ratio(a: Tensor, b: Tensor) -> Tensor:
    """a/b, and 0 where b is 0 or the products of finite gradients are too large: no NaN from finite gradients."""
    ratio = _ratio(a, b)
    return torch.where(ratio.isfinite(), ratio, 0.0)
