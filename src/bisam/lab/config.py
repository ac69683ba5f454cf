"""The configuration of a run: every number that decides its result. Defaults are the paper's, for CIFAR."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, get_args, get_type_hints


@dataclass(frozen=True)
class Config:
    """One run. `recipe` is the table that it belongs to; its result depends on the other fields only."""

    recipe: str = "own"
    data: str = "cifar10"
    model: str = "resnet56"
    method: str = "bisam-log"
    seed: int = 0

    epochs: int = 200
    batch: int = 128
    lr: float = 0.1
    """The largest rate: a cosine leads from it to 0, epoch by epoch."""
    warmup_epochs: int = 0
    """Epochs in which the rate rises linearly to `lr`, before the cosine."""
    momentum: float = 0.9
    weight_decay: float = 5e-4
    label_smoothing: float = 0.1

    rho: float = 0.05
    """Radius of the perturbation; SGD has none."""
    mu: float | None = None
    """Sharpness of Q's smooth maximum; None is the paper's 1 for −log and 10 for tanh."""
    alpha: float = 0.1
    """Slope of tanh."""
    eta: float = 0.0
    """Added to |w| in the adaptive methods."""
    beta: float = 0.5
    """Fraction of the tensors that the efficient methods perturb."""
    gamma: float = 0.5
    """Fraction of the samples in the descent of the efficient methods."""
    micro_batch: int | None = None
    """Samples that are perturbed together; None is the whole batch."""

    noise: float = 0.0
    """Fraction of the training and validation labels that is moved to another class."""
    validation: float = 0.1
    """Fraction of the training data that is used for validation."""
    select: str = "best"
    """Which weights are tested: those with the "best" validation accuracy, or the "last" ones."""
    padding: int = 4
    """Black pixels around an image before it is cropped at random."""
    flip: bool = True
    cutout: int = 0
    """Side of a square at a random place that is set to 0 after normalisation; 0 for none."""
    cutout_probability: float = 0.5
    """Part of the training images that `cutout` is applied to."""

    partial_data: bool = False
    """Whether a part of the data set was accepted, to try things out."""

    precision: str = "bf16"
    """"bf16" for autocast, "fp32" for none."""
    compile: bool = False
    """Whether torch.compile is applied to the model."""
    deterministic: bool = False
    """On CUDA: the same bits in every run, with slower algorithms. A CPU gives them anyway."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not _is_known(name, value):
                raise ValueError(f"{name} must be {_words(name)}, got {value!r:.60}")
        for name, low, high in _RANGES:
            value = getattr(self, name)
            if value is not None and not (low <= value <= high):
                raise ValueError(f"{name} must lie between {low} and {high}, got {value}")
        if self.warmup_epochs > self.epochs:
            raise ValueError(
                f"warmup_epochs must be at most epochs, got {self.warmup_epochs} of {self.epochs}: lr is never reached"
            )
        if self.select not in ("best", "last"):
            raise ValueError(f'select must be "best" or "last", got {self.select!r}')
        if self.precision not in ("bf16", "fp32"):
            raise ValueError(f'precision must be "bf16" or "fp32", got {self.precision!r}')

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Config:
        """The inverse of `as_dict`, also for records of older versions: see `completed`."""
        names = {field.name for field in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in completed(values).items() if name in names})

    def with_changes(self, changes: Mapping[str, str]) -> Config:
        """Fields set from text, as from a command line.

        >>> Config().with_changes({"epochs": "3", "mu": "none"}).epochs
        3
        """
        return dataclasses.replace(self, **{name: _parsed(name, text) for name, text in changes.items()})


def suggestion(name: str, names: Collection[str], cutoff: float = 0.5) -> str:
    """The end of an error about a name that there is not: the names near to it, or all.

    >>> suggestion("resnet57", ["resnet56", "vgg"]), suggestion("mynet", ["resnet56", "vgg"])
    ('the nearest names are resnet56', 'there are resnet56, vgg')
    """
    near = difflib.get_close_matches(name.lower(), names, n=3, cutoff=cutoff)
    return f"the nearest names are {', '.join(near)}" if near else f"there are {', '.join(names)}"


ESSENTIAL = ("recipe", "data", "model", "method", "seed", "epochs")
"""Fields that a record must have to be assigned to a cell."""


def recorded(values: Mapping[str, Any]) -> Config:
    """The configuration of a record, also one of an older version with fewer fields. ValueError if it has none of ours.

    >>> recorded({"seed": 0})
    Traceback (most recent call last):
    ValueError: its configuration lacks recipe, data, model, method, epochs
    """
    missing = [name for name in ESSENTIAL if name not in values]
    if missing:
        raise ValueError(f"its configuration lacks {', '.join(missing)}")
    strange = [f"{name!r} is {value!r:.60}" for name, value in values.items() if not _is_known(name, value)]
    if strange:
        raise ValueError(f"its configuration has values that this version does not support: {', '.join(strange)}")
    try:
        return Config.from_dict(values)
    except ValueError as error:
        raise ValueError(f"its configuration is not valid: {error}") from None


def completed(values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a record, and for those that its version did not have yet the value that it trained with.

    Versions without `cutout_probability` cut every image, or none.

    >>> completed({"epochs": 3})["lr"]
    0.1
    >>> completed({"epochs": 3, "cutout": 16})["cutout_probability"]
    1.0
    """
    later = {name: value for name, value in Config().as_dict().items() if name not in (*ESSENTIAL, *values)}
    if "cutout_probability" in later and values.get("cutout"):
        later["cutout_probability"] = 1.0
    return {**values, **later}


def _is_known(name: str, value: object) -> bool:
    """Whether there is such a field, and the value has its type."""
    kinds = _kinds().get(name, ())
    if isinstance(value, str) and not value.isprintable():
        return False  # no name of ours has line breaks or control characters, which a terminal would obey
    return type(value) in kinds or (float in kinds and type(value) is int)


def _words(name: str) -> str:
    """The values that a field may have, for an error."""
    words = {int: "a whole number", float: "a number", str: "a printable text", bool: "true or false"}
    return " or ".join(words.get(kind, "none") for kind in _kinds()[name])


@cache
def _kinds() -> dict[str, tuple[type, ...]]:
    return {name: get_args(kind) or (kind,) for name, kind in get_type_hints(Config).items()}


_RANGES = [
    ("seed", 0, 2**31),
    ("epochs", 1, 100_000),
    ("batch", 1, 1_000_000),
    ("micro_batch", 1, 1_000_000),
    ("lr", 0, 1000),
    ("warmup_epochs", 0, 100_000),
    ("momentum", 0, 1),
    ("weight_decay", 0, 10),
    ("label_smoothing", 0, 0.999),
    ("rho", 0, 1000),
    ("mu", 1e-6, 1e6),
    ("alpha", 1e-6, 1e6),
    ("eta", 0, 100),
    ("beta", 1e-6, 1),
    ("gamma", 1e-6, 1),
    ("noise", 0, 1),
    ("validation", 0.001, 0.9),
    ("padding", 0, 64),
    ("cutout", 0, 512),
    ("cutout_probability", 0, 1),
]


def rate(config: Config, epoch: int) -> float:
    """The learning rate of an epoch, beginning with 0.

    >>> [round(rate(Config(epochs=4), epoch), 4) for epoch in range(4)]
    [0.1, 0.0854, 0.05, 0.0146]
    """
    if epoch < config.warmup_epochs:
        return config.lr * (epoch + 1) / config.warmup_epochs
    progress = (epoch - config.warmup_epochs) / (config.epochs - config.warmup_epochs)
    return config.lr * (1 + math.cos(math.pi * progress)) / 2


def _parsed(name: str, text: str) -> Any:
    kinds = get_type_hints(Config)
    if name not in kinds:
        near = difflib.get_close_matches(name, kinds, n=3, cutoff=0.4)
        meant = f": did you mean {', '.join(near)}?" if near else f"; there are {', '.join(kinds)}"
        raise ValueError(f"no field of a run is called {name!r}{meant}")
    kind = kinds[name]
    choices = get_args(kind) or (kind,)
    if type(None) in choices and text.lower() in ("none", "null", ""):
        return None
    (kind,) = (choice for choice in choices if choice is not type(None))
    if kind is bool:
        words = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
        if text.lower() not in words:
            raise ValueError(f"{name} is true or false, got {text!r}")
        return words[text.lower()]
    try:
        return kind(text) + 0.0 if kind is float else kind(text)  # -0.0 + 0.0 is 0.0: they are one run
    except ValueError:
        raise ValueError(f"{name} is {_words(name)}, got {text!r:.60}") from None
