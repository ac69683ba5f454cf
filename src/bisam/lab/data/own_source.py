"""Batches of one's own data: images, rows of numbers, or texts through the model's tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from bisam.lab import spec
from bisam.lab.config import Config
from bisam.lab.data import duplicates, tokens
from bisam.lab.data.batches import Batched, Loaders, Rounds, TensorBatches
from bisam.lab.data.classes import counted, hint_of_quantity
from bisam.lab.data.held_out import stratified_split
from bisam.lab.data.images import DataError
from bisam.lab.data.labels import with_noise
from bisam.lab.data.on_device import Batches
from bisam.lab.data.own_dataset import DataSplit, OwnDataset
from bisam.lab.data.preparation import EVALUATION_BATCH, Preparation, pixels_of

NORMALIZATION = {
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "half": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
}
Statistics = tuple[tuple[float, ...], tuple[float, ...]]


class OwnData:
    """A `Source` of one's own data. Split, noise and order come from a run's seed."""

    def __init__(self, dataset: OwnDataset) -> None:
        self.dataset = dataset
        self.classes, self.checksum, self.features = len(dataset.classes), dataset.checksum, dataset.features
        self.notes: Sequence[str] = [*dataset.notes, *duplicates.notes(dataset)]
        self._ready: dict[Any, Any] = {}

    def prepare(self) -> None:
        """The data are in memory already; what depends on a configuration is made when a run needs it."""

    def described(self) -> list[str]:
        dataset = self.dataset
        validation = [] if dataset.validation is None else [("validation", dataset.validation)]
        lines = [
            f"{spec.parse_data(dataset.name).place}, {name}: {len(part)} samples ({dataset.kind}), "
            f"{self.classes} classes"
            for name, part in (("train", dataset.train), *validation, ("test", dataset.test))
        ]
        classes = f"classes, with their training samples: {counted(dataset.classes, dataset.counts.tolist())}"
        return [*lines, classes, *self.notes, f"sha256 of the contents: {self.checksum}"]

    def sizes(self, config: Config) -> dict[str, int]:
        """Samples of each part, with the validation samples of a seed."""
        train, validation, _ = self._rows(config)
        return {"train": len(train), "validation": len(validation), "test": len(self.dataset.test)}

    def loaders(self, config: Config, device: torch.device) -> Loaders:
        train, validation, labels = self._rows(config)
        inputs, test = self._inputs("train", config), self._inputs("test", config)
        if self.dataset.validation is None:
            known = labels if config.validation_noise else self.dataset.train.labels
            validating = self._evaluated(_rows(inputs, validation), known[validation], config, device)
        else:
            own = self._inputs("validation", config)
            validating = self._evaluated(own, self.dataset.validation.labels, config, device)
        training = self._trained(_rows(inputs, train), labels[train], config, device)
        steps = config.epoch_steps
        return Loaders(
            training if steps is None else Rounds(training, steps),
            validating,
            self._evaluated(test, self.dataset.test.labels, config, device),
        )

    def preparation(self, config: Config) -> Preparation:
        dataset = self.dataset
        common = Preparation(dataset.kind, tuple(dataset.classes), columns=dataset.columns)
        if dataset.kind == "image":
            mean, std = self._statistics(config)
            return replace(common, size=config.size, mean=mean, std=std)
        if dataset.kind == "text":
            return replace(common, length=config.length)
        shape = tuple(dataset.train.inputs.shape[1:])
        return replace(common, features=self.features, shape=shape if len(shape) > 1 else ())

    def training_rows(self, config: Config) -> Tensor:
        """Rows of the training part that are not for validation."""
        return self._rows(config)[0]

    def plain(self, name: str, rows: Tensor, config: Config, device: torch.device, batch: int) -> Batched:
        """These rows of a part in their order, without augmentation, with the labels that a run has seen."""
        part: DataSplit = getattr(self.dataset, name)
        labels = self._rows(config)[2] if name == "train" else part.labels
        return self._evaluated(_rows(self._inputs(name, config), rows), labels[rows], config, device, batch)

    def _rows(self, config: Config) -> tuple[Tensor, Tensor, Tensor]:
        """Training rows, validation rows, and the labels of the training part."""
        dataset = self.dataset
        labels = with_noise(dataset.train.labels, config.noise, self.classes, seed=config.seed)
        if dataset.validation is not None:
            return torch.arange(len(labels)), torch.arange(len(dataset.validation)), labels
        train, validation = stratified_split(labels, config.validation, seed=1 + config.seed)
        left = torch.bincount(labels[train], minlength=self.classes)
        if bool((left == 0).any()):
            lost = dataset.classes[int((left == 0).nonzero()[0])]
            raise DataError(
                f"{dataset.name}: of class {lost!r} no training sample is left beside those for validation and test: "
                f"add samples to it, or remove it{hint_of_quantity(dataset.classes)}"
            )
        return train, validation, labels

    def _trained(self, inputs: Any, labels: Tensor, config: Config, device: torch.device) -> Batched:
        if self.dataset.kind == "image":
            return self._images(inputs, labels, config, device, batch=config.batch, train=True)
        return TensorBatches(
            inputs, labels, batch=config.batch, device=device, seed=config.seed, shuffle=True, drop_last=True,
            trim=device.type == "cpu",  # on a GPU all batches have one shape, so that one graph fits them
        )  # fmt: skip

    def _evaluated(
        self, inputs: Any, labels: Tensor, config: Config, device: torch.device, batch: int | None = None
    ) -> Batched:
        batch = batch or EVALUATION_BATCH[self.dataset.kind]
        if self.dataset.kind == "image":
            return self._images(inputs, labels, config, device, batch=batch)
        return TensorBatches(inputs, labels, batch=batch, device=device, seed=config.seed, trim=True)

    def _images(
        self, pixels: Tensor, labels: Tensor, config: Config, device: torch.device, *, batch: int, train: bool = False
    ) -> Batched:
        mean, std = self._statistics(config)
        return Batches(
            pixels, labels, batch=batch, mean=mean, std=std,
            device=device, seed=config.seed, augment=train, padding=config.padding, flip=config.flip,
            cutout=config.cutout, cutout_probability=config.cutout_probability, drop_last=train,
        )  # fmt: skip

    def _inputs(self, name: str, config: Config) -> Any:
        """The inputs of a part as tensors, made once: pixels of a size, tokens of a model, numbers."""
        part: DataSplit = getattr(self.dataset, name)
        if self.dataset.kind == "image":
            return self._once(("pixels", name, config.size), lambda: pixels_of(part.inputs, config.size))
        if self.dataset.kind == "text":
            key = ("tokens", name, config.model, config.length)
            return self._once(key, lambda: tokens.tokenize(part.inputs, self._tokenizer(config.model), config.length))
        return part.inputs

    def _statistics(self, config: Config) -> Statistics:
        """Mean and deviation of each channel, of pixels in [0, 1]."""
        if config.pixels in NORMALIZATION:
            return NORMALIZATION[config.pixels]
        return self._once(("statistics", config.size), lambda: _statistics(self._inputs("train", config)))

    def _tokenizer(self, model: str) -> Any:
        return self._once(("tokenizer", model), lambda: tokens.tokenizer(model))

    def _once(self, key: Any, make: Callable[[], Any]) -> Any:
        if key not in self._ready:
            self._ready[key] = make()
        return self._ready[key]


def _statistics(pixels: Tensor) -> Statistics:
    values = pixels[:: max(1, len(pixels) // 2000)].double() / 255
    std = values.std((0, 2, 3)).clamp(min=1e-3)  # of an image of one colour it is 0
    return tuple(values.mean((0, 2, 3)).tolist()), tuple(std.tolist())


def _rows(inputs: Any, rows: Tensor) -> Any:
    return {name: tensor[rows] for name, tensor in inputs.items()} if isinstance(inputs, dict) else inputs[rows]
