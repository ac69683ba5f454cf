"""What one step does: the ascent pass at w, the move to w + ε, the descent pass there, the way back, the update.

A step owns its gradients. Every closure starts with none in `.grad`; what it leaves there is taken and summed
elsewhere, so it does not matter whether, or how, a closure clears.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from bisam.engine.batch import Planned, are_equal_batches, precision
from bisam.engine.checks import (
    FRAMEWORKS,
    Closure,
    RefuseUnknownReplicas,
    Start,
    WatchBuffers,
    explain_graph_of_first_pass,
    refuse_loss_without_criterion,
)
from bisam.engine.criterion import Criterion, Pass
from bisam.engine.telemetry import Telemetry
from bisam.engine.vectorized import Vectorized
from bisam.engine.weights import Weights
from bisam.engine.wrapper import Wrapper
from bisam.tensors import gradients, scaling
from bisam.tensors.buckets import Bucket, all_zero, into_buckets
from bisam.tensors.distributed import GradientSync
from bisam.tensors.gradients import Gradients
from bisam.tensors.snapshot import BufferSnapshot, RandomState, Snapshot


class Work(Protocol):
    """The samples that share one ε, as closures for each pass. Gradients of the closures add up, over `divisor`."""

    share: float | Tensor
    """The weight of its descent gradient in that of the step."""
    divisor: int

    def ascent(self) -> Sequence[Closure]: ...
    def descent(self) -> Sequence[Closure]: ...
    def plain(self) -> Sequence[Closure]: ...


@dataclass
class Given:
    """Closures that the user gave, each for an equal part of the batch: the same in every pass."""

    closures: Sequence[Closure]
    divisor: int
    share: float | Tensor = 1.0

    def ascent(self) -> Sequence[Closure]:
        return self.closures

    descent = plain = ascent


class TwoPasses(Wrapper):
    """The passes of a step around a base optimizer. `SharpnessAware` is its public form."""

    criterion: Criterion
    vectorize: bool
    start: Start
    clip_norm: float | None
    scaler: torch.amp.GradScaler | None
    autocast: torch.dtype | None
    same_dropout: bool

    # What lives across a pass:
    _weights: Snapshot
    """The weights at w, while they are perturbed."""
    _buffers: BufferSnapshot
    _running: bool
    """Whether `step` or `minimize` is running: closures cannot begin, end or give up another one."""
    _stale: Gradients | None
    """Gradients from before the step, until its first closure clears them by `zero_grad`."""
    _awaits_update: bool
    """Whether `.grad` holds the gradient that `backward` left for `step()`."""
    _has_perturbed: bool
    """Whether this object has done a perturbed step, for what is checked in the first one."""
    _fixed_radii: list[Tensor] | None
    """The radius of each group as a tensor on the device: in a captured step."""

    model: nn.Module | None
    _sync: GradientSync

    @property
    def telemetry(self) -> Telemetry:
        """What the current step, or the last one, measured."""
        return self.criterion.telemetry

    @property
    def perturbed(self) -> bool:
        """Whether the weights are at w + ε now."""
        return self._weights.originals is not None

    def _run(self, work: Sequence[Work], *, update: bool = True) -> list[Any]:
        """Both passes of all the work, and the update. Returns the values of the closures at w."""
        params = self._parameters()
        self._refuse_inference("step()")
        self._refuse_inside_step("step() or minimize()")
        perturbs = self._perturbs()
        self._begin(work, params)
        watch = WatchBuffers() if perturbs and not self._has_perturbed and self.model is None else None
        is_first_of_many = self._steps == 0 and self._sync.may_miss_replicas
        replicas = RefuseUnknownReplicas(type(self).__name__) if is_first_of_many else None
        try:
            self._running = True
            values = self._perturbed_step(work, params) if perturbs else self._plain_step(work, params)
            self.criterion.current = Pass.NONE  # the passes are over: the base optimizer may step
            if watch is not None:
                watch.warn(type(self).__name__)
            if update:
                self._update(params)
            self._awaits_update = not update
            torch.clear_autocast_cache()
            self._has_perturbed |= perturbs
            self._steps += 1
        except BaseException:
            self._give_up(params)
            raise
        finally:
            for look in (watch, replicas):
                if look is not None:
                    look.stop()
            self._stale, self._running, self.criterion.parts = None, False, None
            self.criterion.finish()
        return values

    def _begin(self, work: Sequence[Work], params: list[Tensor]) -> None:
        """Take away the gradients from before the step."""
        self._awaits_update = False
        self.criterion.begin()
        torch.clear_autocast_cache()  # under an autocast of the user's it holds the weights of the step before
        if gradients.present(params):
            are_cleared = isinstance(work[0], Planned) or gradients.are_cleared(params) or gradients.are_zero(params)
            found = gradients.take(params)
            self._stale = None if are_cleared else found

    def _give_up(self, params: list[Tensor]) -> None:
        """After an exception: weights, gradients and the base optimizer's state as before the step."""
        if self.perturbed:
            self._bring_back()
        scaling.forget(self.scaler, self)
        self._buffers.forget()
        gradients.put(params, self._stale or [None] * len(params))

    def _plain_step(self, work: Sequence[Work], params: list[Tensor]) -> list[Any]:
        """Leave the gradient of a step that does not perturb in `.grad`."""
        self.criterion.current = Pass.PLAIN
        closures = [closure for part in work for closure in part.plain()]
        found, values = self._pass(closures, work[0].divisor, params)
        gradients.put(params, found)
        if self._has_radius():
            with torch.no_grad():
                self.merge.plain(params)
        return values

    def _perturbed_step(self, work: Sequence[Work], params: list[Tensor]) -> list[Any]:
        """Leave the gradient of a perturbed step in `.grad`: each part of the work has its own ε, and all add up."""
        if not self._captured:
            self.perturbation.begin_step()
        if self.vectorize and are_equal_batches(work):
            return self._vectorized_step(work, params)
        values: list[Any] = []
        total: Gradients | None = None
        at_weights: Gradients | None = None
        is_whole = len(work) == 1
        for part in work:
            self.criterion.current = Pass.ASCENT
            closures = part.ascent()
            if self._needs_extra_pass:
                at_weights = gradients.add(at_weights, self._gradient_at_weights(part, params))
            ascent, random = None, None
            if self.perturbation.needs_ascent:
                ascent, more, random = self._ascent_pass(part, closures, params)
                values += more
                if self.merge.needs_gradient_at_weights and not self._needs_extra_pass:
                    at_weights = gradients.add(at_weights, gradients.scale_(gradients.copy(ascent), part.share))
            self._ascend(ascent)
            ascent = None  # its memory is the descent gradient's now
            # restored twice: the descent closures are built after the move, because choosing samples may run the
            # model at w + ε, and both that look and the pass itself draw the ascent's dropout masks
            if random is not None:
                random.restore()
            closures = part.descent()
            if random is not None:
                random.restore()
            found, more = self._pass(closures, part.divisor, params, averaged=is_whole, followed=not is_whole)
            values += [] if self.perturbation.needs_ascent else more
            self._bring_back()
            total = gradients.add(total, found)
            del found
        assert total is not None
        gradients.put(params, total if is_whole else self._sync.average(params, total))
        if at_weights is not None:
            self._merge(params, at_weights)
        return values

    @property
    def _needs_extra_pass(self) -> bool:
        """Whether the descent's gradient at w takes a pass of its own.

        It is the ascent's gradient if the ascent has the same objective, at w, with all parameters.
        """
        perturbation = self.perturbation
        elsewhere = self.criterion.bilevel or perturbation.acts_before_ascent or not perturbation.needs_ascent
        return self.merge.needs_gradient_at_weights and elsewhere

    @torch.no_grad()
    def _merge(self, params: list[Tensor], at_weights: Gradients) -> None:
        if scaling.is_unscaled(self.scaler, self):
            raise RuntimeError(
                f"{type(self).__name__} compares the gradients of both passes, and the closure has unscaled that of "
                "the second. Leave unscaling to the step; clip_norm= clips"
            )
        if self._sync.is_local and not self._needs_extra_pass:  # else it was averaged in its pass
            at_weights = self._sync.average(params, at_weights)
        self.merge.perturbed(params, at_weights)

    def _ascent_pass(
        self, part: Work, closures: Sequence[Closure], params: list[Tensor]
    ) -> tuple[Gradients, list[Any], RandomState | None]:
        """The first pass. Returns its gradient, its values, and the random state that the second is to begin with."""
        try:
            if self.perturbation.acts_before_ascent:
                self._save(buckets := self._buckets(None))
                with torch.no_grad():
                    compiled = _is_compiled(self.model)
                    self.perturbation.before_ascent(buckets, compiled=compiled, captured=self._captured)
                torch.clear_autocast_cache()
            random = RandomState(self._devices()) if self.same_dropout else None
            # the perturbation may have frozen every parameter that the loss uses: then the descent finds gradients
            may_be_empty = isinstance(part, Planned)
            found, values = self._pass(
                closures, part.divisor, params, averaged=not self._sync.is_local, may_be_empty=may_be_empty
            )
            if self.criterion.bilevel and not self.criterion.telemetry.used_criterion():
                refuse_loss_without_criterion(type(self).__name__)
            return found, values, random
        finally:
            if self.perturbation.acts_before_ascent:
                self.perturbation.after_ascent()

    def _gradient_at_weights(self, part: Work, params: list[Tensor]) -> Gradients:
        """One more pass. Its batch statistics and random numbers are those of the ascent pass, which follows."""
        buffers = BufferSnapshot(self.model)
        buffers.save()
        random = RandomState(self._devices()) if self.same_dropout else None
        self.criterion.current = Pass.EXTRA
        try:
            found, _ = self._pass(part.plain(), part.divisor, params, followed=True)
        finally:
            buffers.restore()
        self.criterion.current = Pass.ASCENT
        if random is not None:
            random.restore()
        return found

    def _pass(
        self,
        closures: Sequence[Closure],
        divisor: int,
        params: list[Tensor],
        *,
        averaged: bool = True,
        followed: bool = False,
        may_be_empty: bool = False,
    ) -> tuple[Gradients, list[Any]]:
        """Run the closures of one pass. Returns the sum of their gradients over the divisor, and their values.

        `averaged` over the ranks, or not; `followed` by passes whose gradients may come to lie in the same memory.
        """
        total: Gradients | None = None
        values = []
        weights = Weights(self.criterion) if divisor > 1 else None
        replicas = self._sync.replicas
        # DistributedDataParallel averages one closure's gradients while they are computed; of several, the sum
        during = averaged and len(closures) == 1 and (not replicas or self._sync.overlaps)
        copied = bool(replicas) and self._sync.reuses_gradient_memory and (followed or not during)
        for closure in closures:
            if weights is not None:
                weights.begin_closure()
            with torch.enable_grad(), self._sync.during(averaged=during) if replicas else nullcontext():
                try:
                    value = closure()
                except RuntimeError as error:
                    explain_graph_of_first_pass(error)
                    raise
            if self._stale is not None:
                raise RuntimeError(
                    "step() found gradients from before it, and the closure did not clear them by "
                    "optimizer.zero_grad(). Gradients cannot be accumulated outside, because the second pass would "
                    "miss them: give step() a list of closures, one for each micro-batch, or use "
                    "minimize(x, y, accumulate=n). If they are left over, call zero_grad() first. Inside of a "
                    f"framework that accumulates see {FRAMEWORKS}"
                )
            values.append(value.detach() if isinstance(value, Tensor) else value)
            if weights is not None and scaling.is_unscaled(self.scaler, self):
                raise RuntimeError(
                    "a closure of a list has called scaler.unscale_(optimizer), which reaches its own gradients only. "
                    "Leave unscaling to the step; clip_norm= clips"
                )
            found = gradients.take(params, copied=copied)
            total = gradients.add(total, found if weights is None else weights.end_closure(found))
            del found  # else it would live beside the next closure's
        assert total is not None
        if not may_be_empty and all(gradient is None for gradient in total):
            raise self._no_gradients("step()", "the closure")
        if weights is not None:
            weights.finish(total)
        return (self._sync.average(params, total) if averaged and not during else total), values

    def _vectorized_step(self, work: Sequence[Planned], params: list[Tensor]) -> list[Any]:
        """The same gradient as of one micro-batch after the other."""
        assert self.model is not None
        for part in work:
            self.criterion.check_task(part.batch.y)
        self._save(self._buckets(None))
        of_name: dict[Tensor, str] = {param: name for name, param in self.model.named_parameters()}

        def perturb(gradient: dict[str, Tensor]) -> None:
            buckets = self._buckets([gradient.get(of_name.get(param, "")) for param in params])
            for bucket in buckets:
                bucket.weights = self._weights.copies_of(bucket.owners)
            self.criterion.telemetry._ascent_norms.append(self.perturbation(buckets))
            for bucket in buckets:
                _ = bucket.gradients  # multiplied by what the perturbation left to multiply by
            perturbed = {of_name[owner] for bucket in buckets for owner in bucket.owners}
            left_out = [value for name, value in gradient.items() if name not in perturbed]
            if left_out:
                torch._foreach_zero_(left_out)

        with torch.no_grad(), precision(self.autocast, params[0].device):
            micro_batches = [part.batch for part in work]
            shares = [part.share for part in work]
            found = Vectorized(self.model, self.criterion, micro_batches).gradients(perturb, shares)
        self._bring_back()
        gradients.put(params, [found.get(of_name.get(param, "")) for param in params])
        return [None]

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
        self._weights.save(
            [param for bucket in buckets for param in bucket.params],
            [owner for bucket in buckets for owner in bucket.owners],
        )

    @torch.no_grad()
    def _bring_back(self) -> None:
        self._buffers.restore()
        self._weights.restore()  # last, for a buffer may share memory with a weight
        self._weights_changed()

    def _weights_changed(self) -> None:
        torch.clear_autocast_cache()  # it holds low-precision copies of the weights as they were
        if self._sync.gathering:
            self._sync.forget_gathered()

    @torch.no_grad()
    def _update(self, params: list[Tensor]) -> None:
        """Let the base optimizer step with the gradients in `.grad`."""
        if self.scaler is not None:
            scaling.unscale_descent(self.scaler, self, self.base)
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
    def skips_steps(self) -> bool:
        """Whether there may be steps that do not perturb."""
        return self.merge.every > 1 or self.start != 0

    def _perturbs(self) -> bool:
        """Whether the next step perturbs."""
        if callable(self.start):
            return self.start(self._steps) and self._steps % self.merge.every == 0 and self._has_radius()
        since = self._steps - self.start
        return since >= 0 and since % self.merge.every == 0 and self._has_radius()

    def _has_radius(self) -> bool:
        self._complete_groups()
        return not all_zero(self.base.param_groups)

    def _complete_groups(self) -> None:
        """Give each group the options that it does not set: it may come from the base optimizer or its checkpoint."""
        for group in self.base.param_groups:
            for name, value in self.perturbation.defaults.items():
                group.setdefault(name, value)

    def _parameters(self) -> list[Tensor]:
        return [param for group in self.base.param_groups for param in group["params"]]

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

        self.base.register_step_pre_hook(refuse)

    def _devices(self) -> set[torch.device]:
        return {param.device for param in self._parameters()}

    def _refuse_inside_step(self, method: str) -> None:
        if self._running:
            raise RuntimeError(
                f"{method} called by a closure, inside of a running step. The step runs both passes and the update: a "
                "closure computes the loss, calls backward() and returns it"
            )

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


def _is_compiled(model: nn.Module | None) -> bool:
    """Whether torch.compile was applied to the model or to any module in it."""
    modules = model.modules() if model is not None else ()
    return any(hasattr(module, "_orig_mod") or module._compiled_call_impl is not None for module in modules)
