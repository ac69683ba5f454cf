"""The settings of a training on one's own data, where none are given: by the kind of data, and of the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from bisam.lab import spec
from bisam.lab.config import Config
from bisam.lab.data.own_dataset import OwnDataset
from bisam.lab.models.pretraining import Expected

PRETRAINED = (spec.TIMM, spec.TRANSFORMERS)
MODELS = {"image": "resnet20", "rows": "perceptron"}
"""The network of ours for each kind of data."""

STEPS_OF_AN_EPOCH = 4
"""A batch is halved until an epoch has this many steps."""

SMALLEST_BATCH = 2
"""Batch norm cannot train on one sample."""

LARGEST_SIZE, LARGEST_PADDING = 1024, 64
"""The largest that a configuration may have."""

SAMPLES_TO_SELECT = 1000
"""Validation samples from which they choose the epoch that is tested: fewer would choose by chance among many."""

RHOS_OF_PRETRAINED = (0.005, 0.01, 0.02, 0.05, 0.1)

SHOWN = (
    "optimizer", "lr", "schedule", "warmup", "weight_decay", "momentum", "clip_norm", "epochs", "batch",
    "label_smoothing", "size", "pixels", "padding", "flip", "length", "validation", "select", "measures", "precision",
)  # fmt: skip


class Settings(NamedTuple):
    """A configuration without method and seed, and the fields of it that matter for this kind of data."""

    config: Config
    shown: tuple[str, ...]

    @property
    def lines(self) -> list[str]:
        """Such as "lr=0.1", as --set has them."""
        return [f"{name}={getattr(self.config, name)}" for name in self.shown]


def model_for(dataset: OwnDataset) -> str:
    """The model where none is given."""
    if dataset.kind not in MODELS:
        raise ValueError(
            "text needs a pretrained model: pip install 'bisam[transformers]' and give --model "
            "transformers:NAME-OR-FOLDER, such as transformers:google-bert/bert-base-uncased"
        )
    return MODELS[dataset.kind]


def comes_pretrained(model: str) -> bool:
    """Whether models from there have weights, so that the defaults are those of fine-tuning."""
    return spec.parse_model(model).source in PRETRAINED


def settings(
    dataset: OwnDataset,
    model: str,
    expected: Expected,
    samples: Mapping[str, int],
    device: torch.device,
    *,
    pretrained: bool | None = None,
    changes: Mapping[str, str] | None = None,
) -> Settings:
    """The defaults for these data and this model, with changes as after --set.

    `samples` has how many there are of each part.
    """
    is_pretrained = comes_pretrained(model) if pretrained is None else pretrained
    values = _fine_tuning(dataset) if is_pretrained else _from_scratch(dataset)
    if dataset.kind == "image":
        size = _size(dataset, expected, is_pretrained)
        padding = min(size // 8, LARGEST_PADDING)
        values |= {"size": size, "padding": padding, "pixels": expected.pixels if is_pretrained else "data"}
    else:
        values |= {"padding": 0, "flip": False}
    if dataset.is_unbalanced:
        values["measures"] = "accuracy,balanced_accuracy,macro_f1"
    values["select"] = "best" if samples["validation"] >= SAMPLES_TO_SELECT else "last"
    batch = values.pop("batch")
    while batch > SMALLEST_BATCH and samples["train"] // batch < STEPS_OF_AN_EPOCH:
        batch //= 2
    precision = "fp32" if device.type == "cpu" else "bf16"
    changes = changes or {}
    config = Config(data=dataset.name, model=model, batch=batch, precision=precision, **values).with_changes(changes)
    shown = [*SHOWN, *(name for name in changes if name not in SHOWN)]
    return Settings(config, tuple(name for name in shown if _matters(name, config, dataset)))


def _from_scratch(dataset: OwnDataset) -> dict[str, Any]:
    """SGD with a cosine, as the paper's."""
    if dataset.kind == "rows":
        return {"epochs": 50, "batch": 64, "lr": 0.05, "label_smoothing": 0.0}
    return {"epochs": 30, "batch": 128, "lr": 0.1, "label_smoothing": 0.1}


def _fine_tuning(dataset: OwnDataset) -> dict[str, Any]:
    """AdamW with a warm-up and a linear decay, as the paper's."""
    text = dataset.kind == "text"
    return {
        "optimizer": "adamw", "schedule": "linear", "warmup": 0.1, "weight_decay": 0.01, "clip_norm": 1.0,
        "lr": 2e-5 if text else 1e-4, "epochs": 3 if text else 10, "batch": 32 if text else 64, "label_smoothing": 0.0,
    }  # fmt: skip


def _size(dataset: OwnDataset, expected: Expected, is_pretrained: bool) -> int:
    if expected.size is not None and is_pretrained:
        return expected.size
    if isinstance(dataset.train.inputs, torch.Tensor):
        return min(max(8, int(min(dataset.train.inputs.shape[2:]))), LARGEST_SIZE)
    return 32


def _matters(name: str, config: Config, dataset: OwnDataset) -> bool:
    of_kind = {"size": "image", "pixels": "image", "padding": "image", "flip": "image", "length": "text"}
    if of_kind.get(name, dataset.kind) != dataset.kind:
        return False
    if name == "validation":
        return dataset.validation is None
    if name == "momentum":
        return config.optimizer == "sgd"
    return name != "warmup" or config.schedule == "linear"
