"""Lightning Fabric: `SharpnessAwareBackward` takes the place of `fabric.backward`; the rest of the loop stays.

model, optimizer = fabric.setup(model, bisam.BiSAM(base, model))
backward = SharpnessAwareBackward(fabric, model, optimizer)

def loss_of(x, y):
    return optimizer.criterion(model(x), y) / 2

for number, (x, y) in enumerate(loader, start=1):
    is_accumulating = number % 2 != 0
    loss = backward(loss_of, x, y, is_accumulating=is_accumulating)
    if not is_accumulating:
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from lightning.fabric import Fabric, is_wrapped
from lightning.fabric.strategies.ddp import DDPStrategy
from lightning.fabric.strategies.deepspeed import DeepSpeedStrategy
from lightning.fabric.strategies.model_parallel import ModelParallelStrategy
from lightning.fabric.strategies.single_device import SingleDeviceStrategy
from lightning.fabric.strategies.single_xla import SingleDeviceXLAStrategy
from lightning.fabric.strategies.strategy import Strategy
from torch import Tensor, nn

from bisam.engine.optimizer import SharpnessAware
from bisam.integrations.micro_batches import Waiting


class SharpnessAwareBackward:
    """Both passes of a step, over the micro-batches since the last update.

    The optimizer's own forms of a step are right too from then on: `optimizer.step(closure)` and
    `optimizer.backward(closure)` with `fabric.backward(loss)` in the closure, and `optimizer.minimize(x, y)`.

    Args:
        fabric: the Fabric.
        model: the model, as `fabric.setup` returned it. It becomes the optimizer's: under DistributedDataParallel each
            rank perturbs by its own gradient, or all alike with `sharpness="global"`.
        optimizer: the optimizer, as `fabric.setup` returned it.
    """

    def __init__(self, fabric: Fabric, model: nn.Module, optimizer: Any) -> None:
        inner = optimizer.optimizer if is_wrapped(optimizer) else None
        if not isinstance(inner, SharpnessAware):
            given = type(optimizer).__name__ if inner is None else f"that around a {type(inner).__name__}"
            raise TypeError(
                "optimizer must be what fabric.setup() returned for a sharpness-aware one, such as "
                f"bisam.BiSAM(base, model), got {given}"
            )
        if not is_wrapped(model):
            raise TypeError(f"model must be what fabric.setup() returned, got {type(model).__name__}")
        _check_strategy(fabric.strategy)
        inner.model = model
        self._fabric = fabric
        self._optimizer = inner
        self._scaler = getattr(fabric.strategy.precision, "scaler", None)
        self._waiting = Waiting(fabric.backward)
        inner.register_state_dict_pre_hook(self._warn_of_waiting)
        inner.register_load_state_dict_post_hook(lambda _: self._waiting.clear())
        vars(optimizer)["zero_grad"] = partial(self._zero_grad, optimizer.zero_grad)
        if self._scaler is not None:
            vars(optimizer).update(backward=partial(inner.backward, scaler=self._scaler), ascend=_refuse_ascend)

    def __call__(
        self, loss_of: Callable[..., Tensor], *batch: Any, is_accumulating: bool = False, **named: Any
    ) -> Tensor | None:
        """Note this micro-batch; with the last of an accumulation, run both passes over all of them.

        `loss_of(*batch, **named)` runs the model and returns the loss: it is called once in each pass. As with
        `fabric.backward`, gradients add up: divide the loss by the number of micro-batches for their mean.

        Returns the criterion's loss at w (with MSAM at w + ε), over all micro-batches, and None before the last of
        them. Where the function does not use the criterion, it is the mean of what the function returned. The gradient
        is in `.grad` then, for `fabric.clip_gradients` and `optimizer.step()`.
        """
        self._waiting.add(loss_of, batch, named)
        if is_accumulating:
            return None
        replicas = self._optimizer._sync.replicas
        if not all(replica.require_backward_grad_sync for replica in replicas):
            raise RuntimeError(
                "fabric.no_backward_sync() is on where the update is due, so that the ranks would update by different "
                "gradients. Give it the same condition, enabled=is_accumulating, or remove it: micro-batches that wait "
                "are not averaged one by one"
            )
        value = self._waiting.run(self._optimizer, replicas[0] if replicas else None, self._scaler)
        loss = self._optimizer.observed_loss
        return value if loss is None else loss

    def _zero_grad(self, zero_grad: Callable[..., None], *args: Any, **options: Any) -> None:
        """Drop the micro-batches that wait too, as `fabric.backward` would have left them in `.grad`."""
        self._waiting.clear()
        zero_grad(*args, **options)

    def _warn_of_waiting(self, _: Any) -> None:
        self._waiting.warn_in_checkpoint("after optimizer.step()")


def _check_strategy(strategy: Strategy) -> None:
    supported = isinstance(strategy, SingleDeviceStrategy | DDPStrategy | ModelParallelStrategy)
    if not supported or isinstance(strategy, DeepSpeedStrategy | SingleDeviceXLAStrategy):  # derived from those
        raise RuntimeError(
            f"{type(strategy).__name__} is not supported: it runs backward passes, or divides parameters or batches, "
            'in a way of its own. Use strategy="ddp", or ModelParallelStrategy with fully_shard (FSDP2)'
        )


def _refuse_ascend(*_: Any) -> None:
    raise RuntimeError(
        'precision="16-mixed" scales losses, and descend() would update by scaled gradients. Use '
        "backward(loss_of, x, y) and optimizer.step() instead of ascend() and descend()"
    )
