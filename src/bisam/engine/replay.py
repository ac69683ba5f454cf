"""A step that is recorded once and replayed: the interface of the engine that `bisam.capture` uses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from bisam.engine.combined import leaves
from bisam.engine.optimizer import SharpnessAware
from bisam.engine.telemetry import Telemetry
from bisam.merge import Turn
from bisam.tensors import gradients
from bisam.tensors.gradients import Gradients
from bisam.tensors.snapshot import modules_of

T = TypeVar("T")


class Replay:
    """One optimizer's steps, run with numbers on the device."""

    def __init__(self, optimizer: SharpnessAware) -> None:
        self.optimizer = optimizer

    @property
    def params(self) -> list[Tensor]:
        return self.optimizer._parameters()

    @property
    def turn(self) -> Turn:
        """Whether the next step perturbs, is left out by `every`, or is the base optimizer's."""
        return self.optimizer._turn()

    @property
    def is_alone(self) -> bool:
        """Whether one process trains, with whole parameters."""
        return self.optimizer._sync.is_alone

    def unrecordable(self) -> str | None:
        """The reason why a graph cannot hold the collectives of several processes; None if it can."""
        return None if self.is_alone else self.optimizer._sync.unrecordable()

    def prepare_recording(self) -> None:
        self.optimizer._sync.prepare_recording()

    def refuse_while_perturbed(self) -> None:
        self.optimizer._refuse_while_perturbed("a captured step")

    def begin_step(self) -> Sequence[float | Tensor] | None:
        """What the host does when a step begins. Returns the radius of each parameter group if it perturbs."""
        turn = self.turn
        self.optimizer.merge.begin_step(turn)
        if turn is not Turn.PERTURBED:
            return None
        self.optimizer.perturbation.begin_step()
        return self.optimizer._radii()

    @contextmanager
    def with_radii(self, radii: Sequence[Tensor]) -> Iterator[None]:
        """Perturb with these radii, one for each group, instead of those that the groups' options give."""
        self.optimizer._fixed_radii = list(radii)
        try:
            yield
        finally:
            self.optimizer._fixed_radii = None

    def run(self, closure: Callable[[], Any] | None, batch: Sequence[Any]) -> Tensor:
        """The passes and the update, without the hooks of a step."""
        work = self.optimizer.work_of_batch(*batch) if closure is None else self.optimizer.work_of_closure(closure)
        return self.optimizer.run(work)

    def with_hooks(self, function: Callable[[], T]) -> T:
        """Call a function inside of the optimizer's step hooks: they may set a learning rate."""
        return _hooked(self.optimizer, function)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Around a step that is recorded, not run: it does not count."""
        steps = self.optimizer._steps
        try:
            yield
        finally:
            self.optimizer._steps = steps

    def others(self, modules: Sequence[nn.Module] | None = None) -> list[Tensor]:
        """The parameters of the model that the optimizer does not have. `modules` are `modules()`, if at hand."""
        return self.optimizer._parameters_of_others(modules)

    def modules(self) -> list[nn.Module]:
        return modules_of(self.optimizer.model)

    def kept_tensors(self, modules: Sequence[nn.Module] | None = None) -> list[Tensor]:
        """What lasts from step to step beside the parameters: buffers, the base optimizer's state, the variant's.

        `modules` are those of `modules()`, if they are known.
        """
        optimizer = self.optimizer
        walked = self.modules() if modules is None else modules
        buffers = [buffer for module in walked for buffer in module._buffers.values() if buffer is not None]
        state = [value for entry in optimizer.state.values() for value in entry.values() if isinstance(value, Tensor)]
        tables = [table for memory in optimizer._memories().values() for table in memory.tensors.values()]
        return [*buffers, *state, *(tensor for table in tables for tensor in table.values())]

    def copies(self) -> list[Tensor]:
        """The copies of weights and buffers that a perturbed step makes."""
        return [*self.optimizer._weights.copies, *self.optimizer._buffers.copies]

    def finish(self, telemetry: Telemetry, found: Gradients) -> None:
        """After a replay: what a step that ran would have left behind."""
        optimizer = self.optimizer
        optimizer._steps += 1
        optimizer._opt_called = True
        optimizer.criterion.telemetry = telemetry
        for param, gradient in zip(self.params, found, strict=True):
            if param.grad is not gradient:
                param.grad = gradient
        gradients.mark_tensors(found)

    def abandon(self) -> None:
        """Forget a step whose recording failed: nothing is restored, because nothing was moved."""
        optimizer = self.optimizer
        optimizer._weights.forget()
        optimizer._buffers.forget()
        optimizer.criterion.finish()
        gradients.take(self.params)

    def base_has_hooks(self) -> bool:
        """Whether the base optimizer's step has hooks beside the engine's own."""
        base, parts = self.optimizer.base, leaves(self.optimizer.base)
        hooks = [] if base in parts else [base._optimizer_step_pre_hooks, base._optimizer_step_post_hooks]
        hooks += [one._optimizer_step_post_hooks for one in parts]
        return any(hooks) or any(len(one._optimizer_step_pre_hooks) > 1 for one in parts)


@torch.optim.Optimizer.profile_hook_step
def _hooked(optimizer: SharpnessAware, function: Callable[[], Any]) -> Any:
    return function()
