"""Micro-batches that wait until the update is due, and then run together in each pass."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from bisam.engine.criterion import Criterion
from bisam.engine.optimizer import SharpnessAware
from bisam.objectives import logits_of

Run = Callable[[], Any]
"""The forward and backward pass of one micro-batch. Returns its loss."""


class MicroBatch:
    """What a micro-batch is run with, in each pass the same.

    A pass may take entries out of a dictionary or a list. A tensor that is changed in place is refused: by a loader
    that fills the same memory again, all micro-batches would be the last one, and the second pass would see what the
    first has changed.
    """

    def __init__(self, *arguments: Any) -> None:
        self._arguments = _with_own_containers(arguments)
        self._versions = [(tensor, tensor._version) for tensor in _tensors(arguments) if not tensor.is_inference()]

    def arguments(self) -> tuple[Any, ...]:
        for tensor, version in self._versions:
            if tensor._version != version:
                raise RuntimeError(
                    f"a tensor of the batch, of shape {tuple(tensor.shape)}, was changed in place: by the loader while "
                    "the batch waited for its update, or by the first pass, and the second needs it as it was. Change "
                    "a copy, as in x = x.clone()"
                )
        return tuple(_with_own_containers(self._arguments))


class Waiting:
    """Micro-batches that wait until the update is due. `backward` is the framework's, which may scale the loss."""

    def __init__(self, backward: Callable[[Tensor], Any]) -> None:
        self._backward = backward
        self._batches: list[tuple[Callable[..., Tensor], MicroBatch]] = []

    def __len__(self) -> int:
        return len(self._batches)

    def add(self, loss_of: Callable[..., Tensor], batch: Iterable[Any], named: Mapping[str, Any]) -> None:
        """A micro-batch: `loss_of(*batch, **named)` runs the model and returns the loss."""
        if not batch and not named:
            raise TypeError(
                "give the batch beside the function, as in backward(loss_of, x, y): the function runs after the loop "
                "has moved on, and would find the last batch only"
            )
        self._batches.append((loss_of, MicroBatch(batch, named)))

    def clear(self) -> None:
        self._batches.clear()

    def run(self, optimizer: SharpnessAware, model: nn.Module | None, scaler: torch.amp.GradScaler | None) -> Any:
        """Both passes over all of them; none waits then. Returns the mean of their losses at w."""
        runs, self._batches = [partial(self._run, *one) for one in self._batches], []
        return optimizer.backward(partial(run_all, runs, model), scaler=scaler)

    def _run(self, loss_of: Callable[..., Tensor], micro_batch: MicroBatch) -> Tensor:
        batch, named = micro_batch.arguments()
        loss = loss_of(*batch, **named)
        self._backward(loss)
        return loss.detach()

    def warn_in_checkpoint(self, where: str) -> None:
        if self._batches:
            warnings.warn(
                f"saving in the middle of an accumulation: {len(self)} micro-batches wait for their update, and are "
                f"not part of what is saved. Save {where}",
                stacklevel=4,
            )


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(part)


def _with_own_containers(value: Any) -> Any:
    """The same tensors, in copies of the lists and dictionaries."""
    if isinstance(value, MutableMapping) and hasattr(value, "copy"):
        copied = value.copy()
        for key, part in value.items():
            copied[key] = _with_own_containers(part)
        return copied
    if type(value) in (list, tuple):
        return type(value)(map(_with_own_containers, value))
    return value


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
