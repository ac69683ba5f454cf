"""Frameworks that hold an optimizer and call its `step`: those ways that would train on the wrong batches are refused.

Nothing is imported here: a framework that is not loaded calls nothing.
"""

from __future__ import annotations

import functools
import sys
import warnings
from typing import Any

from bisam.compat import SAM
from bisam.engine.checks import CALLER_CHECKS, DEPTH, FRAMEWORKS


def check(optimizer: Any, closure: Any) -> None:
    """Refuse a `step` that a framework calls in a way that drops or mixes batches."""
    if "accelerate.optimizer" in sys.modules:
        _refuse_dropped_batches(optimizer, closure)
    if isinstance(closure, functools.partial):
        _check_lightning(optimizer, closure)


def _refuse_dropped_batches(optimizer: Any, closure: Any) -> None:
    """Accelerate's wrapper calls `step` with the last closure of several, and drops the others unseen."""
    wrapper_class = sys.modules["accelerate.optimizer"].AcceleratedOptimizer
    frame = sys._getframe(1)
    for _ in range(DEPTH):
        if frame.f_back is None:
            return
        frame = frame.f_back
        caller = frame.f_locals.get("self")
        if isinstance(caller, wrapper_class) and caller.optimizer is optimizer:
            count = caller.gradient_state.num_steps
            if closure is not None and count > 1:
                raise RuntimeError(
                    f"Accelerate accumulates {count} batches and calls step() with the closure of the last one only: "
                    "the others would be dropped. Use bisam.integrations.accelerate.SharpnessAwareBackward, as "
                    f"{FRAMEWORKS} shows"
                )
            return


def _check_lightning(optimizer: Any, closure: functools.partial[Any]) -> None:
    """Lightning's closure runs one batch, clips, and logs, each time that it is called."""
    plugin = getattr(closure.func, "__self__", None)
    if plugin is None or type(plugin).__module__.split(".")[0] not in ("lightning", "pytorch_lightning"):
        return
    module: Any = closure.args[0] if closure.args else None
    if hasattr(module, "sharpness_loss"):
        if module.automatic_optimization:
            raise RuntimeError(
                f"optimizer_step() of {type(module).__name__} calls optimizer.step() by itself: call "
                "super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure) there instead"
            )
        return
    if isinstance(optimizer, SAM):
        raise RuntimeError(
            "compat.SAM.step(closure) takes the gradients that are there for those of the first pass, and Lightning "
            "accumulates those of other batches there. Derive the module from "
            f"bisam.integrations.lightning.SharpnessAwareModule, as {FRAMEWORKS} shows"
        )
    warnings.warn(
        f"{type(module).__name__} runs training_step() in both passes of a step: it logs the losses of both, counts "
        "metrics twice, and clips the gradients of both. Derive it from "
        f"bisam.integrations.lightning.SharpnessAwareModule, as {FRAMEWORKS} shows",
        stacklevel=5,
    )


CALLER_CHECKS.append(check)
