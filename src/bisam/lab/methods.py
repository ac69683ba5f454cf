"""The methods that the paper compares, by name."""

from __future__ import annotations

import difflib
from collections.abc import Callable

import torch
from torch import nn

import bisam
from bisam.engine.optimizer import Options, SharpnessAware
from bisam.lab.config import Config

Build = Callable[[torch.optim.Optimizer, nn.Module, Config, Options], SharpnessAware]


def _sgd(base: torch.optim.Optimizer, model: nn.Module, config: Config, options: Options) -> SharpnessAware:
    return bisam.SAM(base, model, rho=0.0, **options)  # is the base optimizer, bit for bit


def _sam(base: torch.optim.Optimizer, model: nn.Module, config: Config, options: Options) -> SharpnessAware:
    return bisam.SAM(base, model, rho=config.rho, **options)


def _asam(base: torch.optim.Optimizer, model: nn.Module, config: Config, options: Options) -> SharpnessAware:
    return bisam.ASAM(base, model, rho=config.rho, eta=config.eta, **options)


def _esam(base: torch.optim.Optimizer, model: nn.Module, config: Config, options: Options) -> SharpnessAware:
    return bisam.ESAM(base, model, rho=config.rho, beta=config.beta, gamma=config.gamma, **options)


def _bilevel(plain: Build, phi: str) -> Build:
    """The same method with Q on the way up."""

    def build(base: torch.optim.Optimizer, model: nn.Module, config: Config, options: Options) -> SharpnessAware:
        ascent = bisam.LowerBound(phi, config.mu, config.alpha)
        return plain(base, model, config, {**options, "ascent": ascent})

    return build


METHODS: dict[str, Build] = {
    "sgd": _sgd,
    "sam": _sam,
    "bisam-log": _bilevel(_sam, "log"),
    "bisam-tanh": _bilevel(_sam, "tanh"),
    "asam": _asam,
    "abisam-log": _bilevel(_asam, "log"),
    "abisam-tanh": _bilevel(_asam, "tanh"),
    "esam": _esam,
    "ebisam-log": _bilevel(_esam, "log"),
    "ebisam-tanh": _bilevel(_esam, "tanh"),
}

TITLES = {
    "sgd": "SGD",
    "sam": "SAM",
    "bisam-log": "BiSAM (-log)",
    "bisam-tanh": "BiSAM (tanh)",
    "asam": "ASAM",
    "abisam-log": "A-BiSAM (-log)",
    "abisam-tanh": "A-BiSAM (tanh)",
    "esam": "ESAM",
    "ebisam-log": "E-BiSAM (-log)",
    "ebisam-tanh": "E-BiSAM (tanh)",
}

BASELINES = {
    "sam": "sgd",
    "bisam-log": "sam",
    "bisam-tanh": "sam",
    "abisam-log": "asam",
    "abisam-tanh": "asam",
    "ebisam-log": "esam",
    "ebisam-tanh": "esam",
}
"""What each method is compared with."""

_SAM, _ASAM, _ESAM = ("rho", "micro_batch"), ("rho", "micro_batch", "eta"), ("rho", "micro_batch", "beta", "gamma")
FIELDS = {
    "sgd": (),
    "sam": _SAM,
    "bisam-log": (*_SAM, "mu"),
    "bisam-tanh": (*_SAM, "mu", "alpha"),
    "asam": _ASAM,
    "abisam-log": (*_ASAM, "mu"),
    "abisam-tanh": (*_ASAM, "mu", "alpha"),
    "esam": _ESAM,
    "ebisam-log": (*_ESAM, "mu"),
    "ebisam-tanh": (*_ESAM, "mu", "alpha"),
}
"""What of a configuration each method uses that not every method does."""


def uses(method: str, field: str) -> bool:
    """Whether a field of a configuration matters to that method."""
    of_some = {field for fields in FIELDS.values() for field in fields}
    return field not in of_some or field in FIELDS[method]


def optimizer(model: nn.Module, config: Config) -> SharpnessAware:
    """The optimizer of a run: SGD with momentum inside, cross entropy with label smoothing on the way down."""
    if config.method not in METHODS:
        near = difflib.get_close_matches(config.method.lower(), METHODS, n=3, cutoff=0.4) or METHODS
        raise ValueError(f"no method is called {config.method!r}: the nearest names are {', '.join(near)}")
    base = torch.optim.SGD(model.parameters(), lr=config.lr, momentum=config.momentum, weight_decay=config.weight_decay)
    options: Options = {
        "descent": bisam.CrossEntropy(label_smoothing=config.label_smoothing),
        "micro_batch": config.micro_batch,
        "autocast": torch.bfloat16 if config.precision == "bf16" else None,
    }
    return METHODS[config.method](base, model, config, options)
