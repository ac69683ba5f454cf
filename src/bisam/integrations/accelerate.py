"""Accelerate: `SharpnessAwareBackward` takes the place of `accelerator.backward`; the rest of the loop stays.

model, optimizer, loader, scheduler = accelerator.prepare(model, bisam.BiSAM(base, model), loader, scheduler)
backward = SharpnessAwareBackward(accelerator, model, optimizer)

def loss_of(x, y):
    return backward.criterion(model(x), y)

for x, y in loader:
    with accelerator.accumulate(model):
        loss = backward(loss_of, x, y)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import accelerate
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType
from torch import Tensor, nn

from bisam.engine.criterion import Criterion
from bisam.engine.optimizer import SharpnessAware
from bisam.integrations.micro_batches import Waiting

_REFUSED = (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.XLA)
"""They run backward passes, or average gradients, by themselves."""


class SharpnessAwareBackward:
    """Both passes of a step, over the micro-batches that `accelerator.accumulate` puts together.

    Args:
        accelerator: the Accelerator.
        model: the model, as `accelerator.prepare` returned it. It becomes the optimizer's: under
            DistributedDataParallel each rank perturbs by its own gradient, or all alike with `sharpness="global"`.
        optimizer: the optimizer, as `accelerator.prepare` returned it.
    """

    def __init__(self, accelerator: accelerate.Accelerator, model: nn.Module, optimizer: AcceleratedOptimizer) -> None:
        inner = optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else None
        if not isinstance(inner, SharpnessAware):
            given = type(optimizer).__name__ if inner is None else f"that around a {type(inner).__name__}"
            raise TypeError(
                "optimizer must be what accelerator.prepare() returned for a sharpness-aware one, such as "
                f"bisam.BiSAM(base, model), got {given}"
            )
        if accelerator.distributed_type in _REFUSED:
            raise RuntimeError(
                f"{accelerator.distributed_type} runs or averages backward passes by itself, and a step of two passes "
                "needs each micro-batch twice: use DistributedDataParallel or FSDP2"
            )
        inner.model = model
        if not inner._sync.averages:
            raise ValueError(
                f"{accelerator.num_processes} processes train together, and the model is not wrapped: give the one "
                "that accelerator.prepare() returned"
            )
        self._accelerator = accelerator
        self._optimizer = inner
        self._waiting = Waiting(accelerator.backward)
        accelerator.register_save_state_pre_hook(self._warn_of_waiting)
        accelerator.register_load_state_pre_hook(lambda *_: self._waiting.clear())
        # the inner one's, which Accelerate calls where the update is due, and not in the middle of an accumulation
        vars(inner)["zero_grad"] = partial(self._zero_grad, inner.zero_grad)

    @property
    def criterion(self) -> Criterion:
        """The optimizer's criterion: the ascent's objective in the first pass, the descent's in the second."""
        return self._optimizer.criterion

    def __call__(self, loss_of: Callable[..., Tensor], *batch: Any, **named: Any) -> Any:
        """Note this micro-batch; with the last of an accumulation, run both passes over all of them.

        `loss_of(*batch, **named)` runs the model and returns the loss: it is called once in each pass. Returns the
        mean loss of the micro-batches at w, and None before the last of them. The gradient is in `.grad` then, for
        clipping and `optimizer.step()`.
        """
        self._waiting.add(loss_of, batch, named)
        if not self._accelerator.sync_gradients:
            return None
        return self._waiting.run(self._optimizer, self._optimizer.model, self._accelerator.scaler)

    def _zero_grad(self, zero_grad: Callable[[bool], None], set_to_none: bool = True) -> None:
        """Drop the micro-batches that wait too, as `accelerator.backward` would have left them in `.grad`."""
        self._waiting.clear()
        zero_grad(set_to_none)

    def _warn_of_waiting(self, *_: Any) -> None:
        self._waiting.warn_in_checkpoint("where accelerator.sync_gradients is True")
