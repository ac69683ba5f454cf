"""The closed form as Triton kernels: one pass over the logits for Q, one more for its gradient, nothing in between.

The value's pass keeps two numbers of each row: S, and Σ_{j≠y} w_j φ′(F_j), the negative of the
gradient's entry of the label. So the gradient's pass is elementwise; it recomputes the terms from the logits, which is
cheaper than to store them. Half-precision logits are read as they are and computed with in float32. A label outside of
0 … K − 1 that is not `ignore_index` makes the value NaN; torch's cross entropy would stop the device.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from bisam.kernels.lower_bound import Formula, Saved

E = tl.constexpr(2.718281828459045)
GAMMA = tl.constexpr(0.541324854612918)  # log(e − 1)
LARGEST_EXPONENT = tl.constexpr(86.0)  # e^86 is a float32, and so is its inverse

ROWS_OF_ONE_SUM = 65536
"""Up to this many rows, one program adds them up."""


@triton.jit
def _capped(exponent):
    return tl.minimum(exponent, LARGEST_EXPONENT, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _weight_and_slope(margin, IS_LOG: tl.constexpr, MU: tl.constexpr, ALPHA: tl.constexpr):
    """w = exp(μ φ(F)) and w φ′(F). Exponents are kept from overflowing: infinity times 0 is not 0."""
    if IS_LOG:
        x = margin - GAMMA
        v = tl.exp(_capped(-x))
        part = 1 / (1 + v)  # σ(x)
        if MU == 1:
            weight = part * E
        else:  # by the logarithm, for the power of a σ(x) that underflows need not
            weight = tl.exp(MU * (1 + tl.minimum(x, 0.0) - tl.log(1 + tl.exp(-tl.abs(x)))))
        slope = weight * (v * part)
    else:  # tanh(a) = 1 − 2/(1 + e^2a), and 1 − tanh² = 4 e^2a/(1 + e^2a)²
        v = tl.exp(_capped(2 * ALPHA * margin))
        part = 1 / (1 + v)
        weight = tl.exp(MU * (1 - 2 * part))
        slope = weight * (4 * ALPHA) * (v * part) * part
    return weight, slope


@triton.jit
def _rows(logits, labels, stride, rows, classes, ignore_index, WIDE: tl.constexpr, ROW_TILE: tl.constexpr):
    """This program's rows: number, label, whether it exists and counts, where it starts, the logit of its label."""
    row = tl.program_id(0) * ROW_TILE + tl.arange(0, ROW_TILE)
    inside = row < rows
    label = tl.load(labels + row, mask=inside, other=0)
    counted = inside & (label != ignore_index)
    known = (label >= 0) & (label < classes)
    start = logits + row.to(tl.int64) * stride
    own = tl.load(start + label, mask=counted & known, other=0.0).to(WIDE)
    own = tl.where(counted & (known == 0), float("nan"), own)
    return row, label, inside, counted, start, own


@triton.jit
def _value_kernel(
    logits,
    labels,
    class_weights,
    values,
    shares,
    sums,
    other_slopes,
    stride,
    rows,
    classes,
    ignore_index,
    IS_LOG: tl.constexpr,
    MU: tl.constexpr,
    ALPHA: tl.constexpr,
    WIDE: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    ROW_TILE: tl.constexpr,
    CLASS_TILE: tl.constexpr,
):
    """Each row's weighted Q, its weight, S, and the sum of its slopes."""
    row, label, inside, counted, start, own = _rows(logits, labels, stride, rows, classes, ignore_index, WIDE, ROW_TILE)
    total = tl.zeros((ROW_TILE,), WIDE)
    back = tl.zeros((ROW_TILE,), WIDE)
    for first in range(0, classes, CLASS_TILE):
        column = first + tl.arange(0, CLASS_TILE)
        mask = counted[:, None] & (column < classes)[None, :]
        z = tl.load(start[:, None] + column[None, :], mask=mask, other=0.0).to(WIDE)
        weight, slope = _weight_and_slope(z - own[:, None], IS_LOG, MU, ALPHA)
        total += tl.sum(tl.where(mask, weight, 0.0), 1)
        back += tl.sum(tl.where(mask & (column[None, :] != label[:, None]), slope, 0.0), 1)
    total = tl.where(counted, total, 1.0)
    share = tl.where(counted, 1.0, 0.0).to(WIDE)
    if HAS_WEIGHTS:
        share *= tl.load(class_weights + label, mask=counted & (label >= 0) & (label < classes), other=0.0).to(WIDE)
    tl.store(sums + row, total, mask=inside)
    tl.store(other_slopes + row, back, mask=inside)
    tl.store(shares + 1 + row, share, mask=inside)
    tl.store(values + row, tl.where(counted, tl.log(total) / MU * share, 0.0), mask=inside)


@triton.jit
def _sum_kernel(values, shares, value, rows, WIDE: tl.constexpr, IS_MEAN: tl.constexpr, TILE: tl.constexpr):
    """The mean or the sum of all rows, always in the same order."""
    whole = tl.zeros((TILE,), WIDE)
    total = tl.zeros((TILE,), WIDE)
    for first in range(0, rows, TILE):
        row = first + tl.arange(0, TILE)
        whole += tl.load(values + row, mask=row < rows, other=0.0)
        total += tl.load(shares + 1 + row, mask=row < rows, other=0.0)
    all_shares = tl.sum(total, 0)
    tl.store(shares, all_shares)
    tl.store(value, tl.sum(whole, 0) / all_shares if IS_MEAN else tl.sum(whole, 0))


@triton.jit
def _gradient_kernel(
    logits,
    labels,
    shares,
    sums,
    other_slopes,
    upstream,
    gradient,
    stride,
    rows,
    classes,
    ignore_index,
    IS_LOG: tl.constexpr,
    MU: tl.constexpr,
    ALPHA: tl.constexpr,
    WIDE: tl.constexpr,
    IS_MEAN: tl.constexpr,
    EACH_ROW: tl.constexpr,
    ROW_TILE: tl.constexpr,
    CLASS_TILE: tl.constexpr,
):
    """w_j φ′(F_j) · share/S · upstream for j ≠ y, and minus their sum for y."""
    row, label, inside, counted, start, own = _rows(logits, labels, stride, rows, classes, ignore_index, WIDE, ROW_TILE)
    factor = tl.load(shares + 1 + row, mask=inside, other=0.0) / tl.load(sums + row, mask=inside, other=1.0)
    if EACH_ROW:
        factor *= tl.load(upstream + row, mask=inside, other=0.0).to(WIDE)
    else:
        factor *= tl.load(upstream).to(WIDE)
    if IS_MEAN:
        factor /= tl.load(shares)
    back = tl.load(other_slopes + row, mask=inside, other=0.0)
    column = tl.program_id(1) * CLASS_TILE + tl.arange(0, CLASS_TILE)
    exists = inside[:, None] & (column < classes)[None, :]
    z = tl.load(start[:, None] + column[None, :], mask=exists, other=0.0).to(WIDE)
    _, slope = _weight_and_slope(z - own[:, None], IS_LOG, MU, ALPHA)
    slope = tl.where(column[None, :] == label[:, None], -back[:, None], slope) * factor[:, None]
    slope = tl.where(counted[:, None], slope, 0.0)
    target = gradient + row.to(tl.int64) * classes
    tl.store(target[:, None] + column[None, :], slope, mask=exists)


Method = TypeVar("Method", bound=Callable[..., Any])


def _on_its_device(method: Method) -> Method:
    """Triton launches on the current device, which need not be that of the logits."""

    @wraps(method)
    def launched(self: Fused, formula: Formula, logits: Tensor, *args: Any, **options: Any) -> Any:
        if not logits.is_cuda:  # interpreted
            return method(self, formula, logits, *args, **options)
        with torch.cuda.device(logits.device):
            return method(self, formula, logits, *args, **options)

    return cast(Method, launched)


class Fused:
    @_on_its_device
    def value(
        self, formula: Formula, logits: Tensor, labels: Tensor, weight: Tensor | None, *, keep: bool
    ) -> tuple[Tensor, Saved]:
        rows, classes = logits.shape
        logits, labels = _by_row(logits), labels.contiguous()
        wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
        values, sums, other_slopes = (logits.new_empty(rows, dtype=wide) for _ in range(3))
        shares = logits.new_empty(1 + rows, dtype=wide)  # their sum first
        row_tile, class_tile, warps = _tiles(classes, largest=4096)
        _value_kernel[(triton.cdiv(rows, row_tile),)](
            logits,
            labels,
            logits if weight is None else weight.contiguous(),
            values,
            shares,
            sums,
            other_slopes,
            logits.stride(0),
            rows,
            classes,
            formula.ignore_index,
            **_constants(formula, wide),
            HAS_WEIGHTS=weight is not None,
            ROW_TILE=row_tile,
            CLASS_TILE=class_tile,
            num_warps=warps,
        )
        value = values if formula.reduction == "none" else _summed(values, shares, is_mean=formula.reduction == "mean")
        return value, (shares, sums, other_slopes) if keep else ()

    @_on_its_device
    def gradient(self, formula: Formula, logits: Tensor, labels: Tensor, saved: Saved, upstream: Tensor) -> Tensor:
        shares, sums, other_slopes = saved
        rows, classes = logits.shape
        logits, labels = _by_row(logits), labels.contiguous()
        gradient = torch.empty((rows, classes), dtype=logits.dtype, device=logits.device)
        row_tile, class_tile, warps = _tiles(classes, largest=1024)
        _gradient_kernel[(triton.cdiv(rows, row_tile), triton.cdiv(classes, class_tile))](
            logits,
            labels,
            shares,
            sums,
            other_slopes,
            upstream.contiguous(),
            gradient,
            logits.stride(0),
            rows,
            classes,
            formula.ignore_index,
            **_constants(formula, shares.dtype),
            IS_MEAN=formula.reduction == "mean",
            EACH_ROW=formula.reduction == "none",
            ROW_TILE=row_tile,
            CLASS_TILE=class_tile,
            num_warps=warps,
        )
        return gradient


def _summed(values: Tensor, shares: Tensor, *, is_mean: bool) -> Tensor:
    if len(values) > ROWS_OF_ONE_SUM:
        torch.sum(shares[1:], 0, out=shares[0])
        return values.sum() / shares[0] if is_mean else values.sum()
    value = values.new_empty(())
    wide = _triton_type(values.dtype)
    _sum_kernel[(1,)](values, shares, value, len(values), WIDE=wide, IS_MEAN=is_mean, TILE=1024, num_warps=8)
    return value


def _tiles(classes: int, largest: int) -> tuple[int, int, int]:
    """Rows and classes that one program holds at a time, and its warps; tuned on an H200."""
    class_tile = min(triton.next_power_of_2(classes), largest)
    row_tile = max(1, 256 // class_tile)
    return row_tile, class_tile, min(8, row_tile * class_tile // 32)


def _constants(formula: Formula, wide: torch.dtype) -> dict[str, Any]:
    return {"IS_LOG": formula.phi == "log", "MU": formula.mu, "ALPHA": formula.alpha, "WIDE": _triton_type(wide)}


def _by_row(logits: Tensor) -> Tensor:
    return logits if logits.stride(1) == 1 else logits.contiguous()


def _triton_type(dtype: torch.dtype) -> tl.dtype:
    return tl.float64 if dtype == torch.float64 else tl.float32
