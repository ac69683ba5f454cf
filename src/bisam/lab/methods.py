"""The methods that the paper compares: one `Method` each, in `METHODS`. A new one is one more entry."""

from __future__ import annotations

from collections.abc import Callable
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
    """Name of the method that it is compared with; None for no comparison."""
    fields: tuple[str, ...] = ()
    """Fields of `Config` that it uses and some other method does not."""
    passes: float = 2.0
    """Cost of a step, in forward and backward passes of the batch."""
    phi: str | None = None
    """φ of the ascent's lower bound, "log" or "tanh"; None for cross entropy."""

    @property
    def perturbs(self) -> bool:
        return self.passes > 1


def _sgd(
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


SGD = Method("sgd", "SGD", _sgd, passes=1.0)
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


def uses(method: str, field: str) -> bool:
    """Whether a field of a configuration has an effect on that method."""
    of_some = {field for one in METHODS.values() for field in one.fields}
    return field not in of_some or field in METHODS[method].fields


def optimizer(model: nn.Module, config: Config) -> bisam.SharpnessAware:
    """The optimizer of a run: SGD with momentum as the base, cross entropy with label smoothing as the descent."""
    method = find(config.method)
    base = torch.optim.SGD(model.parameters(), lr=config.lr, momentum=config.momentum, weight_decay=config.weight_decay)
    options = {
        "descent": bisam.CrossEntropy(label_smoothing=config.label_smoothing),
        "micro_batch": config.micro_batch,
        "autocast": torch.bfloat16 if config.precision == "bf16" else None,
    }
    return method.build(base, model, config, options)
