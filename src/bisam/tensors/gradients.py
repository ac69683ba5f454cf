"""The gradients of parameters as lists outside of `.grad`: take them, add them up, put them back, clip."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from bisam.tensors import buckets

Gradients = list[Tensor | None]
"""One for each parameter, in their order."""


def present(params: Iterable[Tensor]) -> bool:
    return any(param.grad is not None for param in params)


def take(params: Sequence[Tensor], *, copied: bool = False) -> Gradients:
    """The gradients, removed from the parameters. `copied` where a later backward pass writes to their memory."""
    taken = [param.grad for param in params]
    for param in params:
        param.grad = None
    return copy(taken) if copied else taken


def owned(gradients: Gradients) -> Gradients:
    """Clone gradients that are a part of larger memory, all of which a later closure may clear."""
    return [gradient.clone() if gradient is not None and _is_part(gradient) else gradient for gradient in gradients]


def _is_part(gradient: Tensor) -> bool:
    if type(gradient) is not Tensor or gradient.layout is not torch.strided:
        return False
    return gradient.untyped_storage().nbytes() > gradient.numel() * gradient.element_size()


def apart(gradients: Gradients) -> Gradients:
    """Clone gradients that share memory with an earlier one, so that scaling in place scales each once.

    Autograd may leave views of one tensor in the `.grad` of two parameters that are added up.
    """
    if torch.compiler.is_compiling():
        return gradients
    places = [~index if gradient is None else _place(gradient, ~index) for index, gradient in enumerate(gradients)]
    if len({*places}) == len(places):
        return gradients
    seen: set[int] = set()
    found = list(gradients)
    for index, (gradient, place) in enumerate(zip(gradients, places, strict=True)):
        if gradient is not None and place in seen:
            found[index] = gradient.clone()
        seen.add(place)
    return found


def placed(params: Sequence[Tensor], gradients: Gradients) -> Gradients:
    """Redistribute gradients that are DTensors to the placements of their parameters.

    Tensor parallelism leaves gradients whose ranks hold parts of a sum: what follows is computed from each rank's own.
    """
    if all(gradient is None or type(gradient) is Tensor for gradient in gradients):
        return gradients
    return [
        gradient
        if gradient is None or not buckets.is_sharded(gradient) or gradient.placements == param.placements  # type: ignore[attr-defined]
        else gradient.redistribute(placements=param.placements)  # type: ignore[attr-defined]
        for param, gradient in zip(params, gradients, strict=True)
    ]


def _place(gradient: Tensor, otherwise: int) -> int:
    """Where its memory begins, if it is an ordinary tensor."""
    return gradient.data_ptr() if type(gradient) is Tensor and gradient.layout is torch.strided else otherwise


def put(params: Sequence[Tensor], gradients: Gradients) -> None:
    for param, gradient in zip(params, gradients, strict=True):
        param.grad = gradient


@contextmanager
def unchanged(params: Sequence[Tensor], *, copied: bool = False) -> Iterator[None]:
    """Drop what backward passes in the block add to the gradients of these parameters. For `copied` see `take`."""
    before = take(params, copied=copied)
    try:
        yield
    finally:
        put(params, before)


def copy(gradients: Gradients) -> Gradients:
    return [None if gradient is None else gradient.detach().clone() for gradient in gradients]


def add(a: Gradients | None, b: Gradients) -> Gradients:
    """a + b, in the storage of a; where only one of them has a gradient, that one."""
    if a is None:
        return b
    pairs = [(x, y) for x, y in zip(a, b, strict=True) if x is not None and y is not None]
    dense = [(x, y) for x, y in pairs if x.layout is y.layout is torch.strided]
    if dense:
        torch._foreach_add_(*(buckets.locals_of(tensors) for tensors in zip(*dense, strict=True)))
    # dense + sparse is dense; torch does not take them in the other order
    sums = {
        id(x): y + x if y.layout is torch.strided else x + y
        for x, y in pairs
        if not (x.layout is y.layout is torch.strided)
    }
    return [y if x is None else sums.get(id(x), x) for x, y in zip(a, b, strict=True)]


def scale_(gradients: Gradients, factor: float | Tensor) -> Gradients:
    found = buckets.locals_of(g for g in gradients if g is not None)
    if isinstance(factor, Tensor):
        for device in {gradient.device for gradient in found}:
            torch._foreach_mul_([g for g in found if g.device == device], factor.to(device))
    elif factor != 1.0:
        torch._foreach_mul_(found, factor)
    return gradients


def clip_(params: Sequence[Tensor], most: float) -> Tensor:
    """Scale all gradients together, in place, to a norm of `most` where it is larger. Returns the norm before."""
    kinds = buckets.by_kind(_values(param) for param in params if param.grad is not None)
    norm = buckets.norm_of(kinds)
    factor = (most / (norm + 1e-6)).clamp(max=1.0)
    for tensors in kinds:
        torch._foreach_mul_(buckets.locals_of(tensors), factor.to(tensors[0].device))
    return norm


def _values(param: Tensor) -> Tensor:
    """The numbers of a gradient; of a sparse one those that it has, each place once."""
    assert param.grad is not None
    if param.grad.layout is torch.strided:
        return param.grad
    param.grad = param.grad.coalesce()
    return param.grad.values()


def are_zero(params: Iterable[Tensor]) -> bool:
    """Whether all gradients are zeros, as `zero_grad(set_to_none=False)` leaves them. Waits for the device."""
    found = buckets.locals_of(param.grad for param in params if param.grad is not None)
    if any(gradient.layout is not torch.strided for gradient in found):
        return False
    return not torch.stack([gradient.any().to(found[0].device) for gradient in found]).any()


# The gradient that a step leaves in `.grad` for reading is marked, so that the next step can clear it. So are the zeros
# of our `zero_grad`: without a mark they would have to be read.

_MARK = "_bisam_of_last_step"
_ZEROS = "_bisam_zeros"


def mark(params: Iterable[Tensor], *, zeros: bool = False) -> None:
    """Mark the gradients as those of the last step, or as zeros. A gradient that is written to outdates its mark."""
    mark_tensors((param.grad for param in params), zeros=zeros)


def mark_tensors(found: Iterable[Tensor | None], *, zeros: bool = False) -> None:
    """Mark these gradients as those of the last step, or as zeros: see `mark`."""
    for gradient in found:
        if gradient is not None:
            setattr(gradient, _ZEROS if zeros else _MARK, _version(gradient))


def unmark(gradient: Tensor) -> None:
    """Remove the mark, before the gradient is cleared: its tensor may be used again."""
    for name in (_MARK, _ZEROS):
        if hasattr(gradient, name):
            delattr(gradient, name)


def are_cleared(params: Iterable[Tensor]) -> bool:
    """Whether all gradients are marked, and nothing was added to them."""
    return all(p.grad is None or _version(p.grad) in _marks(p.grad) for p in params)


def any_of_last_step(params: Iterable[Tensor]) -> bool:
    """Whether any gradient is marked, whatever was added to it."""
    return any(param.grad is not None and hasattr(param.grad, _MARK) for param in params)


def _marks(gradient: Tensor) -> tuple[int | None, int | None]:
    return getattr(gradient, _MARK, None), getattr(gradient, _ZEROS, None)


def versions(found: Sequence[Tensor | None]) -> list[int | None]:
    """Counts that rise where a gradient is written to."""
    return [None if gradient is None else _version(gradient) for gradient in found]


def _version(gradient: Tensor) -> int:
    if type(gradient) is Tensor:  # looking for an attribute that a tensor lacks is slow
        return gradient._version
    return getattr(gradient, "_local_tensor", gradient)._version
