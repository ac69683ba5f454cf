"""Pretrained networks of timm, by name."""

from __future__ import annotations

import importlib
from typing import Any

from torch import nn


def timm() -> Any:
    """The package, imported when it is needed."""
    try:
        return importlib.import_module("timm")
    except ImportError as error:
        if error.name == "timm":
            raise ValueError("timm:NAME needs the package timm: pip install 'bisam[timm]'") from None
        raise ValueError(
            f"timm is installed and does not import ({error}): install a torchvision that fits this torch"
        ) from None
    except RuntimeError as error:  # torchvision's, beside a torch that it was not built for
        raise ValueError(
            f"timm does not import here ({next(iter(str(error).splitlines()), '')}): its torchvision was built for "
            "another torch, such as one with CUDA. Install a matching pair, or give another model"
        ) from None


def build(name: str, classes: int, pretrained: bool = True) -> nn.Module:
    package = timm()
    try:
        return package.create_model(name, pretrained=pretrained, num_classes=classes)
    except Exception as error:  # no such model, no network, no weights
        reason = next(iter(str(error).splitlines()), "")[:160]
        raise ValueError(
            f"timm could not make {name!r} with its pretrained weights ({type(error).__name__}: {reason}): check the "
            "name by timm.list_models(pretrained=True), and the connection"
        ) from error
