"""What changes the weights: the move to w + ε, how far and in which steps, the way back, the update."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bisam.engine.checks import warn_caller, warn_of_rounding
from bisam.engine.combined import leaves
from bisam.engine.criterion import Criterion, Pass
from bisam.engine.telemetry import Telemetry
from bisam.engine.wrapper import Wrapper
from bisam.merge import Turn
from bisam.tensors import gradients, scaling
from bisam.tensors.buckets import Bucket, all_zero, into_buckets
from bisam.tensors.distributed import GradientSync
from bisam.tensors.gradients import Gradients
from bisam.tensors.snapshot import BufferSnapshot, forget_derived, modules_of


class Moves(Wrapper):
    """The move to w + ε, the way back and the update, around a base optimizer; and what is refused meanwhile."""

    criterion: Criterion
    scaler: torch.amp.GradScaler | None
    clip_norm: float | None

    # What lives across a pass:
    _buffers: BufferSnapshot
    _awaits_update: bool
    """Whether `.grad` holds the gradient that `backward` left for `step()`."""
    _scaler_state: dict[str, Any] | None
    """What the GradScaler that `backward` was given keeps of this optimizer."""
    _fixed_radii: list[Tensor] | None
    """The radius of each group as a tensor on the device: in a captured step."""

    model: nn.Module | None
    _others: list[Tensor]
    """Parameters of the model that another optimizer may step, as of the beginning of the step."""
    _has_warned_of_scaled = False
    _has_warned_of_averaged: bool
    _has_looked_at_rounding: bool
    """Whether the types of the weights were looked at, in the first perturbed step."""
    _start_key: tuple[Callable[[int], bool], int] | None = None
    """The function given as `start` and the step that `_start_result` is of."""
    _start_result = False
    _gradients_of_others: Gradients | None
    """What was in their `.grad` before the step; None where it is left there, for a closure to clear."""
    _sync: GradientSync

    @property
    def telemetry(self) -> Telemetry:
        """What the current step, or the last one, measured."""
        return self.criterion.telemetry

    @torch.no_grad()
    def _ascend(self, ascent: Gradients | None) -> None:
        """Move to w + ε, from the ascent's gradients, which the move uses up."""
        buckets = self._buckets(ascent)
        if self._weights.originals is None:  # else they were saved before the ascent pass
            self._save(buckets)
        try:
            if ascent is not None:  # without an ascent pass, the statistics of the only pass are kept
                self._buffers.save()
            self.criterion.current = Pass.DESCENT
            for bucket in buckets:
                bucket.weights = self._weights.copies_of(bucket.owners)
            if self.scaler is not None and ascent is not None:
                scaling.check_used(self.scaler)
                scaling.unscale_ascent(self.scaler, self, [bucket.gradients for bucket in buckets])
            if buckets:
                self.criterion.telemetry._ascent_norms.append(self.perturbation(buckets))
            for bucket in buckets:
                bucket.move()
            self._weights_changed()
        except BaseException:
            self._bring_back()
            self.criterion.finish()
            raise

    @torch.no_grad()
    def _save(self, buckets: list[Bucket]) -> None:
        if not self._has_looked_at_rounding:
            self._has_looked_at_rounding = True
            warn_of_rounding({param.dtype for bucket in buckets for param in bucket.params})
        self._weights.save(
            [param for bucket in buckets for param in bucket.params],
            [owner for bucket in buckets for owner in bucket.owners],
        )

    @torch.no_grad()
    def _bring_back(self) -> None:
        try:
            self._buffers.restore()
        finally:
            self._weights.restore()  # last, for a buffer may share memory with a weight
            self._weights_changed()

    def _weights_changed(self) -> None:
        forget_derived()
        if self._sync.gathering:
            self._sync.forget_gathered()

    @torch.no_grad()
    def _update(self, params: list[Tensor]) -> None:
        """Let the base optimizer step with the gradients in `.grad`."""
        if self.scaler is not None:
            scaling.unscale_descent(self.scaler, self, self.base)
            self._warn_of_scaled(self.scaler)
        try:
            if self.clip_norm is not None:
                self.criterion.telemetry.descent_norm = gradients.clip_(params, self.clip_norm)
            if self.scaler is None:
                self.base.step()
            else:
                self.scaler.step(self.base)
        finally:
            if self.scaler is not None:
                self.scaler.update()
        self._awaits_update = False
        self._opt_called = True  # what torch's schedulers look at; descend() is a step too
        gradients.mark(params)

    def _warn_of_scaled(self, scaler: torch.amp.GradScaler) -> None:
        """Where parameters of another optimizer have gradients, once: only this one's are unscaled."""
        if scaler.is_enabled() and gradients.present(self._others) and not self._has_warned_of_scaled:
            self._has_warned_of_scaled = True
            warn_caller(
                "the model has parameters that this optimizer does not step, and their gradients stay multiplied by "
                "the GradScaler's factor. If another optimizer steps them, remove scaler= and call "
                "optimizer.backward(closure, scaler=scaler), scaler.step(optimizer), scaler.step(other), "
                "scaler.update(). If none does, freeze them: param.requires_grad_(False)"
            )

    def _buckets(self, found: Gradients | None) -> list[Bucket]:
        """The parameters to perturb, with these gradients; None takes all, without gradients."""
        return into_buckets(self.base.param_groups, self._radii(), found, self.base.state)

    def _radii(self) -> Sequence[float | Tensor]:
        """The radius of each group in this step. The groups' options are checked."""
        self._complete_groups()
        radii: list[float | Tensor] = []
        for number, group in enumerate(self.base.param_groups):
            self.perturbation.check(group)
            radii.append(self.perturbation.radius(group) if self._fixed_radii is None else self._fixed_radii[number])
        return radii

    @property
    def _captured(self) -> bool:
        """Whether a captured step is being recorded, or run with its numbers."""
        return self._fixed_radii is not None

    @property
    def has_stopped(self) -> bool:
        """Whether the next step, and every later one, is the base optimizer's."""
        return self.stop is not None and self._steps >= self.stop

    def _turn(self) -> Turn:
        """Whether the next step perturbs, is left out by `every`, or is the base optimizer's."""
        self._complete_groups()
        if self.has_stopped or all_zero(self.base.param_groups):
            return Turn.PLAIN
        if callable(self.start):
            begun, since = self._evaluate(self.start), self._steps
        else:
            begun, since = self._steps >= self.start, self._steps - self.start
        if not begun:
            return Turn.PLAIN
        return Turn.BETWEEN if since % self.every else Turn.PERTURBED

    def _evaluate(self, start: Callable[[int], bool]) -> bool:
        """What the function returns for the next step. It is called once a step."""
        if self._start_key != (start, self._steps):
            self._start_result = bool(start(self._steps))
            self._start_key = (start, self._steps)
        return self._start_result

    def _attach(self) -> None:
        """Tie the base optimizer to this one: its step is refused while the weights are perturbed."""
        super()._attach()
        this = weakref.ref(self)

        def refuse(*_: Any) -> None:
            optimizer = this()
            if optimizer is None:
                return
            if optimizer.criterion.current is not Pass.NONE:  # the passes are over when the engine lets it step
                optimizer._refuse_inside_step("the base optimizer's step()")
            if optimizer._weights.originals is not None:
                optimizer._refuse_while_perturbed("the base optimizer's step()")
            optimizer._awaits_update = False  # the gradient that backward() left is used up

        for one in leaves(self.base):
            one.register_step_pre_hook(refuse)

    def _parameters_of_others(self, modules: Sequence[nn.Module] | None = None) -> list[Tensor]:
        """Those of the model that this optimizer does not have: layers may be replaced, and groups added.

        `modules` are the model's, if they are at hand.
        """
        ours = {*map(id, self._parameters())}
        walked = modules_of(self.model) if modules is None else modules
        found = (param for module in walked for param in module._parameters.values())
        return [*{id(param): param for param in found if param is not None and id(param) not in ours}.values()]

    def _notice_skipped_update(self) -> None:
        """Where a GradScaler did not call `step()`, the gradient that `backward` left is one of a step that is over."""
        if self._awaits_update and scaling.has_stepped(self._scaler_state):
            self._awaits_update, self._scaler_state = False, None
            gradients.mark(self._parameters())

    def _devices(self) -> set[torch.device]:
        return {param.device for param in self._parameters()}

    def _refuse_inference(self, method: str) -> None:
        if torch.is_inference_mode_enabled():
            raise RuntimeError(f"{method} needs gradients, which torch.inference_mode() rules out: leave that first")

    def _require_gradients(self, method: str, source: str) -> None:
        if not gradients.present(self._parameters()):
            raise self._no_gradients(method, source)

    def _no_gradients(self, method: str, source: str) -> RuntimeError:
        if not any(param.requires_grad for param in self._parameters()):
            return RuntimeError(
                "the step found no gradients: every parameter of the optimizer has requires_grad=False. Unfreeze those "
                "that are to be trained"
            )
        if self.model is not None and {*self._parameters()}.isdisjoint(self.model.parameters()):
            return RuntimeError(
                "the step found no gradients: the base optimizer has no parameter of the model. Build both from the "
                "same model, the base optimizer after the last change of its layers"
            )
        return RuntimeError(
            f"{method} found no gradients: {source} left none in the optimizer's parameters. Call backward() on the "
            "loss, on a model whose parameters this optimizer holds."
        )
