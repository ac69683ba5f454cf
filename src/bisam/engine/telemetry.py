"""What a step measures without extra passes: it sees the logits of both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bisam import objectives
from bisam.engine import objective_options
from bisam.engine.objective_options import setting
from bisam.objectives import LowerBound, Objective

MOST_CALLS = 1000
"""Calls of the criterion outside of a step that are observed. A loop that never steps makes more: they are not kept."""


@dataclass(frozen=True)
class ObjectivePair:
    """The two objectives, and what telemetry needs of them."""

    ascent: Objective
    descent: Objective
    is_classification: bool
    """Whether errors can be counted: one of the objectives is cross entropy or a lower bound."""
    ignore_index: int

    @classmethod
    def of(cls, ascent: Objective, descent: Objective) -> ObjectivePair:
        is_classification = any(objective_options.is_of_labels(objective) for objective in (ascent, descent))
        ignore_index = setting(descent, "ignore_index", setting(ascent, "ignore_index", -100))
        return cls(ascent, descent, is_classification, ignore_index)

    @property
    def bilevel(self) -> bool:
        return self.ascent is not self.descent


@dataclass
class Observation:
    """What one call of the criterion saw: scalars and masks on their device. Sums are computed when they are read."""

    loss: Tensor
    target: Any
    loss_divisor: float | Tensor = 1.0
    ascent: Tensor | None = None
    ascent_divisor: float | Tensor = 1.0
    bound: Tensor | None = None
    right: Tensor | None = None
    wrong: Tensor | None = None
    propagated: bool | None = None
    """Whether `backward` has run through the loss; None where that is not noted, as of a compiled criterion."""

    def weigh(self, pair: ObjectivePair) -> None:
        """Compute the weight of this part. Needed only where there are several parts."""
        if self.target is not None:
            self.loss_divisor = objective_options.divisor(pair.descent, self.target)
            self.ascent_divisor = objective_options.divisor(pair.ascent, self.target)
            self.target = None

    def wait_for_backward(self, loss: Tensor) -> None:
        self.propagated = False
        loss.register_hook(self._note_backward)  # type: ignore[no-untyped-call]

    def _note_backward(self, _: Tensor) -> None:
        self.propagated = True


class Telemetry:
    """What one step measured. Values are device tensors; reading one does not wait for the device.

    A value is None if

    - its pass has not run yet
    - the criterion was not used
    - several terms of one loss were computed before `backward`
    - it counts errors, and neither objective is cross entropy or a lower bound: the task may not be a classification
    """

    descent_norm: Tensor | None = None
    """‖g‖ of the gradient that reached the base optimizer, before clipping; known when `clip_norm` is set."""

    def __init__(self, pair: ObjectivePair, most_calls: float = MOST_CALLS) -> None:
        self._pair = pair
        self._most_calls = most_calls
        self._at_weights: list[Observation] = []
        self._at_perturbed: list[Observation] = []
        self._ascent_norms: list[Tensor] = []
        self._gave_up = False

    @property
    def ascent_norm(self) -> Tensor | None:
        """The norm that the perturbation was divided by, ‖g‖ or, adaptive, ‖T g‖; the mean over micro-batches."""
        norms = self._ascent_norms
        return (norms[0] if len(norms) == 1 else torch.stack(norms).mean()) if norms else None

    @property
    def loss(self) -> Tensor | None:
        """The descent's loss (cross entropy) at w."""
        return _merged(self._pair.descent, [(o.loss, o.loss_divisor) for o in self._at_weights])

    @property
    def perturbed_loss(self) -> Tensor | None:
        """The descent's loss (cross entropy) at w + ε: what the update minimises."""
        return _merged(self._pair.descent, [(o.loss, o.loss_divisor) for o in self._at_perturbed])

    @property
    def surrogate_gap(self) -> Tensor | None:
        """Loss at w + ε minus loss at w: how sharp the surface is here."""
        loss, perturbed = self.loss, self.perturbed_loss
        return None if loss is None or perturbed is None else perturbed - loss

    @property
    def ascent(self) -> Tensor | None:
        """The ascent's objective at w: Q for the bilevel variants, else the loss."""
        return _merged(self._pair.ascent, [(o.ascent, o.ascent_divisor) for o in self._at_weights])

    @property
    def bound(self) -> Tensor | None:
        """Q − log(K)/μ at w: never above `error`.

        None if Q has class weights or the targets are probabilities: the bound is then below another error than
        `error`, which counts each sample once and takes the most probable class as its label.
        """
        return _merged(self._pair.ascent, [(o.bound, o.ascent_divisor) for o in self._at_weights])

    @property
    def error(self) -> Tensor | None:
        """The 0-1 error at w."""
        return _error(self._at_weights)

    @property
    def perturbed_error(self) -> Tensor | None:
        """The 0-1 error at w + ε."""
        return _error(self._at_perturbed)

    @property
    def flips(self) -> Tensor | None:
        """How many samples the perturbation turned from right to wrong."""
        if not self._at_weights or len(self._at_weights) != len(self._at_perturbed):
            return None
        turned: list[Tensor] = []
        for before, after in zip(self._at_weights, self._at_perturbed, strict=True):
            if before.right is None or after.wrong is None or before.right.shape != after.wrong.shape:
                return None
            turned.append((before.right & after.wrong).sum())
        return torch.stack(turned).sum()

    def was_propagated(self) -> bool | None:
        """Whether a loss at w was propagated back; None where that is not known."""
        noted = [observation.propagated for observation in self._at_weights]
        return None if self._gave_up or None in noted else any(noted)

    def used_criterion(self) -> bool:
        """Whether the criterion was called at w."""
        return bool(self._at_weights) or self._gave_up

    @torch.no_grad()
    def record(self, logits: Any, target: Any, loss: Tensor, *, of_ascent: bool, perturbed: bool) -> None:
        """Observe a call of the criterion that gave this loss: the ascent's objective if `of_ascent`."""
        passes = self._at_perturbed if perturbed else self._at_weights
        if self._gave_up or (passes and passes[-1].propagated is False) or len(passes) >= self._most_calls:
            # two calls before a backward pass are terms of one loss, and their weights are not known here
            self._at_weights, self._at_perturbed, self._gave_up = [], [], True
            return
        # cloned: the caller may change the loss in place, such as divide it
        value = loss.detach().clone()
        descent = self._pair.descent(logits, target) if of_ascent and self._pair.bilevel else value
        # labels of its own: the caller may put the next part's into the same tensor
        observation = Observation(descent, target.clone() if _are_labels(target) else target)
        if loss.requires_grad and not torch.compiler.is_compiling():
            observation.wait_for_backward(loss)
        if of_ascent:
            observation.ascent, observation.bound = value, self._bound_of(value, logits, target)
        if self._pair.is_classification and isinstance(target, Tensor):
            observation.right, observation.wrong = self._right_and_wrong(logits, target)
        passes.append(observation)
        if not _are_labels(target):  # of which the shape is enough
            observation.weigh(self._pair)
        if len(passes) > 1:
            for part in passes[-2:]:
                part.weigh(self._pair)

    def _bound_of(self, value: Tensor, logits: Tensor, target: Any) -> Tensor | None:
        ascent = self._pair.ascent
        if not isinstance(ascent, LowerBound) or ascent.reduction != "mean" or ascent.weight is not None:
            return None
        return value - ascent.slack(logits) if _are_labels(target) else None

    def _right_and_wrong(self, logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        ignore_index = self._pair.ignore_index
        right = objectives.correct(logits, target, ignore_index=ignore_index)
        if target.is_floating_point():
            return right, ~right
        counted = target.long() != ignore_index  # as int64: in uint8, -100 would be class 156
        return right & counted, ~right & counted

    def __repr__(self) -> str:
        """The values, which are read from the device for it."""
        values = ", ".join(f"{name}={value.item():.4g}" for name, value in self.as_dict().items())
        return f"Telemetry({values})"

    def as_dict(self) -> dict[str, Tensor]:
        """All values that are not None, by name: for a logger."""
        names = [name for name, value in vars(Telemetry).items() if isinstance(value, property)]
        known = {name: getattr(self, name) for name in [*names, "descent_norm"]}
        return {name: value for name, value in known.items() if value is not None}


def _are_labels(target: Any) -> bool:
    return isinstance(target, Tensor) and not target.is_floating_point()


def _merged(objective: Objective, parts: list[tuple[Tensor | None, float | Tensor]]) -> Tensor | None:
    """One value from those of several parts: sums add up, means are weighted by what they were divided by."""
    values = [value for value, _ in parts if value is not None]
    if len(values) != len(parts) or not parts:
        return None
    if len(parts) == 1:
        return values[0]
    if objective_options.is_sum(objective):
        return torch.stack(values).sum()
    divisors = [divisor for _, divisor in parts]
    weighted = [
        # a part in which everything was ignored is 0/0, and counts for nothing
        torch.where(divisor == 0, 0.0, value * divisor) if isinstance(divisor, Tensor) else value * divisor
        for value, divisor in zip(values, divisors, strict=True)
    ]
    return (torch.stack(weighted).sum() / sum(divisors)).to(values[0].dtype)


def _error(observations: list[Observation]) -> Tensor | None:
    masks = [(o.right, o.wrong) for o in observations if o.right is not None and o.wrong is not None]
    if len(masks) != len(observations) or not masks:
        return None
    right, wrong = (torch.stack([mask.sum() for mask in kind]).sum() for kind in zip(*masks, strict=True))
    return wrong / (right + wrong)
