"""The gradients that parameters hold: whether there are any, taking them away, putting them back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

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


def clip_(params: Sequence[Tensor], most: float) -> Tensor:
    """Scale all gradients together, in place, to a norm of `most` where it is larger. Returns the norm before."""
    buckets: dict[tuple[Any, ...], list[Tensor]] = {}
    for param in params:
        if param.grad is not None:
            values = _values(param)
            buckets.setdefault(sharding.kind(values), []).append(values)
    norm = sharding.norm(buckets.values())
    factor = (most / (norm + 1e-6)).clamp(max=1.0)
    for bucket in buckets.values():
        torch._foreach_mul_([sharding.local(tensor) for tensor in bucket], factor.to(bucket[0].device))
    return norm


def _values(param: Tensor) -> Tensor:
    """The numbers of a gradient; of a sparse one those that it has, each place once."""
    assert param.grad is not None
    if param.grad.layout is torch.strided:
        return param.grad
    param.grad = param.grad.coalesce()
    return param.grad.values()


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


_MARK = "_bisam_gradient"


def mark(params: Iterable[Tensor], what: str) -> None:
    """Write on the gradients what they are, to know them again; whatever is added to one later shows."""
    for param in params:
        if param.grad is not None:
            setattr(param.grad, _MARK, (what, _version(param.grad)))


def unmark(params: Iterable[Tensor]) -> None:
    """What is marked is to be cleared, and its tensor may be used again."""
    for param in params:
        if param.grad is not None and hasattr(param.grad, _MARK):
            delattr(param.grad, _MARK)


def are_as_marked(params: Iterable[Tensor]) -> bool:
    """Whether all that the parameters hold is marked, and nothing was added to it."""
    for param in params:
        gradient = param.grad
        if gradient is not None and getattr(gradient, _MARK, ("", None))[1] != _version(gradient):
            return False
    return True


def any_marked(params: Iterable[Tensor], what: str) -> bool:
    """Whether any was marked as that, whatever was added to it."""
    return any(param.grad is not None and getattr(param.grad, _MARK, ("", None))[0] == what for param in params)


def versions(params: Iterable[Tensor]) -> dict[Tensor, tuple[int, int]]:
    """Which gradient each has, of those that have one, and how often it was written to: another one if any changed."""
    return {param: (id(param.grad), _version(param.grad)) for param in params if param.grad is not None}


def fill(params: Iterable[Tensor]) -> None:
    """Zeros, marked as such, for those that have none."""
    missing = [param for param in params if param.grad is None and param.requires_grad]
    for param in missing:
        param.grad = torch.zeros_like(param)
    mark(missing, "zeros")


def drop_zeros(params: Iterable[Tensor]) -> None:
    """Take away what was marked as zeros, and to which nothing was added."""
    for param in params:
        if param.grad is not None and getattr(param.grad, _MARK, None) == ("zeros", _version(param.grad)):
            param.grad = None


def _version(gradient: Tensor) -> int:
    if type(gradient) is Tensor:  # asking a tensor for what it has not is slow
        return gradient._version
    return getattr(gradient, "_local_tensor", gradient)._version
