"""`optimizer.criterion`: the loss whose objective depends on the pass that it is called in."""

from __future__ import annotations

from enum import Enum
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from bisam.engine import objective_options
from bisam.engine.telemetry import MOST_CALLS, ObjectivePair, Telemetry
from bisam.objectives import CrossEntropy, LowerBound, Objective, logits_of

Phase = Literal["ascent", "descent", "plain"]
"""What the next backward pass is for; "plain" is a step that does not perturb."""


class Pass(Enum):
    """The pass that the criterion is called in."""

    NONE = "no step has begun: the first call of the criterion begins one"
    ASCENT = "the ascent's objective"
    DESCENT = "the descent's objective at w + ε"
    DESCENT_OBSERVED = "the same, where telemetry has seen all samples before some of them were chosen"
    PLAIN = "the descent's objective at w, in a step that does not perturb"
    EXTRA = "the descent's objective at w, for a merge that needs its gradient beside the ascent's; not observed"


_PHASES: dict[Pass, Phase] = {
    Pass.NONE: "ascent",
    Pass.ASCENT: "ascent",
    Pass.DESCENT: "descent",
    Pass.DESCENT_OBSERVED: "descent",
    Pass.PLAIN: "plain",
    Pass.EXTRA: "plain",
}
_NOT_OBSERVED = (Pass.DESCENT_OBSERVED, Pass.EXTRA)


class LabelCount(NamedTuple):
    """How many labels a call of the criterion had, and kept (by class weights, if any)."""

    labels: float
    kept: float | Tensor
    is_sum: bool

    @classmethod
    def of(cls, objective: Objective, target: Any) -> LabelCount:
        kept = objective_options.divisor(objective, target)
        labels = float(target.numel()) if isinstance(kept, Tensor) else kept  # kept is a tensor only if the target is
        return cls(labels, kept, objective_options.is_sum(objective))


class Criterion:
    """The ascent's objective in the ascent pass, the descent's in the descent pass.

    Call it as any loss, `criterion(output, target)`; `output` is the logits or an object with a `logits` attribute.
    With gradients switched off it is the descent's loss and is not observed, so validation code can call it too.
    """

    def __init__(self, ascent: Objective | None, descent: Objective | None) -> None:
        for name, objective in {"ascent": ascent, "descent": descent}.items():
            if objective is not None and (not callable(objective) or isinstance(objective, type)):
                given = f"the class {objective.__name__}" if isinstance(objective, type) else repr(objective)
                raise TypeError(
                    f"{name} must be an objective to call with (output, target), such as bisam.LowerBound() or "
                    f"torch.nn.CrossEntropyLoss(), got {given}"
                )
        descent = CrossEntropy() if descent is None else descent
        self._pair = ObjectivePair.of(descent if ascent is None else ascent, descent)
        self.current = Pass.NONE
        """The pass of the current step. The engine sets it."""
        of_labels = [objective_options.is_of_labels(objective) for objective in (self.ascent, self.descent)]
        self._targets_checked = not any(of_labels)
        """Whether the targets need no check, because no objective takes labels, or because the first were checked."""
        self.telemetry = Telemetry(self._pair)
        self.label_counts: list[LabelCount] | None = None
        """The calls of a closure, where the engine has to weigh the closures of a list."""

    def __call__(self, output: Any, target: Any) -> Tensor:
        logits = logits_of(output)
        if not torch.is_grad_enabled():
            return self.descent(logits, target)
        if isinstance(logits, Tensor) and logits.numel() == 0:
            raise ValueError(f"the batch is empty: the model's output has shape {tuple(logits.shape)}")
        if not self._targets_checked:
            self.check_task(target)
        if self.current is Pass.NONE:
            self.begin()
        loss = self.objective(logits, target)
        check_loss(loss, self.objective)
        if self.label_counts is not None:
            self.label_counts.append(LabelCount.of(self.objective, target))
        if self.current not in _NOT_OBSERVED:
            self.record(logits, target, loss)
        return loss

    def __repr__(self) -> str:
        return f"Criterion(ascent={self.ascent}, descent={self.descent})"

    @property
    def ascent(self) -> Objective:
        return self._pair.ascent

    @ascent.setter
    def ascent(self, _: Objective) -> None:
        raise AttributeError("an objective cannot be replaced: build a new optimizer, with ascent=")

    @property
    def descent(self) -> Objective:
        return self._pair.descent

    @descent.setter
    def descent(self, _: Objective) -> None:
        raise AttributeError("an objective cannot be replaced: build a new optimizer, with descent=")

    @property
    def bilevel(self) -> bool:
        """Whether the two players have different objectives."""
        return self._pair.bilevel

    @property
    def phase(self) -> Phase:
        """What the next backward pass is for."""
        return _PHASES[self.current]

    @property
    def objective(self) -> Objective:
        """The objective of the current pass."""
        return self.ascent if _PHASES[self.current] == "ascent" else self.descent

    def begin(self, most_calls: float = MOST_CALLS) -> None:
        """Begin a step, with new telemetry and the ascent pass. The old telemetry keeps its values."""
        self.telemetry = Telemetry(self._pair, most_calls)
        self.current = Pass.ASCENT

    def finish(self) -> None:
        """End the step: its telemetry stays readable until the next one begins."""
        self.current = Pass.NONE

    def observe(self, logits: Tensor, target: Tensor) -> None:
        """Record what the descent's loss would be, where a pass looks at samples without descending them."""
        self.record(logits, target, self.descent(logits, target))

    def record(self, logits: Tensor, target: Tensor, loss: Tensor) -> None:
        """Record a pass that gave this value of its objective."""
        if self.current is Pass.NONE:
            self.begin()
        self.telemetry.record(
            logits, target, loss, of_ascent=self.current is Pass.ASCENT, perturbed=self.current is Pass.DESCENT
        )

    def check_task(self, target: Any) -> None:
        """Raise if targets are neither class indices nor probabilities: the first floating-point ones are read.

        Where the descent takes several labels a sample, as binary cross entropy does, those of every batch are read.
        """
        if self._targets_checked or not (isinstance(target, Tensor) and target.is_floating_point()):
            return
        if target.is_cuda and torch.cuda.is_current_stream_capturing():
            return  # the eager steps before were checked
        if target.dim() < 2 and objective_options.is_of_labels(self.descent):
            return  # cross entropy itself refuses these, by their shape
        total = target.sum(1) if target.dim() > 1 else torch.zeros(())
        if not (torch.allclose(total, torch.ones_like(total), atol=1e-2) and bool((target >= 0).all())):
            of_q = isinstance(self.ascent, LowerBound)
            raise ValueError(
                f"{'Q' if of_q else 'cross entropy'} takes one label for each sample, and the targets of shape "
                f"{tuple(target.shape)} are not class indices or probabilities (N, K) that sum to 1. For two classes "
                "give the model two logits and class indices; for several labels a sample, or a regression, use a "
                "variant without Q, such as SAM, with descent=torch.nn.BCEWithLogitsLoss() or another loss"
            )
        self._targets_checked = not objective_options.takes_several_labels(self.descent)


def check_loss(loss: Any, objective: Objective) -> None:
    """Raise if this is no loss that `backward` can start from: a scalar tensor."""
    if not isinstance(loss, Tensor):
        raise TypeError(
            f"an objective must return a scalar tensor to step on, got {type(loss).__name__} from {objective}. Return "
            "the loss alone, as the tensor that torch computed, not its .item()"
        )
    if loss.dim() != 0:
        raise ValueError(
            f"an objective must return a scalar to step on, got shape {tuple(loss.shape)} from {objective}. "
            'Use reduction="mean" or "sum"'
        )
