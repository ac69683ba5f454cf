"""Q and its gradient in closed form, each in one pass over the logits: in torch operations, or one Triton kernel.

With F_j = z_j − z_y, w_j = exp(μ φ(F_j)) and S = Σ_j w_j, of which w_y = exp(μ φ(0)) = 1 is one:

    Q = log(S)/μ,      ∂Q/∂z_j = w_j φ′(F_j)/S  for j ≠ y,      ∂Q/∂z_y = −Σ_{j≠y} ∂Q/∂z_j

S lies between 1 and K e^μ, so there is no maximum to subtract first, as other sums of exponentials need, while e^μ is
far from the largest float: up to `LARGEST_MU`. The plain form in `bisam.objectives` takes what is not fused (a φ of the
user's own, probabilities as targets, a larger μ, forward-mode derivatives, `torch.func`), gives the gradient's own
derivatives, and is what the tests compare with.
"""

from __future__ import annotations

import importlib.util
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

LARGEST_MU = 40.0
LARGE, AT_ONCE = 2**20, 2**18
"""Of more logits than the first, such as those of a vocabulary, a CPU takes the second at once: 1 MiB in float32."""
GAMMA = math.log(math.e - 1)

Plain = Callable[[Tensor, Tensor], Tensor]
Saved = tuple[Tensor, ...]


class Formula(NamedTuple):
    """Which Q: the constants of the closed form, and how its rows are reduced."""

    phi: str
    mu: float
    alpha: float
    ignore_index: int
    reduction: str


class Backend(Protocol):
    """A place to compute it, for logits (N, K) and labels (N)."""

    def value(
        self, formula: Formula, logits: Tensor, labels: Tensor, weight: Tensor | None, *, keep: bool
    ) -> tuple[Tensor, Saved]:
        """Q, and what `gradient` needs of it, if that is to be kept."""

    def gradient(self, formula: Formula, logits: Tensor, labels: Tensor, saved: Saved, upstream: Tensor) -> Tensor:
        """∂Q/∂z, times the upstream gradient."""


def can_fuse(formula: Formula, logits: Tensor, target: Tensor, weight: Tensor | None) -> bool:
    """Whether `lower_bound` computes this; it looks at types, shapes and places only."""
    return (
        not torch.compiler.is_compiling()  # the compiler fuses the plain form by itself
        and formula.phi in ("log", "tanh")
        and formula.mu <= LARGEST_MU
        and logits.dim() > 1
        and not target.is_floating_point()
        and not (weight is not None and weight.requires_grad)
        and not torch._C._are_functorch_transforms_active()
        and torch.autograd.forward_ad._current_level < 0
        and backend(logits.device.type) is not None  # last: it tries the kernel once, which must not be inside of vmap
    )


def lower_bound(formula: Formula, logits: Tensor, labels: Tensor, weight: Tensor | None, plain: Plain) -> Tensor:
    """Q of logits (N, K, …) and class indices (N, …); `plain` is the same function, for derivatives of derivatives."""
    if logits.dim() == 2:
        return _Fused.apply(logits, labels, weight, formula, plain)  # type: ignore[no-untyped-call]
    rows = logits.movedim(1, -1).flatten(0, -2)
    values: Tensor = _Fused.apply(rows, labels.flatten(), weight, formula, plain)  # type: ignore[no-untyped-call]
    return values.view(labels.shape) if formula.reduction == "none" else values


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, weight: Tensor | None, formula: Formula, plain: Plain
    ) -> Tensor:
        place = backend(logits.device.type)
        assert place is not None
        if isinstance(place, OnePass) and logits.numel() > LARGE:
            place = ByRows(place)
        value, saved = place.value(formula, logits, labels, weight, keep=ctx.needs_input_grad[0])
        ctx.save_for_backward(logits, labels, *saved)
        ctx.formula, ctx.plain, ctx.place = formula, plain, place
        return value

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Any:
        logits, labels, *saved = ctx.saved_tensors
        if torch.is_grad_enabled():  # the graph of the gradient is wanted too
            gradient = _by_plain(ctx.plain, logits, labels, upstream, create_graph=True)
        elif not _has_storage(upstream):  # a batch of gradients has no memory of its own for a kernel
            gradient = _by_plain(ctx.plain, logits, labels, upstream, create_graph=False)
        else:
            gradient = ctx.place.gradient(ctx.formula, logits, labels, tuple(saved), upstream)
        return gradient, None, None, None, None


def _has_storage(tensor: Tensor) -> bool:
    try:
        tensor.data_ptr()
    except RuntimeError:  # NotImplementedError is one
        return False
    return True


def _by_plain(plain: Plain, logits: Tensor, labels: Tensor, upstream: Tensor, *, create_graph: bool) -> Tensor:
    with torch.enable_grad():
        alias = logits.view_as(logits)  # its hooks are not those of the logits
        if not create_graph:
            alias = alias.detach().requires_grad_()
        value = plain(alias, labels)
    return torch.autograd.grad(value, alias, upstream, create_graph=create_graph)[0]


class OnePass:
    """The closed form in as few torch operations as it takes. The gradient is computed with the value."""

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
        # set to 0, not subtracted from the sum: that would leave little of a confident sample's gradient
        slopes.scatter_(1, column, 0.0)
        return value, (slopes.scatter_(1, column, slopes.sum(1, keepdim=True).neg_()),)

    def gradient(self, formula: Formula, logits: Tensor, labels: Tensor, saved: Saved, upstream: Tensor) -> Tensor:
        (slopes,) = saved
        return (slopes * (upstream.unsqueeze(1) if formula.reduction == "none" else upstream)).to(logits.dtype)


class ByRows:
    """The closed form for some rows at a time. Nothing as large as the logits is kept, and no float32 copy of them is
    made: what the gradient needs is computed again, beside the gradient alone."""

    def __init__(self, rows: OnePass) -> None:
        self._rows = rows

    def value(
        self, formula: Formula, logits: Tensor, labels: Tensor, weight: Tensor | None, *, keep: bool
    ) -> tuple[Tensor, Saved]:
        each = formula._replace(reduction="none")
        values = torch.cat([self._rows.value(each, *part, weight, keep=False)[0] for part in _parts(logits, labels)])
        if formula.reduction == "none":
            return values, () if weight is None else (torch.ones_like(values[0]), weight)
        divisor = torch.ones_like(values[0])
        if formula.reduction == "mean":
            ignored = labels == formula.ignore_index
            divisor = _shares(labels.masked_fill(ignored, 0), ignored, weight, values.dtype).sum()
        return values.sum() / divisor, (divisor,) if weight is None else (divisor, weight)

    def gradient(self, formula: Formula, logits: Tensor, labels: Tensor, saved: Saved, upstream: Tensor) -> Tensor:
        each = formula._replace(reduction="none")
        divisor, weight = (*saved, None, None)[:2]
        if formula.reduction != "none":
            assert divisor is not None
            upstream = torch.where(divisor == 0, 0.0, upstream / divisor)  # if every label is ignored
        upstreams = upstream.expand(len(labels)).unsqueeze(1)
        gradient = torch.empty_like(logits)
        parts = zip(_parts(logits, labels), _split(gradient, logits), _split(upstreams, logits), strict=True)
        for part, place, factor in parts:
            (slopes,) = self._rows.value(each, *part, weight, keep=True)[1]
            place.copy_(slopes.mul_(factor))
        return gradient


def _parts(logits: Tensor, labels: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    return zip(_split(logits, logits), _split(labels, logits), strict=True)


def _split(tensor: Tensor, logits: Tensor) -> Sequence[Tensor]:
    """As many rows at a time as a CPU takes logits at once."""
    return torch.split(tensor, max(1, AT_ONCE // logits.shape[1]))


class _LogTerms:
    """φ(F) = 1 + log σ(x) with x = F − γ, so that w = e^μ σ(x)^μ and φ′ = σ(−x). The factor e^μ is left out."""

    def __init__(self, formula: Formula, logits: Tensor, own: Tensor) -> None:
        self.mu = formula.mu
        self.x = torch.sub(logits, own).sub_(GAMMA)  # in this order: F_y is to be 0 exactly
        # by the logarithm: σ(x) itself may underflow where its power does not
        self.weights = self.x.sigmoid() if self.mu == 1 else F.logsigmoid(self.x).mul_(self.mu).exp_()

    def value(self, sums: Tensor) -> Tensor:
        return sums.log().div_(self.mu).add_(1) if self.mu != 1 else sums.log().add_(1)

    def slopes(self, scale: Tensor) -> Tensor:
        # of −x: 1 − σ(x) would be 0 for samples that are wrong by a large margin
        if self.mu == 1:  # σ(x) σ(−x) is the same for |x|
            return torch.ops.aten.sigmoid_backward(scale, self.x.abs_().neg_().sigmoid_())
        return self.weights.mul_(self.x.neg_().sigmoid_()).mul_(scale)


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
    """The logit of each label; None where one is out of range, as the usual ignore_index is."""
    try:
        return logits.gather(1, column)
    except RuntimeError as error:
        if "out of bounds" not in str(error):
            raise
        return None


def _shares(column: Tensor, ignored: Tensor, weight: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The weight of each row: 0 where ignored, else its class weight or 1."""
    ones = torch.ones_like(column, dtype=dtype) if weight is None else weight.to(dtype)[column]
    return ones.masked_fill(ignored, 0.0)


@cache
def backend(device: str) -> Backend | None:
    """What computes it on such a device, if anything does."""
    if device == "cpu":
        return OnePass()
    if device == "cuda" and importlib.util.find_spec("triton") is not None:
        from bisam.kernels.lower_bound_triton import Fused

        return Fused() if _works(Fused()) else None
    return None


def _works(place: Backend) -> bool:
    """Whether kernels can be built and launched: Triton needs a compiler and a GPU that is new enough."""
    try:
        logits, labels = torch.zeros(2, 2, device="cuda"), torch.zeros(2, dtype=torch.long, device="cuda")
        place.value(Formula("log", 1.0, 0.1, -100, "mean"), logits, labels, None, keep=False)
    except Exception as error:
        warnings.warn(f"the fused bound cannot be used here, and plain torch takes its place: {error}", stacklevel=2)
        return False
    return True
