"""The methods that the paper compares: one `Method` each, in `METHODS`. A new one is one more entry."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

import bisam
from bisam.lab.config import Config, suggestion

Build = Callable[[torch.optim.Optimizer, nn.Module, Config, dict[str, Any]], bisam.SharpnessAware]
"""Wraps the base optimizer of a model. The last argument has the options that all methods share, as keywords."""


@dataclass(frozen=True)
class Method:
    """A row or column of the tables: how it is called, built and compared.

    >>> METHODS["bisam-tanh"].title, METHODS["bisam-tanh"].baseline, METHODS["bisam-tanh"].fields
    ('BiSAM (tanh)', 'sam', ('rho', 'micro_batch', 'mu', 'alpha'))
    """

    name: str
    title: str
    build: Build
    baseline: str | None = None
    """Name of the method that it is compared with; None for no comparison. See `baseline_of`."""
    fields: tuple[str, ...] = ()
    """Fields of `Config` that it uses and some other method does not."""
    passes: float = 2.0
    """Cost of a step, in forward and backward passes of the batch."""
    phi: str | None = None
    """φ of the ascent's lower bound, "log" or "tanh"; None for cross entropy."""

    @property
    def perturbs(self) -> bool:
        return self.passes > 1


def _plain(
    base: torch.optim.Optimizer, model: nn.Module, config: Config, options: dict[str, Any]
) -> bisam.SharpnessAware:
    return bisam.SAM(base, model, rho=0.0, **options)  # the base optimizer, bit for bit


def _sam(
    base: torch.optim.Optimizer, model: nn.Module, config: Config, options: dict[str, Any]
) -> bisam.SharpnessAware:
    return bisam.SAM(base, model, rho=config.rho, **options)


def _asam(
    base: torch.optim.Optimizer, model: nn.Module, config: Config, options: dict[str, Any]
) -> bisam.SharpnessAware:
    return bisam.ASAM(base, model, rho=config.rho, eta=config.eta, **options)


def _esam(
    base: torch.optim.Optimizer, model: nn.Module, config: Config, options: dict[str, Any]
) -> bisam.SharpnessAware:
    return bisam.ESAM(base, model, rho=config.rho, beta=config.beta, gamma=config.gamma, **options)


def _bilevel(plain: Method, phi: str) -> Method:
    """The same method with Q as the ascent's objective, compared with the plain one."""

    def build(
        base: torch.optim.Optimizer, model: nn.Module, config: Config, options: dict[str, Any]
    ) -> bisam.SharpnessAware:
        ascent = bisam.LowerBound(phi, config.mu, config.alpha)
        return plain.build(base, model, config, {**options, "ascent": ascent})

    letter = plain.name.removesuffix("sam")  # "", "a" or "e"
    title = f"{letter.upper()}-BiSAM" if letter else "BiSAM"
    return replace(
        plain,
        name=f"{letter}bisam-{phi}",
        title=f"{title} ({'-log' if phi == 'log' else phi})",
        build=build,
        baseline=plain.name,
        fields=(*plain.fields, "mu") if phi == "log" else (*plain.fields, "mu", "alpha"),
        phi=phi,
    )


SGD = Method("sgd", "SGD", _plain, passes=1.0)
ADAMW = Method("adamw", "AdamW", _plain, passes=1.0)
SAM = Method("sam", "SAM", _sam, baseline="sgd", fields=("rho", "micro_batch"))
ASAM = Method("asam", "ASAM", _asam, fields=("rho", "micro_batch", "eta"))
ESAM = Method(
    "esam",
    "ESAM",
    _esam,
    fields=("rho", "micro_batch", "beta", "gamma"),
    passes=1.83,  # one of the batch, a forward pass of it, and one of half of the samples
)

METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        SGD,
        ADAMW,
        *(one for plain in (SAM, ASAM, ESAM) for one in (plain, _bilevel(plain, "log"), _bilevel(plain, "tanh"))),
    )
}


def find(name: str) -> Method:
    """The method of that name; ValueError with the names that there are if there is none."""
    if name not in METHODS:
        raise ValueError(f"no method is called {name!r}: {suggestion(name, METHODS, cutoff=0.4)}")
    return METHODS[name]


def title_of(name: str) -> str:
    """The title of a method; the name itself where a record has a method that is not registered here."""
    return METHODS[name].title if name in METHODS else name


def perturbs(name: str) -> bool:
    """Whether a method has a perturbation; also True for one that is not registered here."""
    return name not in METHODS or METHODS[name].perturbs


def uses(method: str, field: str) -> bool:
    """Whether a field of a configuration has an effect on that method."""
    of_some = {field for one in METHODS.values() for field in one.fields}
    return field not in of_some or field in METHODS[method].fields


def baseline_of(method: str, methods: Sequence[str]) -> str | None:
    """Which of these methods it is compared with: its baseline, where that is SGD also another base optimizer.

    >>> baseline_of("sam", ["adamw", "sam"]), baseline_of("bisam-log", ["adamw", "sam", "bisam-log"])
    ('adamw', 'sam')
    >>> baseline_of("bisam-log", ["adamw", "bisam-log"])
    """
    own = METHODS[method].baseline
    if own is None or own in methods:
        return own
    plain = [name for name in methods if name in METHODS and not METHODS[name].perturbs]
    return plain[0] if plain and not METHODS[own].perturbs else None


BASES: dict[str, Callable[[nn.Module, Config], torch.optim.Optimizer]] = {
    "sgd": lambda model, config: torch.optim.SGD(
        model.parameters(), lr=config.lr, momentum=config.momentum, weight_decay=config.weight_decay
    ),
    "adamw": lambda model, config: torch.optim.AdamW(
        model.parameters(), lr=config.lr, weight_decay=config.weight_decay
    ),
}
"""The base optimizers, by their names in a configuration."""


def optimizer(model: nn.Module, config: Config) -> bisam.SharpnessAware:
    """The optimizer of a run: its base optimizer, and cross entropy with label smoothing as the descent."""
    method = find(config.method)
    if method.name in BASES and method.name != config.optimizer:
        raise ValueError(
            f"the method {method.name} is the base optimizer alone, and the configuration has "
            f"optimizer={config.optimizer}: use the method {config.optimizer}, or set optimizer={method.name}"
        )
    options: dict[str, Any] = {
        "descent": bisam.CrossEntropy(label_smoothing=config.label_smoothing),
        "micro_batch": config.micro_batch,
        "autocast": torch.bfloat16 if config.precision == "bf16" else None,
    }
    if config.clip_norm is not None:
        options["clip_norm"] = config.clip_norm
    return method.build(BASES[config.optimizer](model, config), model, config, options)
