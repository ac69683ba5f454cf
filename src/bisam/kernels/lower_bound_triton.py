"""The closed form as Triton kernels: one pass over the logits for Q, one more for its gradient, nothing in between.

The value's pass keeps S for each row; the gradient's pass recomputes the terms from the logits. Half-precision logits
are read as they are and computed with in float32. A label outside of 0 … K − 1 that is not `ignore_index` makes the
value NaN; torch's cross entropy would stop the device.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from bisam.kernels.lower_bound import Formula, Saved

E = tl.constexpr(2.718281828459045)
GAMMA = tl.constexpr(0.541324854612918)  # log(e − 1)
LARGEST_EXPONENT = tl.constexpr(86.0)  # e^86 is a float32, and so is its inverse

LARGEST_TILE = 4096
"""Elements that one program holds at a time."""

ROWS_OF_ONE_PROGRAM = 256
"""Up to so many rows of few classes, one program computes all of them and their mean: one kernel instead of two."""

ROWS_OF_ONE_SUM = 65536
"""Up to so many rows, one program adds them up."""


@triton.jit
def _weight(margin, IS_LOG: tl.constexpr, MU: tl.constexpr, ALPHA: tl.constexpr):
    """w = exp(μ φ(F)). Exponentials may overflow: what is divided by infinity is 0, as it should be."""
    if IS_LOG and MU == 1:  # e σ(F − γ)
        weight = 1 / (1 + tl.exp(-(margin - GAMMA))) * E
    elif IS_LOG:
        x = margin - GAMMA
        weight = tl.exp(MU * (1 + tl.minimum(x, 0.0) - tl.log(1 + tl.exp(-tl.abs(x)))))
    else:  # tanh(a) = 1 − 2/(1 + e^2a)
        weight = tl.exp(MU * (1 - 2 / (1 + tl.exp(2 * ALPHA * margin))))
    return weight


@triton.jit
def _weight_times_slope(margin, IS_LOG: tl.constexpr, MU: tl.constexpr, ALPHA: tl.constexpr):
    """w φ′(F). Here exponentials must not overflow: infinity times 0 is not 0."""
    if IS_LOG:
        v = tl.exp(tl.minimum(-(margin - GAMMA), LARGEST_EXPONENT))
        part = 1 / (1 + v)  # σ(F − γ)
        if MU == 1:
            product = (v * part) * part * E
        else:
            product = (v * part) * _weight(margin, IS_LOG, MU, ALPHA)
    else:
        v = tl.exp(tl.minimum(2 * ALPHA * margin, LARGEST_EXPONENT))
        part = 1 / (1 + v)
        product = tl.exp(MU * (1 - 2 * part)) * (4 * ALPHA) * (v * part) * part  # α (1 − tanh²) = 4α v/(1 + v)²
    return product


@triton.jit
def _value_kernel(
    logits,
    labels,
    class_weights,
    values,
    shares,
    sums,
    stride,
    rows,
    classes,
    ignore_index,
    IS_LOG: tl.constexpr,
    MU: tl.constexpr,
    ALPHA: tl.constexpr,
    WIDE: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    REDUCE: tl.constexpr,
    IS_MEAN: tl.constexpr,
    ROW_TILE: tl.constexpr,
    CLASS_TILE: tl.constexpr,
):
    """S, the row's weight, and the weighted Q of each row; of all rows together if one program has them all."""
    row = tl.program_id(0) * ROW_TILE + tl.arange(0, ROW_TILE)
    inside = row < rows
    label = tl.load(labels + row, mask=inside, other=0)
    counted = inside & (label != ignore_index)
    known = (label >= 0) & (label < classes)
    start = logits + row.to(tl.int64) * stride
    own = tl.load(start + label, mask=counted & known, other=0.0).to(WIDE)
    own = tl.where(counted & (known == 0), float("nan"), own)
    total = tl.zeros((ROW_TILE,), WIDE)
    for first in range(0, classes, CLASS_TILE):
        column = first + tl.arange(0, CLASS_TILE)
        mask = counted[:, None] & (column < classes)[None, :]
        z = tl.load(start[:, None] + column[None, :], mask=mask, other=0.0).to(WIDE)
        total += tl.sum(tl.where(mask, _weight(z - own[:, None], IS_LOG, MU, ALPHA), 0.0), 1)
    total = tl.where(counted, total, 1.0)
    share = tl.where(counted, 1.0, 0.0).to(WIDE)
    if HAS_WEIGHTS:
        share *= tl.load(class_weights + label, mask=counted & known, other=0.0).to(WIDE)
    value = tl.where(counted, tl.log(total) / MU * share, 0.0)
    tl.store(sums + row, total, mask=inside)
    if REDUCE:
        all_shares = tl.sum(share, 0)
        tl.store(shares + 1 + row, share, mask=inside)
        tl.store(shares, all_shares)
        whole = tl.sum(value, 0)
        tl.store(values, whole / all_shares if IS_MEAN else whole)
    else:
        tl.store(shares + 1 + row, share, mask=inside)
        tl.store(values + row, value, mask=inside)


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
    row = tl.program_id(0) * ROW_TILE + tl.arange(0, ROW_TILE)
    inside = row < rows
    label = tl.load(labels + row, mask=inside, other=0)
    counted = inside & (label != ignore_index)
    known = (label >= 0) & (label < classes)
    start = logits + row.to(tl.int64) * stride
    target = gradient + row.to(tl.int64) * classes
    own = tl.load(start + label, mask=counted & known, other=0.0).to(WIDE)
    own = tl.where(counted & (known == 0), float("nan"), own)
    factor = tl.load(shares + 1 + row, mask=inside, other=0.0) / tl.load(sums + row, mask=counted, other=1.0)
    if EACH_ROW:
        factor *= tl.load(upstream + row, mask=inside, other=0.0).to(WIDE)
    else:
        factor *= tl.load(upstream).to(WIDE)
    if IS_MEAN:
        factor /= tl.load(shares)
    back = tl.zeros((ROW_TILE,), WIDE)
    for first in range(0, classes, CLASS_TILE):
        column = first + tl.arange(0, CLASS_TILE)
        exists = inside[:, None] & (column < classes)[None, :]
        mask = exists & counted[:, None]
        z = tl.load(start[:, None] + column[None, :], mask=mask, other=0.0).to(WIDE)
        slope = _weight_times_slope(z - own[:, None], IS_LOG, MU, ALPHA) * factor[:, None]
        others = column[None, :] != label[:, None]
        slope = tl.where(mask & others, slope, 0.0)
        back += tl.sum(slope, 1)
        # the label's own entry is stored once, below: two stores to one place have no order
        tl.store(target[:, None] + column[None, :], slope, mask=exists & (others | (counted == 0)[:, None]))
    tl.store(target + label, -back, mask=counted & known)


class Fused:
    def value(
        self, formula: Formula, logits: Tensor, labels: Tensor, weight: Tensor | None, *, keep: bool
    ) -> tuple[Tensor, Saved]:
        rows, classes = logits.shape
        logits, labels = _by_row(logits), labels.contiguous()
        row_tile, class_tile = _tiles(rows, classes)
        wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
        reduce = formula.reduction != "none"
        at_once = reduce and rows <= row_tile
        values = logits.new_empty(1 if at_once else rows, dtype=wide)
        shares, sums = logits.new_empty(rows + 1, dtype=wide), logits.new_empty(rows, dtype=wide)
        is_mean = formula.reduction == "mean"
        _value_kernel[(triton.cdiv(rows, row_tile),)](
            logits,
            labels,
            logits if weight is None else weight,
            values,
            shares,
            sums,
            logits.stride(0),
            rows,
            classes,
            formula.ignore_index,
            IS_LOG=formula.phi == "log",
            MU=formula.mu,
            ALPHA=formula.alpha,
            WIDE=_triton_type(wide),
            HAS_WEIGHTS=weight is not None,
            REDUCE=at_once,
            IS_MEAN=is_mean,
            ROW_TILE=row_tile,
            CLASS_TILE=class_tile,
            num_warps=_warps(row_tile * class_tile),
        )
        if reduce and not at_once:
            values = self._summed(values, shares, rows, is_mean=is_mean)
        return (values.view(()) if reduce else values), (shares, sums) if keep else ()

    def gradient(self, formula: Formula, logits: Tensor, labels: Tensor, saved: Saved, upstream: Tensor) -> Tensor:
        shares, sums = saved
        rows, classes = logits.shape
        logits, labels = _by_row(logits), labels.contiguous()
        row_tile, class_tile = _tiles(rows, classes, alone=True)
        gradient = torch.empty((rows, classes), dtype=logits.dtype, device=logits.device)
        _gradient_kernel[(triton.cdiv(rows, row_tile),)](
            logits,
            labels,
            shares,
            sums,
            upstream.contiguous(),
            gradient,
            logits.stride(0),
            rows,
            classes,
            formula.ignore_index,
            IS_LOG=formula.phi == "log",
            MU=formula.mu,
            ALPHA=formula.alpha,
            WIDE=_triton_type(shares.dtype),
            IS_MEAN=formula.reduction == "mean",
            EACH_ROW=formula.reduction == "none",
            ROW_TILE=row_tile,
            CLASS_TILE=class_tile,
            num_warps=_warps(row_tile * class_tile),
        )
        return gradient

    def _summed(self, values: Tensor, shares: Tensor, rows: int, *, is_mean: bool) -> Tensor:
        if rows > ROWS_OF_ONE_SUM:
            torch.sum(shares[1:], 0, out=shares[0])
            return values.sum() / shares[0] if is_mean else values.sum()
        value = values.new_empty(1)
        wide = _triton_type(values.dtype)
        _sum_kernel[(1,)](values, shares, value, rows, WIDE=wide, IS_MEAN=is_mean, TILE=1024, num_warps=8)
        return value


def _tiles(rows: int, classes: int, *, alone: bool = False) -> tuple[int, int]:
    """Rows and classes that one program holds at a time: few rows of many classes, or many of few."""
    class_tile = min(triton.next_power_of_2(classes), LARGEST_TILE)
    if not alone and rows <= ROWS_OF_ONE_PROGRAM and rows * class_tile <= 4 * LARGEST_TILE:
        row_tile = triton.next_power_of_2(rows)
        return row_tile, min(class_tile, max(16, LARGEST_TILE // row_tile))
    return max(1, min(1024 // class_tile, 16)), class_tile


def _warps(elements: int) -> int:
    return max(1, min(16, elements // 512))


def _by_row(logits: Tensor) -> Tensor:
    return logits if logits.stride(1) == 1 else logits.contiguous()


def _triton_type(dtype: torch.dtype) -> tl.dtype:
    return tl.float64 if dtype == torch.float64 else tl.float32
