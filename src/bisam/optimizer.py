"""The engine: one sharpness-aware step around any torch optimizer. Variants are compositions of its parts.

A step is two passes. The first gives the ascent gradient at w; `ascend` turns it into ε and moves to w + ε. The
second gives the descent gradient there; `descend` brings w back, bit for bit, and lets the base optimizer update it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypedDict

import torch
from torch import Tensor, nn

from bisam import gradients, scaling, sharding
from bisam.batches import Batch, Everyone, Plan, share
from bisam.checks import (
    Closure,
    as_closures,
    check_asked,
    check_base,
    check_by_hand,
    check_options,
    check_sees_batch,
    check_vectorize,
    warn_unless_asked,
)
from bisam.clearing import Clearing
from bisam.criterion import Criterion, Phase, Telemetry
from bisam.gradients import Gradients
from bisam.merge import Merge, Perturbed
from bisam.objectives import Objective
from bisam.perturbation import Ball, Bucket, Perturbation, into_buckets, is_zero
from bisam.settings import setting
from bisam.snapshot import BufferSnapshot, RandomState, Snapshot
from bisam.vectorized import Vectorized
from bisam.work import Given, Planned, Runner, Work, are_equal_batches, precision
from bisam.wrapper import Wrapper


class Options(TypedDict, total=False):
    """What every variant takes beside its own arguments."""

    ascent: Objective | None
    descent: Objective | None
    micro_batch: int | None
    vectorize: bool
    every: int
    clip_norm: float | None
    sharpness: str | None
    scaler: torch.amp.GradScaler | None
    autocast: torch.dtype | None
    same_dropout: bool


class SharpnessAware(Wrapper):
    """A base optimizer that descends from the worst point nearby.

    Args:
        base: any torch optimizer but LBFGS; its parameter groups, state and schedulers are this optimizer's too.
        model: the model that owns the parameters, as it is run: wrapped by DistributedDataParallel, if it will be.
            Needed by `minimize`, to bring back buffers (batch-norm statistics) that the second pass changes, and to
            keep DistributedDataParallel from averaging what need not be. May be set later.
        perturbation: from the ascent gradient to ε.
        plan: which samples of a batch feed which pass.
        merge: which gradient reaches the base optimizer, and when the weights are perturbed.
        ascent: the objective to climb; None is the descent's.
        descent: the objective to minimise at w + ε; None is cross entropy.
        micro_batch: `minimize` perturbs each micro-batch of so many samples by itself and averages gradients (mSAM).
        vectorize: run the micro-batches as one batched computation (`torch.func`). Faster on a GPU, for several times
            the memory; impossible with batch norm.
        every: perturb in every k-th step only, beginning with the first.
        clip_norm: clip the gradient that reaches the base optimizer to this norm.
        sharpness: with several ranks, perturb each by its own gradient ("local") or all alike ("global").
            None is local for DistributedDataParallel, global for sharded parameters.
        scaler: a GradScaler. Backward passes run on `scaler.scale(loss)`; unscaling, skipping and `scaler.update()`
            are done here.
        autocast: the type for `torch.autocast` around the forward passes of `minimize`.
        same_dropout: draw the same random numbers (dropout masks) in both passes.
    """

    def __init__(
        self,
        base: torch.optim.Optimizer,
        model: nn.Module | None = None,
        *,
        perturbation: Perturbation | None = None,
        plan: Plan | None = None,
        merge: Merge | None = None,
        ascent: Objective | None = None,
        descent: Objective | None = None,
        micro_batch: int | None = None,
        vectorize: bool = False,
        every: int = 1,
        clip_norm: float | None = None,
        sharpness: str | None = None,
        scaler: torch.amp.GradScaler | None = None,
        autocast: torch.dtype | None = None,
        same_dropout: bool = False,
    ) -> None:
        self.perturbation: Perturbation = Ball() if perturbation is None else perturbation
        self.plan: Plan = Everyone() if plan is None else plan
        self.merge: Merge = Perturbed(every) if merge is None else merge
        if merge is not None and every != 1:
            raise ValueError(
                f"every is the merge's own: give it to {type(merge).__name__}, got every={every} beside it"
            )
        check_base(base, self.perturbation)
        check_options(clip_norm, scaler, autocast, micro_batch)
        self.criterion = Criterion(ascent, descent)
        self.micro_batch = micro_batch
        self.vectorize = vectorize
        self.clip_norm = clip_norm
        self.sharpness = sharpness
        self.scaler = scaler
        self.autocast = autocast
        self.same_dropout = same_dropout
        self.base = base
        self.model = model
        self._weights = Snapshot()
        self._clearing = Clearing()
        self._fixed_radii: list[Tensor] | None = None
        super().__init__(base)

    @property
    def model(self) -> nn.Module | None:
        return self._model

    @model.setter
    def model(self, model: nn.Module | None) -> None:
        if model is not None and not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module or None, got {type(model).__name__}")
        sync = sharding.GradientSync(model, self.sharpness)
        if self.vectorize:
            check_vectorize(self, model, sync)
        if not self.perturbation.alike_on_all_ranks and not sync.perturbs_each_rank:
            raise ValueError(
                f"{type(self).__name__} draws random numbers, and ranks would not draw the same: it cannot perturb all "
                'of them alike (sharpness="global", or sharded parameters)'
            )
        self._sync = sync
        self._buffers = BufferSnapshot(model)
        self._model = model

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients. In a closure of `step` those of the closures before it in a list stay: they add up."""
        params, inside_pass = self._parameters(), self._clearing.inside_pass
        if self._clearing.keeps_gradients() or (inside_pass and not gradients.present(params)):
            return
        set_to_none = set_to_none and not (self._sync.wants_zeros and (self._perturbed or inside_pass))
        gradients.unmark(params)
        self.base.zero_grad(set_to_none)
        self._clearing.note_cleared()
        if not set_to_none:
            gradients.mark(params, "zeros")

    # The step, in its three forms.

    def step(self, closure: Closure | Sequence[Closure] | Prepared | None = None) -> Any:
        """One step. The closure computes `criterion(model(x), y)`, calls `backward` on it and returns it, twice.

        A list of closures, each of an equally large micro-batch, is one step on all of them together.

        Returns what the closure returned at w; for the bilevel variants the descent's loss there, if it used
        `criterion` once. The gradient of the update stays in `.grad` until the next step, or `zero_grad`, clears it.
        """
        if isinstance(closure, Prepared):
            return closure.run()
        return self.run(self.plan_closure(closure))

    def minimize(self, x: Any, y: Tensor, *, accumulate: int = 1) -> Tensor:
        """The whole step on one batch: forward and backward passes, accumulation, autocast, clipping, update.

        `x` is what the model takes: a tensor, a tuple (`model(*x)`) or a dict (`model(**x)`). `accumulate` cuts the
        batch, or each micro-batch, into so many parts that run one after the other, for the gradient of the whole: of
        the inputs those tensors are cut that have as many rows as `y`. Gradients from before are cleared.

        Returns the descent's loss at w.
        """
        work = self.plan_batch(x, y, accumulate=accumulate)
        return self.step(Prepared(partial(self.run, work)))

    def ascend(self) -> None:
        """After the first backward pass: move the weights to w + ε and clear the gradients."""
        if self._perturbed:
            raise RuntimeError(
                "ascend() called twice: the weights are perturbed already. Call descend() after the second backward "
                "pass, or restore() to give this step up."
            )
        self._refuse_inference("ascend()")
        self._refuse_leftovers()
        check_by_hand(self)
        self._require_gradients("ascend()", "the first backward pass")
        warn_unless_asked(self)
        self._ascend()

    def descend(self, *, zero_grad: bool = True) -> None:
        """After the second backward pass: bring w back, bit for bit, let the base optimizer step, clear gradients."""
        if not self._perturbed:
            raise RuntimeError(
                "descend() called before ascend(): there is no perturbation to take back. Call ascend() after the "
                "first backward pass, or use step(closure), which runs both passes."
            )
        self._bring_back()
        self._require_gradients("descend()", "the second backward pass")
        self._update()
        if zero_grad:
            self.zero_grad()

    def restore(self) -> None:
        """Give a step up: weights and buffers as before `ascend`, no gradients. Does nothing between steps."""
        if self._perturbed:
            self._bring_back()
            scaling.forget(self.scaler, self)
            self.zero_grad()

    @property
    def perturbed(self) -> bool:
        """Whether the weights are at w + ε now."""
        self.criterion.asked = True  # it tells the passes apart too
        return self._perturbed

    @property
    def phase(self) -> Phase:
        """Whose gradient the next backward pass is for."""
        return self.criterion.phase

    @property
    def telemetry(self) -> Telemetry:
        """What the last step, or the one under way, knows."""
        return self.criterion.telemetry

    # The parts of a step.

    def plan_closure(self, closure: Closure | Sequence[Closure] | None) -> Sequence[Work]:
        """What `step` runs."""
        work = [Given([partial(self.criterion.run, each) for each in as_closures(closure)])]
        check_sees_batch(self, "step(closure)")
        self._refuse_while_perturbed("step()")
        return work

    def plan_batch(self, x: Any, y: Tensor, *, accumulate: int = 1) -> Sequence[Work]:
        """What `minimize` runs."""
        if self.model is None:
            raise RuntimeError(f"minimize() runs the model: give it, as in {type(self).__name__}(base, model)")
        if accumulate < 1:
            raise ValueError(f"accumulate must be at least 1, got {accumulate}")
        if not isinstance(y, Tensor):
            raise TypeError(f"y must be a tensor of targets, got {type(y).__name__}. For others use step(closure)")
        if len(y) == 0:
            raise ValueError(f"the batch is empty: y has shape {tuple(y.shape)}")
        if not self._sync.averages:
            raise RuntimeError(
                f"minimize() runs the model that this optimizer was given, and {sharding.ranks()} ranks would drift "
                "apart: it is neither wrapped by DistributedDataParallel nor sharded. Wrap it and set optimizer.model"
            )
        self._refuse_while_perturbed("minimize()")
        scaled = partial(scaling.scaled, self.scaler)
        runner = Runner(
            self.model, self.criterion, self.plan, self.autocast, scaled, self.zero_grad, self._buffers.save_early
        )
        micro_batches = Batch(x, y).cut(self.micro_batch if self.micro_batch and self._perturbs() else len(y))
        for micro_batch in micro_batches:
            self.plan.check(len(micro_batch))
        shares = [1.0 if len(micro_batches) == 1 else share(self.criterion.descent, b.y, y) for b in micro_batches]
        return [Planned(runner, b, accumulate, part) for b, part in zip(micro_batches, shares, strict=True)]

    def run(self, work: Sequence[Work]) -> Any:
        """The step on this work. Returns the loss, as `step` does."""
        values = self._run(work)
        value = _mean(values)
        loss = self.telemetry.loss
        if isinstance(work[0], Given):
            if loss is None or (not self.criterion.bilevel and value is not None):
                return value
            return loss / work[0].divisor if setting(self.criterion.descent, "reduction") == "sum" else loss
        return loss

    def abandon(self) -> None:
        """Forget a step that never ran, as after a failed capture: nothing is brought back, for nothing was moved."""
        self._perturbed = False
        self._weights.forget()
        self._buffers.forget()
        self.criterion.finish()
        self.base.zero_grad(set_to_none=True)

    def _run(self, work: Sequence[Work]) -> list[Any]:
        """Both passes of all the work, and the update. Returns what the closures returned at w."""
        params = self._parameters()
        self._refuse_inference("step()")
        try:
            self.criterion.begin()
            torch.clear_autocast_cache()  # under an autocast of the user's it holds the weights of the step before
            if gradients.are_as_marked(params):
                self.zero_grad()
            self._clearing.begin_step(params)
            if self._perturbs():
                values = self._run_perturbed(work, params)
            else:
                closures = [closure for part in work for closure in part.plain()]
                values = self._pass("plain", closures, work[0].divisor)
                if self._has_radius():
                    with torch.no_grad():
                        self.merge.plain(params)
            self._update()
            torch.clear_autocast_cache()
            self._steps += 1
            gradients.mark(params, "of the last step")
        except BaseException:
            self.restore()
            scaling.forget(self.scaler, self)
            self._buffers.forget()
            if self._clearing.began_clear:  # what a broken pass left is of no use
                self.zero_grad()
            raise
        finally:
            self._clearing.end_step()
            self.criterion.finish()
        return values

    def _run_perturbed(self, work: Sequence[Work], params: list[Tensor]) -> list[Any]:
        """Leave the gradient of a perturbed step in `.grad`: each part of the work climbs by itself, and all add up."""
        if not self._captured:
            self.perturbation.begin_step()
        if self.vectorize and are_equal_batches(work):
            return self._run_vectorized(work, params)
        values: list[Any] = []
        at_weights: Gradients | None = None
        # the ascent pass gives the descent's gradient at w if it climbs the same objective, at w, with all parameters
        elsewhere = self.criterion.bilevel or self.perturbation.acts_before_ascent
        own_pass = self.merge.needs_gradient_at_weights and elsewhere
        for number, part in enumerate(work, start=1):
            before_ascent = self._take(params) if number > 1 else None
            closures = part.ascent()
            if own_pass:
                at_weights = gradients.add(at_weights, self._descent_gradient_at_weights(part, params), 1.0)
            more, random = self._ascent_pass(part, closures)
            values += more
            if self.merge.needs_gradient_at_weights and not own_pass:
                at_weights = gradients.add(at_weights, gradients.copy(params), part.share)
            self._ascend()
            if random is not None:
                random.restore()
            closures = part.descent()  # which may look at the samples
            if random is not None:
                random.restore()
            if before_ascent is not None:
                gradients.put(params, before_ascent)  # what the parts before have left; this one's adds up in place
            last = number == len(work)
            self._pass("descent", closures, part.divisor, last=last or self._sync.averages_what_is_used)
            self._bring_back(last=last)
        if at_weights is not None and self._sync.leaves_ascent_to_each_rank and not own_pass:
            at_weights = self._sync.average_(params, at_weights)
        if at_weights is not None and scaling.is_unscaled(self.scaler, self):
            raise RuntimeError(
                f"{type(self).__name__} compares the gradients of both passes, and the closure has unscaled that of "
                "the second. Leave unscaling to the step; clip_norm= clips"
            )
        with torch.no_grad():
            self.merge.perturbed(params, at_weights)
        return values

    def _run_vectorized(self, work: Sequence[Planned], params: list[Tensor]) -> list[Any]:
        """The same gradient as of one micro-batch after the other."""
        assert self.model is not None
        for part in work:
            self.criterion.check_task(part.batch.y)
        self._save(self._buckets(with_gradients=False))
        of_name: dict[Tensor, str] = {param: name for name, param in self.model.named_parameters()}

        def perturb(gradient: dict[str, Tensor]) -> None:
            buckets = self._buckets(lambda param: gradient.get(of_name.get(param, "")))
            for bucket in buckets:
                bucket.weights = self._weights.copies_of(bucket.owners)
            self.telemetry._ascent_norms.append(self.perturbation(buckets))
            for bucket in buckets:
                bucket.settle()
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

    def _ascent_pass(self, part: Work, closures: Sequence[Closure]) -> tuple[list[Any], RandomState | None]:
        """The first pass, and the random numbers that it began with, if the second is to have them too."""
        try:
            if self.perturbation.acts_before_ascent:
                self._save(buckets := self._buckets(with_gradients=False))
                with torch.no_grad():
                    compiled = _is_compiled(self.model)
                    self.perturbation.before_ascent(buckets, compiled=compiled, captured=self._captured)
                torch.clear_autocast_cache()
            random = RandomState(self._devices()) if self.same_dropout else None
            # a perturbation may have left nobody to climb; then the descent has to find gradients
            values = self._pass("ascent", closures, part.divisor, may_be_idle=not isinstance(part, Given))
            check_asked(self)
            return values, random
        finally:
            self.perturbation.after_ascent()

    def _descent_gradient_at_weights(self, part: Work, params: list[Tensor]) -> Gradients:
        """Where the ascent climbs another objective: one more pass, whose statistics the ascent pass repeats."""
        buffers = BufferSnapshot(self.model)
        buffers.save()
        random = RandomState(self._devices()) if self.same_dropout else None
        self._pass("plain", part.plain(), part.divisor, silent=True)
        buffers.restore()
        if random is not None:
            random.restore()
        return self._take(params)

    def _pass(
        self,
        phase: Phase,
        closures: Sequence[Closure],
        divisor: int,
        *,
        last: bool = True,
        silent: bool | None = None,
        may_be_idle: bool = False,
    ) -> list[Any]:
        """Run all closures of one phase; their gradients, over the divisor, add up in `.grad`."""
        params = self._parameters()
        self.criterion.enter(phase, silent=self.criterion.silent if silent is None else silent)
        values = []
        try:
            with self._clearing.during_pass(params, listed=divisor > 1):
                for number, closure in enumerate(closures, start=1):
                    averaged = last and number == len(closures) and not (phase == "ascent" and self._sync.is_local)
                    self._clearing.begin_closure(params)
                    if averaged and self._sync.wants_zeros:
                        gradients.fill(params)
                    with torch.enable_grad(), self._sync.during(averaged=averaged):
                        value = closure()
                    values.append(value.detach() if isinstance(value, Tensor) else value)
                    self._clearing.end_closure()
        finally:
            self.criterion.silent = False
        if self._sync.wants_zeros:
            gradients.drop_zeros(params)
        if not may_be_idle:
            self._require_gradients("step()", "the closure")
        gradients.scale_(self._parameters(), 1 / divisor)
        return values

    @torch.no_grad()
    def _ascend(self) -> None:
        """Move to w + ε, from the gradients."""
        buckets = self._buckets()
        if not self._perturbed:  # else it was saved before the ascent pass
            self._save(buckets)
        try:
            self._buffers.save()
            self.criterion.enter("descent")
            for bucket in buckets:
                bucket.weights = self._weights.copies_of(bucket.owners)
            scaling.unscale_ascent(self.scaler, self, [bucket.gradients for bucket in buckets])
            if buckets:
                self.telemetry._ascent_norms.append(self.perturbation(buckets))
            for bucket in buckets:
                bucket.move()
            torch.clear_autocast_cache()  # it holds low-precision copies of the weights as they were
            self._sync.forget_gathered()
        except BaseException:
            self.restore()
            raise
        self.base.zero_grad(set_to_none=True)
        if self._sync.wants_zeros:
            gradients.fill(self._parameters())

    @torch.no_grad()
    def _save(self, buckets: list[Bucket]) -> None:
        self._weights.save(
            [param for bucket in buckets for param in bucket.params],
            [owner for bucket in buckets for owner in bucket.owners],
        )
        self._perturbed = True

    @torch.no_grad()
    def _bring_back(self, *, last: bool = True) -> None:
        self._perturbed = False
        if last:
            self.criterion.finish()
        self._buffers.restore()
        self._weights.restore()  # last, for a buffer may share memory with a weight
        self._sync.forget_gathered()
        torch.clear_autocast_cache()
        if self._sync.wants_zeros:
            gradients.drop_zeros(self._parameters())

    @torch.no_grad()
    def _update(self) -> None:
        """Hand the gradients to the base optimizer."""
        scaling.unscale_descent(self.scaler, self, self.base)
        try:
            if self.clip_norm is not None:
                self.telemetry.descent_norm = gradients.clip_(self._parameters(), self.clip_norm)
            if self.scaler is None:
                self.base.step()
            else:
                self.scaler.step(self.base)
        finally:
            if self.scaler is not None:
                self.scaler.update()
        self._opt_called = True  # what torch's schedulers ask; descend() is a step too

    def _buckets(
        self, gradient_of: Callable[[Tensor], Tensor | None] = lambda param: param.grad, *, with_gradients: bool = True
    ) -> list[Bucket]:
        self._complete_groups()
        for group in self.param_groups:
            self.perturbation.check(group)
        return into_buckets(self.param_groups, self._radii(), gradient_of if with_gradients else None)

    def _radii(self) -> Sequence[float | Tensor]:
        """The radius of each group in this step: of the host's arithmetic, but in a captured step, which is told."""
        return self._fixed_radii or [self.perturbation.radius(group) for group in self.param_groups]

    @property
    def _captured(self) -> bool:
        """Whether a captured step is being recorded, or run with its numbers."""
        return self._fixed_radii is not None

    def _perturbs(self) -> bool:
        self._complete_groups()
        return self._steps % self.merge.every == 0 and self._has_radius()

    def _has_radius(self) -> bool:
        return not all(is_zero(group["rho"]) for group in self.param_groups)

    def _take(self, params: list[Tensor]) -> Gradients:
        return gradients.take(params, copied=self._sync.reuses_gradient_memory)

    def _devices(self) -> set[torch.device]:
        return {param.device for param in self._parameters()}

    # Misuse is loud.

    def _refuse_inference(self, method: str) -> None:
        if torch.is_inference_mode_enabled():
            raise RuntimeError(f"{method} needs gradients, which torch.inference_mode() rules out: leave that first")

    def _refuse_leftovers(self) -> None:
        if gradients.any_marked(self._parameters(), "of the last step"):
            raise RuntimeError(
                "ascend() found the gradient of the last step() beneath the new one. Call zero_grad() before the first "
                "backward pass"
            )

    def _require_gradients(self, method: str, source: str) -> None:
        if not gradients.present(self._parameters()):
            raise RuntimeError(
                f"{method} found no gradients: {source} left none in the optimizer's parameters. Call backward() on "
                "the loss, on a model whose parameters this optimizer holds."
            )

    def __repr__(self) -> str:
        options = ", ".join(f"{name}={value}" for name, value in self.perturbation.defaults.items())
        return (
            f"{type(self).__name__}({options}, ascent={self.criterion.ascent}, descent={self.criterion.descent},\n"
            f"base={self.base})"
        )

    def __getstate__(self) -> dict[str, Any]:
        """All but what is this object's alone: hooks, a scheduler's patch of `step`, the copies of the weights."""
        self._refuse_while_perturbed("copying or pickling")
        state = {name: value for name, value in self.__dict__.items() if "_hooks" not in name and name != "step"}
        own = {"_weights": Snapshot(), "_buffers": BufferSnapshot(self.model)}
        return {**state, **own, "_clearing": Clearing()}


@dataclass
class Prepared:
    """A whole step, on its way through `step`, so that hooks and schedulers see that there is one."""

    run: Callable[[], Any]


def _mean(values: Sequence[Any]) -> Any:
    """Of what the closures of a list returned; what cannot be added up is the first one's."""
    if len(values) == 1 or values[0] is None:
        return values[0]
    try:
        return sum(values) / len(values)
    except TypeError:
        return values[0]


def _is_compiled(model: nn.Module | None) -> bool:
    """Whether torch.compile was applied to the model or to any module in it."""
    modules = model.modules() if model is not None else ()
    return any(hasattr(module, "_orig_mod") or module._compiled_call_impl is not None for module in modules)
