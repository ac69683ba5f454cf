"""The loss that knows which player asks, and what it learns from seeing the logits of both passes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from bisam import objectives, settings
from bisam.objectives import CrossEntropy, LowerBound, Objective
from bisam.settings import setting

Phase = Literal["ascent", "descent", "plain"]
"""Whose gradient the next backward pass is for; "plain" is a step that does not perturb."""


@dataclass
class Observation:
    """What one call of the criterion saw: scalars and masks on their device, whose sums wait until they are read."""

    loss: Tensor
    target: Tensor | None
    loss_divisor: float | Tensor = 1.0
    ascent: Tensor | None = None
    ascent_divisor: float | Tensor = 1.0
    bound: Tensor | None = None
    right: Tensor | None = None
    wrong: Tensor | None = None

    def weigh(self, ascent: Objective, descent: Objective) -> None:
        """Find out what this part counts for. It is asked only where there are several parts."""
        if self.target is not None:
            self.loss_divisor = settings.divisor(descent, self.target)
            self.ascent_divisor = settings.divisor(ascent, self.target)
            self.target = None


class Telemetry:
    """What one step knows without extra passes. Values are device tensors; reading one waits for nothing.

    A value is None while its pass has not run, where the criterion was not used, or a closure used it for several terms
    that it propagates back together, and, for those that count errors, where the task is not known to be a
    classification (neither objective is cross entropy or a lower bound).
    """

    descent_norm: Tensor | None = None
    """‖g‖ of the gradient that reached the base optimizer, before clipping; known when `clip_norm` is set."""

    def __init__(self, ascent: Objective, descent: Objective) -> None:
        self._ascent, self._descent = ascent, descent
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
        return _merged(self._descent, [(o.loss, o.loss_divisor) for o in self._at_weights])

    @property
    def perturbed_loss(self) -> Tensor | None:
        """The descent's loss (cross entropy) at w + ε: what the update minimises."""
        return _merged(self._descent, [(o.loss, o.loss_divisor) for o in self._at_perturbed])

    @property
    def surrogate_gap(self) -> Tensor | None:
        """Loss at w + ε minus loss at w: how sharp the surface is here."""
        loss, perturbed = self.loss, self.perturbed_loss
        return None if loss is None or perturbed is None else perturbed - loss

    @property
    def ascent(self) -> Tensor | None:
        """The ascent's objective at w: Q for the bilevel variants, else the loss."""
        return _merged(self._ascent, [(o.ascent, o.ascent_divisor) for o in self._at_weights])

    @property
    def bound(self) -> Tensor | None:
        """Q − log(K)/μ at w: never above `error`. None where that is another error: where Q has class weights, or the
        targets are probabilities, of which `error` takes the most probable class."""
        return _merged(self._ascent, [(o.bound, o.ascent_divisor) for o in self._at_weights])

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

    def _give_up(self) -> None:
        """The loss of a part has several terms, and what each counts for is not known here."""
        self._at_weights, self._at_perturbed, self._gave_up = [], [], True

    def as_dict(self) -> dict[str, Tensor]:
        """All that is known, by name: for a logger."""
        names = [name for name, value in vars(Telemetry).items() if isinstance(value, property)]
        known = {name: getattr(self, name) for name in [*names, "descent_norm"]}
        return {name: value for name, value in known.items() if value is not None}


class Criterion:
    """`optimizer.criterion`: the ascent's objective on the way up, the descent's on the way down.

    Call it as any loss, `criterion(output, target)`; `output` is the logits or an object with a `logits` attribute.
    With gradients switched off it is the descent's loss and leaves no trace, so validation code can call it too.
    """

    def __init__(self, ascent: Objective | None, descent: Objective | None) -> None:
        for name, objective in {"ascent": ascent, "descent": descent}.items():
            if objective is not None and not callable(objective):
                raise TypeError(
                    f"{name} must be an objective to call with (output, target), such as bisam.LowerBound() or "
                    f"torch.nn.CrossEntropyLoss(), got {objective!r}"
                )
        self.descent: Objective = CrossEntropy() if descent is None else descent
        self.ascent: Objective = self.descent if ascent is None else ascent
        self._phase: Phase = "ascent"
        self.silent = False
        self.asked = False
        """Whether anyone has asked, since the pass began, which objective it is for."""
        self._inside_closure = False
        self._waits_for_backward = False
        # Q's own task is that of cross entropy; of another loss, the first targets tell
        self._knows_the_task = not isinstance(self.ascent, LowerBound) or settings.is_of_labels(self.descent)
        self.telemetry = Telemetry(self.ascent, self.descent)
        self._step_is_over = False
        self._is_classification = settings.is_of_labels(self.ascent) or settings.is_of_labels(self.descent)

    def __call__(self, output: Any, target: Tensor) -> Tensor:
        logits = objectives.logits_of(output)
        if not torch.is_grad_enabled():
            return self.descent(logits, target)
        if isinstance(logits, Tensor) and logits.numel() == 0:
            raise ValueError(f"the batch is empty: the model's output has shape {tuple(logits.shape)}")
        self.check_task(target)
        loss = self.objective(logits, target)
        if loss.dim() != 0:
            raise ValueError(
                f"an objective must return a scalar to step on, got shape {tuple(loss.shape)} from {self.objective}. "
                'Use reduction="mean" or "sum"'
            )
        if not self.silent:
            self._note_term(loss)
            self.record(logits, target, loss)
        return loss

    @property
    def phase(self) -> Phase:
        """Whose gradient the next backward pass is for."""
        self.asked = True
        return self._phase

    @property
    def objective(self) -> Objective:
        """The objective of the phase that is on."""
        self.asked = True
        return self.ascent if self._phase == "ascent" else self.descent

    @property
    def bilevel(self) -> bool:
        """Whether the two players have different objectives."""
        return self.ascent is not self.descent

    @property
    def unasked(self) -> bool:
        """Whether there are two objectives, and the pass so far has not asked which is its own."""
        return self.bilevel and not self.asked

    def begin(self) -> None:
        """A step begins, and with it new telemetry; the old stays with whoever holds it."""
        self.telemetry = Telemetry(self.ascent, self.descent)
        self._step_is_over = False
        self.asked = False

    def enter(self, phase: Phase, *, silent: bool = False) -> None:
        """What follows is a pass of that phase; a silent one leaves no trace in the telemetry."""
        if self._step_is_over:
            self.begin()
        self._phase = phase
        self.silent = silent
        self.asked = False

    def run(self, closure: Callable[[], Any]) -> Any:
        """A closure of the user's. Calls of the criterion in it are parts of a batch if each is propagated back before
        the next; otherwise they are terms of one loss, of which telemetry does not know what each counts for."""
        self._inside_closure, self._waits_for_backward = True, False
        try:
            return closure()
        finally:
            self._inside_closure = False

    def finish(self) -> None:
        """The step is over: its telemetry stays readable until the next one begins."""
        self._phase = "ascent"
        self.silent = False
        self.asked = False
        self._step_is_over = True

    def observe(self, logits: Tensor, target: Tensor) -> None:
        """Record what the descent's loss would be, where a pass looks at samples without descending them."""
        self.record(logits, target, self.descent(logits, target))

    @torch.no_grad()
    def record(self, logits: Tensor, target: Tensor, value: Tensor) -> None:
        """Take note of a pass of the phase that is on, which gave this value of its objective."""
        if self._step_is_over:
            self.enter("ascent")
        self.asked = True
        if self.telemetry._gave_up:
            return
        # cloned: what the caller does to the loss in place, such as dividing it, is not what was observed
        value = value.detach().clone()
        climbing = self._phase == "ascent"
        loss = self.descent(logits, target) if climbing and self.bilevel else value
        # labels of its own: the caller may put the next part's into the same tensor
        observation = Observation(loss, target if target.is_floating_point() else target.clone())
        if climbing:
            observation.ascent = value
            observation.bound = self._bound(value, logits, target)
        if self._is_classification:
            observation.right, observation.wrong = self._right_and_wrong(logits, target)
        passes = self.telemetry._at_perturbed if self._phase == "descent" else self.telemetry._at_weights
        passes.append(observation)
        if len(passes) > 1:
            for part in passes[-2:]:
                part.weigh(self.ascent, self.descent)

    def _note_term(self, loss: Tensor) -> None:
        if self._inside_closure and loss.requires_grad and not torch.compiler.is_compiling():
            if self._waits_for_backward:
                self.telemetry._give_up()
            self._waits_for_backward = True
            loss.register_hook(self._hear_of_backward)  # type: ignore[no-untyped-call]

    def _hear_of_backward(self, gradient: Tensor) -> None:
        self._waits_for_backward = False

    def check_task(self, target: Any) -> None:
        """Q is of one label for each sample, or of probabilities. Looked at once: it waits for the device."""
        if self._knows_the_task:
            return
        if isinstance(target, Tensor) and target.is_floating_point():
            total = target.sum(1) if target.dim() > 1 else torch.zeros(())
            if not (torch.allclose(total, torch.ones_like(total), atol=1e-2) and bool((target >= 0).all())):
                raise ValueError(
                    f"Q bounds the error of a classification with one label for each sample, and the targets of shape "
                    f"{tuple(target.shape)} are not class indices or probabilities (N, K). For two classes give the "
                    "model two logits and use cross entropy; otherwise use a variant without Q, such as SAM"
                )
        self._knows_the_task = True

    def _bound(self, value: Tensor, logits: Tensor, target: Tensor) -> Tensor | None:
        climbed = self.ascent
        if not isinstance(climbed, LowerBound) or climbed.reduction != "mean" or climbed.weight is not None:
            return None
        return None if target.is_floating_point() else value - climbed.slack(logits)

    def _right_and_wrong(self, logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        ignore_index = setting(self.descent, "ignore_index", setting(self.ascent, "ignore_index", -100))
        right = objectives.correct(logits, target, ignore_index=ignore_index)
        if target.is_floating_point():
            return right, ~right
        counted = objectives.as_target(target) != ignore_index
        return right & counted, ~right & counted


def _merged(objective: Objective, parts: list[tuple[Tensor | None, float | Tensor]]) -> Tensor | None:
    """One value from those of several parts: sums add up, means are weighted by what they were divided by."""
    values = [value for value, _ in parts if value is not None]
    if len(values) != len(parts) or not parts:
        return None
    if len(parts) == 1:
        return values[0]
    if setting(objective, "reduction", "mean") == "sum":
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
