"""The methods that the lab compares: one `Method` each, in `METHODS`. A new one is one more entry."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

import bisam
from bisam.integrations.methods import VARIANTS
from bisam.lab.config import Config, suggestion

BuildOptimizer = Callable[[torch.optim.Optimizer, nn.Module, Config, dict[str, Any]], bisam.SharpnessAware]
"""Wraps the base optimizer of a model. The last argument has the options that all methods share, as keywords."""

OF_ALL_VARIANTS = ("micro_batch", "every", "start", "stop")
"""Fields of `Config` that are options of every variant: `build` gets those that its method uses among its options."""

RHOS = (0.01, 0.02, 0.05, 0.1, 0.2)
"""Of SAM, to choose from: the paper has none. About two octaves on either side of its 0.05."""
RHOS_OF_ADAPTIVE = (0.1, 0.5, 1.0, 2.0, 3.0)
"""The paper's."""

FORWARD = 1 / 3
"""A forward pass as a part of a forward and backward pass: propagating back takes twice as much as forward."""


@dataclass(frozen=True)
class Method:
    """A row or column of the tables: how it is called, built and compared.

    >>> METHODS["bisam-tanh"].title, METHODS["bisam-tanh"].baseline, METHODS["bisam-tanh"].fields
    ('BiSAM (tanh)', 'sam', ('rho', 'micro_batch', 'every', 'start', 'stop', 'mu', 'alpha'))
    """

    name: str
    title: str
    build: BuildOptimizer
    baseline: str | None = None
    """Name of the method that it is compared with; None for no comparison. See `baseline_of`."""
    fields: tuple[str, ...] = ()
    """Fields of `Config` that it uses and some other method does not."""
    passes: float | Callable[[Config], float] = 2.0
    """Cost of a step that perturbs, in forward and backward passes of the batch. See `passes` for that of a run."""
    phi: str | None = None
    """φ of the ascent's lower bound, "log" or "tanh"; None for cross entropy."""
    rho: float = 0.05
    """The usual one, where it is neither given nor searched: the default of the variant."""
    rho_to_sams: float = 1.0
    """How many times SAM's its values of ρ are, where they are searched."""
    every: int = 1
    """Which steps perturb where a configuration has no `every` of its own."""

    @property
    def perturbs(self) -> bool:
        return "rho" in self.fields or callable(self.passes) or self.passes > 1

    @property
    def is_adaptive(self) -> bool:
        return "eta" in self.fields

    def rhos(self, of_sam: Sequence[float] = RHOS) -> tuple[float, ...]:
        """ρ to choose from: the paper's for adaptive methods, else `rho_to_sams` times SAM's.

        >>> METHODS["bisam-log"].rhos(), METHODS["msam"].rhos()
        ((0.01, 0.02, 0.05, 0.1, 0.2), (0.12, 0.24, 0.6, 1.2, 2.4))
        """
        if self.is_adaptive:
            return RHOS_OF_ADAPTIVE
        return tuple(float(f"{self.rho_to_sams * rho:.3g}") for rho in of_sam)


def _plain(
    base: torch.optim.Optimizer, model: nn.Module, config: Config, options: dict[str, Any]
) -> bisam.SharpnessAware:
    return bisam.SAM(base, model, rho=0.0, **options)  # the base optimizer, bit for bit


def _variant(name: str, title: str, *own: str, shared: Sequence[str] = OF_ALL_VARIANTS, **others: Any) -> Method:
    """A variant of the library under the same name, with ρ and its `own` fields as its arguments."""

    def build(
        base: torch.optim.Optimizer, model: nn.Module, config: Config, options: dict[str, Any]
    ) -> bisam.SharpnessAware:
        return VARIANTS[name](base, model, **{field: getattr(config, field) for field in ("rho", *own)}, **options)

    rho = inspect.signature(VARIANTS[name]).parameters["rho"].default
    return Method(name, title, build, fields=("rho", *shared, *own), rho=rho, **others)


def _bilevel(plain: Method, *own: str) -> tuple[Method, Method]:
    """The same method with Q as the ascent's objective, −log and tanh, each compared with the plain one."""
    letter = plain.name.removesuffix("sam")  # "", "a" or "e"
    title = f"{letter.upper()}-BiSAM" if letter else "BiSAM"
    log = _variant(f"{letter}bisam-log", f"{title} (-log)", *own, "mu", phi="log", baseline=plain.name)
    tanh = _variant(f"{letter}bisam-tanh", f"{title} (tanh)", *own, "mu", "alpha", phi="tanh", baseline=plain.name)
    return replace(log, passes=plain.passes), replace(tanh, passes=plain.passes)


def _with_chosen_samples(config: Config) -> float:
    """ESAM: a pass of the batch at w; at w + ε a forward pass of it, and a pass of the chosen samples."""
    return 1.0 + FORWARD + config.gamma if config.gamma < 1 else 2.0


SGD = Method("sgd", "SGD", _plain, passes=1.0)
ADAMW = Method("adamw", "AdamW", _plain, passes=1.0)
SAM = _variant("sam", "SAM", baseline="sgd")
ASAM = _variant("asam", "ASAM", "eta")
ESAM = _variant("esam", "ESAM", "beta", "gamma", baseline="sam", passes=_with_chosen_samples)
# a forward pass of the batch, and two passes of half of the samples
KSAM = _variant("ksam", "K-SAM", baseline="sam", passes=FORWARD + 1.0)
LOOKSAM = _variant("looksam", "LookSAM", baseline="sam", every=5)
FSAM = _variant("fsam", "Friendly SAM", baseline="sam")
GSAM = _variant("gsam", "GSAM", baseline="sam")
RSAM = _variant("rsam", "R-SAM", baseline="sam")
VASSO = _variant("vasso", "VaSSO", baseline="sam")
WSAM = _variant("wsam", "WSAM", baseline="sam")
FISHERSAM = _variant("fishersam", "Fisher SAM", baseline="sam")
# its best ρ is 17 times SAM's on the demo's digits, and 15 times in its authors' examples (3 and 0.2)
MSAM = _variant("msam", "MSAM", shared=("every", "start", "stop"), baseline="sgd", passes=1.0, rho_to_sams=12.0)

METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        SGD,
        ADAMW,
        *(SAM, *_bilevel(SAM)),
        *(ASAM, *_bilevel(ASAM, "eta")),
        *(ESAM, *_bilevel(ESAM, "beta", "gamma")),
        KSAM,
        LOOKSAM,
        MSAM,
        *(FSAM, GSAM, RSAM, VASSO, WSAM, FISHERSAM),
    )
}


def find_method(name: str) -> Method:
    """The method of that name; ValueError with the names that there are, or those of the class that is meant.

    >>> find_method("FriendlySAM")
    Traceback (most recent call last):
    ValueError: unknown method 'FriendlySAM': use fsam
    """
    if name not in METHODS:
        of_class = [one for one, variant in VARIANTS.items() if name in (own := _class_name(variant), own.lower())]
        remedy = f"use {' or '.join(of_class)}" if of_class else suggestion(name, METHODS, cutoff=0.6)
        raise ValueError(f"unknown method {name!r}: {remedy}")
    return METHODS[name]


def _class_name(variant: Any) -> str:
    return str(getattr(variant, "func", variant).__name__)


def title_of(name: str) -> str:
    """The title of a method; the name itself where a record has a method that is not registered here."""
    return METHODS[name].title if name in METHODS else name


def perturbs(name: str) -> bool:
    """Whether a method has a perturbation; also True for one that is not registered here."""
    return name not in METHODS or METHODS[name].perturbs


def uses(method: str, field: str) -> bool:
    """Whether a field of a configuration has an effect on that method; also True for one that is not registered."""
    of_some = {field for one in METHODS.values() for field in one.fields}
    return method not in METHODS or field not in of_some or field in METHODS[method].fields


def in_order(names: Iterable[str]) -> list[str]:
    """Each name once, in the order of `METHODS`; behind them those that are not registered here.

    >>> in_order(["own", "sam", "sgd", "sam"])
    ['sgd', 'sam', 'own']
    """
    there = dict.fromkeys(names)
    return [*(name for name in METHODS if name in there), *(name for name in there if name not in METHODS)]


def every_of(config: Config) -> int:
    """Which steps of a run perturb, once it has begun to: each k-th.

    >>> every_of(Config(method="looksam")), every_of(Config(method="sam")), every_of(Config(method="sam", every=2))
    (5, 1, 2)
    """
    own = METHODS[config.method].every if config.method in METHODS else 1
    return own if config.every is None else config.every


def passes(config: Config, begin: float = 0.0, end: float = 1.0) -> float:
    """Forward and backward passes of the batch in a step, the mean over a part of the training; 1 for unknown methods.

    >>> passes(Config(method="sam")), passes(Config(method="sam", start=0.75)), passes(Config(method="looksam"))
    (2.0, 1.25, 1.2)
    >>> passes(Config(method="sam", start=0.75), 0.0, 0.75), passes(Config(method="sam", start=0.75), 0.75, 1.0)
    (1.0, 2.0)
    >>> passes(Config(method="sam", stop=0.25))
    1.25
    """
    if config.method not in METHODS:
        return 1.0
    of_method = METHODS[config.method].passes
    perturbed = of_method(config) if callable(of_method) else of_method
    part = max(0.0, min(end, config.stop) - max(begin, config.start)) / (end - begin)
    return 1.0 + (perturbed - 1.0) * part / every_of(config)


def passes_until(config: Config, epochs: float) -> float:
    """Gradient evaluations of the first epochs of a run, in passes over the training data: see `passes`.

    >>> late = Config(method="sam", epochs=10, start=0.75)
    >>> [passes_until(late, epochs) for epochs in (0, 5, 10)]
    [0.0, 5.0, 12.5]
    """
    return epochs * passes(config, 0.0, epochs / config.epochs) if epochs else 0.0


def baseline_of(method: str, methods: Sequence[str]) -> str | None:
    """Which of these methods it is compared with: its baseline, where that is SGD also another base optimizer.

    None for a method that is not registered here.

    >>> baseline_of("sam", ["adamw", "sam"]), baseline_of("bisam-log", ["adamw", "sam", "bisam-log"])
    ('adamw', 'sam')
    >>> baseline_of("bisam-log", ["adamw", "bisam-log"])
    """
    own = METHODS[method].baseline if method in METHODS else None
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


def optimizer(
    model: nn.Module, config: Config, sharpness: str | None = None, *, steps: int | None = None
) -> bisam.SharpnessAware:
    """The optimizer of a run: its base optimizer, and cross entropy with label smoothing as the descent.

    `steps` are those of the whole run. They may be left out where it perturbs from its first step on.
    """
    method = find_method(config.method)
    if method.name in BASES and method.name != config.optimizer:
        raise ValueError(
            f"the method {method.name} is the base optimizer alone, and the configuration has "
            f"optimizer={config.optimizer}: use the method {config.optimizer}, or set optimizer={method.name}"
        )
    options: dict[str, Any] = {
        "descent": bisam.CrossEntropy(label_smoothing=config.label_smoothing),
        "autocast": torch.bfloat16 if config.precision == "bf16" else None,
        **_of_all_variants(method, config, steps),
    }
    if config.clip_norm is not None:
        options["clip_norm"] = config.clip_norm
    if sharpness is not None:
        options["sharpness"] = sharpness
    return method.build(BASES[config.optimizer](model, config), model, config, options)


def _of_all_variants(method: Method, config: Config, steps: int | None) -> dict[str, Any]:
    """Of the options that every variant has, those that the method uses and the configuration sets."""
    values: dict[str, Any] = {name: getattr(config, name) for name in OF_ALL_VARIANTS if name in method.fields}
    start, stop = values.pop("start", 0.0), values.pop("stop", 1.0)
    for name, part in (("start", start), ("stop", stop)):
        if steps is None and part not in (0.0, 1.0):
            raise ValueError(f"{name}={part:g} is a part of the training: give the number of its steps")
    if start and steps is not None:
        values["start"] = min(round(start * steps), steps - 1)  # a short run perturbs in one step at least
    if stop < 1 and steps is not None:
        values["stop"] = max(round(stop * steps), values.get("start", 0) + 1)
    return {name: value for name, value in values.items() if value is not None}
