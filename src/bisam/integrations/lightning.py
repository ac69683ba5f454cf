"""Lightning: derive your module from `SharpnessAwareModule`, and return a sharpness-aware optimizer.

    class Classifier(SharpnessAwareModule):
        def training_step(self, batch, batch_idx):
            x, y = batch
            loss = self.sharpness_loss(self.net(x), y)
            self.log("train_loss", loss)
            return loss

        def configure_optimizers(self):
            base = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
            return bisam.BiSAM(base, self)

The Trainer's accumulation, clipping, precision, strategy and checkpoints work as with any optimizer.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any, Literal

import lightning
import torch
import torchmetrics
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.trainer import call
from torch import Tensor

from bisam.engine.optimizer import SharpnessAware
from bisam.integrations.micro_batches import MicroBatch, Run, loss_of_pass, run_all


class SharpnessAwareModule(lightning.LightningModule):
    """A LightningModule whose update takes two passes.

    With automatic optimization, `training_step` runs when the update is due: in the first pass for each micro-batch of
    the accumulation, and once more for each in the second, where logging and metrics are switched off. So logged
    values are those at w.

    With manual optimization, `self.optimizers().step(closure)` takes a closure or a list of closures.

    The optimizer's model is set to the module as the Trainer wraps it: under DistributedDataParallel each rank perturbs
    by its own gradient, or all alike with `sharpness="global"`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._batches: list[MicroBatch] = []
        """What `training_step` was called with, for each micro-batch of the next update."""
        self._mode: Literal["wait", "collect", "run"] = "wait"
        """Whether `training_step` leaves its batch for the update, notes it and runs it, or runs it."""
        self._is_silent = False
        self._values: dict[int, Any] = {}
        """What metrics have returned in the first pass of a step, by their identity."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        step = cls.training_step  # its own, or that of a class beside this one
        if step is not lightning.LightningModule.training_step and not hasattr(step, "_waits"):
            cls.training_step = _waiting(step)  # type: ignore[method-assign]

    def sharpness_loss(self, output: Any, target: Tensor, optimizer: Any = None) -> Tensor:
        """The loss to return from `training_step`: each pass has the gradients of its own objective.

        Its value is the descent's loss (cross entropy) in both, so it can be logged. `optimizer` is one of
        `self.optimizers()`. Default: the first that is sharpness-aware.
        """
        optimizer = self._sharpness_aware() if optimizer is None else _unwrapped(optimizer)
        if optimizer is None:
            raise RuntimeError(
                "sharpness_loss() is that of the optimizer, and there is no sharpness-aware one here. Return one from "
                "configure_optimizers(), for a baseline bisam.SAM(base, self, rho=0); outside of fit() use the plain "
                "loss"
            )
        return loss_of_pass(optimizer.criterion, output, target)

    def optimizer_step(
        self,
        epoch: int,
        batch_idx: int,
        optimizer: torch.optim.Optimizer | LightningOptimizer,
        optimizer_closure: Callable[[], Any] | None = None,
    ) -> None:
        inner = self._sharpness_aware()
        if inner is None or optimizer_closure is None:
            return super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        if self._runs_forward_only:
            optimizer_closure()  # no update: the gradient in `.grad` is that of the last one
            return None
        self._connect(inner)
        waiting, self._batches = self._batches, []
        current = self._logged_batch
        is_repeated = False

        def run_last() -> Any:
            self._mode, self._logged_batch = "collect", current
            return optimizer_closure()

        def run_pass() -> Any:
            nonlocal is_repeated
            self._mode = "run"
            if is_repeated:
                with self._silence():
                    batches = [*waiting, *self._batches]
                    loss = run_all([partial(self._run_batch, inner, batch) for batch in batches], inner.model)
            else:
                is_repeated = True
                runs: list[Run] = [*(partial(self._run_batch, inner, batch) for batch in waiting), run_last]
                with self._noted_values():
                    loss = run_all(runs, inner.model)
                self._refuse_replaced_step()
            if loss is None:
                raise _NoLossError
            return loss

        try:
            loss = inner.backward(run_pass, scaler=self._scaler())
        except _NoLossError:
            return None  # no update, as in Lightning
        finally:
            self._batches, self._values, self._mode = [], {}, "wait"
        return super().optimizer_step(epoch, batch_idx, optimizer, lambda: loss)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: torch.optim.Optimizer) -> None:
        if self._mode == "wait":
            self._batches = self._batches[-1:]  # earlier ones are left from an accumulation that was broken off
        super().optimizer_zero_grad(epoch, batch_idx, optimizer)

    def optimizers(self, use_pl_optimizer: bool = True) -> Any:
        found = super().optimizers(use_pl_optimizer)
        if not self.automatic_optimization:
            for optimizer in found if isinstance(found, list) else [found]:
                if isinstance(optimizer, LightningOptimizer) and isinstance(optimizer.optimizer, SharpnessAware):
                    self._take_over(optimizer, optimizer.optimizer)
        return found

    def log(self, *args: Any, **kwargs: Any) -> None:
        if not self._is_silent:
            super().log(*args, **kwargs)

    # How it is done.

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _note(self, arguments: tuple[Any, ...]) -> None:
        self._batches.append(MicroBatch(*arguments))

    def _run_batch(self, optimizer: SharpnessAware, micro_batch: MicroBatch) -> Any:
        """Forward and backward of a micro-batch, as Lightning's own closure runs them."""
        batch = micro_batch.arguments()
        self._logged_batch = batch[0] if batch else None
        output = call._call_strategy_hook(self.trainer, "training_step", *batch)
        loss = output["loss"] if isinstance(output, Mapping) else output
        if loss is None:
            return None
        loss = loss / self.trainer.accumulate_grad_batches
        call._call_strategy_hook(self.trainer, "backward", loss, optimizer)
        return loss.detach()

    @property
    def _logged_batch(self) -> Any:
        """The batch whose size weighs what is logged, in the mean over an epoch."""
        return None if self.trainer._results is None else self.trainer._results.batch

    @_logged_batch.setter
    def _logged_batch(self, batch: Any) -> None:
        if self.trainer._results is not None:
            self.trainer._results.batch, self.trainer._results.batch_size = batch, None

    def _sharpness_aware(self) -> SharpnessAware | None:
        """The sharpness-aware optimizer of the Trainer, if it has one."""
        optimizers = () if self._trainer is None else self.trainer.optimizers
        return next(filter(None, map(_unwrapped, optimizers)), None)

    @property
    def _runs_forward_only(self) -> bool:
        """Whether the Trainer runs batches for their statistics alone, as StochasticWeightAveraging does at its end."""
        return bool(self.trainer.fit_loop._skip_backward)

    def _connect(self, optimizer: SharpnessAware) -> None:
        """Give the optimizer the model as the strategy runs it."""
        if self.trainer.strategy.handles_gradient_accumulation:
            raise RuntimeError(
                f"{type(self.trainer.strategy).__name__} accumulates gradients by itself, and a step of two passes "
                'needs each micro-batch twice. Use strategy="ddp"'
            )
        if optimizer.model is not self.trainer.model:
            optimizer.model = self.trainer.model

    def _refuse_replaced_step(self) -> None:
        if not self._batches:
            raise RuntimeError(
                f"training_step() of this {type(self).__name__} is not that of its class, so its batches cannot be run "
                "in a second pass: define it in the class, instead of setting it on the module"
            )

    def _scaler(self) -> torch.amp.GradScaler | None:
        return getattr(self.trainer.precision_plugin, "scaler", None)

    @property
    def _metrics(self) -> list[torchmetrics.Metric]:
        return [module for module in self.modules() if isinstance(module, torchmetrics.Metric)]

    @contextmanager
    def _noted_values(self) -> Iterator[None]:
        """Keep what each metric returns, for the second pass: not all of them do so themselves."""
        handles = [metric.register_forward_hook(self._note_value) for metric in self._metrics]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _note_value(self, metric: torchmetrics.Metric, _: Any, value: Any) -> None:
        self._values[id(metric)] = value

    def _last_value(self, metric: torchmetrics.Metric, *_: Any, **__: Any) -> Any:
        return self._values.get(id(metric), metric._forward_cache)

    @contextmanager
    def _silence(self) -> Iterator[None]:
        """Without logging, and with metrics that keep their state."""
        metrics = self._metrics
        kept = [metric.__dict__["update"] for metric in metrics]  # torchmetrics wraps it for each object
        for metric in metrics:
            metric.__dict__.update(update=_nothing, reset=_nothing, forward=partial(self._last_value, metric))
        self._is_silent = True
        try:
            yield
        finally:
            self._is_silent = False
            for metric, update in zip(metrics, kept, strict=True):
                metric.__dict__["update"] = update
                del metric.__dict__["forward"], metric.__dict__["reset"]

    def _take_over(self, wrapper: LightningOptimizer, optimizer: SharpnessAware) -> None:
        """In manual optimization: count each update once, and let the precision plugin unscale.

        Lightning's wrapper is of a class derived from the optimizer's, so that methods of that class would keep what
        they note in the wrapper: all of them are made those of the optimizer.
        """
        if "minimize" in vars(wrapper):
            return
        plain_step = wrapper.step

        def backward(closure: Any, *, scaler: torch.amp.GradScaler | None = None) -> Any:
            self._connect(optimizer)
            calls = 0

            def quiet_when_repeated(run: Callable[[], Any]) -> Any:
                nonlocal calls
                calls += 1
                with self._noted_values() if calls <= len(runs) else self._silence():
                    return run()

            runs = [closure] if callable(closure) else closure
            quiet = [partial(quiet_when_repeated, run) for run in runs]
            scaler = self._scaler() if scaler is None else scaler
            try:
                return optimizer.backward(quiet[0] if callable(closure) else quiet, scaler=scaler)
            finally:
                self._values = {}

        def step(closure: Any = None, **kwargs: Any) -> Any:
            if closure is None:
                return plain_step(**kwargs)
            loss = backward(closure)
            plain_step(closure=lambda: loss, **kwargs)
            return loss

        def counted(name: str) -> Callable[..., Any]:
            def method(*args: Any, **kwargs: Any) -> Any:
                if self._scaler() is not None:
                    raise RuntimeError(f'precision="16-mixed" scales losses: use step(closure) instead of {name}()')
                self._connect(optimizer)
                wrapper._on_before_step()
                result = getattr(optimizer, name)(*args, **kwargs)
                wrapper._on_after_step()
                return result

            return method

        methods = [name for name, _ in inspect.getmembers(type(optimizer), inspect.isfunction) if name[0] != "_"]
        vars(wrapper).update({name: getattr(optimizer, name) for name in methods})
        updates = [name for name in ("minimize", "descend", "second_step") if name in methods]
        vars(wrapper).update(step=step, backward=backward, **{name: counted(name) for name in updates})


def _waiting(training_step: Callable[..., Any]) -> Callable[..., Any]:
    """A `training_step` that leaves its batch for the update, unless the update runs it."""
    if "dataloader_iter" in inspect.signature(training_step).parameters:
        raise TypeError(
            "training_step(self, dataloader_iter) fetches batches by itself, and a step of two passes needs each of "
            "them twice. Use training_step(self, batch, batch_idx)"
        )

    @wraps(training_step)
    def waiting(self: SharpnessAwareModule, *args: Any, **kwargs: Any) -> Any:
        if not self.automatic_optimization or self._sharpness_aware() is None or self._runs_forward_only:
            return training_step(self, *args, **kwargs)
        if self._mode != "run":
            self._note(args)
        if self._mode == "wait":
            return torch.zeros((), device=self.device, requires_grad=True)
        self._mode = "run"
        return training_step(self, *args, **kwargs)

    waiting._waits = True  # type: ignore[attr-defined]
    return waiting


class _NoLossError(Exception):
    """`training_step` has returned None for every micro-batch of an update."""


def _unwrapped(optimizer: Any) -> SharpnessAware | None:
    optimizer = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
    return optimizer if isinstance(optimizer, SharpnessAware) else None


def _nothing(*_: Any, **__: Any) -> None:
    pass
