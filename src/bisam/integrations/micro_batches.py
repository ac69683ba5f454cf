"""Micro-batches that wait until the update is due, and then run together in each pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from bisam.engine.criterion import Criterion
from bisam.objectives import logits_of

Run = Callable[[], Any]
"""The forward and backward pass of one micro-batch. Returns its loss."""


def run_all(runs: Iterable[Run], model: nn.Module | None) -> Any:
    """Run them one after the other, so that their gradients add up. Returns the mean of their losses.

    DistributedDataParallel averages the sum over the ranks, with the last of them.
    """
    runs = list(runs)
    losses = []
    for run in runs[:-1]:
        with _without_averaging(model):
            losses.append(run())
    losses.append(runs[-1]())
    known = [loss.detach() if isinstance(loss, Tensor) else loss for loss in losses if loss is not None]
    return sum(known) / len(known) if known else None


def _without_averaging(model: nn.Module | None) -> AbstractContextManager[Any]:
    return model.no_sync() if isinstance(model, nn.parallel.DistributedDataParallel) else nullcontext()


def loss_of_pass(criterion: Criterion, output: Any, target: Tensor) -> Tensor:
    """The criterion's loss, whose value can be logged: in the ascent pass too it is the descent's loss.

    Gradients are those of the pass's own objective.
    """
    loss = criterion(output, target)
    if not (criterion.bilevel and criterion.phase == "ascent" and torch.is_grad_enabled()):
        return loss
    with torch.no_grad():
        value = criterion.descent(logits_of(output), target)
    return value + (loss - loss.detach())
