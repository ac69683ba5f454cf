"""The gradients that parameters hold: whether there are any, taking them away, putting them back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

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


@dataclass
class Leftover:
    """A witness to the gradients that a step left for reading: one of them, and how often it had been written to."""

    param: Tensor
    gradient: Tensor
    version: int

    @classmethod
    def of(cls, params: Sequence[Tensor]) -> Leftover | None:
        for param in reversed(params):
            if param.grad is not None:
                return cls(param, param.grad, param.grad._version)
        return None

    def is_present(self) -> bool:
        return self.param.grad is self.gradient

    def is_untouched(self) -> bool:
        return self.is_present() and self.gradient._version == self.version
