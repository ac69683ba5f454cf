"""A GradScaler in a step of two passes: each gradient is unscaled once, by the step or, before it, by the caller."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

Scaler = torch.amp.GradScaler


def scaled(scaler: Scaler | None, loss: Tensor) -> Tensor:
    return loss if scaler is None else scaler.scale(loss)


def check_used(scaler: Scaler) -> None:
    """Raise if no loss was scaled yet: a scaler makes its factor when it scales the first one."""
    if scaler.is_enabled() and scaler._scale is None:
        raise RuntimeError(
            "the optimizer has a GradScaler, and the first pass did not use it: call scaler.scale(loss).backward() "
            "instead of loss.backward()"
        )


def unscale_ascent(scaler: Scaler, optimizer: torch.optim.Optimizer, kinds: Sequence[list[Tensor]]) -> None:
    """Undo the scaler's factor without `scaler.unscale_`, which is for the one gradient that decides the update.

    A gradient that is not finite stays so, makes ε and with it the second gradient not finite, and is found there.
    """
    if take_unscaled_state(scaler, optimizer) is not None:
        return
    for gradients in kinds:
        torch._foreach_div_(gradients, scaler.scale(torch.ones((), device=gradients[0].device)))


def unscale_descent(scaler: Scaler, optimizer: torch.optim.Optimizer, base: torch.optim.Optimizer) -> None:
    """For the base optimizer's update, which the scaler may skip."""
    state = take_unscaled_state(scaler, optimizer)
    if state is None:
        scaler.unscale_(base)
    else:
        scaler._per_optimizer_states[id(base)] = state


def is_unscaled(scaler: Scaler | None, optimizer: torch.optim.Optimizer) -> bool:
    """Whether the caller has called `scaler.unscale_(optimizer)`, as torch's recipe for clipping does."""
    states = getattr(scaler, "_per_optimizer_states", {})  # a scaler that is switched off has none
    return id(optimizer) in states and states[id(optimizer)]["stage"].name == "UNSCALED"


def state_of(scaler: Scaler | None, optimizer: torch.optim.Optimizer) -> dict[str, Any] | None:
    """The scaler's state for this optimizer until its next update: `scaler.step` writes into it that it has run."""
    states = getattr(scaler, "_per_optimizer_states", None)
    return None if states is None else states[id(optimizer)]


def has_stepped(state: dict[str, Any] | None) -> bool:
    """Whether `scaler.step(optimizer)` has run since, even if it skipped the update."""
    return state is not None and state["stage"].name == "STEPPED"


def take_unscaled_state(scaler: Scaler | None, optimizer: torch.optim.Optimizer) -> dict[str, Any] | None:
    """Remove and return the scaler's state for this optimizer if `scaler.unscale_` was called for it; else None."""
    if scaler is None or not is_unscaled(scaler, optimizer):
        return None
    return scaler._per_optimizer_states.pop(id(optimizer))
