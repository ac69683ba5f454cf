"""Keras 3 on torch: `SharpnessAwareModel` is a `keras.Model` whose training step runs both passes.

    from bisam.integrations.keras import SharpnessAwareModel  # chooses torch, if Keras is not imported yet

    model = SharpnessAwareModel(inputs, outputs)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss, method="bisam-log", rho=0.05)
    model.fit(x, y)

The update is the Keras optimizer's: learning rate, schedule, clipping, weight decay, accumulation, average of weights.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bisam.engine.optimizer import SharpnessAware
from bisam.integrations import methods
from bisam.integrations.micro_batches import MicroBatch

if "keras" not in sys.modules:
    os.environ.setdefault("KERAS_BACKEND", "torch")
import keras

if keras.backend.backend() != "torch":
    raise ImportError(
        f"Keras runs on {keras.backend.backend()} here, and bisam trains with torch: set the environment variable "
        "KERAS_BACKEND=torch, or import bisam.integrations.keras before keras"
    )

__all__ = ["SharpnessAwareMixin", "SharpnessAwareModel"]

WITHOUT_EFFECT = {
    "same_dropout": "whose layers draw random numbers by themselves",
    "descent": "where the loss of the descent is that of compile",
}
"""Options of the variants that cannot be used, and why."""

IGNORED = -100
STATE, OPTIONS = "bisam", "bisam_options"
"""Names in a file of Keras, beside the variables of the model: the variant's memory, and what training has changed in
its options, such as the largest learning rate that GSAM has seen."""


class _Update(torch.optim.Optimizer):
    """The update of a Keras optimizer as a base optimizer."""

    def __init__(self, params: list[Tensor], apply: Callable[[], None]) -> None:
        super().__init__(params, {"lr": 0.0})
        self._apply = apply

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self._apply()


class _Stepping:
    """What a model trains with, apart from what Keras tracks: the variant, and micro-batches that wait."""

    def __init__(self, method: str, rho: float | None, options: Mapping[str, Any]) -> None:
        self.method, self.rho, self.options = method, rho, dict(options)
        self.optimizer: SharpnessAware | None = None
        self.options_at_start: dict[str, Any] = {}
        self.waiting: list[MicroBatch] = []
        self.loaded: dict[str, Any] = {}


if TYPE_CHECKING:
    from keras import Model as Mixed
else:
    Mixed = object


class SharpnessAwareMixin(Mixed):
    """Sharpness-aware steps for any model: `class Net(SharpnessAwareMixin, keras.Model)`, or `keras.Sequential`.

    `compile` takes three arguments beside those of Keras:

    Args:
        method: a name of `bisam.integrations.methods.CLOSURE_METHODS`. Default: "bisam-log".
        rho: the radius of the perturbation. Default: the variant's own.
        method_options: more options of the variant, such as `{"mu": 4}`.
    """

    _stepping: _Stepping

    def compile(
        self,
        *args: Any,
        method: str = "bisam-log",
        rho: float | None = None,
        method_options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if not isinstance(method, str):
            raise TypeError(f"method must be a name, which is saved with the model, got {method!r}")
        methods.find_variant(method)
        if method == "msam":
            raise ValueError("MSAM perturbs by the momentum of a torch optimizer, and Keras keeps its own: use another")
        for option, reason in WITHOUT_EFFECT.items():
            if option in (method_options or {}):
                raise ValueError(f"{option} has no effect in Keras, {reason}: remove it from method_options")
        super().compile(*args, **kwargs)
        self._stepping = _Stepping(method, rho, method_options or {})
        if self.jit_compile:
            raise ValueError("jit_compile=True compiles a step of one pass: remove it. Both passes run eagerly")
        if isinstance(self.optimizer, keras.optimizers.LossScaleOptimizer):
            raise ValueError(
                "mixed_float16 scales the loss anew after an overflow, which two passes do not share: use the policy "
                "mixed_bfloat16, or auto_scale_loss=False with loss_scale_factor= of the optimizer"
            )

    def get_compile_config(self) -> dict[str, Any]:
        own, config = getattr(self, "_stepping", None), super().get_compile_config()
        if own is None:
            return config
        return {**config, "method": own.method, "rho": own.rho, "method_options": own.options}

    def compile_from_config(self, config: dict[str, Any]) -> None:
        self.compile(**keras.saving.deserialize_keras_object(config))
        if self.built:
            self.optimizer.build(self.trainable_variables)

    @property
    def sharpness_aware(self) -> SharpnessAware:
        """The optimizer of the variant, for its `telemetry` in a callback."""
        own = getattr(self, "_stepping", None)
        if own is None:
            raise RuntimeError("the optimizer of the variant is made after compile(): call model.compile(...) first")
        weights = [variable.value for variable in self.trainable_weights]
        if own.optimizer is None or [*map(id, own.optimizer.base.param_groups[0]["params"])] != [*map(id, weights)]:
            if not weights:
                raise ValueError("the model has no trainable weights: build it, or set layer.trainable = True")
            own.optimizer = methods.build(own.method, _Update(weights, self._apply), own.rho, own.options)
            own.optimizer.model = self
            own.options_at_start = _options(own.optimizer)
            own.optimizer.base.param_groups[0].update(own.loaded.get(OPTIONS, {}))
            if STATE in own.loaded:
                own.optimizer.load_state_dict({**own.optimizer.state_dict(), "sharpness": own.loaded[STATE]})
            own.loaded = {}
        return own.optimizer

    def train_step(self, data: Any) -> dict[str, Any]:
        """Keep the micro-batch; at the last one of an update run both passes on all of them.

        Losses and metrics are those at w, and count then.
        """
        own, optimizer = self._stepping, self.sharpness_aware
        own.waiting.append(MicroBatch(data))
        count = self.optimizer.gradient_accumulation_steps or 1
        # by the counter of Keras: in a model that was loaded between two updates, fewer than `count` wait
        if count > 1 and (int(self.optimizer._iterations) + 1) % count:
            self._apply(waits=True)
            return self.get_metrics_result()
        batches, own.waiting = own.waiting, []
        optimizer.base.param_groups[0]["lr"] = float(self.optimizer.learning_rate)
        passes = 0

        def run() -> Tensor:
            nonlocal passes
            is_first, passes = passes == 0, passes + 1
            with nullcontext() if is_first else self._unchanged_state():
                losses = [self._run(optimizer, batch, count / len(batches), observed=is_first) for batch in batches]
            return torch.stack(losses).mean()

        optimizer.backward(run)
        optimizer.step()
        return self.get_metrics_result()

    def logits_of(self, y_pred: Any) -> Tensor:
        """The logits for Q, classes last. Override it for a loss of your own."""
        loss: Any = self.loss
        config = loss.get_config() if isinstance(loss, keras.losses.Loss) else {}
        name = getattr(loss, "__name__", type(loss).__name__) if not isinstance(loss, str) else loss
        known = name.lower().replace("_", "") in ("categoricalcrossentropy", "sparsecategoricalcrossentropy")
        if not (known and isinstance(y_pred, Tensor) and config.get("axis", -1) == -1):
            raise ValueError(
                f"Q of {type(self.sharpness_aware).__name__} needs logits, classes last, and the loss {name} does not "
                "show where they are: use keras.losses.SparseCategoricalCrossentropy(from_logits=True) or its "
                'categorical form, override logits_of(y_pred), or use method="sam", which takes any loss'
            )
        return y_pred if config.get("from_logits") else y_pred.clamp_min(keras.backend.epsilon()).log()

    def _run(self, optimizer: SharpnessAware, batch: MicroBatch, factor: float, *, observed: bool) -> Tensor:
        """Forward and backward pass of one micro-batch, whose gradient is multiplied by `factor`. Returns the loss."""
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(*batch.arguments())
        y_pred = self(x, training=True)
        loss = self.compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight)
        if observed:
            self._observe(loss.detach(), x, y, y_pred, sample_weight)
        objective = loss
        if optimizer.criterion.bilevel and optimizer.phase == "ascent":
            objective = self._ascent(optimizer, y_pred, y, sample_weight)
        self.optimizer.scale_loss(objective * factor).backward()
        return loss.detach()

    def _ascent(self, optimizer: SharpnessAware, y_pred: Any, y: Any, sample_weight: Any) -> Tensor:
        if sample_weight is not None:
            raise ValueError(
                f"Q of {type(optimizer).__name__} weighs all samples alike: remove sample_weight and class_weight, or "
                'use method="sam", which takes any loss'
            )
        logits = self.logits_of(y_pred)
        logits = logits.reshape(-1, logits.shape[-1])
        y = keras.ops.convert_to_tensor(y)  # an array of train_on_batch; a tensor of a loader comes to the device
        is_one_hot = y.numel() == logits.numel()
        targets = y.reshape(logits.shape).to(logits.dtype) if is_one_hot else y.reshape(-1).long()
        mask = getattr(y_pred, "_keras_mask", None)
        if mask is not None:  # the loss of Keras leaves out what a layer has masked, such as padding
            kept = mask.reshape(-1).bool()
            logits, targets = logits[kept], targets[kept]
        ignored = getattr(self.loss, "ignore_class", None)
        if ignored is not None:
            targets = targets.masked_fill(targets == ignored, IGNORED)
        return optimizer.criterion(logits, targets)

    @torch.no_grad()
    def _observe(self, loss: Tensor, x: Any, y: Any, y_pred: Any, sample_weight: Any) -> None:
        """Count a micro-batch in the loss and the metrics that are logged, as Keras does."""
        samples = next(part for part in keras.tree.flatten(x) if part is not None).shape[0]
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss, sample_weight=samples)
        self.compute_metrics(x, y, y_pred, sample_weight=sample_weight)

    @contextmanager
    def _unchanged_state(self) -> Iterator[None]:
        """Bring back what a later pass changes beside the trained weights: moving averages of batch norm, metrics."""
        state = [variable.value for variable in (*self.non_trainable_weights, *self.metrics_variables)]
        before = [value.detach().clone() for value in state]
        try:
            yield
        finally:
            with torch.no_grad():
                for value, old in zip(state, before, strict=True):
                    value.copy_(old)

    @torch.no_grad()
    def _apply(self, *, waits: bool = False) -> None:
        """The update of the Keras optimizer. For a micro-batch that waits it counts a step without a gradient."""
        weights = self.trainable_weights[:]
        grads = [torch.zeros_like(one.value) if waits else one.value.grad for one in weights]
        self.optimizer.apply(grads, weights)

    def save_own_variables(self, store: Any) -> None:
        super().save_own_variables(store)
        own = getattr(self, "_stepping", None)
        if own is not None and own.optimizer is not None:
            now = _options(own.optimizer)
            changed = {name: value for name, value in now.items() if value != own.options_at_start[name]}
            for name, part in ((STATE, own.optimizer.state_dict().get("sharpness")), (OPTIONS, changed)):
                if part:
                    content = io.BytesIO()
                    torch.save(part, content)
                    store[name] = torch.frombuffer(bytearray(content.getvalue()), dtype=torch.uint8).numpy()

    def load_own_variables(self, store: Any) -> None:
        names = [*store.keys()]
        super().load_own_variables({name: store[name] for name in names if name not in (STATE, OPTIONS)})
        own = getattr(self, "_stepping", None)
        if own is not None:
            # memory and micro-batches of the weights before: Keras replaces its own state too
            own.optimizer, own.waiting = None, []
            own.loaded = {
                name: torch.load(io.BytesIO(bytes(store[name])), weights_only=True)
                for name in (STATE, OPTIONS)
                if name in names
            }


def _options(optimizer: SharpnessAware) -> dict[str, Any]:
    return {name: value for name, value in optimizer.base.param_groups[0].items() if name not in ("params", "lr")}


@keras.saving.register_keras_serializable("bisam")
class SharpnessAwareModel(SharpnessAwareMixin, keras.Model):
    """`keras.Model` with sharpness-aware steps. To convert a model, pass (model.inputs, model.outputs)."""
