"""What every diagnostic is given, a model, data and numbers, and how mistakes in it are explained."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from bisam import numbers
from bisam.plan import are_several

Data = tuple[Any, Tensor] | Iterable[tuple[Any, Tensor]]
"""One batch (x, y), or a list or loader of them. x is a tensor, a tuple (`model(*x)`) or a dict (`model(**x)`)."""

Progress = Callable[[int, int], None]
"""Called with the work done and the whole."""


def plain(model: nn.Module) -> nn.Module:
    """The model itself: compiled code cannot be differentiated twice, and wrappers for several devices wait for each
    other's gradients."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def batches_of(data: Data) -> tuple[Iterable[Any], int | None]:
    """The batches, and their number if it is known."""
    if isinstance(data, (tuple, list)) and len(data) == 2 and isinstance(data[1], Tensor):
        return [data], 1
    if isinstance(data, Iterator):
        raise TypeError(
            "data is iterated several times, got an iterator, which can be consumed once. Pass a list of batches or a "
            "DataLoader"
        )
    if not isinstance(data, Iterable) or isinstance(data, Tensor):
        raise TypeError(f"data must be (x, y) or an iterable of such pairs, got {kind(data)}")
    try:
        length = len(data)  # type: ignore[arg-type]
    except TypeError:
        return data, None
    if length == 0:
        raise ValueError("the data is empty: it has no batches")
    return data, length


def to_device(x: Any, device: torch.device) -> Any:
    if isinstance(x, (Tensor, PackedSequence)):
        return x.to(device)  # type: ignore[arg-type]  # torch's annotation of the latter's
    if isinstance(x, Mapping):
        return {key: to_device(value, device) for key, value in x.items()}
    if are_several(x):
        return tuple(to_device(value, device) for value in x)
    return x


def kind(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return f"({', '.join(type(part).__name__ for part in value)})"
    return type(value).__name__


def check_radius(name: str, value: float | Tensor) -> None:
    numbers.non_negative(name, value.item() if isinstance(value, Tensor) else value)


def check_count(name: str, value: int, least: int) -> None:
    if not numbers.is_count(value) or value < least:
        raise ValueError(f"{name} must be a whole number, at least {least}, got {value!r}")
