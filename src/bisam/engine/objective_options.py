"""Options of an objective, be it a module or a function: class weights, ignored labels, reduction."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bisam.objectives import LowerBound, Objective, as_target, label_weights, lower_bound
from bisam.tensors.buckets import widest

_FUNCTIONS = (F.cross_entropy, F.nll_loss, lower_bound)
_OF_SEVERAL_LABELS = (nn.BCELoss, nn.BCEWithLogitsLoss, nn.MultiLabelSoftMarginLoss, nn.SoftMarginLoss)
_BINARY = (
    F.binary_cross_entropy,
    F.binary_cross_entropy_with_logits,
    F.multilabel_soft_margin_loss,
    F.soft_margin_loss,
)
_DEFAULTS = {"weight": None, "ignore_index": -100, "reduction": "mean"}
"""Of these functions, each of logits and one label for each sample."""


def setting(objective: Objective, name: str, default: Any = None) -> Any:
    """An option of an objective: a module's attribute, or what a function is called with.

    >>> setting(nn.CrossEntropyLoss(ignore_index=0), "ignore_index")
    0
    >>> setting(partial(F.cross_entropy, reduction="sum"), "reduction")
    'sum'
    """
    if isinstance(objective, partial):
        return objective.keywords[name] if name in objective.keywords else setting(objective.func, name, default)
    return _DEFAULTS[name] if _is_known_function(objective) else getattr(objective, name, default)


def class_weights(objective: Objective) -> Tensor | None:
    """The class weights; None if its `weight` is something else, such as a layer's matrix."""
    weight = setting(objective, "weight")
    return weight if isinstance(weight, Tensor) and weight.dim() == 1 else None


def is_of_labels(objective: Objective) -> bool:
    """Whether it is known to take logits and one label for each sample, so that errors can be counted."""
    while isinstance(objective, partial):
        objective = objective.func
    return isinstance(objective, (nn.CrossEntropyLoss, nn.NLLLoss, LowerBound)) or _is_known_function(objective)


def takes_several_labels(objective: Objective) -> bool:
    """Whether it is known to take several labels a sample, where later batches may have other targets than the first.

    >>> takes_several_labels(nn.BCEWithLogitsLoss()), takes_several_labels(nn.CrossEntropyLoss())
    (True, False)
    """
    while isinstance(objective, partial):
        objective = objective.func
    return isinstance(objective, _OF_SEVERAL_LABELS) or any(objective is function for function in _BINARY)


def is_sum(objective: Objective) -> bool:
    """Whether its values on parts of a batch add up to that on the whole."""
    return setting(objective, "reduction", "mean") == "sum"


def divisor(objective: Objective, target: Any) -> float | Tensor:
    """What the objective's value on these targets was divided by: 1 for a sum; for a mean the number of labels, less
    what is ignored, by class weights if any. Probabilities (N, K, …) are a label for each K numbers. Targets that are
    no tensor count as one.

    >>> divisor(nn.CrossEntropyLoss(), torch.zeros(2, 4, 5)), divisor(nn.MSELoss(), torch.zeros(2, 4, 5))
    (10.0, 40.0)
    """
    if is_sum(objective) or not isinstance(target, Tensor):
        return 1.0
    if setting(objective, "reduction", "mean") == "batchmean":
        return float(len(target))
    ignore_index = setting(objective, "ignore_index")
    if ignore_index is None or target.is_floating_point():
        classes = target.shape[1] if target.dim() > 1 and is_of_labels(objective) else 1
        return target.numel() / classes
    kept = label_weights(target, class_weights(objective), ignore_index)
    return kept.sum(dtype=widest(target.device))  # 1/3 of a batch is a third in float64 too


def ignored(objective: Objective, target: Tensor) -> Tensor | None:
    """Which samples the objective ignores altogether; None if it cannot ignore any."""
    ignore_index = setting(objective, "ignore_index")
    if ignore_index is None or target.is_floating_point():
        return None
    found = as_target(target) == ignore_index
    return found.flatten(1).all(1) if found.dim() > 1 else found


def shares(objective: Objective, parts: Sequence[Tensor]) -> list[float | Tensor]:
    """What the loss of each part of a batch counts for: weighted by these, the losses add up to that of the batch.

    0 where every label of the batch is ignored: not 0/0, by which some objectives would multiply their gradients.

    >>> shares(torch.nn.CrossEntropyLoss(), [torch.tensor([0, -100]), torch.tensor([1, 2, 3])])[0].item()
    0.25
    """
    if len(parts) == 1 or is_sum(objective):
        return [1.0] * len(parts)
    counts = [divisor(objective, part) for part in parts]
    whole = sum(counts)
    if not isinstance(whole, Tensor):
        return [count / whole for count in counts]
    return [torch.where(whole == 0, 0.0, count / whole) for count in counts]


def per_sample(objective: Objective, logits: Tensor, target: Tensor) -> Tensor:
    """The objective's value for each sample of the batch: the mean over its labels, without those that are ignored.

    >>> per_sample(torch.nn.CrossEntropyLoss(), torch.zeros(3, 2), torch.tensor([0, 1, 1])).shape
    torch.Size([3])
    """
    if setting(objective, "reduction") is None:
        raise ValueError(
            "choosing samples needs an objective with a reduction, such as torch.nn.CrossEntropyLoss(), got "
            f"{objective!r}"
        )
    values = _unreduced(objective)(logits, target)
    if values.dim() == 1:
        return values
    ignore_index = setting(objective, "ignore_index")
    if ignore_index is None or target.is_floating_point():
        return values.flatten(1).mean(1)
    counts = (as_target(target) != ignore_index).flatten(1).sum(1)
    return values.flatten(1).sum(1) / counts.clamp(min=1)


def _unreduced(objective: Any) -> Objective:
    if hasattr(objective, "reduction"):
        each = copy.copy(objective)
        each.reduction = "none"
        return each
    if isinstance(objective, partial) and hasattr(objective.func, "reduction"):
        return partial(_unreduced(objective.func), *objective.args, **objective.keywords)
    return partial(objective, reduction="none")


def _is_known_function(objective: Objective) -> bool:
    return any(objective is function for function in _FUNCTIONS)
