"""The engine: one sharpness-aware step around any torch optimizer. Variants are compositions of its parts.

A step is two passes. The first gives the ascent gradient at w; `ascend` turns it into ε and moves to w + ε. The
second gives the descent gradient there; `descend` brings w back, bit for bit, and lets the base optimizer update it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, TypedDict

import torch
from torch import Tensor, nn

from bisam import batches, sharding
from bisam.criterion import Criterion, Phase, Telemetry
from bisam.objectives import Objective
from bisam.perturbation import Ball, Bucket, Perturbation
from bisam.snapshot import BufferSnapshot, RandomState, Snapshot

Closure: TypeAlias = Callable[[], Any]


class Options(TypedDict, total=False):
    """What every variant takes beside its own arguments."""

    ascent: Objective | None
    descent: Objective | None
    clip_norm: float | None
    sharpness: str | None
    scaler: torch.amp.GradScaler | None
    autocast: torch.dtype | None
    same_dropout: bool


class SharpnessAware(torch.optim.Optimizer):
    """A base optimizer that descends from the worst point nearby.

    Args:
        base: any torch optimizer but LBFGS; its parameter groups, state and schedulers are this optimizer's too.
        model: the model that owns the parameters, as it is run: wrapped by DistributedDataParallel, if it will be.
            Needed by `minimize`, to bring back buffers (batch-norm statistics) that the second pass changes, and to
            keep DistributedDataParallel from averaging what need not be. May be set later.
        perturbation: from the ascent gradient to ε.
        ascent: the objective to climb; None is the descent's.
        descent: the objective to minimise at w + ε; None is cross entropy.
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
        ascent: Objective | None = None,
        descent: Objective | None = None,
        clip_norm: float | None = None,
        sharpness: str | None = None,
        scaler: torch.amp.GradScaler | None = None,
        autocast: torch.dtype | None = None,
        same_dropout: bool = False,
    ) -> None:
        self.perturbation: Perturbation = Ball() if perturbation is None else perturbation
        _check_base(base, self.perturbation)
        if clip_norm is not None and not clip_norm > 0:
            raise ValueError(f"clip_norm must be positive, got {clip_norm}")
        if not (scaler is None or isinstance(scaler, torch.amp.GradScaler)):
            raise TypeError(f"scaler must be a torch.amp.GradScaler or None, got {scaler!r}")
        if not (autocast is None or isinstance(autocast, torch.dtype)):
            raise TypeError(f"autocast must be a type such as torch.bfloat16, or None, got {autocast!r}")
        self.base = base
        self.criterion = Criterion(ascent, descent)
        self.clip_norm = clip_norm
        self.sharpness = sharpness
        self.scaler = scaler
        self.autocast = autocast
        self.same_dropout = same_dropout
        self.model = model
        self._weights = Snapshot()
        self._perturbed = False
        self._stepping = False
        self._inside_pass = False
        self._pass_began_clear = True
        self._leftover: Leftover | None = None
        groups, state = base.param_groups, base.state
        super().__init__(groups, base.defaults)
        base.param_groups, base.state = groups, state
        self._attach()

    def _attach(self) -> None:
        """Tie the base optimizer to this one: its checkpoint hooks are shared, its step is refused while perturbed."""
        self.base.__dict__["_sharpness_aware"] = True
        for name in _CHECKPOINT_HOOKS:
            setattr(self, name, getattr(self.base, name))
        this = weakref.ref(self)

        def refuse_while_perturbed(*_: Any) -> None:
            wrapper = this()
            if wrapper is not None:
                wrapper._refuse_while_perturbed("the base optimizer's step()")

        self.base.register_step_pre_hook(refuse_while_perturbed)

    @property
    def model(self) -> nn.Module | None:
        return self._model

    @model.setter
    def model(self, model: nn.Module | None) -> None:
        if model is not None and not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module or None, got {type(model).__name__}")
        self._sync = sharding.GradientSync(model, self.sharpness)
        self._buffers = BufferSnapshot(model)
        self._model = model

    # What is the base optimizer's is this optimizer's: one list of groups, one state, whoever replaces them.

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.base.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.base.param_groups = groups

    @property
    def state(self) -> Any:
        return self.base.state

    @state.setter
    def state(self, state: Any) -> None:
        self.base.state = state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.perturbation.check({**self.perturbation.defaults, **param_group})
        self.base.add_param_group(param_group)
        self._complete_groups()

    def state_dict(self) -> dict[str, Any]:
        """The base optimizer's state, and ρ and the like in its groups; nothing of a step under way."""
        self._refuse_while_perturbed("state_dict()")
        self._complete_groups()
        return self.base.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` gave, or a state dict of the base optimizer alone: then ρ and the like stay."""
        self._refuse_while_perturbed("load_state_dict()")
        self._complete_groups()
        options = [{name: group[name] for name in self.perturbation.defaults} for group in self.param_groups]
        self.base.load_state_dict(state_dict)
        for group, kept in zip(self.param_groups, options, strict=True):
            for name, value in kept.items():
                group.setdefault(name, value)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients. Inside a closure of `step` only the first call does: those of a list add up."""
        if not (self._inside_pass and self._pass_began_clear):
            self.base.zero_grad(set_to_none)
            self._pass_began_clear = True
            self._leftover = None

    # The step, in its three forms.

    def step(self, closure: Closure | Sequence[Closure] | None = None) -> Any:
        """One step. The closure computes `criterion(model(x), y)`, calls `backward` on it and returns it, twice.

        A list of closures, each of an equally large micro-batch, is one step on all of them together.

        Returns what the closure returned at w; for the bilevel variants the descent's loss there, if it used
        `criterion`. The gradient of the update stays in `.grad` until the next step, or `zero_grad`, clears it.
        """
        closures = _as_closures(closure)
        self._refuse_while_perturbed("step()")
        value = _mean_of(self._run(closures))
        loss = self.telemetry.loss
        return value if loss is None or not (self.criterion.bilevel or value is None) else loss

    def minimize(self, x: Any, y: Tensor, *, accumulate: int = 1) -> Tensor:
        """The whole step on one batch: forward and backward passes, accumulation, autocast, clipping, update.

        `x` is what the model takes: a tensor, a tuple (`model(*x)`) or a dict (`model(**x)`). `accumulate` cuts the
        batch into so many parts that run one after the other, for a gradient equal to the whole batch's.

        Returns the descent's loss at w.
        """
        model = self.model
        if model is None:
            raise RuntimeError(f"minimize() runs the model: give it, as in {type(self).__name__}(base, model)")
        if accumulate < 1:
            raise ValueError(f"accumulate must be at least 1, got {accumulate}")
        if len(y) == 0:
            raise ValueError(f"the batch is empty: y has shape {tuple(y.shape)}")
        if not self._sync.averages:
            raise RuntimeError(
                f"minimize() runs the model that this optimizer was given, and {sharding.ranks()} ranks would drift "
                "apart: it is neither wrapped by DistributedDataParallel nor sharded. Wrap it and set optimizer.model"
            )
        self._refuse_while_perturbed("minimize()")
        parts = batches.split(x, y, accumulate)

        def backward(inputs: Any, target: Tensor) -> None:
            self.zero_grad()
            with nullcontext() if self.autocast is None else torch.autocast(target.device.type, self.autocast):
                loss = self.criterion(batches.forward(model, inputs), target)
            if len(parts) > 1:  # step() takes the mean over parts, whatever their size
                loss = loss * (len(parts) * batches.share(self.criterion.objective, target, whole=y))
            self._scaled(loss).backward()  # type: ignore[no-untyped-call]

        self.step([partial(backward, *part) for part in parts])
        loss = self.telemetry.loss
        assert loss is not None
        return loss

    @torch.no_grad()
    def ascend(self) -> None:
        """After the first backward pass: move the weights to w + ε and clear the gradients."""
        if self._perturbed:
            raise RuntimeError(
                "ascend() called twice: the weights are perturbed already. Call descend() after the second backward "
                "pass, or restore() to give this step up."
            )
        if self._leftover is not None and self._leftover.is_present():
            raise RuntimeError(
                "ascend() found the gradient of the last step() beneath the new one. Call zero_grad() before the first "
                "backward pass"
            )
        if self.same_dropout and not self._stepping:
            raise RuntimeError(
                "same_dropout needs to see the random numbers of both passes: use step(closure) or minimize(x, y), "
                "which run them"
            )
        self._require_gradients("ascend()", "the first backward pass")
        buckets = self._buckets()
        self._weights.save([param for bucket in buckets for param in bucket.params])
        self._buffers.save()
        self._perturbed = True
        self.criterion.start("descent")
        try:
            self._perturb(buckets)
        except BaseException:
            self.restore()
            raise
        self.base.zero_grad(set_to_none=True)

    @torch.no_grad()
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
            self.zero_grad()

    @property
    def perturbed(self) -> bool:
        """Whether the weights are at w + ε now."""
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

    def _run(self, closures: Sequence[Closure]) -> list[Any]:
        random = RandomState(self._devices()) if self.same_dropout else None
        self._stepping = True
        try:
            if not self._perturbs():
                values = self._pass("plain", closures)
                self._update()
                self._leftover = Leftover.of(self._parameters())
                return values
            values = self._pass("ascent", closures)
            self.ascend()
            if random is not None:
                random.restore()
            self._pass("descent", closures)
            self.descend(zero_grad=False)
            self._leftover = Leftover.of(self._parameters())
        except BaseException:
            self.restore()
            if self._pass_began_clear:  # what a broken pass left is of no use
                self.zero_grad()
            raise
        finally:
            self._stepping = False
            self.criterion.finish()
        return values

    def _pass(self, phase: Phase, closures: Sequence[Closure]) -> list[Any]:
        """Run all closures of one phase; `.grad` holds the mean of their gradients then."""
        if phase != "descent":
            self.criterion.start(phase)
        if self._leftover is not None and self._leftover.is_untouched():
            self.zero_grad()
        self._pass_began_clear = not self._has_gradients()
        self._inside_pass = True
        try:
            values = []
            for number, closure in enumerate(closures, start=1):
                with torch.enable_grad(), self._sync.during(ascent=phase == "ascent", last=number == len(closures)):
                    value = closure()
                values.append(value.detach() if isinstance(value, Tensor) else value)
                self._refuse_gradients_of_before()
        finally:
            self._inside_pass = False
        self._require_gradients("step()", "the closure")
        if len(closures) > 1:
            with torch.no_grad():
                gradients = [sharding.local(p.grad) for p in self._parameters() if p.grad is not None]
                torch._foreach_div_(gradients, float(len(closures)))
        return values

    @torch.no_grad()
    def _bring_back(self) -> None:
        self._perturbed = False
        self.criterion.finish()
        self._weights.restore()
        torch.clear_autocast_cache()
        self._buffers.restore()

    def _perturb(self, buckets: list[Bucket]) -> None:
        start = 0
        for bucket in buckets:
            bucket.weights = self._weights.copies[start : start + len(bucket.params)]
            start += len(bucket.params)
        if self.scaler is not None:
            self._unscale(buckets)
        if buckets:
            self.telemetry.ascent_norm = self.perturbation(buckets)
        for bucket in buckets:
            torch._foreach_add_(bucket.params, bucket.gradients)
        torch.clear_autocast_cache()  # it holds low-precision copies of the weights as they were

    def _update(self) -> None:
        """Hand the gradients to the base optimizer."""
        if self.scaler is not None:
            self.scaler.unscale_(self.base)
        try:
            if self.clip_norm is not None:
                norm = nn.utils.clip_grad_norm_(self._parameters(), self.clip_norm)
                self.telemetry.descent_norm = sharding.full(norm)
            if self.scaler is None:
                self.base.step()
            else:
                self.scaler.step(self.base)
        finally:
            if self.scaler is not None:
                self.scaler.update()
        self._opt_called = True  # what torch's schedulers ask; descend() is a step too

    def _buckets(self) -> list[Bucket]:
        """The ascent gradients of the groups that are perturbed, cut so that each bucket is one foreach call."""
        self._complete_groups()
        buckets: dict[tuple[Any, ...], Bucket] = {}
        for index, group in enumerate(self.param_groups):
            self.perturbation.check(group)
            if _is_zero(group["rho"]):
                continue
            for param in group["params"]:
                gradient = param.grad
                if gradient is None:
                    continue
                if gradient.layout is not torch.strided:
                    raise RuntimeError(
                        f"a parameter of shape {tuple(param.shape)} in group {index} has a sparse gradient, which "
                        "cannot be perturbed. Build its layer with sparse=False, or put it into a group with rho=0."
                    )
                key = (index, *sharding.kind(param))
                if key not in buckets:
                    buckets[key] = Bucket(group)
                buckets[key].add(param, gradient)
        return list(buckets.values())

    def _perturbs(self) -> bool:
        self._complete_groups()
        return not all(_is_zero(group["rho"]) for group in self.param_groups)

    def _complete_groups(self) -> None:
        """Give each group the options that it does not set: it may come from the base optimizer or its checkpoint."""
        for group in self.param_groups:
            for name, value in self.perturbation.defaults.items():
                group.setdefault(name, value)

    def _parameters(self) -> list[Tensor]:
        return [param for group in self.param_groups for param in group["params"]]

    def _devices(self) -> set[torch.device]:
        return {param.device for param in self._parameters()}

    def _scaled(self, loss: Tensor) -> Tensor:
        return loss if self.scaler is None else self.scaler.scale(loss)

    def _unscale(self, buckets: list[Bucket]) -> None:
        """Undo the scaler's factor without `scaler.unscale_`, which is for the one gradient that decides the update.

        A gradient that is not finite stays so, makes ε and with it the second gradient not finite, and is found there.
        """
        for bucket in buckets:
            scale = self._scaled(torch.ones((), device=bucket.gradients[0].device))
            torch._foreach_div_(bucket.gradients, scale)

    # Misuse is loud.

    def _has_gradients(self) -> bool:
        return any(param.grad is not None for group in self.param_groups for param in group["params"])

    def _refuse_gradients_of_before(self) -> None:
        if not self._pass_began_clear:
            raise RuntimeError(
                "step() found gradients from before it, and the closure did not clear them. Gradients cannot be "
                "accumulated outside, because the second pass would miss them: give step() a list of closures, one for "
                "each micro-batch, or use minimize(x, y, accumulate=n). If they are left over, call zero_grad() first."
            )

    def _require_gradients(self, method: str, source: str) -> None:
        if not self._has_gradients():
            raise RuntimeError(
                f"{method} found no gradients: {source} left none in the optimizer's parameters. Call backward() on "
                "the loss, on a model whose parameters this optimizer holds."
            )

    def _refuse_while_perturbed(self, method: str) -> None:
        if self._perturbed:
            raise RuntimeError(
                f"{method} called between ascend() and descend(): the weights are perturbed now. Call descend() first, "
                "or restore() to give the step up."
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
        return {**state, "_weights": Snapshot(), "_buffers": BufferSnapshot(self.model), "_leftover": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._attach()


@dataclass
class Leftover:
    """A witness to the gradients that a step left for reading: one of them, and how often it had been written to."""

    param: Tensor
    gradient: Tensor
    version: int

    @classmethod
    def of(cls, params: list[Tensor]) -> Leftover:
        param = next(param for param in reversed(params) if param.grad is not None)
        assert param.grad is not None
        return cls(param, param.grad, param.grad._version)

    def is_present(self) -> bool:
        return self.param.grad is self.gradient

    def is_untouched(self) -> bool:
        return self.is_present() and self.gradient._version == self.version


_CHECKPOINT_HOOKS = [
    f"_optimizer_{action}state_dict_{moment}_hooks" for action in ("", "load_") for moment in ("pre", "post")
]


def _check_base(base: Any, perturbation: Perturbation) -> None:
    if isinstance(base, SharpnessAware) or hasattr(base, "first_step"):
        raise TypeError(
            f"the base optimizer {type(base).__name__} is sharpness-aware already. Give a plain one, such as "
            "torch.optim.SGD(model.parameters(), lr=0.1)"
        )
    if not isinstance(base, torch.optim.Optimizer):
        raise TypeError(
            f"base must be a torch optimizer, got {type(base).__name__}. Build it first, such as "
            "torch.optim.SGD(model.parameters(), lr=0.1); bisam.compat.SAM takes parameters and a class"
        )
    if isinstance(base, torch.optim.LBFGS):
        raise TypeError("LBFGS evaluates its closure many times in a step and cannot be a base optimizer")
    if "_sharpness_aware" in base.__dict__:
        raise TypeError(
            f"this {type(base).__name__} is the base of a sharpness-aware optimizer already, whose options are in its "
            "parameter groups. Build a new one"
        )
    if not any(group["params"] for group in base.param_groups):
        raise ValueError("the base optimizer has an empty parameter list: there is nothing to train")
    clash = sorted(perturbation.defaults.keys() & base.defaults.keys())
    if clash:
        raise ValueError(
            f"{type(base).__name__} has options of its own by the name of {', '.join(clash)}, which the perturbation "
            "keeps in the same parameter groups: it cannot be a base optimizer"
        )
    for group in base.param_groups:
        perturbation.check({**perturbation.defaults, **group})


def _as_closures(closure: Closure | Sequence[Closure] | None) -> Sequence[Closure]:
    closures = [closure] if callable(closure) else closure
    if closures is None:
        raise TypeError(
            "step() needs a closure that computes the loss, calls backward() and returns it, because a step runs it "
            "twice. Without one, use minimize(x, y), or ascend() and descend() after your own backward passes."
        )
    if not (isinstance(closures, Sequence) and closures and all(callable(c) for c in closures)):
        raise TypeError(f"step() takes a closure or a non-empty list of closures, got {closure!r}")
    return closures


def _mean_of(values: list[Any]) -> Any:
    return values[0] if len(values) == 1 or values[0] is None else sum(values) / len(values)


def _is_zero(rho: float | Tensor) -> bool:
    """Whether a group is left out. A tensor is not asked: that would wait for the device."""
    return not isinstance(rho, Tensor) and rho == 0
