"""The gradients that parameters hold: whether there are any, taking them away, putting them back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from bisam import sharding

Gradients = list[Tensor | None]
"""One for each parameter, in their order."""


def present(params: Iterable[Tensor]) -> bool:
    return any(param.grad is not None for param in params)


def take(params: Sequence[Tensor], *, copied: bool = False) -> Gradients:
    """The gradients, which the parameters hold no more; copies of them where their memory will be used again."""
    taken = copy(params) if copied else [param.grad for param in params]
    for param in params:
        param.grad = None
    return taken


def put(params: Sequence[Tensor], gradients: Gradients) -> None:
    for param, gradient in zip(params, gradients, strict=True):
        param.grad = gradient


def copy(params: Sequence[Tensor]) -> Gradients:
    return [None if param.grad is None else param.grad.detach().clone() for param in params]


def scale_(params: Sequence[Tensor], factor: float) -> None:
    if factor != 1.0:
        torch._foreach_mul_([sharding.local(p.grad) for p in params if p.grad is not None], factor)


def add(a: Gradients | None, b: Gradients, factor: float | Tensor) -> Gradients:
    """a + factor · b, in the storage of either; where only one has a gradient, that one."""
    for tensor in b:
        if tensor is not None and not (isinstance(factor, float) and factor == 1.0):
            tensor.mul_(factor)
    if a is None:
        return b
    return [y if x is None else x if y is None else x.add_(y) for x, y in zip(a, b, strict=True)]


class Leftover:
    """The gradients that parameters hold now, and how often each was written to: to know them again later."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        self._seen = {param: (param.grad, param.grad._version) for param in params if param.grad is not None}

    def is_present(self) -> bool:
        """Whether any of them is where it was, whatever was added to it."""
        return any(param.grad is gradient for param, (gradient, _) in self._seen.items())

    def is_all_of(self, params: Iterable[Tensor]) -> bool:
        """Whether these parameters hold no other gradients, and nothing was added to these."""
        return all(param.grad is None or self._holds(param, param.grad) for param in params)

    def _holds(self, param: Tensor, gradient: Tensor) -> bool:
        seen, version = self._seen.get(param, (None, 0))
        return gradient is seen and gradient._version == version
