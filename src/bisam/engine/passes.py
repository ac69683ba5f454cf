"""What one step does: the ascent pass at w, the move to w + ε, the descent pass there, the way back, the update.

A step owns its gradients. Every closure starts with none in `.grad`; what it leaves there is taken and summed
elsewhere, so it does not matter whether, or how, a closure clears. Parameters of the model that another optimizer steps
have the descent's gradient in the end, beside what they had accumulated.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from bisam.engine.batch import Planned, are_equal_batches, precision
from bisam.engine.checks import (
    FRAMEWORKS,
    Closure,
    RefuseUnknownReplicas,
    WatchBuffers,
    explain_graph_of_first_pass,
    has_no_reentrant_checkpoint,
    refuse_lazy,
    refuse_loss_without_criterion,
    warn_caller,
)
from bisam.engine.closure_weights import ClosureWeights
from bisam.engine.criterion import Pass
from bisam.engine.moves import Moves
from bisam.engine.vectorized import Vectorized
from bisam.engine.work import Given, Work
from bisam.merge import Turn
from bisam.tensors import gradients, scaling
from bisam.tensors.gradients import Gradients
from bisam.tensors.snapshot import BufferSnapshot, RandomState, forget_derived, modules_of


class TwoPasses(Moves):
    """The passes of a step around a base optimizer. `SharpnessAware` is its public form."""

    vectorize: bool
    autocast: torch.dtype | None
    same_dropout: bool

    _stale: Gradients | None
    """Gradients from before the step, until its first closure clears them by `zero_grad`."""
    _has_perturbed: bool
    """Whether this object has done a perturbed step, for what is checked in the first one."""
    _has_looked_for_replicas: bool
    """Whether the first step of this object has looked for a DistributedDataParallel that it was not given."""
    _may_freeze: bool
    """Whether parameters may be frozen in an ascent pass: no reentrant checkpoint was seen in the first one."""

    def _run(self, work: Sequence[Work], *, update: bool = True) -> list[Any]:
        """Both passes of all the work, and the update. Returns the values of the closures at w."""
        params = self._parameters()
        self._refuse_inference("step()")
        self._refuse_inside_step("step() or minimize()")
        turn = self._turn()
        perturbs = turn is Turn.PERTURBED
        self._begin(work, params)
        if not self._captured:
            self.merge.begin_step(turn)
        restores_buffers = self.model is not None or not self.perturbation.needs_ascent
        must_watch = perturbs and not self._has_perturbed and not restores_buffers
        buffer_watch = WatchBuffers() if must_watch else None
        may_miss_replicas = not self._has_looked_for_replicas and self._sync.may_miss_replicas
        self._has_looked_for_replicas = True
        replica_check = RefuseUnknownReplicas(type(self).__name__) if may_miss_replicas else None
        try:
            self._running = True
            values = self._perturbed_step(work, params) if perturbs else self._plain_step(work, params, turn)
            self.criterion.current = Pass.NONE  # the passes are over: the base optimizer may step
            if buffer_watch is not None:
                buffer_watch.warn(type(self).__name__)
            if self._gradients_of_others is not None:
                earlier = gradients.copy(self._gradients_of_others)  # those themselves come back if the update raises
                gradients.put(self._others, gradients.add(earlier, gradients.take(self._others)))
            if update:
                self._update(params)
            self._awaits_update = not update
            forget_derived()
            self._has_perturbed |= perturbs
            self._steps += 1
        except BaseException:
            self._give_up(params)
            raise
        finally:
            for check in (buffer_watch, replica_check):
                if check is not None:
                    check.stop()
            self._stale, self._running, self.criterion.label_counts, self._gradients_of_others = None, False, None, None
            self.criterion.finish()
        return values

    def _begin(self, work: Sequence[Work], params: list[Tensor]) -> None:
        """Take away the gradients from before the step."""
        self._notice_skipped_update()
        self._awaits_update = False
        self._others = self._parameters_of_others()
        if not (isinstance(work[0], Given) and len(work[0].closures) == 1):  # a single closure may clear them itself
            self._gradients_of_others = gradients.take(self._others, copied=self._sync.reuses_gradient_memory)
        self.criterion.begin(most_calls=math.inf)  # the step ends them
        forget_derived()  # under an autocast of the user's: of the step before
        if gradients.present(params):
            are_cleared = isinstance(work[0], Planned) or gradients.are_cleared(params) or gradients.are_zero(params)
            found = gradients.take(params)
            self._stale = None if are_cleared else found

    def _give_up(self, params: list[Tensor]) -> None:
        """After an exception: weights, gradients and the base optimizer's state as before the step."""
        if self.perturbed:
            self._bring_back()
        scaling.take_unscaled_state(self.scaler, self)
        self._buffers.forget()
        gradients.put(params, self._stale or [None] * len(params))
        if self._gradients_of_others is not None:
            gradients.put(self._others, self._gradients_of_others)

    def _plain_step(self, work: Sequence[Work], params: list[Tensor], turn: Turn) -> list[Any]:
        """Leave the gradient of a step that does not perturb in `.grad`."""
        self.criterion.current = Pass.PLAIN
        found, values = self._pass(work[0], work[0].plain(), params, of_others=True)
        gradients.put([*params, *self._others], found)
        if turn is Turn.BETWEEN:
            with torch.no_grad():
                self.merge.plain(params)
        return values

    def _perturbed_step(self, work: Sequence[Work], params: list[Tensor]) -> list[Any]:
        """Leave the gradient of a perturbed step in `.grad`: each part of the work has its own ε, and all add up."""
        if not self._captured:
            self.perturbation.begin_step()
        if not self._has_perturbed and self.perturbation.acts_before_first_pass:
            refuse_lazy(params, type(self).__name__)
        if self.vectorize and are_equal_batches(work):
            return self._vectorized_step(work, params)
        values: list[Any] = []
        total: Gradients | None = None
        at_weights: Gradients | None = None
        everyone, is_whole = [*params, *self._others], work[0].is_whole
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
            with nullcontext() if self.perturbation.needs_ascent else self._warn_of_lost_writes(params):
                found, more = self._pass(
                    part, closures, params, of_others=True, averaged=is_whole, followed=not is_whole
                )
            values += [] if self.perturbation.needs_ascent else more
            self._bring_back()
            total = gradients.add(total, found)
            del found
        assert total is not None
        gradients.put(everyone, total if is_whole else self._sync.average(everyone, total))
        if at_weights is not None:
            are_averaged = is_whole if self._needs_extra_pass else not self._sync.is_local
            self._merge(params, at_weights if are_averaged else self._sync.average(params, at_weights))
        return values

    @property
    def _needs_extra_pass(self) -> bool:
        """Whether the descent's gradient at w takes a pass of its own.

        It is the ascent's gradient if the ascent has the same objective, at w, with all parameters.
        """
        elsewhere = self.criterion.bilevel or self.perturbation.acts_before_first_pass
        return self.merge.needs_gradient_at_weights and elsewhere

    @torch.no_grad()
    def _merge(self, params: list[Tensor], at_weights: Gradients) -> None:
        if scaling.is_unscaled(self.scaler, self):
            raise RuntimeError(
                f"{type(self).__name__} compares the gradients of both passes, and the closure has unscaled that of "
                "the second. Leave unscaling to the step; clip_norm= clips"
            )
        self.merge.perturbed(params, at_weights)

    def _ascent_pass(
        self, part: Work, closures: Sequence[Closure], params: list[Tensor]
    ) -> tuple[Gradients, list[Any], RandomState | None]:
        """The first pass. Returns its gradient, its values, and the random state that the second is to begin with."""
        try:
            if self.perturbation.acts_before_ascent:
                self._save(buckets := self._buckets(None))
                with torch.no_grad():
                    may_freeze = self._has_perturbed and self._may_freeze and not _is_compiled(self.model)
                    self.perturbation.before_ascent(buckets, may_freeze=may_freeze, captured=self._captured)
                forget_derived()
                if not self._has_perturbed:
                    closures = [partial(self._look_for_checkpoints, closure) for closure in closures]
            random = RandomState(self._devices()) if self.same_dropout else None
            # the perturbation may have frozen every parameter that the loss uses: then the descent finds gradients
            may_be_empty = isinstance(part, Planned)
            with self._others_unchanged(), self._warn_of_lost_writes(params):
                found, values = self._pass(
                    part, closures, params, averaged=not self._sync.is_local, may_be_empty=may_be_empty
                )
            if self.criterion.bilevel and not self.criterion.telemetry.used_criterion():
                refuse_loss_without_criterion(type(self).__name__)
            return found, values, random
        finally:
            if self.perturbation.acts_before_ascent:
                self.perturbation.after_ascent()

    @contextmanager
    def _warn_of_lost_writes(self, params: list[Tensor]) -> Iterator[None]:
        """Around the first pass, in the first step: the forward pass may write to weights that were saved before it."""
        if self._has_perturbed or self._weights.originals is None:
            yield
            return
        before = gradients.versions(params)
        yield
        if before != gradients.versions(params):
            warn_caller(
                f"the forward pass writes to parameters, and {type(self).__name__} saves the weights before it: what "
                "was written is lost, while buffers stay as the pass leaves them. If this is a layer that initialises "
                "itself from the first batch, run the model on a batch before; if it writes in every pass, as "
                "nn.Embedding(max_norm=…) does, use a variant whose first pass is at the weights, such as SAM"
            )

    def _look_for_checkpoints(self, closure: Closure) -> Any:
        value = closure()
        self._may_freeze &= isinstance(value, Tensor) and has_no_reentrant_checkpoint(value)
        return value

    def _gradient_at_weights(self, part: Work, params: list[Tensor]) -> Gradients:
        """One more pass. Its batch statistics and random numbers are those of the ascent pass, which follows."""
        buffers = BufferSnapshot(self.model)
        buffers.save()
        random = RandomState(self._devices()) if self.same_dropout else None
        self.criterion.current = Pass.EXTRA
        try:
            with self._others_unchanged():
                found, _ = self._pass(part, part.plain(), params, averaged=part.is_whole, followed=True)
        finally:
            buffers.restore()
        self.criterion.current = Pass.ASCENT
        if random is not None:
            random.restore()
        return found

    def _others_unchanged(self) -> AbstractContextManager[None]:
        """Around a pass whose gradients another optimizer must not step with."""
        return gradients.unchanged(self._others, copied=self._sync.reuses_gradient_memory)

    def _pass(
        self,
        part: Work,
        closures: Sequence[Closure],
        params: list[Tensor],
        *,
        of_others: bool = False,
        averaged: bool = True,
        followed: bool = False,
        may_be_empty: bool = False,
    ) -> tuple[Gradients, list[Any]]:
        """Run the closures of one pass of a part. Returns the sum of their gradients, and their values.

        Each closure of a list counts by its labels. The gradients `of_others` follow those of `params`, or are dropped.
        `averaged` over the ranks, or not; `followed` by passes whose gradients may come to lie in the same memory.
        """
        wanted = [*params, *self._others] if of_others else params
        total: Gradients | None = None
        values = []
        closure_weights = ClosureWeights(self.criterion) if part.needs_label_weights else None
        replicas = self._sync.replicas
        # DistributedDataParallel averages one closure's gradients while they are computed; of several, the sum
        during = averaged and not part.in_pieces and (not replicas or self._sync.overlaps)
        copied = bool(replicas) and self._sync.reuses_gradient_memory and (followed or not during)
        for closure in closures:
            before = gradients.versions(total) if total is not None else []
            if closure_weights is not None:
                closure_weights.begin_closure()
            with self._sync.during(averaged=during) if replicas else nullcontext():
                values.append(_value_of(closure, moved=self.perturbed))
            self._check_closure(is_of_list=closure_weights is not None)
            if total is not None and before != gradients.versions(total):
                raise RuntimeError(
                    "a closure of a list wrote into the gradients of the one before it: both have put the same memory "
                    "into .grad. Let backward() create the gradients, or put a copy there"
                )
            found = gradients.apart(gradients.placed(wanted, gradients.take(wanted, copied=copied)))
            if not of_others:  # the next closure would add to them, in memory that FSDP2 shares with ours
                gradients.take(self._others)
            if (followed or len(closures) > 1) and not copied:
                found = gradients.owned(found)
            total = gradients.add(total, found if closure_weights is None else closure_weights.end_closure(found))
            del found  # else it would live beside the next closure's
        assert total is not None
        if not may_be_empty and all(gradient is None for gradient in total[: len(params)]):
            raise self._no_gradients("step()", "the closure")
        if closure_weights is not None:
            closure_weights.finish(total)
            values = closure_weights.mean(values)
        return (self._sync.average(wanted, total) if averaged and not during else total), values

    def _check_closure(self, *, is_of_list: bool) -> None:
        """Raise if gradients from before the closure are left in `.grad`, or a closure of a list unscaled its own."""
        if self._stale is not None:
            raise RuntimeError(
                "step() found gradients from before it, and the closure did not clear them by optimizer.zero_grad(). "
                "Gradients cannot be accumulated outside, because the second pass would miss them: give step() a list "
                "of closures, one for each micro-batch, or use minimize(x, y, accumulate=n). If they are left over, "
                f"call zero_grad() first. Inside of a framework that accumulates see {FRAMEWORKS}"
            )
        if is_of_list and scaling.is_unscaled(self.scaler, self):
            raise RuntimeError(
                "a closure of a list has called scaler.unscale_(optimizer), which reaches its own gradients only. "
                "Leave unscaling to the step; clip_norm= clips"
            )

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
        everyone = [*params, *self._others]
        gradients.put(everyone, [found.get(of_name.get(param, "")) for param in everyone])
        return [None]


def _value_of(closure: Closure, *, moved: bool) -> Any:
    """What the closure returned, without its graph. `moved` is whether the weights are at w + ε."""
    try:
        with torch.enable_grad():
            value = closure()
    except RuntimeError as error:
        if moved:
            explain_graph_of_first_pass(error)
        raise
    return value.detach() if isinstance(value, Tensor) else value


def _is_compiled(model: nn.Module | None) -> bool:
    """Whether torch.compile was applied to the model or to any module in it."""
    return any("_orig_mod" in each._modules or each._compiled_call_impl is not None for each in modules_of(model))
