"""Networks of one's own, from a function in a Python file."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from bisam.lab import spec


def build(name: str, classes: int, pretrained: bool = True) -> nn.Module:
    """What `file.py:function` returns, which decides itself on its weights."""
    make = spec.function(name)
    with spec.calling(name):
        model = _call(make, classes)
    return _checked(model, name)


def called(make: Callable[..., Any], classes: int, name: str) -> nn.Module:
    """The network that a function returns, called with the number of classes if it takes an argument."""
    return _checked(_call(make, classes), name)


def _call(make: Callable[..., Any], classes: int) -> Any:
    return make(classes) if _takes_argument(make) else make()


def _checked(model: Any, name: str) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise ValueError(f"{name} must return a torch.nn.Module, got {type(model).__name__}")
    return model


def _takes_argument(make: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(make).parameters.values()
    except (TypeError, ValueError):
        return False
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return any(one.kind in positional and one.default is inspect.Parameter.empty for one in parameters)
