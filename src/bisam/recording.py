"""One training's part of a captured step: what goes into a graph, what comes out, and what the host does in between."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bisam.criterion import Observation, Telemetry
from bisam.gradients import Gradients, Leftover
from bisam.optimizer import Prepared, SharpnessAware
from bisam.perturbation import is_zero

_LIVE = {"params", "lr", "initial_lr", "max_lr", "min_lr", "rho", "rho_min", "lr_max"}
"""Options of a parameter group that a graph does not hold: lr and the radius are read anew, the others lead to them."""


class Training:
    """One optimizer, and how to run its step."""

    def __init__(
        self,
        optimizer: SharpnessAware,
        closure: Callable[..., Any] | None,
        generator: torch.Generator | None,
        after: Callable[[SharpnessAware], Any] | None,
    ) -> None:
        if not isinstance(optimizer, SharpnessAware):
            raise TypeError(
                f"a sharpness-aware optimizer is captured, such as bisam.BiSAM(base, model), got {optimizer!r}"
            )
        if optimizer.model is None and closure is None:
            raise ValueError(f"a captured step runs the model: give it, as in {type(optimizer).__name__}(base, model)")
        self.optimizer, self.closure, self.after = optimizer, closure, after
        self.device = optimizer._parameters()[0].device
        self.rates: list[Number] = []
        self.radii: list[Number] = []
        if generator is not None and generator.device.type != self.device.type:
            raise ValueError(
                f"the generator is on {generator.device}, and the parameters on {self.device}: create it with "
                f'torch.Generator("{self.device.type}")'
            )
        self.generator = generator

    def eager(self, batch: Sequence[Any]) -> Tensor:
        """A step as the optimizer runs it."""
        with self.own_random_numbers():
            if self.closure is None:
                loss = self.optimizer.minimize(*batch)
            else:
                loss = self.optimizer.step(partial(self.closure, *batch))
        self._after()
        return loss

    def like_captured(self, batch: Sequence[Any]) -> Tensor:
        """The same with the numbers of a captured step: one that is not captured rounds as those that are."""
        self.move_counters()
        self.refresh()
        return self.optimizer.step(Prepared(partial(self.run, batch)))

    def run(self, batch: Sequence[Any]) -> Tensor:
        """The passes and the update, with all numbers on the device, in no `step` of its own."""
        plan = self.optimizer.plan_batch if self.closure is None else self._plan_closure
        with self.told_numbers(), self.own_random_numbers():
            loss = self.optimizer.run(plan(*batch))
        self._after()
        return loss

    @contextmanager
    def told_numbers(self) -> Iterator[None]:
        """Have the optimizer take radii and learning rates from the device, and the base optimizer know that it can.

        Its groups look as ever afterwards: what is done for a graph is no part of a checkpoint.
        """
        optimizer, groups = self.optimizer, self.optimizer.param_groups
        before = [dict(group) for group in groups]
        try:
            for group, rate in zip(groups, self.rates, strict=True):
                forms = {"fused": True, "foreach": False, "capturable": True}
                group.update({name: value for name, value in forms.items() if name in group}, lr=rate.tensor)
            optimizer._fixed_radii = [radius.tensor for radius in self.radii]
            yield
        finally:
            optimizer._fixed_radii = None
            for group, options in zip(groups, before, strict=True):
                group.update(
                    {name: options[name] for name in ("lr", "fused", "foreach", "capturable") if name in options}
                )

    def _after(self) -> None:
        if self.after is not None:
            with torch.no_grad():
                self.after(self.optimizer)

    def _plan_closure(self, *batch: Any) -> Any:
        assert self.closure is not None
        return self.optimizer.plan_closure(partial(self.closure, *batch))

    def refresh(self) -> None:
        """What the host does for every step: tell the device this step's learning rates and radii."""
        groups = self.optimizer.param_groups
        while len(self.rates) < len(groups):
            self.rates.append(Number(self.device))
            self.radii.append(Number(self.device))
        for group, rate in zip(groups, self.rates, strict=True):
            rate.update(group["lr"])
        if self.optimizer._perturbs():
            self.optimizer.perturbation.begin_step()
            for radius, value in zip(self.radii, self.optimizer._radii(), strict=True):
                radius.update(value)

    def generators(self) -> list[torch.Generator]:
        own = [] if self.generator is None else [self.generator]
        return own + self.optimizer.perturbation.generators()

    @contextmanager
    def own_random_numbers(self) -> Iterator[None]:
        """Let torch's default generator draw from this training's."""
        if self.generator is None:
            yield
        elif self.device.type == "cuda":
            default = torch.cuda.default_generators[self.device.index]
            others = default.graphsafe_get_state()
            default.graphsafe_set_state(self.generator)
            try:
                yield
            finally:
                default.graphsafe_set_state(others)
        else:
            state = torch.get_rng_state()
            torch.set_rng_state(self.generator.get_state())
            try:
                yield
            finally:
                self.generator.set_state(torch.get_rng_state())
                torch.set_rng_state(state)

    def move_counters(self) -> None:
        """Have the base optimizer count its steps on the device."""
        for param, state in self.optimizer.state.items():
            if isinstance(state.get("step"), Tensor):
                state["step"] = state["step"].to(param.device)

    def signature(self, batch: Sequence[Any]) -> Any:
        """What a graph was captured for: nothing else may differ in a step that replays it."""
        optimizer, model = self.optimizer, self.optimizer.model
        perturbs = optimizer._perturbs()  # which completes the groups
        options = [
            (is_zero(group["rho"]), *((name, value) for name, value in group.items() if name not in _LIVE))
            for group in optimizer.param_groups
        ]
        return (
            _shape(batch),
            perturbs,
            tuple(map(str, options)),
            tuple((p.data_ptr(), p.requires_grad) for p in optimizer._parameters()),
            tuple(module.training for module in model.modules()) if model is not None else (),
            (optimizer.clip_norm, optimizer.autocast, optimizer.micro_batch, optimizer.vectorize),
            (torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")),
        )


@dataclass
class Recording:
    """One training's part of a graph: what goes in, and what comes out."""

    training: Training
    batch: tuple[Any, ...]
    loss: Tensor = field(init=False)
    telemetry: Telemetry = field(init=False)
    gradients: Gradients = field(init=False)
    leftover: Leftover | None = field(init=False)
    replays: int = 0

    def record(self) -> None:
        optimizer = self.training.optimizer
        steps = optimizer._steps
        self.loss = self.training.run(self.batch)
        optimizer._steps = steps
        self.telemetry = optimizer.telemetry
        self.gradients = [param.grad for param in optimizer._parameters()]
        self.leftover = optimizer._leftover

    def load(self, batch: Sequence[Any]) -> None:
        """Before a replay: this step's batch."""
        for static, given in zip(_tensors(self.batch), _tensors(tuple(batch)), strict=True):
            if static is not given:
                static.copy_(given, non_blocking=True)

    def finish(self) -> Tensor:
        """After a replay: what an eager step would have left behind."""
        self.replays += 1
        optimizer = self.training.optimizer
        optimizer._steps += 1
        optimizer._opt_called = True
        optimizer.criterion.telemetry = BorrowedTelemetry(self)
        for param, gradient in zip(optimizer._parameters(), self.gradients, strict=True):
            if param.grad is not gradient:
                param.grad = gradient
        optimizer._leftover = self.leftover
        return self.loss.clone()


class Number:
    """A number that a graph reads from the device, and the host may change between steps."""

    def __init__(self, device: torch.device) -> None:
        self._value: float | Tensor | None = None
        self.tensor = torch.zeros((), device=device)

    def update(self, value: float | Tensor) -> None:
        if isinstance(value, Tensor):
            self.tensor.copy_(value, non_blocking=True)
        elif isinstance(self._value, Tensor) or value != self._value:
            self.tensor.fill_(value)
        self._value = value


class BorrowedTelemetry(Telemetry):
    """Telemetry in the tensors of a graph: the next replay writes over them."""

    def __init__(self, recording: Recording) -> None:
        self._recording, self._replay = recording, recording.replays
        self._ascent, self._descent = recording.telemetry._ascent, recording.telemetry._descent

    def _captured(self) -> Telemetry:
        if self._recording.replays != self._replay:
            raise RuntimeError(
                "this telemetry is of an earlier captured step, and the next one has written over it. Read "
                "optimizer.telemetry before the next step"
            )
        return self._recording.telemetry

    @property
    def _at_weights(self) -> list[Observation]:  # type: ignore[override]
        return [_own(observation) for observation in self._captured()._at_weights]

    @property
    def _at_perturbed(self) -> list[Observation]:  # type: ignore[override]
        return [_own(observation) for observation in self._captured()._at_perturbed]

    @property
    def ascent_norm(self) -> Tensor | None:  # type: ignore[override]
        return _cloned(self._captured().ascent_norm)

    @property
    def descent_norm(self) -> Tensor | None:  # type: ignore[override]
        return _cloned(self._captured().descent_norm)


def _own(o: Observation) -> Observation:
    return replace(o, loss=o.loss.clone(), ascent=_cloned(o.ascent), bound=_cloned(o.bound))


def _cloned(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.clone()


# A batch: tensors in tuples, lists and mappings.


def _shape(value: Any) -> Any:
    """Structure, shapes and types; whatever is no tensor by its value."""
    if isinstance(value, Tensor):
        return (tuple(value.shape), value.dtype, value.device)
    if isinstance(value, Mapping):
        return tuple((key, _shape(item)) for key, item in value.items())
    if isinstance(value, (tuple, list)):
        return tuple(_shape(item) for item in value)
    return repr(value)


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = tuple(value.values())
    return [tensor for item in value for tensor in _tensors(item)] if isinstance(value, (tuple, list)) else []


def copied(value: Any) -> Any:
    """The same structure with tensors of its own."""
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, Mapping):
        return {key: copied(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return tuple(copied(item) for item in value)
    return value
