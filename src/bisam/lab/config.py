"""The configuration of a run: every number that decides its result. Defaults are the paper's, for CIFAR."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, get_args, get_type_hints

from bisam.lab import measures as known_measures


@dataclass(frozen=True)
class Config:
    """One run. `recipe`, `title` and `row` are the table that it belongs to; its result depends on the others only."""

    recipe: str = "own"
    title: str = ""
    """Title of a table that is not registered: reports make that table from its records. Empty for a registered one."""
    row: str = ""
    """Row of a table that is not registered, or whose rows differ in more than data, model and noise."""
    data: str = "cifar10"
    model: str = "resnet56"
    method: str = "bisam-log"
    seed: int = 0

    epochs: int = 200
    batch: int = 128
    lr: float = 0.1
    """The largest rate: the schedule leads from it to 0."""
    schedule: str = "cosine"
    """"cosine" goes epoch by epoch, "linear" step by step."""
    warmup_epochs: int = 0
    """Epochs in which the rate rises linearly to `lr`, before the cosine."""
    warmup: float = 0.0
    """Fraction of all steps in which the rate rises to `lr`, before it falls linearly."""
    epoch_steps: int | None = None
    """Steps of an epoch, through the training data as often as needed; None is once through them."""
    optimizer: str = "sgd"
    """The base optimizer, "sgd" or "adamw"."""
    momentum: float = 0.9
    """Of SGD."""
    clip_norm: float | None = None
    """Largest norm of the gradient that reaches the base optimizer; None does not clip."""
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
    every: int | None = None
    """Perturb in every k-th step only; None is the method's own: 5 of LookSAM, 1 of the others."""
    start: float = 0.0
    """Fraction of all steps that come first and do not perturb: late sharpness. 0.9 perturbs in the last tenth.

    The optimizer's `start` is this times the number of steps.
    """
    stop: float = 1.0
    """Fraction of all steps after which none perturbs: early sharpness. 0.5 perturbs in the first half."""

    noise: float = 0.0
    """Fraction of the training and validation labels that is moved to another class; see `validation_noise`."""
    validation: float = 0.1
    """Fraction of the training data that is used for validation."""
    validation_noise: bool = True
    """Whether `noise` is in the validation labels too; false keeps those as they are in the data."""
    select: str = "best"
    """Which weights are tested: those with the "best" value of the first measure on validation data, or the "last"."""
    measures: str = "accuracy"
    """Measures of validation and test data, with commas between. The first is the one that counts."""
    size: int = 32
    """Side of the images of one's own data: they are scaled and cut to a square."""
    pixels: str = "data"
    """Mean and deviation that images of one's own are normalised with: the "data"'s, "imagenet"'s, or 0.5: "half"."""
    length: int = 128
    """Tokens of a text that are read."""
    padding: int = 4
    """Black pixels around an image before it is cropped at random."""
    flip: bool = True
    cutout: int = 0
    """Side of a square at a random place that is set to 0 after normalisation; 0 for none."""
    cutout_probability: float = 0.5
    """Fraction of the training images that `cutout` is applied to."""

    partial_data: bool = False
    """Whether a part of the data set was accepted, to try things out."""

    precision: str = "bf16"
    """"bf16" for autocast, "fp32" for none."""
    compile: bool = False
    """Whether the model is compiled: a ResNet on a GPU by Triton kernels of its own, others by torch.compile."""
    deterministic: bool = False
    """On CUDA: the same bits in every run, with slower algorithms. A CPU gives them anyway."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not _is_known(name, value):
                raise ValueError(f"{name} must be {_described_type(name)}, got {value!r:.60}")
        for name, low, high in _RANGES:
            value = getattr(self, name)
            if value is not None and not (low <= value <= high):
                raise ValueError(f"{name} must lie between {low} and {high}, got {value}")
        if self.warmup_epochs > self.epochs:
            raise ValueError(
                f"warmup_epochs must be at most epochs, got {self.warmup_epochs} of {self.epochs}: lr is never reached"
            )
        if self.stop <= self.start:
            raise ValueError(f"no step would perturb: stop must be above start, got {self.stop:g} and {self.start:g}")
        for name, words in _CHOICES.items():
            if getattr(self, name) not in words:
                listed = " or ".join(f'"{word}"' for word in words)
                raise ValueError(f"{name} must be {listed}, got {getattr(self, name)!r}")
        for name in self.measured:
            known_measures.find_measure(name)

    @property
    def measured(self) -> tuple[str, ...]:
        """Names of the measures; the first is the one that counts.

        >>> Config(measures="mcc, accuracy").measured
        ('mcc', 'accuracy')
        """
        return tuple(name.strip() for name in self.measures.split(","))

    @property
    def primary(self) -> str:
        """The measure that counts."""
        return self.measured[0]

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
    ('the nearest names are resnet56', 'choose from resnet56, vgg')
    """
    near = difflib.get_close_matches(name.lower(), names, n=3, cutoff=cutoff)
    return f"the nearest names are {', '.join(near)}" if near else f"choose from {', '.join(names)}"


def refuse_without_effect(changed: Collection[str], config: Config) -> None:
    """ValueError for a changed field that the schedule or the base optimizer of this configuration does not read.

    >>> refuse_without_effect(["warmup"], Config(schedule="linear", warmup=0.1))
    >>> refuse_without_effect(["warmup"], Config(warmup=0.1))
    Traceback (most recent call last):
    ValueError: warmup has no effect with schedule=cosine: use warmup_epochs, or set schedule=linear
    """
    for name, field, needed, remedy in _READ_WITH:
        found = getattr(config, field)
        if name in changed and getattr(config, name) and found != needed:
            raise ValueError(f"{name} has no effect with {field}={found}: {remedy}")


_READ_WITH = [
    ("warmup", "schedule", "linear", "use warmup_epochs, or set schedule=linear"),
    ("warmup_epochs", "schedule", "cosine", "use warmup, a part of the training, or set schedule=cosine"),
    ("momentum", "optimizer", "sgd", "remove it, or set optimizer=sgd"),
]
"""Fields that have an effect only where another field has this value."""

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


def _described_type(name: str) -> str:
    """The values that a field may have, for an error."""
    words = {int: "a whole number", float: "a number", str: "a printable text", bool: "true or false"}
    return " or ".join(words.get(kind, "none") for kind in _kinds()[name])


@cache
def _kinds() -> dict[str, tuple[type, ...]]:
    return {name: get_args(kind) or (kind,) for name, kind in get_type_hints(Config).items()}


_CHOICES = {
    "select": ("best", "last"),
    "precision": ("bf16", "fp32"),
    "schedule": ("cosine", "linear"),
    "optimizer": ("sgd", "adamw"),
    "pixels": ("data", "imagenet", "half"),
}

_RANGES = [
    ("seed", 0, 2**31),
    ("epochs", 1, 100_000),
    ("batch", 1, 1_000_000),
    ("micro_batch", 1, 1_000_000),
    ("every", 1, 1_000_000),
    ("start", 0, 0.999),
    ("stop", 0.001, 1),
    ("lr", 0, 1000),
    ("warmup_epochs", 0, 100_000),
    ("warmup", 0, 1),
    ("epoch_steps", 1, 1_000_000),
    ("clip_norm", 1e-9, 1e9),
    ("size", 8, 1024),
    ("length", 2, 8192),
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


def rate(config: Config, epoch: int, batch: int = 0, batches: int = 1) -> float:
    """The learning rate of an epoch, beginning with 0; of a linear schedule, that of a batch in it.

    >>> [round(rate(Config(epochs=4), epoch), 4) for epoch in range(4)]
    [0.1, 0.0854, 0.05, 0.0146]
    >>> linear = Config(epochs=1, schedule="linear", warmup=0.5)
    >>> [round(rate(linear, 0, batch, 4), 4) for batch in range(4)]
    [0.05, 0.1, 0.1, 0.05]
    """
    if config.schedule == "linear":
        return config.lr * _linear(epoch * batches + batch, config.epochs * batches, config.warmup)
    if epoch < config.warmup_epochs:
        return config.lr * (epoch + 1) / config.warmup_epochs
    progress = (epoch - config.warmup_epochs) / (config.epochs - config.warmup_epochs)
    return config.lr * (1 + math.cos(math.pi * progress)) / 2


def _linear(step: int, steps: int, warmup: float) -> float:
    """The part of the largest rate: up in the first steps, then down to 0 after the last."""
    rising = round(warmup * steps)
    return (step + 1) / rising if step < rising else (steps - step) / (steps - rising)


def _parsed(name: str, text: str) -> Any:
    kinds = get_type_hints(Config)
    if name not in kinds:
        raise ValueError(f"unknown field {name!r}: {suggestion(name, kinds, cutoff=0.4)}")
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
        raise ValueError(f"{name} is {_described_type(name)}, got {text!r:.60}") from None
