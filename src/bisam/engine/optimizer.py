"""`SharpnessAware`: one sharpness-aware step around any torch optimizer. Variants are compositions of its parts.

A step is two passes. The first gives the ascent gradient at w; `ascend` turns it into ε and moves to w + ε. The
second gives the descent gradient there; `descend` brings w back, bit for bit, and lets the base optimizer update it.
What a step does in detail is in `passes.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, TypedDict

import torch
from torch import Tensor, nn

from bisam import numbers
from bisam.engine.batch import Planned, Runner
from bisam.engine.checks import (
    Closure,
    Start,
    as_closures,
    check_ascent,
    check_base,
    check_by_hand,
    check_caller,
    check_no_autocast,
    check_options,
    check_sees_batch,
    check_start,
    check_stop,
    check_vectorize,
    refuse_unknown_options,
    refusing_third_pass,
    warn_caller,
    warn_of_averaged_ascent,
    warn_of_label_ignored_by_one,
    warn_unless_criterion,
)
from bisam.engine.combined import Base, combine, leaves
from bisam.engine.criterion import Criterion, Pass, Phase
from bisam.engine.objective_options import shares
from bisam.engine.passes import TwoPasses
from bisam.engine.work import Given, Work
from bisam.engine.wrapper import parts_of
from bisam.merge import Merge, Turn
from bisam.objectives import Objective
from bisam.perturbation import Ball, Perturbation
from bisam.plan import Batch, Plan
from bisam.tensors import gradients, scaling
from bisam.tensors.distributed import GradientSync, ranks
from bisam.tensors.gradients import Gradients
from bisam.tensors.snapshot import BufferSnapshot, Snapshot


class Options(TypedDict, total=False):
    """Options of every variant, beside its own arguments."""

    ascent: Objective | None
    descent: Objective | None
    micro_batch: int | None
    vectorize: bool
    every: int
    start: Start
    stop: int | None
    clip_norm: float | None
    sharpness: str | None
    scaler: torch.amp.GradScaler | None
    autocast: torch.dtype | None
    same_dropout: bool


class SharpnessAware(TwoPasses):
    """A base optimizer whose updates use the gradient at w + ε, the worst point near the weights w.

    Args:
        base: any torch optimizer except LBFGS, Adadelta (whose `rho` is another option) and SparseAdam. Both optimizers
            share parameter groups and state, so a scheduler works on either. Or a list of optimizers, each with its own
            parameters, such as `[Muon(matrices), AdamW(others)]`: one perturbation moves the parameters of all.
        model: the model to train, wrapped by DistributedDataParallel if it will be. Needed by `minimize`, to restore
            buffers (batch-norm statistics) that the second pass changes, and to skip all-reduces that a step does not
            need. May be set later.
        perturbation: from the ascent gradient to ε.
        plan: which samples of a batch feed which pass.
        merge: which gradient reaches the base optimizer.
        ascent: the objective to maximise. Default: same as `descent`.
        descent: the objective to minimise at w + ε. Default: cross entropy.
        micro_batch: `minimize` perturbs each micro-batch of this many samples by itself and averages gradients (mSAM).
        vectorize: run the micro-batches as one batched computation (`torch.func`). Faster on a GPU, for several times
            the memory; impossible with batch norm.
        every: perturb in every k-th step only, beginning with the first step, or with `start`.
        start: the first step that perturbs, counted from 0. Earlier steps are plain steps of the base optimizer, at its
            cost. Or a function of a step's number that returns whether the step perturbs.
        stop: the first step that no longer perturbs. Default: never stop.
        clip_norm: clip the gradient that reaches the base optimizer to this norm.
        sharpness: with several ranks, perturb each by its own gradient ("local") or all alike ("global").
            Default: local for DistributedDataParallel, global for sharded parameters.
        scaler: a GradScaler. Closures call `scaler.scale(loss).backward()`; the optimizer unscales, skips updates
            after an overflow, and calls `scaler.update()`.
        autocast: the type for `torch.autocast` around the forward passes of `minimize`.
        same_dropout: draw the same random numbers (dropout masks) in both passes. A sample keeps its mask only where
            both passes run all samples: not with ESAM and K-SAM, which choose some.
    """

    def __init__(
        self,
        base: Base,
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
        start: Start = 0,
        stop: int | None = None,
        clip_norm: float | None = None,
        sharpness: str | None = None,
        scaler: torch.amp.GradScaler | None = None,
        autocast: torch.dtype | None = None,
        same_dropout: bool = False,
        **unknown: Any,
    ) -> None:
        self.perturbation: Perturbation = Ball() if perturbation is None else perturbation
        self.plan: Plan = Plan() if plan is None else plan
        self.merge: Merge = Merge() if merge is None else merge
        combined: torch.optim.Optimizer = combine(base)
        for one in leaves(combined):
            check_base(one, self.perturbation)
        if unknown:
            refuse_unknown_options(type(self), unknown)
        check_options(clip_norm, scaler, autocast, micro_batch, {"vectorize": vectorize, "same_dropout": same_dropout})
        check_ascent(self.perturbation, type(self).__name__, ascent, micro_batch)
        self.criterion = Criterion(ascent, descent)
        warn_of_label_ignored_by_one(self.criterion)
        self.micro_batch = micro_batch
        self.vectorize = vectorize
        self.every = numbers.count("every", every, "steps")
        self.start = check_start(start)
        self.stop = check_stop(stop, start)
        self.clip_norm = clip_norm
        self._model: nn.Module | None = None
        self._sharpness = sharpness
        self.scaler = scaler
        self.autocast = autocast
        self.same_dropout = same_dropout
        self.base = combined
        self.model = model
        self._weights = Snapshot()
        self._running = False
        self._stale = None
        self._awaits_update, self._scaler_state = False, None
        self._has_perturbed = self._has_looked_for_replicas = self._has_warned_of_averaged = False
        self._may_freeze = True
        self._fixed_radii = None
        self._has_looked_at_rounding = False
        super().__init__(combined)

    @property
    def model(self) -> nn.Module | None:
        return self._model

    @model.setter
    def model(self, model: nn.Module | None) -> None:
        if model is not None and not isinstance(model, nn.Module):
            named = f". Options have names, such as rho={model}" if isinstance(model, float) else ""
            raise TypeError(f"model must be a torch.nn.Module or None, got {type(model).__name__}{named}")
        sync = GradientSync(model, self.sharpness)
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
        self._others, self._gradients_of_others = [], None

    @property
    def sharpness(self) -> str | None:
        """Which ranks are perturbed alike."""
        return self._sharpness

    @sharpness.setter
    def sharpness(self, sharpness: str | None) -> None:
        earlier, self._sharpness = self._sharpness, sharpness
        try:
            if self._model is not None:  # else it is checked with the model
                self.model = self._model
        except (TypeError, ValueError):
            self._sharpness = earlier
            raise

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients. A closure need not call it: inside a step each closure starts without gradients."""
        self._stale, self._awaits_update = None, False
        if not self._running and self.criterion.current is Pass.ASCENT:
            dropped = self.telemetry.was_propagated()
            if dropped is None:
                dropped = not gradients.are_cleared(self._parameters())
            if dropped:
                self.criterion.finish()  # a batch whose gradients are dropped is not of the next step
        for group in self.base.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    gradients.unmark(param.grad)
        self.base.zero_grad(set_to_none)
        if not set_to_none:
            gradients.mark(self._parameters(), zeros=True)

    # The step, in its three forms.

    def step(self, closure: Closure | Sequence[Closure] | None = None) -> Any:
        """One step: run the closure in both passes, then update.

        The closure computes `criterion(model(x), y)`, calls `backward` on it and returns it. A list of closures, one
        for each micro-batch, is one step on all of them together: means are weighted by the labels that are not
        ignored, sums add up. With several ranks, give a list on all of them or on none.
        Clip by `clip_norm=`: a closure sees only its own gradients.

        Returns the closure's value at w. For bilevel variants: the descent's loss at w, averaged over the calls,
        provided that the closure calls `criterion` once before each `backward`. The gradient of the update stays in
        `.grad` until the next step, or `zero_grad`, clears it.

        After `backward`, call `step()` without a closure: only the update is left. A closure given then runs once,
        without gradients, because frameworks clip in theirs.
        """
        self._refuse_inside_step("step()")
        self._notice_skipped_update()
        if self._awaits_update:
            return self._update_after_backward(closure)
        check_caller(self, closure)
        return self.run(self.work_of_closure(closure))

    def backward(self, closure: Closure | Sequence[Closure], *, scaler: torch.amp.GradScaler | None = None) -> Any:
        """Both passes of `step` without the update: leaves its gradient in `.grad`, for `step()` to use.

        For loops and frameworks that clip, skip and step by themselves. `scaler` is the GradScaler of such a loop: the
        closure scales its loss, and the gradient in `.grad` is left scaled for `scaler.unscale_` and `scaler.step`.
        Returns what `step` returns.
        """
        if scaler is not None and self.scaler is not None:
            raise ValueError("the optimizer has a GradScaler of its own: give scaler= to one of them only")
        own, self.scaler = self.scaler, self.scaler if scaler is None else scaler
        try:
            value = self.run(self.work_of_closure(closure), update=False)
        finally:
            self.scaler = own
        self._scaler_state = scaling.state_of(scaler, self)
        return value

    @torch.optim.Optimizer.profile_hook_step  # as torch decorates `step`: hooks and the profiler see one step
    def minimize(self, x: Any, y: Tensor, *, accumulate: int = 1) -> Tensor:
        """The whole step on one batch: forward and backward passes, accumulation, autocast, clipping, update.

        `x` is what the model takes: a tensor, a tuple (`model(*x)`) or a dict (`model(**x)`). `accumulate` cuts the
        batch, or each micro-batch, into this many parts, which run one after the other and give the gradient of the
        whole. Input tensors with `len(y)` rows are split; other inputs go to every part. Earlier gradients are cleared.

        Returns the descent's loss at w; without an ascent pass (MSAM), at w + ε.
        """
        return self.run(self.work_of_batch(x, y, accumulate=accumulate))

    def ascend(self) -> None:
        """After the first backward pass: move the weights to w + ε and clear the gradients."""
        self._refuse_inside_step("ascend()")
        self._notice_skipped_update()
        if self.perturbed:
            raise RuntimeError(
                "ascend() called twice: the weights are perturbed already. Call descend() after the second backward "
                "pass, or restore() to give this step up."
            )
        if self._awaits_update:
            raise RuntimeError(
                "ascend() called after backward(), which has run both passes: call step(), or zero_grad() to give this "
                "step up."
            )
        self._refuse_inference("ascend()")
        params = self._parameters()
        if gradients.any_of_last_step(params):
            raise RuntimeError(
                "ascend() found the gradient of the last step beneath the new one. Call optimizer.zero_grad() before "
                "the first backward pass. Zeros that model.zero_grad(set_to_none=False) writes look the same"
            )
        check_by_hand(self)
        check_no_autocast(self.autocast, "ascend()")
        self._require_gradients("ascend()", "the first backward pass")
        if self._sync.is_local and self._sync.has_averaged_last_pass and not self._has_warned_of_averaged:
            self._has_warned_of_averaged = True
            warn_of_averaged_ascent()
        warn_unless_criterion(self)
        if self.criterion.current is Pass.NONE:
            self.criterion.begin()
        self._ascend(_own_gradients(params))
        self._others = self._parameters_of_others()
        gradients.take([*params, *self._others])  # another optimizer steps with those of the descent

    def descend(self, *, zero_grad: bool = True) -> None:
        """After the second backward pass: restore w, bit for bit, run the base optimizer's step, clear gradients."""
        self._refuse_inside_step("descend()")
        if not self.perturbed:
            raise RuntimeError(
                "descend() called before ascend(): there is no perturbation to take back. Call ascend() after the "
                "first backward pass, or use step(closure), which runs both passes."
            )
        try:
            self._bring_back()
        finally:
            self.criterion.finish()
        self._require_gradients("descend()", "the second backward pass")
        params = self._parameters()
        gradients.put(params, _own_gradients(params))  # to be unscaled and clipped in place
        self._update(params)
        if zero_grad:
            self.zero_grad()

    def restore(self) -> None:
        """Abandon a step: restore weights and buffers, clear gradients. Does nothing between steps."""
        self._refuse_inside_step("restore()")
        if self.perturbed:
            try:
                self._bring_back()
            finally:
                self.criterion.finish()
                scaling.take_unscaled_state(self.scaler, self)
                self.zero_grad()

    @property
    def phase(self) -> Phase:
        """What the next backward pass is for: "ascent", "descent", or "plain" in a step that does not perturb."""
        return self.criterion.phase

    # The parts of a step, for code that runs it in another way, as `bisam.capture` does.

    def work_of_closure(self, closure: Closure | Sequence[Closure] | None) -> Sequence[Work]:
        """The work of `step`."""
        self._refuse_while_perturbed("step()")
        closures = [closure] if callable(closure) else as_closures(closure)
        check_sees_batch(self, "step(closure)")
        check_no_autocast(self.autocast, "a closure")
        return [Given(closures, in_pieces=not callable(closure))]

    def work_of_batch(self, x: Any, y: Tensor, *, accumulate: int = 1) -> Sequence[Work]:
        """The work of `minimize`."""
        if self.model is None:
            raise RuntimeError(f"minimize() runs the model: give it, as in {type(self).__name__}(base, model)")
        accumulate = numbers.count("accumulate", accumulate, "parts")
        if not isinstance(y, Tensor):
            raise TypeError(f"y must be a tensor of targets, got {type(y).__name__}. For others use step(closure)")
        if y.dim() == 0:
            raise ValueError(f"y must hold one target for each sample of x, got a single number, {y.item()}")
        if len(y) == 0:
            raise ValueError(f"the batch is empty: y has shape {tuple(y.shape)}")
        if not self._sync.averages and not self._sync.has_warned_of_separate_models:
            self._sync.has_warned_of_separate_models = True
            warn_caller(
                f"minimize() runs the model that this optimizer was given, which is neither wrapped by "
                f"DistributedDataParallel nor sharded: each of the {ranks()} ranks trains a model of its own. To train "
                "one together, wrap it and set optimizer.model"
            )
        self._refuse_while_perturbed("minimize()")
        scaled = partial(scaling.scaled, self.scaler)
        runner = Runner(self.model, self.criterion, self.plan, self.autocast, scaled, self._buffers.save_early)
        size = self.micro_batch if self.micro_batch is not None and self._turn() is Turn.PERTURBED else None
        micro_batches = Batch(x, y).cut(len(y) if size is None else size)
        weights = shares(self.criterion.descent, [batch.y for batch in micro_batches])
        is_whole = size is None
        return [Planned(runner, b, accumulate, own, is_whole) for b, own in zip(micro_batches, weights, strict=True)]

    def run(self, work: Sequence[Work], *, update: bool = True) -> Any:
        """The step on this work, or its passes alone. Returns the loss, as `step` does."""
        values = self._run(work, update=update)
        if not isinstance(work[0], Given):
            return self.observed_loss
        value = values[0]
        if not self.criterion.bilevel and value is not None:
            return value
        loss = self.observed_loss
        return value if loss is None else loss

    @property
    def observed_loss(self) -> Tensor | None:
        """The descent's loss at w; without an ascent pass (MSAM), at w + ε. None if the criterion was not used."""
        loss = self.telemetry.loss
        return self.telemetry.perturbed_loss if loss is None and not self.perturbation.needs_ascent else loss

    def _update_after_backward(self, closure: Closure | Sequence[Closure] | None) -> Any:
        """The update with the gradient that `backward` left."""
        value = None
        if closure is not None:
            with torch.no_grad(), refusing_third_pass():
                value = as_closures(closure)[0]()
        self._require_gradients("step()", "backward()")
        self._update(self._parameters())
        return value

    def __repr__(self) -> str:
        self._complete_groups()
        values = {name: [str(group[name]) for group in self.param_groups] for name in self.perturbation.defaults}
        options = [f"{name}={' or '.join(dict.fromkeys(found))}" for name, found in values.items()]
        for part in (*parts_of(self.perturbation), self.plan, self.merge):
            options += [f"{name}={value}" for name, value in vars(part).items() if _is_shown(name, value)]
        shared = ("micro_batch", "vectorize", "start", "stop", "clip_norm", "sharpness", "autocast", "same_dropout")
        options += [f"every={self.every}"] if self.every > 1 else []
        options += [f"{name}={getattr(self, name)}" for name in shared if getattr(self, name)]
        options += [f"ascent={self.criterion.ascent}", f"descent={self.criterion.descent}"]
        return f"{type(self).__name__}({', '.join(options)},\nbase={self.base})"

    def __getstate__(self) -> dict[str, Any]:
        """All but what belongs to this object alone: hooks, patches of its methods, copies of weights."""
        self._refuse_while_perturbed("copying or pickling")
        patches = ("step", "zero_grad")  # schedulers put one over `step`
        state = {name: value for name, value in self.__dict__.items() if "_hooks" not in name and name not in patches}
        return {
            **state,
            "_weights": Snapshot(),
            "_buffers": BufferSnapshot(self.model),
            "_stale": None,
            "_running": False,
        }


def _own_gradients(params: list[Tensor]) -> Gradients:
    """The gradients, to be changed in place by each rank."""
    return gradients.apart(gradients.placed(params, [param.grad for param in params]))


def _is_shown(name: str, value: Any) -> bool:
    """Whether an attribute of a part is one of its options: a number, as β of ESAM."""
    return numbers.is_number(value) and not name.startswith("_")
