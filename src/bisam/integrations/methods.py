"""The variants by name, for the lab and for frameworks that are configured by strings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from bisam.engine.optimizer import SharpnessAware
from bisam.variants import (
    ASAM,
    ESAM,
    GSAM,
    KSAM,
    MSAM,
    RSAM,
    SAM,
    WSAM,
    ABiSAM,
    BiSAM,
    EBiSAM,
    FisherSAM,
    FriendlySAM,
    LookSAM,
    VaSSO,
)

Build = Callable[..., SharpnessAware]
"""Wraps a base optimizer: `bisam.BiSAM` or any other variant, or a function with the same arguments."""

VARIANTS: dict[str, Build] = {
    "sam": SAM,
    "asam": ASAM,
    "bisam-log": BiSAM,
    "bisam-tanh": partial(BiSAM, phi="tanh"),
    "abisam-log": ABiSAM,
    "abisam-tanh": partial(ABiSAM, phi="tanh"),
    "esam": ESAM,
    "ebisam-log": EBiSAM,
    "ebisam-tanh": partial(EBiSAM, phi="tanh"),
    "ksam": KSAM,
    "fishersam": FisherSAM,
    "fsam": FriendlySAM,
    "gsam": GSAM,
    "looksam": LookSAM,
    "msam": MSAM,
    "rsam": RSAM,
    "vasso": VaSSO,
    "wsam": WSAM,
}
"""All of them: the one list of their names."""

CHOOSING = ("esam", "ebisam-log", "ebisam-tanh", "ksam")
"""Those that choose samples and need `minimize`."""

CLOSURE_METHODS = {name: variant for name, variant in VARIANTS.items() if name not in CHOOSING}
"""Variants that see a batch through closures alone, as frameworks run them."""


def find_variant(method: str | Build) -> Build:
    """The variant of that name, or the variant itself.

    >>> find_variant("sam").__name__
    'SAM'
    >>> find_variant("esam")
    Traceback (most recent call last):
    ValueError: esam chooses samples of a batch, which a framework does not show: write a loop with minimize(x, y)
    """
    if method in CHOOSING:
        raise ValueError(
            f"{method} chooses samples of a batch, which a framework does not show: write a loop with minimize(x, y)"
        )
    if isinstance(method, str) and method not in CLOSURE_METHODS:
        raise ValueError(f"unknown method {method!r}: choose from {', '.join(CLOSURE_METHODS)}")
    if not isinstance(method, str) and not callable(method):
        raise TypeError(f"method must be a name such as 'bisam-log', or a variant such as bisam.GSAM, got {method!r}")
    return CLOSURE_METHODS[method] if isinstance(method, str) else method


def build(
    method: str | Build, base: torch.optim.Optimizer, rho: float | None, options: Mapping[str, Any]
) -> SharpnessAware:
    """The variant around a base optimizer, for a framework that wraps the model later and sets `optimizer.model`."""
    given = {**options, **({} if rho is None else {"rho": rho})}
    sharpness = given.pop("sharpness", None)
    optimizer = find_variant(method)(base, **given)
    optimizer.sharpness = sharpness  # checked with the model: without one, "local" is refused where there are ranks
    return optimizer
