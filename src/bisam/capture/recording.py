"""One branch of a captured step: what goes into a graph, what comes out, and what the host does in between."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bisam.engine.optimizer import SharpnessAware
from bisam.engine.replay import Replay
from bisam.engine.telemetry import Observation, Telemetry
from bisam.tensors.buckets import is_zero
from bisam.tensors.gradients import Gradients

_LIVE = {"params", "lr", "initial_lr", "max_lr", "min_lr"}
"""Options of a parameter group that no graph holds: lr, which is read anew at each step, and what sets it."""


class Branch:
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
        self.replay = Replay(optimizer)
        self.device = self.replay.params[0].device
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
            loss = self.replay.with_hooks(partial(self.replay.run, self._closure(batch), batch))
        self._after()
        return loss

    def like_captured(self, batch: Sequence[Any]) -> Tensor:
        """Run the step with the numbers of a captured one, so that both round alike."""

        def step() -> Tensor:
            self.fit_state()
            self.refresh()
            return self.run(batch)

        return self.replay.with_hooks(step)

    def run(self, batch: Sequence[Any]) -> Tensor:
        """The passes and the update, with all numbers on the device, without hooks."""
        with self.numbers_on_device(), self.own_random_numbers():
            loss = self.replay.run(self._closure(batch), batch)
        self._after()
        return loss

    def _closure(self, batch: Sequence[Any]) -> Callable[[], Any] | None:
        return None if self.closure is None else partial(self.closure, *batch)

    @contextmanager
    def numbers_on_device(self) -> Iterator[None]:
        """Have the optimizer read radii and learning rates from the device, with a base optimizer that can.

        Afterwards the parameter groups are as before: checkpoints do not see what is done for a graph.
        """
        groups = self.optimizer.param_groups
        before = [dict(group) for group in groups]
        try:
            for group, rate in zip(groups, self.rates, strict=True):
                forms = {"fused": True, "foreach": "fused" not in group, "capturable": True}
                group.update({name: value for name, value in forms.items() if name in group}, lr=rate.tensor)
            with self.replay.with_radii([radius.tensor for radius in self.radii]):
                yield
        finally:
            for group, options in zip(groups, before, strict=True):
                group.update(
                    {name: options[name] for name in ("lr", "fused", "foreach", "capturable") if name in options}
                )

    def _after(self) -> None:
        if self.after is not None:
            with torch.no_grad():
                self.after(self.optimizer)

    def refresh(self) -> None:
        """What the host does for every step: write its learning rates and radii to the device."""
        groups = self.optimizer.param_groups
        while len(self.rates) < len(groups):
            self.rates.append(Number(self.device))
            self.radii.append(Number(self.device))
        for group, rate in zip(groups, self.rates, strict=True):
            rate.update(group["lr"])
        if (radii := self.replay.begin_step()) is not None:
            for radius, value in zip(self.radii, radii, strict=True):
                radius.update(value)

    def generators(self) -> list[torch.Generator]:
        """Those that a step draws from in its graph."""
        own = [] if self.generator is None else [self.generator]
        drawn_from = own + self.optimizer.perturbation.generators()
        return [generator for generator in drawn_from if generator.device.type == self.device.type]

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

    def fit_state(self) -> None:
        """Lay out the base optimizer's state as a fused update needs it: a checkpoint may have another layout."""
        for param, state in self.optimizer.state.items():
            for name, value in state.items():
                if isinstance(value, Tensor):
                    state[name] = _fitting(value, param)

    def unfit(self, batch: Sequence[Any]) -> str | None:
        """The reason why a graph cannot take this batch; None if it can: tensors on its device, and constants."""
        for leaf in _leaves(tuple(batch)):
            if isinstance(leaf, Tensor):
                if leaf.device != self.device:
                    return f"a tensor of the batch is on {leaf.device}, and the model on {self.device}"
            elif not isinstance(leaf, (str, int, float, bool, type(None))):
                return f"the batch holds an object of type {type(leaf).__name__}, and a graph takes tensors only"
        return None

    def signature(self, batch: Sequence[Any]) -> Any:
        """What must be equal in all steps that replay one graph."""
        optimizer, modules = self.optimizer, self.replay.modules()
        turn = self.replay.turn  # which completes the groups
        live = _LIVE | optimizer.perturbation.radius_options
        options = [
            (is_zero(group["rho"]), *((name, value) for name, value in group.items() if name not in live))
            for group in optimizer.param_groups
        ]
        return (
            shape_of(batch),
            turn,
            tuple(map(str, options)),
            tuple((p.data_ptr(), p.requires_grad) for p in (*self.replay.params, *self.replay.others(modules))),
            tuple(tensor.data_ptr() for tensor in self.replay.kept_tensors(modules)),
            tuple(
                str(value) for state in optimizer.state.values() for value in state.values() if not _is_tensor(value)
            ),
            (id(optimizer.criterion), id(optimizer.perturbation), id(optimizer.plan), id(optimizer.merge)),
            tuple((id(module), module.training) for module in modules),
            (optimizer.clip_norm, optimizer.autocast, optimizer.micro_batch, optimizer.vectorize),
            (optimizer.scaler is None, optimizer.same_dropout),
            (torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")),
        )


@dataclass
class Counter:
    """The number of steps that were replayed, of all graphs: they share their memory."""

    count: int = 0


@dataclass
class Recording:
    """One branch of a graph: what goes in, and what comes out."""

    branch: Branch
    batch: tuple[Any, ...]
    replays: Counter
    loss: Tensor = field(init=False)
    telemetry: Telemetry = field(init=False)
    gradients: Gradients = field(init=False)
    addressed: list[Tensor] = field(init=False)
    """All that the graph reads and writes outside of its own memory: not to be freed while it may run."""

    def record(self) -> None:
        replay = self.branch.replay
        with replay.recording():
            self.loss = self.branch.run(self.batch)
        self.addressed = [*replay.params, *replay.kept_tensors(), *replay.copies()]
        self.telemetry = replay.optimizer.telemetry
        self.gradients = [param.grad for param in replay.params]

    def load(self, batch: Sequence[Any]) -> None:
        """Before a replay: this step's batch."""
        for static, given in zip(_tensors(self.batch), _tensors(tuple(batch)), strict=True):
            if static is not given:
                static.copy_(given, non_blocking=True)

    def finish(self) -> Tensor:
        """After a replay: what an eager step would have left behind."""
        self.branch.replay.finish(BorrowedTelemetry(self), self.gradients)
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
        self._recording, self._replay = recording, recording.replays.count
        self._pair = recording.telemetry._pair

    def _captured(self) -> Telemetry:
        if self._recording.replays.count != self._replay:
            raise RuntimeError(
                "this telemetry is of an earlier captured step, and the next one has written over it. Read "
                "optimizer.telemetry before the next step"
            )
        return self._recording.telemetry

    def __reduce__(self) -> Any:
        return Telemetry, (self._pair,)  # a copy has no graph to read from

    @property
    def _at_weights(self) -> list[Observation]:  # type: ignore[override]
        return [_own(observation) for observation in self._captured()._at_weights]

    @property
    def _at_perturbed(self) -> list[Observation]:  # type: ignore[override]
        return [_own(observation) for observation in self._captured()._at_perturbed]

    @property
    def ascent_norm(self) -> Tensor | None:
        return _cloned(self._captured().ascent_norm)

    @property
    def descent_norm(self) -> Tensor | None:  # type: ignore[override]
        return _cloned(self._captured().descent_norm)


def _fitting(value: Tensor, param: Tensor) -> Tensor:
    """A counter of steps on the device, and a tensor like the parameter in its layout; itself where it fits."""
    if value.dim() == 0 and value.device != param.device:
        return value.to(param.device)
    if value.shape != param.shape or value.stride() == param.stride():
        return value
    fitting = torch.empty_like(param, dtype=value.dtype)
    # a parameter with gaps, which is a part of another tensor, has a layout that no copy has
    return value if fitting.stride() == value.stride() else fitting.copy_(value)


def _own(o: Observation) -> Observation:
    return replace(o, loss=o.loss.clone(), ascent=_cloned(o.ascent), bound=_cloned(o.bound))


def _cloned(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.clone()


# A batch: tensors in tuples, lists and mappings.


def shape_of(value: Any) -> Any:
    """Structure, shapes and types; what is not a tensor by its value."""
    if isinstance(value, Tensor):
        return (tuple(value.shape), value.dtype, value.device)
    if isinstance(value, Mapping):
        return tuple((key, shape_of(item)) for key, item in value.items())
    if isinstance(value, (tuple, list)):
        return tuple(shape_of(item) for item in value)
    return repr(value)


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        value = tuple(value.values())
    return [leaf for item in value for leaf in _leaves(item)] if isinstance(value, (tuple, list)) else [value]


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in _leaves(value) if isinstance(leaf, Tensor)]


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def copied(value: Any) -> Any:
    """The same structure with tensors of its own."""
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, Mapping):
        return {key: copied(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return tuple(copied(item) for item in value)
    return value
