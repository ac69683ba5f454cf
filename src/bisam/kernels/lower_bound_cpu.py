"""The closed form in torch operations, as few as it takes. The gradient is computed with the value, from its terms."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from bisam.kernels.lower_bound import Formula, Saved

GAMMA = math.log(math.e - 1)


class OnePass:
    def value(
        self, formula: Formula, logits: Tensor, labels: Tensor, weight: Tensor | None, *, keep: bool
    ) -> tuple[Tensor, Saved]:
        logits = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
        column = labels.unsqueeze(1)
        own, shares, ignored = None, None, None
        if weight is None and formula.ignore_index < 0:
            own = _gathered(logits, column)
        if own is None:  # something is ignored, or has a weight
            ignored = column == formula.ignore_index
            column = column.masked_fill(ignored, 0)
            own = logits.gather(1, column)
            shares = _shares(column, ignored, weight, logits.dtype)
        terms = _LogTerms(formula, logits, own) if formula.phi == "log" else _TanhTerms(formula, logits, own)
        sums = terms.weights.sum(1, keepdim=True)
        values = terms.value(sums)
        divisor = 1.0 if formula.reduction != "mean" else len(labels) if shares is None else shares.sum()
        if shares is not None and ignored is not None:  # what is ignored may hold anything
            values = (values * shares).masked_fill_(ignored, 0.0)
        value = values.squeeze(1).clone() if formula.reduction == "none" else values.sum() / divisor
        if not keep:
            return value, ()
        slopes = terms.slopes((sums * divisor).reciprocal_() if shares is None else shares / (sums * divisor))
        if ignored is not None:
            slopes.masked_fill_(ignored, 0.0)
        slopes.scatter_(
            1, column, 0.0
        )  # to subtract it from the sum would leave little of a confident sample's gradient
        return value, (slopes.scatter_(1, column, slopes.sum(1, keepdim=True).neg_()),)

    def gradient(self, formula: Formula, logits: Tensor, labels: Tensor, saved: Saved, upstream: Tensor) -> Tensor:
        (slopes,) = saved
        return (slopes * (upstream.unsqueeze(1) if formula.reduction == "none" else upstream)).to(logits.dtype)


class _LogTerms:
    """φ(F) = 1 + log σ(x) with x = F − γ, so that w = e^μ σ(x)^μ and φ′ = 1 − σ(x). The factor e^μ is left out."""

    def __init__(self, formula: Formula, logits: Tensor, own: Tensor) -> None:
        self.mu = formula.mu
        x = torch.sub(logits, own).sub_(GAMMA)  # in this order: F_y is to be 0 exactly
        if self.mu == 1:
            self.weights = self.sigmoid = x.sigmoid_()
        else:  # by the logarithm: σ(x) itself may underflow where its power does not
            logarithm = F.logsigmoid(x)
            self.sigmoid = x.sigmoid_()
            self.weights = logarithm.mul_(self.mu).exp_()

    def value(self, sums: Tensor) -> Tensor:
        return sums.log().div_(self.mu).add_(1) if self.mu != 1 else sums.log().add_(1)

    def slopes(self, scale: Tensor) -> Tensor:
        if self.mu == 1:
            return torch.ops.aten.sigmoid_backward(scale, self.sigmoid)  # scale · σ(1 − σ)
        return self.weights.mul_(self.sigmoid.neg_().add_(1)).mul_(scale)


class _TanhTerms:
    """φ(F) = t = tanh(αF), so that w = exp(μ t) and φ′ = α(1 − t²)."""

    def __init__(self, formula: Formula, logits: Tensor, own: Tensor) -> None:
        self.mu, self.alpha = formula.mu, formula.alpha
        self.tanh = torch.sub(logits, own).mul_(self.alpha).tanh_()
        self.weights = torch.mul(self.tanh, self.mu).exp_()

    def value(self, sums: Tensor) -> Tensor:
        return sums.log().div_(self.mu)

    def slopes(self, scale: Tensor) -> Tensor:
        return torch.ops.aten.tanh_backward(self.weights.mul_(scale.mul_(self.alpha)), self.tanh)


def _gathered(logits: Tensor, column: Tensor) -> Tensor | None:
    """The logit of each label; None where one is outside, as the usual ignore_index is: asking first costs more."""
    try:
        return logits.gather(1, column)
    except RuntimeError as error:
        if "out of bounds" not in str(error):
            raise
        return None


def _shares(column: Tensor, ignored: Tensor, weight: Tensor | None, dtype: torch.dtype) -> Tensor:
    """What each row counts for: 0 where ignored, else its class weight or 1."""
    ones = torch.ones_like(column, dtype=dtype) if weight is None else weight.to(dtype)[column]
    return ones.masked_fill(ignored, 0.0)
