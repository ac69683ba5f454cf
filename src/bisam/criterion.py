"""The loss that knows which player asks, and what it learns from seeing the logits of both passes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from bisam import objectives
from bisam.objectives import CrossEntropy, LowerBound, Objective, divisor

Phase = Literal["ascent", "descent", "plain"]
"""Whose gradient the next backward pass is for; "plain" is a step that does not perturb."""


@dataclass
class Observation:
    """What one call of the criterion saw. Tensors stay on their device; sums over them wait until they are read."""

    objective: Objective
    target: Tensor
    loss: Tensor
    correct: Tensor | None = None
    ascent: Tensor | None = None
    bound: Tensor | None = None

    @property
    def weight(self) -> Any:
        """What this observation counts for in a mean over several."""
        return divisor(self.objective, self.target)

    @property
    def counted(self) -> Tensor:
        """Which samples count as right or wrong."""
        assert self.correct is not None
        if self.target.is_floating_point():
            return torch.ones_like(self.correct)
        return self.target != getattr(self.objective, "ignore_index", -100)


class Telemetry:
    """What one step knows without extra passes. Values are device tensors; reading one waits for nothing.

    A value is None while its pass has not run, where the criterion was not used, and, for those that count errors,
    where the task is not a classification.
    """

    ascent_norm: Tensor | None = None
    """The norm that the perturbation was divided by: ‖g‖ or, adaptive, ‖T g‖."""

    descent_norm: Tensor | None = None
    """‖g‖ of the gradient that reached the base optimizer, before clipping; known when `clip_norm` is set."""

    def __init__(self) -> None:
        self._at_weights: list[Observation] = []
        self._at_perturbed: list[Observation] = []

    @property
    def loss(self) -> Tensor | None:
        """The descent's loss (cross entropy) at w."""
        return _mean(self._at_weights, "loss")

    @property
    def perturbed_loss(self) -> Tensor | None:
        """The descent's loss (cross entropy) at w + ε: what the update minimises."""
        return _mean(self._at_perturbed, "loss")

    @property
    def surrogate_gap(self) -> Tensor | None:
        """Loss at w + ε minus loss at w: how sharp the surface is here."""
        loss, perturbed = self.loss, self.perturbed_loss
        return None if loss is None or perturbed is None else perturbed - loss

    @property
    def ascent(self) -> Tensor | None:
        """The ascent's objective at w: Q for the bilevel variants, else the loss."""
        return _mean(self._at_weights, "ascent")

    @property
    def bound(self) -> Tensor | None:
        """Q − log(K)/μ at w: never above `error`."""
        return _mean(self._at_weights, "bound")

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
        turned: list[Tensor] = []
        if len(self._at_weights) != len(self._at_perturbed):
            return None
        for before, after in zip(self._at_weights, self._at_perturbed, strict=True):
            if before.correct is None or after.correct is None or before.correct.shape != after.correct.shape:
                return None
            turned.append((before.correct & ~after.correct & after.counted).sum())
        return torch.stack(turned).sum() if turned else None

    def as_dict(self) -> dict[str, Tensor]:
        """All that is known, by name: for a logger."""
        names = [name for name, value in vars(Telemetry).items() if isinstance(value, property)]
        known = {name: getattr(self, name) for name in [*names, "ascent_norm", "descent_norm"]}
        return {name: value for name, value in known.items() if value is not None}


class Criterion:
    """`optimizer.criterion`: the ascent's objective on the way up, the descent's on the way down.

    Call it as any loss, `criterion(output, target)`; `output` is the logits or an object with a `logits` attribute.
    With gradients switched off it is the descent's loss and leaves no trace, so validation code can call it too.
    """

    def __init__(self, ascent: Objective | None, descent: Objective | None) -> None:
        self.descent: Objective = CrossEntropy() if descent is None else descent
        self.ascent: Objective = self.descent if ascent is None else ascent
        self.phase: Phase = "ascent"
        self.telemetry = Telemetry()
        self._step_is_over = False

    def __call__(self, output: Any, target: Tensor) -> Tensor:
        logits: Tensor = getattr(output, "logits", output)
        if not torch.is_grad_enabled():
            return self.descent(logits, target)
        _refuse_empty(logits)
        loss = self.objective(logits, target)
        if loss.dim() != 0:
            raise ValueError(
                f"an objective must return a scalar to step on, got shape {tuple(loss.shape)} from {self.objective}. "
                'Use reduction="mean" or "sum"'
            )
        self._record(logits.detach(), target, loss.detach())
        return loss

    @property
    def objective(self) -> Objective:
        """The objective of the phase that is on."""
        return self.ascent if self.phase == "ascent" else self.descent

    def start(self, phase: Phase) -> None:
        """Enter a phase. The first phase of a step begins new telemetry; the old stays with whoever holds it."""
        self.phase = phase
        if phase != "descent":
            self.telemetry = Telemetry()
        self._step_is_over = False

    def finish(self) -> None:
        """The step is over: its telemetry stays readable until the next one begins."""
        self.phase = "ascent"
        self._step_is_over = True

    @torch.no_grad()
    def _record(self, logits: Tensor, target: Tensor, value: Tensor) -> None:
        if self._step_is_over:
            self.start("ascent")
        if self.phase == "descent":
            self.telemetry._at_perturbed.append(self._observe(logits, target, value))
            return
        same = self.objective is self.descent
        observation = self._observe(logits, target, value if same else self.descent(logits, target))
        observation.ascent = value if self.phase == "ascent" else None
        if self.phase == "ascent" and isinstance(self.ascent, LowerBound) and self.ascent.reduction == "mean":
            observation.bound = value - self.ascent.slack(logits)
        self.telemetry._at_weights.append(observation)

    def _observe(self, logits: Tensor, target: Tensor, loss: Tensor) -> Observation:
        observation = Observation(self.descent, target, loss)
        labelled = not target.is_floating_point() and logits.dim() == target.dim() + 1
        if labelled or isinstance(self.descent, (nn.CrossEntropyLoss, LowerBound)):
            ignore_index = getattr(self.descent, "ignore_index", -100)
            observation.correct = objectives.correct(logits, target, ignore_index=ignore_index)
        return observation


def _refuse_empty(logits: Tensor) -> None:
    if logits.numel() == 0:
        raise ValueError(f"the batch is empty: the model's output has shape {tuple(logits.shape)}")


def _mean(observations: list[Observation], name: str) -> Tensor | None:
    """The mean over the samples of all observations: each one is a mean over its own."""
    values = [getattr(o, name) for o in observations]
    if not values or any(value is None for value in values):
        return None
    if len(values) == 1:
        return values[0]
    weights = [o.weight for o in observations]
    return sum(value * weight for value, weight in zip(values, weights, strict=True)) / sum(weights)


def _error(observations: list[Observation]) -> Tensor | None:
    if not observations or any(o.correct is None for o in observations):
        return None
    wrong = [(~o.correct & o.counted).sum() for o in observations]  # type: ignore[operator]
    return torch.stack(wrong).sum() / torch.stack([o.counted.sum() for o in observations]).sum()
