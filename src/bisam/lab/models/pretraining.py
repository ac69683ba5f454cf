"""What a pretrained network expects of images: their size, and how their pixels are normalised."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from bisam.lab import spec

KNOWN = {"imagenet": (0.485, 0.456, 0.406), "half": (0.5, 0.5, 0.5)}
"""Means of the pixels, by the words of a configuration."""


class Expected(NamedTuple):
    """The side of the images, None where any will do; and "imagenet", "half" or "data" for the normalisation."""

    size: int | None
    pixels: str


def expected(model: nn.Module, name: str) -> Expected:
    """As timm's networks carry it, or the folder of one of transformers."""
    timm = getattr(model, "pretrained_cfg", None) or {}
    if timm:
        return Expected(int(timm["input_size"][-1]), _nearest(timm["mean"]))
    size = getattr(getattr(model, "config", None), "image_size", None)
    source, place = spec.parse_model(name)
    if source != spec.TRANSFORMERS or size is None:
        return Expected(None, "data")
    return Expected(size if isinstance(size, int) else int(size[0]), _nearest(_processor(place).get("image_mean")))


def _processor(place: str) -> dict[str, Any]:
    try:
        return json.loads((Path(spec.folder_or_name(place)) / "preprocessor_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def _nearest(mean: Sequence[float] | None) -> str:
    """
    >>> _nearest((0.485, 0.456, 0.406)), _nearest(None)
    ('imagenet', 'half')
    """
    if mean is None:
        return "half"
    return min(KNOWN, key=lambda word: sum(abs(a - b) for a, b in zip(KNOWN[word], mean, strict=False)))
