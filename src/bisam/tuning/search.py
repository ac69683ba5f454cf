"""The sweep: every ρ of a grid, in every repeat."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from torch import nn

from bisam.diagnostics.arguments import Data, Progress, batches_of, check_count
from bisam.engine.checks import warn_caller
from bisam.tuning.randomness import Randomness
from bisam.tuning.training import MakeOptimizer, Outcome, Trainings
from bisam.tuning.verdict import RhoSweep, judge

RHOS = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)


def find_rho(
    model: nn.Module | Callable[[], nn.Module],
    make_optimizer: MakeOptimizer,
    train_batches: Data,
    validation_batches: Data,
    *,
    rhos: Sequence[float] = RHOS,
    epochs: int | None = None,
    steps: int | None = None,
    repeats: int = 3,
    seed: int = 0,
    progress: Progress | None = None,
) -> RhoSweep:
    """Train briefly with each ρ and compare on the validation data: the best ρ, and those that did as well.

    This ranks ρ after a short training. For a long one, or for another learning-rate schedule, the best ρ may be larger
    or smaller. Treat the choice as a starting point.

    Each training uses a copy: the model and the states of torch's and Python's random generators stay as they are.
    Within one repeat every ρ starts from the same weights and sees the same batches in the same order, with the same
    augmentation, and the same dropout in the first pass of each step. Repeats differ in these where the data or the
    model is random, and in the initial weights if `model` is a function.

    The choice is the ρ with the best mean accuracy. Ties go to the lowest validation loss, then to the smallest ρ.
    Another ρ is distinguishable from the choice if the 95 % interval of their difference excludes 0. This interval
    (Student's t of paired differences) covers two sources of chance: the repeats, and which samples are in the
    validation data. One in twenty comparisons may be wrong, and the best of many is best partly by luck.

    Args:
        model: what to train, or a function that makes it.
        make_optimizer: from a model and a ρ to a sharpness-aware optimizer for that model, of any variant. Also the
            place to freeze layers, or to attach a schedule by `optimizer.register_step_post_hook`.
        train_batches: `(x, y)` or an iterable of such batches, as for `bisam.diagnostics`.
        validation_batches: the same, to choose ρ with.
        rhos: the grid. 0 is the base optimizer alone. Adaptive variants and MSAM need larger values, around 1.
        epochs: how long each training is; 1 if neither this nor `steps` is given.
        steps: how long each training is, in steps in place of epochs.
        repeats: how often each ρ is tried; with one, the scatter is not known.
        seed: the seed of all repeats.
        progress: called with the work done and the total, after every step and training.

    A training has diverged if its weights or its validation loss are no longer finite. It is stopped, and its ρ is
    neither tried again nor chosen.

    With several ranks, all of them call this function, each with its own batches, and `make_optimizer` wraps the model.
    The validation data of the first rank decide for all of them.

    Examples:
        >>> import bisam, torch
        >>> batch = torch.randn(64, 4), torch.arange(64) % 3
        >>> found = find_rho(
        ...     lambda: torch.nn.Linear(4, 3),
        ...     lambda model, rho: bisam.BiSAM(torch.optim.SGD(model.parameters(), lr=0.1), model, rho=rho),
        ...     [batch], [batch], rhos=(0, 0.05), steps=5,
        ... )
        >>> found.rho in (0, 0.05), len(found.points[0].accuracies)
        (True, 3)
    """
    grid = _checked_grid(rhos)
    check_count("repeats", repeats, 1)
    epochs = _checked_length(epochs, steps)
    if not isinstance(model, nn.Module) and not callable(model):
        raise TypeError(f"model must be a torch.nn.Module, or a function that makes one, got {type(model).__name__}")
    if progress is not None and not callable(progress):
        raise TypeError(f"progress must be a callable progress(done, total) or None, got {progress!r}")
    if not callable(make_optimizer):
        raise TypeError(
            "make_optimizer must be a function of a model and a ρ, as each training has a new one, got "
            f"{type(make_optimizer).__name__}. Write def make_optimizer(model, rho) and build the optimizer in it"
        )
    if train_batches is validation_batches:
        warn_caller("train_batches and validation_batches are the same: ρ is chosen by samples that were trained on")
    train, length = _checked_data("train_batches", train_batches)
    validation, _ = _checked_data("validation_batches", validation_batches)
    length_of_each = steps if epochs is None or length is None else epochs * length
    ticker = _Ticker(progress, length_of_each, trainings=repeats * len(grid))
    with Randomness(seed, train, validation) as random:
        trainings = Trainings(make_optimizer, train, validation, epochs, steps, random, ticker.step)
        outcomes: dict[float, list[Outcome | None]] = {rho: [] for rho in grid}
        for repeat in range(repeats):
            start = _start(model, random, repeat)
            if repeat == 0:
                trainings.rehearse(start, grid)
            for rho in grid:
                if None not in outcomes[rho]:
                    outcomes[rho].append(trainings.run(start, rho, repeat))
                ticker.end_training()
    return judge(outcomes, trainings.longest)


def _start(model: nn.Module | Callable[[], nn.Module], random: Randomness, repeat: int) -> nn.Module:
    """The model that all trainings of a repeat start from."""
    if isinstance(model, nn.Module):
        return model
    random.start("model", repeat)
    made = model()
    if not isinstance(made, nn.Module):
        raise TypeError(f"the function that makes the model must return a torch.nn.Module, got {type(made).__name__}")
    return made


def _checked_grid(rhos: Sequence[float]) -> tuple[float, ...]:
    """In ascending order."""
    if not isinstance(rhos, Iterable) or isinstance(rhos, str):
        raise TypeError(f"rhos must be several numbers, such as (0, 0.05, 0.1), got {rhos!r}")
    try:
        grid = sorted(float(rho) for rho in rhos)
    except (TypeError, ValueError):
        raise TypeError(f"every rho must be a number, got {rhos!r}") from None
    if len(grid) < 2:
        raise ValueError(f"rhos must be two or more values to choose from, got {len(grid)}")
    for rho in grid:
        if not (rho >= 0 and math.isfinite(rho)):
            raise ValueError(f"every rho must be non-negative and finite, got {rho:g}")
    twice = sorted({rho for rho in grid if grid.count(rho) > 1})
    if twice:
        raise ValueError(f"every rho must be given once, got {', '.join(f'{rho:g}' for rho in twice)} more than once")
    return tuple(grid)


def _checked_length(epochs: int | None, steps: int | None) -> int | None:
    """The number of epochs, or None where steps decide."""
    if epochs is not None and steps is not None:
        raise ValueError(f"give epochs or steps, not both: got epochs={epochs} and steps={steps}")
    if steps is not None:
        check_count("steps", steps, 1)
        return None
    if epochs is not None:
        check_count("epochs", epochs, 1)
    return 1 if epochs is None else epochs


def _checked_data(name: str, data: Data) -> tuple[Iterable[object], int | None]:
    try:
        return batches_of(data)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name}: {error}") from None


class _Ticker:
    """Reports every step, where their number is known, and every training."""

    def __init__(self, progress: Progress | None, steps: int | None, *, trainings: int) -> None:
        self._progress, self._counts_steps = progress, steps is not None
        self._each = (steps or 0) + 1  # and the validation
        self._total = trainings * self._each
        self._done = self._ended = 0

    def step(self) -> None:
        if self._counts_steps:
            self._report(self._done + 1)

    def end_training(self) -> None:
        self._ended += 1
        self._report(self._ended * self._each)

    def _report(self, done: int) -> None:
        self._done = done
        if self._progress is not None:
            self._progress(done, self._total)
