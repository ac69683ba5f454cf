"""A batch that `minimize` runs by itself: forward and backward passes on the samples that the plan chooses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from bisam.engine.checks import Closure
from bisam.engine.criterion import Criterion, Pass
from bisam.engine.objective_options import ignored, per_sample, shares
from bisam.objectives import Objective, logits_of
from bisam.plan import Batch, Plan
from bisam.tensors.snapshot import forget_derived


def are_equal_batches(work: Sequence[Any]) -> TypeGuard[Sequence[Planned]]:
    """Whether these are several micro-batches of one size, each to be run in one piece."""
    planned = [part for part in work if isinstance(part, Planned) and part.pieces == 1]
    return len(planned) == len(work) > 1 and len({len(part.batch) for part in planned}) == 1


def precision(autocast: torch.dtype | None, device: torch.device) -> AbstractContextManager[Any]:
    """Autocast to that type; None leaves the user's own autocast as it is."""
    return nullcontext() if autocast is None else torch.autocast(device.type, autocast)


@dataclass
class Runner:
    """How a model is run on a batch, forward and backward."""

    model: nn.Module
    criterion: Criterion
    plan: Plan
    autocast: torch.dtype | None
    scaled: Callable[[Tensor], Tensor]
    keep_buffers: Callable[[], None]

    def backward(self, batch: Batch, factor: float | Tensor, scores: list[Tensor] | None) -> Tensor:
        with precision(self.autocast, batch.y.device):
            output = batch.run(self.model)
            loss = self.criterion(output, batch.y)
            if scores is not None:
                logits = logits_of(output).detach()
                values = per_sample(self.criterion.ascent, logits, batch.y)
                left_out = ignored(self.criterion.ascent, batch.y)
                scores.append(values if left_out is None else values.masked_fill(left_out, torch.inf))
        if loss.requires_grad:  # else the perturbation has frozen every parameter that the loss uses
            self.scaled(loss if isinstance(factor, float) and factor == 1.0 else loss * factor).backward()  # type: ignore[no-untyped-call]
        return loss

    @torch.no_grad()
    def look(self, objective: Objective, pieces: int, batch: Batch, *, observe: bool) -> Tensor:
        """The objective of each sample at the weights as they are."""
        scores = []
        for part in batch.split(pieces):
            with precision(self.autocast, part.y.device):
                output = part.run(self.model)
                logits = logits_of(output)
                scores.append(per_sample(objective, logits, part.y))
                if observe:
                    self.criterion.observe(logits, part.y)
        forget_derived()  # it was computed without gradients
        return torch.cat(scores)


@dataclass
class Planned:
    """A batch, or micro-batch, that the plan chooses from, in `pieces` parts to be run one after the other."""

    runner: Runner
    batch: Batch
    pieces: int
    share: float | Tensor
    is_whole: bool
    needs_label_weights = False
    _scores: list[Tensor] = field(default_factory=list)

    @property
    def in_pieces(self) -> bool:
        return self.pieces > 1

    def ascent(self) -> Sequence[Closure]:
        runner, plan = self.runner, self.runner.plan
        self.batch = plan.for_ascent(self.batch, partial(self._look, runner.criterion.descent, at_weights=True))
        self._scores = []
        return self._closures(runner.criterion.ascent, 1.0, self._scores if plan.needs_scores_of_ascent else None)

    def descent(self) -> Sequence[Closure]:
        runner, plan = self.runner, self.runner.plan
        before = torch.cat(self._scores) if self._scores else None
        self.batch = plan.for_descent(
            self.batch, before, partial(self._look, runner.criterion.ascent, at_weights=False)
        )
        return self._closures(runner.criterion.descent, self.share)

    def plain(self) -> Sequence[Closure]:
        return self._closures(self.runner.criterion.descent, self.share)

    def _closures(
        self, objective: Objective, factor: float | Tensor, scores: list[Tensor] | None = None
    ) -> list[Closure]:
        parts = self.batch.split(self.pieces)
        weights = shares(objective, [part.y for part in parts])
        return [
            partial(self.runner.backward, part, factor * own, scores) for part, own in zip(parts, weights, strict=True)
        ]

    def _look(self, objective: Objective, batch: Batch, *, at_weights: bool) -> Tensor:
        """Scores for the plan. At w, buffers keep the statistics of all samples; at w + ε, telemetry observes all."""
        scores = self.runner.look(objective, self.pieces, batch, observe=not at_weights)
        if at_weights:
            self.runner.keep_buffers()
        else:
            self.runner.criterion.current = Pass.DESCENT_OBSERVED
        return scores
