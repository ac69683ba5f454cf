"""The objectives: cross entropy for the descent, a lower bound of the 0-1 error for the ascent.

A sample with logits z and label y is misclassified when some margin z_j − z_y is positive. With φ below the
step function, φ(x) ≤ 1[x > 0], and the smooth maximum (1/μ) log Σ exp(μ ·), the paper's Lemma 3.1 is

    0-1 error  ≥  Q − log(K)/μ,      Q = mean_i (1/μ) log Σ_j exp(μ φ(z_ij − z_iy))

`lower_bound` is Q, what the ascent maximises; `bound` is Q − log(K)/μ, the guarantee itself. Both take the
arguments of `torch.nn.functional.cross_entropy`. This module is plain torch and the oracle for faster versions.

The paper's public code leaves out the factor 1/μ (ε is the same without it) and computes the margins in a loop
over samples; here it is the formula above and one gather.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from numbers import Integral
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bisam.kernels.lower_bound import GAMMA, Formula, can_fuse
from bisam.kernels.lower_bound import lower_bound as fused_lower_bound
from bisam.numbers import positive

__all__ = [
    "GAMMA",
    "CrossEntropy",
    "LowerBound",
    "Objective",
    "Phi",
    "bound",
    "correct",
    "log_phi",
    "lower_bound",
    "margins",
    "tanh_phi",
    "zero_one_error",
]

Phi = Callable[[Tensor], Tensor]
"""A function below the step: φ(x) ≤ 0 for x ≤ 0 and φ(x) ≤ 1 for x > 0, elementwise and differentiable."""

Objective = Callable[[Tensor, Tensor], Tensor]
"""(output, target) → scalar loss, as `torch.nn.CrossEntropyLoss()` is."""

PAPER_MU = {"log": 1.0, "tanh": 10.0}


def log_phi(x: Tensor) -> Tensor:
    """φ(x) = 1 − log(1 + e^(γ−x)) with γ = log(e − 1): zero at zero, one at infinity, linear on the left.

    Examples:
        >>> log_phi(torch.tensor([-2.0, 0.0, 2.0]))
        tensor([-1.6171,  0.0000,  0.7909])
    """
    # log-sigmoid, not softplus: torch's softplus turns linear at 20, which float64 notices
    return 1 + F.logsigmoid(x - GAMMA)


def tanh_phi(x: Tensor, alpha: float = 0.1) -> Tensor:
    """φ(x) = tanh(αx).

    Examples:
        >>> tanh_phi(torch.tensor([-2.0, 0.0, 2.0]))
        tensor([-0.1974,  0.0000,  0.1974])
    """
    return torch.tanh(alpha * x)


def margins(logits: Tensor, labels: Tensor) -> Tensor:
    """F_j = z_j − z_y for logits (N, K, …) and class indices (N, …) in int64.

    Examples:
        >>> margins(torch.tensor([[1.0, 3.0, 2.0]]), torch.tensor([2])).tolist()
        [[-1.0, 1.0, 0.0]]
    """
    return logits - _of_label(logits, labels)


def lower_bound(
    logits: Tensor,
    target: Tensor,
    *,
    phi: str | Phi = "log",
    mu: float | None = None,
    alpha: float = 0.1,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> Tensor:
    """Q, the objective of the ascent, with the calling conventions of `F.cross_entropy`.

    `logits` are (K), (N, K) or (N, K, d1, …). `target` holds class indices, or probabilities of the same shape as
    `logits`; then the result is the expectation Σ_c p_c Q(z, c), which costs K times as much in time and memory.
    Half-precision logits are taken to float32 first, and the result is float32.

    Args:
        phi: "log" for 1 − log(1 + e^(γ−x)), "tanh" for tanh(αx), or any callable below the step function.
        mu: sharpness of the smooth maximum; None is the paper's 1 for "log" and 10 for "tanh".
        alpha: slope of tanh.
        weight: a weight for each class, as in `F.cross_entropy`.
        ignore_index: class index that does not count.
        reduction: "mean", "sum" or "none".

    Examples:
        >>> round(lower_bound(torch.zeros(4, 10), torch.zeros(4, dtype=torch.long)).item(), 4)  # log(10)
        2.3026
    """
    objective = LowerBound(phi, mu, alpha, weight=weight, ignore_index=ignore_index, reduction=reduction)
    return objective(logits, target)


def bound(
    logits: Tensor,
    target: Tensor,
    *,
    phi: str | Phi = "log",
    mu: float | None = None,
    alpha: float = 0.1,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> Tensor:
    """Q − log(K)/μ, which never exceeds the 0-1 error (of the same class weights). Arguments as for `lower_bound`.

    With probabilities as target it is below the expected error of a label drawn from them.

    Examples:
        >>> logits, target = torch.tensor([[5.0, 0.0, 0.0], [0.0, 9.0, 0.0]]), torch.tensor([0, 0])
        >>> bound(logits, target, phi="tanh").item() <= zero_one_error(logits, target).item()
        True
    """
    objective = LowerBound(phi, mu, alpha, weight=weight, ignore_index=ignore_index, reduction=reduction)
    return objective.bound(logits, target)


class LowerBound(nn.Module):
    """Q as a module, as `torch.nn.CrossEntropyLoss` is for cross entropy. Arguments as for `lower_bound`.

    Examples:
        >>> LowerBound("tanh", mu=20)
        LowerBound(phi=tanh, mu=20, alpha=0.1)
    """

    weight: Tensor | None

    def __init__(
        self,
        phi: str | Phi = "log",
        mu: float | None = None,
        alpha: float = 0.1,
        *,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
    ) -> None:
        super().__init__()
        self.phi = phi
        _resolve(phi, alpha)
        self.mu = _checked_mu(phi, mu)
        self.alpha = positive("alpha", alpha)
        if reduction not in ("mean", "sum", "none"):
            raise ValueError(f'reduction must be "mean", "sum" or "none", got {reduction!r}')
        given: Any = ignore_index
        if not isinstance(given, Integral):
            raise TypeError(f"ignore_index must be a whole number, such as -100, got {ignore_index!r}")
        self.register_buffer("weight", weight)
        self.ignore_index = ignore_index
        self.reduction = reduction

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        check_classification(logits, target)
        self._check_weight(logits)
        phi = self.phi if isinstance(self.phi, str) else "own"
        formula = Formula(phi, self.mu, self.alpha, self.ignore_index, self.reduction)
        if not can_fuse(formula, logits, target, self.weight):
            return self.plain(logits, target)
        try:
            return fused_lower_bound(formula, logits, as_target(target), self.weight, self.plain)
        except (RuntimeError, IndexError) as error:
            raise _explained(error, target, logits.shape[1]) from None

    def plain(self, logits: Tensor, target: Tensor) -> Tensor:
        """The same in plain torch: what the fused kernels of `bisam.kernels` are measured against."""
        values, shares = self._evaluate(logits, target)
        # as in F.cross_entropy: with probabilities the mean over samples, whatever the class weights
        return self._reduced(values, shares.numel() if target.is_floating_point() else shares.sum())

    def bound(self, logits: Tensor, target: Tensor) -> Tensor:
        """Q − log(K)/μ: the lower bound of the 0-1 error that Q stands for."""
        values, shares = self._evaluate(logits, target)
        return self._reduced(values - self.slack(logits) * shares, shares.sum())

    def slack(self, logits: Tensor) -> float:
        """log(K)/μ: how far Q may lie above the 0-1 error."""
        return math.log(max(logits.shape[_class_dim(logits)], 1)) / self.mu

    def extra_repr(self) -> str:
        phi = self.phi if isinstance(self.phi, str) else getattr(self.phi, "__name__", repr(self.phi))
        return f"phi={phi}, mu={self.mu:g}" + (f", alpha={self.alpha:g}" if phi == "tanh" else "")

    def _evaluate(self, logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Each sample's weighted Q, and that weight: 0 where ignored, 1 without class weights."""
        check_classification(logits, target)
        self._check_weight(logits)
        target = as_target(target)
        logits = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
        if logits.dim() == 1:
            values, shares = self._per_sample(logits.unsqueeze(0), target.unsqueeze(0))
            return values.squeeze(0), shares.squeeze(0)
        return self._per_sample(logits, target)

    def _reduced(self, values: Tensor, divisor: float | Tensor) -> Tensor:
        if self.reduction == "none":
            return values
        return values.sum() if self.reduction == "sum" else values.sum() / divisor

    def _per_sample(self, logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        if target.is_floating_point():
            return self._expectation(logits, target.to(logits.dtype))
        counted = target != self.ignore_index
        labels = target.masked_fill(~counted, 0)
        classes = _along_classes(logits)
        q = self._smooth_maximum(_constant_where(classes == labels.unsqueeze(1), margins(logits, labels)))
        share = counted.to(q.dtype)
        if self.weight is not None:
            share = share * self.weight.to(q.dtype)[labels]
        return torch.where(counted, q, 0.0) * share, share

    def _expectation(self, logits: Tensor, probabilities: Tensor) -> tuple[Tensor, Tensor]:
        if self.ignore_index >= 0:
            raise ValueError(
                "ignore_index applies to class indices only: remove it for targets that are probabilities, got "
                f"{self.ignore_index}"
            )
        if self.weight is not None:
            shape = (1, -1) + (1,) * (logits.dim() - 2)
            probabilities = probabilities * self.weight.to(logits.dtype).view(shape)
        classes = _along_classes(logits)
        is_own = classes.unsqueeze(2) == classes.unsqueeze(1)
        q = self._smooth_maximum(
            _constant_where(is_own, logits.unsqueeze(2) - logits.unsqueeze(1))  # over dimension 1, for each label
        )
        return (probabilities * q).sum(1), probabilities.sum(1)

    def _smooth_maximum(self, margins: Tensor) -> Tensor:
        phi = _resolve(self.phi, self.alpha)  # anew: both may be changed
        return torch.logsumexp(self.mu * phi(margins), dim=1) / self.mu

    def _check_weight(self, logits: Tensor) -> None:
        classes = logits.shape[_class_dim(logits)]
        if self.weight is not None and self.weight.shape != (classes,):
            raise ValueError(
                f"weight must have one number for each of the {classes} classes, got shape {tuple(self.weight.shape)}"
            )


class CrossEntropy(nn.CrossEntropyLoss):
    """`torch.nn.CrossEntropyLoss` with the same values, and clearer errors where logits and labels do not fit.

    Examples:
        >>> CrossEntropy()(torch.zeros(1, 3), torch.tensor([3]))
        Traceback (most recent call last):
        IndexError: labels must lie in 0 … 2, for logits of 3 classes; got labels from 3 to 3
        >>> CrossEntropy(label_smoothing=0.1)
        CrossEntropy(label_smoothing=0.1)
    """

    def extra_repr(self) -> str:
        options = {"label_smoothing": 0.0, "ignore_index": -100, "reduction": "mean"}
        changed = [f"{name}={value}" for name in options if (value := getattr(self, name)) != options[name]]
        return ", ".join([*changed, *(["weight=…"] if self.weight is not None else [])])

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        check_classification(logits, target)
        try:
            return super().forward(logits, as_target(target))
        except IndexError:
            raise _outside(target, logits.shape[_class_dim(logits)]) from None


def logits_of(output: Any) -> Tensor:
    """What a model returned, or its logits, as Hugging Face models return them."""
    return getattr(output, "logits", output)


def correct(logits: Tensor, target: Tensor, *, ignore_index: int = -100) -> Tensor:
    """Which samples are classified correctly: their label is the first of the likeliest classes.

    A tie is not right whatever the label: logits of low precision tie now and then, those of a collapsed model always.
    What is not a number is wrong. With probabilities as target, the label is the most probable class. What is ignored
    counts as class 0.

    Examples:
        >>> correct(torch.tensor([[1.0, 1.0], [1.0, 1.0], [0.0, 1.0]]), torch.tensor([0, 1, 0])).tolist()
        [True, False, False]
    """
    dim = _class_dim(logits)
    target = as_target(target)
    labels = target.argmax(dim) if target.is_floating_point() else target.masked_fill(target == ignore_index, 0)
    largest, predicted = logits.max(dim)
    return (predicted == labels) & (_of_label(logits, labels, dim).squeeze(dim) == largest)  # which NaN is not


def zero_one_error(logits: Tensor, target: Tensor, *, weight: Tensor | None = None, ignore_index: int = -100) -> Tensor:
    """The fraction of samples that are misclassified, by class weights if any: what `bound` bounds.

    With probabilities as target, the label is the most probable class.

    Examples:
        >>> zero_one_error(torch.tensor([[1.0, 2.0], [2.0, 1.0]]), torch.tensor([0, 0])).item()
        0.5
    """
    check_classification(logits, target)
    wrong = (~correct(logits, target, ignore_index=ignore_index)).float()
    if target.is_floating_point():  # which no class index can ignore
        share = label_weights(target.argmax(_class_dim(logits)), weight, -100)
    else:
        share = label_weights(target, weight, ignore_index)
    return (wrong * share).sum() / share.sum()


def label_weights(target: Tensor, weight: Tensor | None, ignore_index: int) -> Tensor:
    """What each class index counts for: 0 where ignored, else its class weight or 1.

    One that is no class counts as 0: the objective refuses it in words when it sees it.
    """
    target = as_target(target)
    counted = target != ignore_index
    if weight is None:
        return counted.float()
    counted &= (target >= 0) & (target < len(weight))
    return torch.where(counted, weight[target.masked_fill(~counted, 0)], 0.0)


def as_target(target: Tensor) -> Tensor:
    """Class indices as int64, whatever integers they came as: in uint8, -100 would be class 156."""
    return target if target.is_floating_point() else target.long()


def check_classification(logits: Tensor, target: Tensor) -> None:
    """Refuse what cannot be logits and labels. Looks at shapes and types only, so it never waits for a device."""
    for name, value in {"logits": logits, "labels": target}.items():
        if not isinstance(value, Tensor):
            raise TypeError(
                f"{name} must be a tensor, got {type(value).__name__}. If the model returns more than logits, or the "
                "loader more than labels, take them out in a closure for step(), or wrap the model or the loader"
            )
    if logits.dim() == 0 or not logits.is_floating_point():
        raise TypeError(f"logits must be a floating-point tensor (K), (N, K) or (N, K, d1, …), got {_describe(logits)}")
    dim = _class_dim(logits)
    if logits.shape[dim] < 2:
        raise ValueError(
            f"a classification needs at least two classes, got logits of shape {tuple(logits.shape)}. For two classes "
            "give the model two logits; for a regression give SAM another loss, as in descent=torch.nn.MSELoss(), and "
            "measure it with objective=torch.nn.MSELoss()"
        )
    if logits.numel() == 0:
        raise ValueError(f"the batch is empty: logits have shape {tuple(logits.shape)}")
    indices = logits.shape[:dim] + logits.shape[dim + 1 :]
    if target.is_floating_point():
        if target.shape != logits.shape:
            raise TypeError(
                f"floating-point targets are probabilities of the logits' shape {tuple(logits.shape)}, got "
                f"{_describe(target)}. If they are class indices, pass target.long()"
            )
    elif target.dtype == torch.bool or target.is_complex():
        remedy = ". Pass target.long()" if target.dtype == torch.bool else ""
        raise TypeError(f"class indices must be integers, got {_describe(target)}{remedy}")
    elif target.shape != indices:
        remedy = ""
        if logits.dim() > 2 and target.shape == logits.shape[:-1]:
            remedy = ". The classes come second: give logits.transpose(1, -1), or flatten both"
        elif target.shape == logits.shape:
            remedy = ". If they are one-hot, pass target.argmax(1) or target.float()"
        elif target.shape == (*indices, 1):
            remedy = f". Pass target.squeeze({len(indices)})"
        raise ValueError(
            f"logits of shape {tuple(logits.shape)} go with class indices of shape {tuple(indices)}, got "
            f"{_describe(target)}{remedy}"
        )


def _of_label(logits: Tensor, labels: Tensor, dim: int = 1) -> Tensor:
    try:
        return logits.gather(dim, labels.unsqueeze(dim))
    except RuntimeError as error:  # on a CPU; CUDA's own assertion stops the kernel
        raise _explained(error, labels, logits.shape[dim]) from None


def _explained(error: Exception, labels: Tensor, classes: int) -> Exception:
    return _outside(labels, classes) if "out of bounds" in str(error) else error


def _outside(labels: Tensor, classes: int) -> IndexError:
    is_outside = (labels < 0) | (labels >= classes)
    outside = {*labels[is_outside].tolist()}
    remedy = ""
    if len(outside) == 1 and classes not in outside and not bool(is_outside.all()):
        option = f"ignore_index={(mark := outside.pop())}"
        remedy = (
            f". If {mark} marks labels to ignore, give descent=torch.nn.CrossEntropyLoss({option}), or, beside a "
            f"descent of your own, ascent=bisam.LowerBound({option})"
        )
    return IndexError(
        f"labels must lie in 0 … {classes - 1}, for logits of {classes} classes; got labels from "
        f"{int(labels.min())} to {int(labels.max())}{remedy}"
    )


def _along_classes(logits: Tensor) -> Tensor:
    """The number of each class, in a shape that goes with logits (N, K, …)."""
    return torch.arange(logits.shape[1], device=logits.device).view(1, -1, *(1,) * (logits.dim() - 2))


def _constant_where(is_own: Tensor, margins: Tensor) -> Tensor:
    """The margins; those of each label to itself, z_y − z_y, as constants. Their slopes cancel, and leave an error of
    rounding that is larger than the gradient of a sample with a large margin."""
    return torch.where(is_own, margins.detach(), margins)


def _class_dim(logits: Tensor) -> int:
    return 0 if logits.dim() == 1 else 1


def _describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)}"


def _resolve(phi: str | Phi, alpha: float) -> Phi:
    if phi == "log":
        return log_phi
    if phi == "tanh":
        return partial(tanh_phi, alpha=alpha)
    if callable(phi):
        return phi
    raise ValueError(f'phi must be "log", "tanh" or a callable, got {phi!r}')


def _checked_mu(phi: str | Phi, mu: float | None) -> float:
    if mu is not None:
        return positive("mu", mu)
    if not isinstance(phi, str):
        raise ValueError("mu must be given for a phi of your own: the paper's values are for its own two")
    return PAPER_MU[phi]
