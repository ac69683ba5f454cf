"""Short trainings that differ in ρ alone, each on a copy of the model."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bisam.diagnostics.arguments import kind, plain, to_device
from bisam.diagnostics.tally import Mean, is_classification
from bisam.engine.batch import precision
from bisam.engine.objective_options import setting
from bisam.engine.optimizer import SharpnessAware
from bisam.objectives import as_target, correct, logits_of
from bisam.plan import Batch
from bisam.tensors.buckets import full, widest
from bisam.tuning.randomness import Randomness

MakeOptimizer = Callable[[Any, float], SharpnessAware]
"""From a model and a ρ to the optimizer that trains it."""

STEPS_BETWEEN_LOOKS = 10
"""Steps between two checks that the weights are finite: each check waits for the device."""


@dataclass
class Outcome:
    """What a training came to on the validation data."""

    shares: Tensor
    """What each sample adds to the accuracy, which is their mean: 1 or 0, where it has one label."""
    loss: float

    @property
    def accuracy(self) -> float:
        return self.shares.mean().item()


class Trainings:
    """Trainings of one sweep: the same data, length and random numbers for all."""

    def __init__(
        self,
        make_optimizer: MakeOptimizer,
        train: Iterable[Any],
        validation: Iterable[Any],
        epochs: int | None,
        steps: int | None,
        random: Randomness,
        tick: Callable[[], None],
    ) -> None:
        self._make_optimizer = make_optimizer
        self._data = {"train_batches": train, "validation_batches": validation}
        self._epochs, self._steps = epochs, steps
        self._random, self._tick = random, tick
        self._pairing = _Pairing()
        self.longest = 0
        """Steps of the longest training so far."""

    def rehearse(self, start: nn.Module, rhos: Sequence[float]) -> None:
        """Find mistakes before the first training: an optimizer for each ρ, a first batch of all data."""
        for rho in rhos:
            model, optimizer = self._begin(start, rho, repeat=0)
        # also since workers that persist draw other numbers when they are started than ever after
        next(self._pass("train_batches", model, [], 0, 0))
        _look(model.eval(), optimizer, next(self._pass("validation_batches", model, [])))

    def run(self, start: nn.Module, rho: float, repeat: int) -> Outcome | None:
        """Train and validate; None if that diverged."""
        model, optimizer = self._begin(start, rho, repeat)
        seen: list[Tensor] = []
        stayed_finite = self._train(model, optimizer, repeat, seen)
        self._pairing.check("train_batches", repeat, seen, cut_short=not stayed_finite)
        self.longest = max(self.longest, len(seen))
        if not stayed_finite:
            return None
        seen = []
        outcome = self._validate(model, optimizer, self._pass("validation_batches", model, seen))
        outcome = optimizer._sync.of_first(outcome)
        self._pairing.check("validation_batches", 0, seen)
        return outcome if math.isfinite(outcome.loss) else None

    def _begin(self, start: nn.Module, rho: float, repeat: int) -> tuple[nn.Module, SharpnessAware]:
        model = _copied(start).train()
        self._random.start("optimizer", repeat)
        optimizer = self._make_optimizer(model, rho)
        _check_optimizer(optimizer, model, rho)
        if optimizer.model is None:
            optimizer.model = model
        _set_mode(optimizer, "train")
        return model, optimizer

    def _train(self, model: nn.Module, optimizer: SharpnessAware, repeat: int, seen: list[Tensor]) -> bool:
        """Whether the weights stayed finite."""
        batches = itertools.islice(self._passes(model, repeat, seen), self._steps)
        for number, batch in enumerate(batches, start=1):
            optimizer.minimize(batch.x, batch.y)  # not step(closure): some variants have to see the samples
            self._tick()
            if number % STEPS_BETWEEN_LOOKS == 0 and not _is_finite(model, optimizer):
                return False
        return _is_finite(model, optimizer)

    def _validate(self, model: nn.Module, optimizer: SharpnessAware, batches: Iterable[Batch]) -> Outcome:
        model.eval()
        _set_mode(optimizer, "eval")
        loss = Mean(optimizer.criterion.descent)
        looks = []
        for batch in batches:
            look = _look(model, optimizer, batch)
            loss.add(look.loss, batch.y)
            looks.append(look)
        right, counted = torch.cat([look.right for look in looks]), sum(look.counted for look in looks)
        return Outcome(right * (len(right) / max(counted, 1)), loss.value)

    def _passes(self, model: nn.Module, repeat: int, seen: list[Tensor]) -> Iterator[Batch]:
        for epoch in itertools.count() if self._epochs is None else range(self._epochs):
            yield from self._pass("train_batches", model, seen, repeat, epoch)

    def _pass(self, name: str, model: nn.Module, seen: list[Tensor], *key: int) -> Iterator[Batch]:
        """Batches on the model's device, each from random numbers of its own; `seen` gets a signature of each."""
        device = next(model.parameters()).device
        self._random.start_pass(name, *key)
        batches = iter(self._data[name])
        for number in itertools.count():
            self._random.start(name, *key, number)
            try:
                pair = next(batches)
            except StopIteration:
                break
            if not (isinstance(pair, (tuple, list)) and len(pair) == 2 and isinstance(pair[1], Tensor)):
                raise TypeError(f"{name} must be (x, y) or an iterable of such pairs, got a batch of {kind(pair)}")
            seen.append(_signature(pair[1]))
            yield Batch(to_device(pair[0], device), pair[1].to(device))
        if number == 0:
            raise ValueError(
                f"{name} gave no batches: it is empty, or can be passed over only once. Pass a list of batches or a "
                "DataLoader"
            )


class _Pairing:
    """Raises if one of the compared trainings sees other labels, or another order of them."""

    def __init__(self) -> None:
        self._first: dict[tuple[str, int], Tensor] = {}

    def check(self, name: str, repeat: int, seen: Sequence[Tensor], *, cut_short: bool = False) -> None:
        now = torch.stack(list(seen)).cpu()
        first = self._first.get((name, repeat))
        if first is None:
            if not cut_short:
                self._first[name, repeat] = now
        elif not torch.equal(first[: len(now)] if cut_short else first, now):
            raise ValueError(
                f"{name} gave other samples, or another order, in one training than in another, so that they cannot be "
                "compared. Pass a list of batches, or a DataLoader that draws its random numbers from torch"
            )


def _signature(target: Tensor) -> Tensor:
    """One number that another order, or other labels, would change."""
    exact = widest(target.device)
    places = torch.arange(1, target.numel() + 1, dtype=exact, device=target.device)
    return (target.detach().flatten().to(exact) * places).sum() + target.numel()


def _copied(model: nn.Module) -> nn.Module:
    model = plain(model)
    try:
        return copy.deepcopy(model)
    except Exception as error:
        raise TypeError(
            f"the model cannot be copied, and every training needs a copy: copy.deepcopy(model) raised {error}"
        ) from error


def _check_optimizer(optimizer: Any, model: nn.Module, rho: float) -> None:
    if not isinstance(optimizer, SharpnessAware):
        raise TypeError(
            "make_optimizer must return a sharpness-aware optimizer, such as bisam.BiSAM(base, model, rho=rho), got "
            f"{type(optimizer).__name__}"
        )
    params = {param for group in optimizer.param_groups for param in group["params"]}
    runs_another = optimizer.model is not None and plain(optimizer.model) is not model
    if runs_another or not params <= {*model.parameters()}:
        raise ValueError(
            "make_optimizer must build on the model that it is given, which is a copy of yours: write "
            "def make_optimizer(model, rho) and use that model's parameters"
        )
    radii = [float(group["rho"]) for group in optimizer.param_groups]
    if not any(math.isclose(radius, rho, rel_tol=1e-6) for radius in radii):
        raise ValueError(
            f"make_optimizer was given rho={rho:g}, and no parameter group of its optimizer has it: they have "
            f"{', '.join(f'{radius:g}' for radius in radii)}. Pass rho=rho on"
        )


def _set_mode(optimizer: SharpnessAware, mode: str) -> None:
    """Schedule-free base optimizers have modes: they evaluate other weights than they train."""
    switch = getattr(optimizer, mode, None)
    if switch is not None:
        switch()


@dataclass
class _Look:
    """What one batch of the validation data showed."""

    loss: Tensor
    right: Tensor
    """How many labels of each sample are right."""
    counted: int
    """How many labels count."""


@torch.no_grad()
def _look(model: nn.Module, optimizer: SharpnessAware, batch: Batch) -> _Look:
    criterion = optimizer.criterion
    with precision(optimizer.autocast, batch.y.device):
        output = batch.run(model)
        logits, target = logits_of(output), batch.y
        loss = criterion(logits, target)
    if not is_classification([criterion.descent, criterion.ascent], logits, target):
        raise ValueError(
            "find_rho compares accuracies and needs a classification: logits (N, K, ...) and labels (N, ...)"
        )
    ignore_index = setting(criterion.descent, "ignore_index", -100)
    right = correct(logits, target, ignore_index=ignore_index)
    counted = torch.ones_like(right) if target.is_floating_point() else as_target(target) != ignore_index
    of_each_sample = (right & counted).reshape(len(right), -1).sum(1)
    return _Look(loss, of_each_sample.cpu().double(), int(counted.sum()))


def _is_finite(model: nn.Module, optimizer: SharpnessAware) -> bool:
    params = list(model.parameters())
    finite = [full(torch.isfinite(param).all()).to(params[0].device) for param in params]
    return optimizer._sync.of_first(bool(torch.stack(finite).all()))
