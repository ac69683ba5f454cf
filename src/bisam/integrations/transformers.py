"""The Hugging Face Trainer with sharpness-aware steps.

    from bisam.integrations.transformers import SharpnessAwareTrainer

    trainer = SharpnessAwareTrainer(model, args, train_dataset=data, method="bisam-log", rho=0.05)
    trainer.train()

The Trainer hands over one micro-batch after the other. They are kept until the last one of an update, and then both
passes run over all of them, each by the Trainer's own `training_step`: its loss, its weights of the micro-batches, its
autocast and scaler. The descent's gradient is left in `.grad`. Clipping, the update, the schedule, logs, evaluation and
checkpoints are the Trainer's, unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn
from transformers import Trainer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from bisam.engine import objective_options
from bisam.engine.optimizer import SharpnessAware
from bisam.integrations import methods
from bisam.integrations.methods import Build
from bisam.integrations.micro_batches import MicroBatch, run_all
from bisam.objectives import CrossEntropy

__all__ = ["SharpnessAwareMixin", "SharpnessAwareTrainer"]

IGNORED = -100
"""The label that Hugging Face models ignore."""

if TYPE_CHECKING:
    from transformers import Trainer as Mixed
else:
    Mixed = object


class SharpnessAwareMixin(Mixed):
    """Sharpness-aware steps for any Trainer: `class MyTrainer(SharpnessAwareMixin, Seq2SeqTrainer)`.

    Args:
        method: a name of `bisam.integrations.methods.CLOSURE_METHODS`, or a variant such as `bisam.GSAM`. It wraps the
            base optimizer, which is the Trainer's (`args.optim`) or a plain one in `optimizers=`. Default: "bisam-log".
            An optimizer of this library in `optimizers=` is used as it is, and takes no method.
        rho: the radius of the perturbation. Default: the variant's own.
        method_options: more options of the variant, such as `{"same_dropout": True, "sharpness": "global"}`.
    """

    def __init__(
        self,
        *args: Any,
        method: str | Build | None = None,
        rho: float | None = None,
        method_options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self._method, self._rho, self._method_options = method, rho, dict(method_options or {})
        self._micro_batches: list[tuple[MicroBatch, Any, int]] = []
        self._made: SharpnessAware | None = None
        self._stepping: SharpnessAware | None = None
        self._has_shifted: bool | None = None
        """Whether the model's loss has been that of shifted labels; None until it is known."""
        if method is not None:
            methods.find_variant(method)
        super().__init__(*args, **kwargs)
        _refuse_parallel(self)
        if self.optimizer is not None:
            self._check_optimizer(self.optimizer)

    @property
    def sharpness_aware(self) -> SharpnessAware:
        """The optimizer, without accelerate's wrapper: for its `telemetry` in a callback. Made by `train`."""
        found = _unwrapped(self.optimizer)
        if not isinstance(found, SharpnessAware):
            raise RuntimeError("the optimizer is made when training begins: call train() first")
        return found

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        """The Trainer's optimizer, wrapped by the method."""
        self._micro_batches.clear()  # what an interrupted run has left
        if not any(param.requires_grad for param in self.model.parameters()):
            raise ValueError(
                f"no parameter of {type(self.model).__name__} requires a gradient, so no weight would change. Unfreeze "
                "the head, such as model.classifier.requires_grad_(True), or add adapters"
            )
        optimizer = super().create_optimizer(*args, **kwargs)
        if _unwrapped(optimizer) is not self._made:  # else it is that of an earlier call of train
            self._check_optimizer(optimizer)
            if not isinstance(_unwrapped(optimizer), SharpnessAware):
                self.optimizer = methods.build(self._method or "bisam-log", optimizer, self._rho, self._method_options)
            _refuse_choosing(self.sharpness_aware)
            self._made = self.sharpness_aware
        return self.optimizer

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Keep the micro-batch; at the last one of an update run both passes on all of them.

        Returns the descent's loss at w, of all of them, then; 0 before.
        """
        self._micro_batches.append((MicroBatch(inputs), num_items_in_batch, self.current_gradient_accumulation_steps))
        if not self.accelerator.sync_gradients:
            return torch.zeros((), device=self.args.device)
        micro_batches, self._micro_batches = self._micro_batches, []
        optimizer = self.sharpness_aware
        if optimizer.model is not model:
            optimizer.model = model
        losses: list[Tensor] = []
        runs = [partial(self._run, losses, model, *part) for part in micro_batches]
        self._stepping = optimizer
        try:
            optimizer.backward(partial(run_all, runs, model), scaler=self.accelerator.scaler)
        finally:
            self._stepping = None
        return torch.stack(losses[: len(runs)]).sum()  # of the first pass

    def _run(
        self, losses: list[Tensor], model: nn.Module, batch: MicroBatch, num_items_in_batch: Any, accumulated: int
    ) -> Tensor:
        """Forward and backward pass of one micro-batch, with the weight that the Trainer gave it."""
        self.current_gradient_accumulation_steps = accumulated
        losses.append(super().training_step(model, *batch.arguments(), num_items_in_batch))
        return losses[-1]

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The Trainer's loss; in the ascent pass of a bilevel method its value, with the gradient of Q."""
        optimizer = self._stepping
        if optimizer is None or not optimizer.criterion.bilevel or optimizer.phase != "ascent":
            return super().compute_loss(
                model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch
            )
        labels, unshifted = self.labels_of(inputs), inputs.get("labels")  # first, for the Trainer may take them out
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch)
        value, logits = loss.detach(), self.logits_of(outputs)
        outputs = outputs if return_outputs else None
        del loss  # with it goes the memory of its graph, before that of Q is made
        if self._has_shifted is None and self._shifts_by_name(inputs):
            self._has_shifted = _is_loss_of_shifted(value, logits, labels, unshifted, self.accelerator.num_processes)
            labels = unshifted if self._has_shifted is False else labels
        logits, labels = _rows(logits, labels)
        ascent = optimizer.criterion(logits, labels)
        loss = _Reported.apply(  # type: ignore[no-untyped-call]
            ascent * self._weight(optimizer, labels, num_items_in_batch), value
        )
        return (loss, outputs) if return_outputs else loss

    def labels_of(self, inputs: Mapping[str, Any]) -> Tensor:
        """The class indices for Q, one for each row of logits. Override it for other names than `labels`."""
        if inputs.get("shift_labels") is not None:
            return inputs["shift_labels"]
        labels = inputs.get("labels")
        if not isinstance(labels, Tensor):
            raise ValueError(
                f"Q of {_name(self)} needs labels, and the batch has only {', '.join(inputs) or 'nothing'}. Name the "
                "column `labels` (and list it in TrainingArguments(label_names=…) if the Trainer removes it), override "
                'labels_of(inputs), or use method="sam", which takes any loss'
            )
        if labels.is_floating_point():
            raise ValueError(
                f"Q of {_name(self)} takes one class index for each sample, and the labels are {labels.dtype}: a "
                'regression, or several labels a sample. Use method="sam", which takes any loss; for a '
                "classification give labels.long() and config.num_labels of at least 2"
            )
        return F.pad(labels, (0, 1), value=IGNORED)[..., 1:] if self._shifts_labels() else labels

    def logits_of(self, outputs: Any) -> Tensor:
        """The logits for Q, classes last. Override it for a model that returns them by another name."""
        logits = outputs.get("logits") if isinstance(outputs, Mapping) else getattr(outputs, "logits", None)
        if not isinstance(logits, Tensor):
            returned = ", ".join(outputs) if isinstance(outputs, Mapping) else type(outputs).__name__
            raise ValueError(
                f"Q of {_name(self)} needs the model's logits, and {type(self.model).__name__} returned {returned}. "
                'Return a dict with "logits" beside "loss" (return_dict=True for a Hugging Face model), override '
                'logits_of(outputs), or use method="sam", which needs the loss alone'
            )
        return logits

    def _shifts_labels(self) -> bool:
        """Whether the model's loss compares each token with the label of the next one."""
        model = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
        model = model.get_base_model() if hasattr(model, "get_base_model") else model  # of peft
        named = type(model).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
        return self._has_shifted is not False and (named or bool(getattr(self, "_loss_shifts_labels", False)))

    def _shifts_by_name(self, inputs: Mapping[str, Any]) -> bool:
        """Whether labels are shifted because of the model's name alone, and its own loss can show whether it does so.

        BART's decoder and some others compare each token with the label in the same place.
        """
        has_own_loss = self.label_smoother is None and self.compute_loss_func is None
        is_overridden = type(self).labels_of is not SharpnessAwareMixin.labels_of
        return has_own_loss and not is_overridden and "shift_labels" not in inputs and self._shifts_labels()

    def _weight(self, optimizer: SharpnessAware, labels: Tensor, num_items_in_batch: Any) -> Any:
        """What turns the mean over a micro-batch into its part of the update, as the Trainer weighs its own loss."""
        if num_items_in_batch is None or getattr(self, "loss_is_scaled_for_ga", None) is False:
            return 1.0  # the mean: training_step divides by the number of micro-batches
        ranks = self.accelerator.num_processes if self.args.average_tokens_across_devices else 1
        return ranks * objective_options.divisor(optimizer.criterion.ascent, labels) / num_items_in_batch

    def _check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise if it can neither be used as it is nor be the base optimizer."""
        found = _unwrapped(optimizer)
        if isinstance(found, SharpnessAware):
            given = [self._method, self._rho, self._method_options or None]
            if any(value is not None for value in given):
                raise ValueError(
                    f"optimizers= has {type(found).__name__}, which is sharpness-aware already: remove method=, rho= "
                    "and method_options=, or give its base optimizer"
                )
            _refuse_own_loss(found)
            base = found.base
        else:
            base = optimizer
        inner = [value for value in vars(base).values() if isinstance(value, torch.optim.Optimizer)]
        if isinstance(base, AcceleratedOptimizer) or any(isinstance(value, SharpnessAware) for value in inner):
            raise TypeError(
                f"{type(base).__name__} wraps another optimizer in the wrong order. Give the Trainer the plain "
                "optimizer, such as torch.optim.AdamW(model.parameters()), or the sharpness-aware one around it, such "
                "as bisam.BiSAM(base): the Trainer itself prepares it for accelerate"
            )
        ours = {id(param) for param in self.model.parameters()}
        if not any(id(param) in ours for group in base.param_groups for param in group["params"]):
            raise ValueError(
                f"{type(base).__name__} holds no parameter of the Trainer's model: build it from model.parameters() of "
                "the model that the Trainer is given"
            )


class SharpnessAwareTrainer(SharpnessAwareMixin, Trainer):
    """The Trainer with sharpness-aware steps. Beside its own arguments it takes those of `SharpnessAwareMixin`."""


class _Reported(torch.autograd.Function):
    """The value of one loss with the gradient of another: the descent's is logged, the ascent's is propagated."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, value: Tensor) -> Tensor:
        return value.to(loss.dtype, copy=True)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Any:
        return upstream, None


@torch.no_grad()
def _is_loss_of_shifted(loss: Tensor, logits: Tensor, shifted: Tensor, unshifted: Tensor, ranks: int) -> bool | None:
    """Whether the model's loss is not the mean cross entropy of the unshifted labels. None where both are alike."""

    def is_mean_of(labels: Tensor) -> bool:
        mean = F.cross_entropy(*_rows(logits, labels), ignore_index=IGNORED)
        return any(torch.isclose(loss.to(mean) / divisor, mean, rtol=1e-5, atol=0.0) for divisor in {1, ranks})

    if not loss.isfinite():
        return None
    if not is_mean_of(unshifted):
        return True
    return None if is_mean_of(shifted) else False


def _rows(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Logits (N, K) and labels (N), without a copy of the logits."""
    classes = logits.shape[-1]
    if classes < 2:
        raise ValueError(
            f"Q compares classes, and the model's logits of shape {tuple(logits.shape)} have one only: a regression. "
            'Use method="sam", which takes any loss, or a head with config.num_labels of at least 2'
        )
    if labels.numel() * classes != logits.numel():
        raise ValueError(
            f"logits of shape {tuple(logits.shape)} go with one label for each of their rows, got labels of shape "
            f"{tuple(labels.shape)}. Override logits_of(outputs) or labels_of(inputs) to bring them together"
        )
    return logits.reshape(-1, classes), labels.reshape(-1).to(logits.device)


def _unwrapped(optimizer: Any) -> Any:
    """The optimizer in accelerate's wrapper; a plain one stays in it."""
    inner = optimizer
    while isinstance(inner, AcceleratedOptimizer):
        inner = inner.optimizer
    return inner if isinstance(inner, SharpnessAware) else optimizer


def _name(trainer: Any) -> str:
    return type(trainer.sharpness_aware).__name__


def _refuse_own_loss(optimizer: SharpnessAware) -> None:
    """A descent that the Trainer would not compute."""
    descent = optimizer.criterion.descent
    default = CrossEntropy()
    options = ("weight", "ignore_index", "reduction", "label_smoothing")
    if type(descent) is not CrossEntropy or any(getattr(descent, o) != getattr(default, o) for o in options):
        raise ValueError(
            f"the Trainer computes the loss of the descent, so descent={descent} has no effect: remove it. The loss is "
            "the model's own; TrainingArguments(label_smoothing_factor=…) smooths labels, and compute_loss_func= "
            "replaces it"
        )


def _refuse_choosing(optimizer: SharpnessAware) -> None:
    if optimizer.plan.chooses or optimizer.micro_batch is not None:
        raise ValueError(
            f"{type(optimizer).__name__} chooses samples, or perturbs micro-batches, and cannot see them in the "
            "Trainer: use another variant, or a loop of your own with minimize(x, y)"
        )


def _refuse_parallel(trainer: Any) -> None:
    """What shards or updates the weights in a way that two passes cannot use."""
    args = trainer.args
    if trainer.is_deepspeed_enabled:
        raise ValueError(
            "DeepSpeed keeps the weights and runs the update by itself, so a step cannot perturb them in between. "
            "Launch with torchrun (DistributedDataParallel)"
        )
    if trainer.is_fsdp_enabled:
        raise ValueError(
            "FSDP is not supported in the Trainer: its first version keeps flat shards, of which each rank would take "
            "the norm by itself, and the optimizer's checkpoint of the second runs steps without a closure. Launch "
            "without fsdp= (DistributedDataParallel), or write a loop with fully_shard, see docs/training-loops.md"
        )
    if args.n_gpu > 1:
        raise ValueError(
            f"DataParallel on {args.n_gpu} GPUs in one process is not supported: launch with torchrun "
            f"--nproc-per-node {args.n_gpu}, or let CUDA_VISIBLE_DEVICES show one GPU"
        )
    if "lomo" in args.optim or "layerwise" in args.optim:
        raise ValueError(
            f"optim={args.optim!r} updates the weights inside of the backward pass, before a second pass can run: use "
            'another, such as optim="adamw_torch"'
        )
