"""timm: `SharpnessAwareScaler` takes the place of `NativeScaler` in a training script.

    base = timm.optim.create_optimizer_v2(model, opt="adamw", lr=1e-4, weight_decay=0.05)
    optimizer = bisam.BiSAM(base, model, rho=0.05)
    loss_scaler = SharpnessAwareScaler(device="cuda")

    def loss_of(x, y):
        with torch.autocast("cuda", torch.float16):
            return optimizer.criterion(model(x), y) / accum_steps

    loss = loss_scaler(partial(loss_of, x, y), optimizer, clip_grad=1.0, parameters=model.parameters(),
                       need_update=need_update)

The loss is given as a function, because a step runs it twice. Where `NativeScaler` is not used, without mixed precision
or with bfloat16, use `SharpnessAwareScaler(enabled=False)`.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bisam.engine.optimizer import SharpnessAware
from bisam.integrations.micro_batches import Waiting


class SharpnessAwareScaler:
    """Called as timm's `NativeScaler`, with a function in the place of the loss.

    Args:
        device: the type of device that trains.
        enabled: whether losses are scaled, for float16. Without it this is both passes, clipping and the step.
    """

    state_dict_key = "amp_scaler"
    """What timm's CheckpointSaver stores its state by."""

    def __init__(self, device: str = "cuda", *, enabled: bool = True) -> None:
        self._scaler = torch.amp.GradScaler(device, enabled=enabled)
        self._waiting = Waiting(self._scaled_backward)

    def __call__(
        self,
        loss: partial[Tensor],
        optimizer: SharpnessAware,
        clip_grad: float | None = None,
        clip_mode: str = "norm",
        parameters: Iterable[Tensor] | None = None,
        create_graph: bool = False,
        need_update: bool = True,
    ) -> Any:
        """Both passes and the update, over this batch and those since the last update.

        `loss` is `functools.partial(loss_of, x, y)`, which runs the model. With `need_update=False` it waits. Returns
        the criterion's loss at w (with MSAM at w + ε), over all these batches, and None where there is no update. Where
        the function does not use the criterion, it is the mean of what the function returned.
        """
        self._check(loss, optimizer, create_graph)
        if clip_grad is not None and parameters is None:
            raise ValueError("clip_grad needs the parameters to clip: parameters=model.parameters()")
        self._waiting.add(loss.func, loss.args, loss.keywords)
        if not need_update:
            return None
        value = self._waiting.run(optimizer, optimizer.model, self._scaler if self._scaler.is_enabled() else None)
        if clip_grad is not None and parameters is not None:
            self._scaler.unscale_(optimizer)
            _clip(parameters, clip_grad, clip_mode)
        self._scaler.step(optimizer)
        self._scaler.update()
        observed = optimizer.observed_loss
        return value if observed is None else observed

    def state_dict(self) -> dict[str, Any]:
        return self._scaler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._scaler.load_state_dict(state_dict)

    def _scaled_backward(self, loss: Tensor) -> None:
        self._scaler.scale(loss).backward()  # type: ignore[no-untyped-call]

    def _check(self, loss: Any, optimizer: Any, create_graph: bool) -> None:
        if not isinstance(optimizer, SharpnessAware):
            raise TypeError(
                f"optimizer must be a sharpness-aware one, such as bisam.BiSAM(base, model), got "
                f"{type(optimizer).__name__}. timm's NativeScaler takes the others"
            )
        if not (isinstance(loss, partial) and (loss.args or loss.keywords)):
            raise TypeError(
                f"loss must be functools.partial(loss_of, x, y), got {type(loss).__name__}: a step runs the model "
                "twice, for which the function needs its batch with it"
            )
        if create_graph:
            raise ValueError("create_graph is for optimizers that use second derivatives, which cannot be a base here")


def _clip(parameters: Iterable[Tensor], value: float, mode: str) -> None:
    if mode == "norm":
        torch.nn.utils.clip_grad_norm_(parameters, value)
    elif mode == "value":
        torch.nn.utils.clip_grad_value_(parameters, value)
    elif mode == "agc":
        from timm.utils import adaptive_clip_grad

        adaptive_clip_grad(parameters, value)
    else:
        raise ValueError(f'clip_mode must be "norm", "value" or "agc", got {mode!r}')
