"""How new samples become inputs of a trained model: values that JSON has, and what applies them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from bisam.lab.data import pictures, tokens
from bisam.lab.data.images import DataError
from bisam.lab.data.on_device import Normalization
from bisam.lab.data.own_dataset import Kind
from bisam.lab.data.table_columns import TableInputs
from bisam.lab.data.table_reading import TableReading

EVALUATION_BATCH = {"image": 250, "rows": 1000, "text": 64}
"""Samples of a batch without gradients, by kind."""

WORDS = {"image": "images", "rows": "rows", "text": "texts"}


@dataclass(frozen=True)
class Preparation:
    """What a model was trained with: its kind of inputs, its classes in order, and the statistics of its data."""

    kind: Kind
    classes: tuple[str, ...]
    columns: TableReading | None = None
    """That of the `OwnDataset`; None where the data were no table."""
    features: int | None = None
    """Numbers of a sample, of rows."""
    shape: tuple[int, ...] = ()
    """Their axes, where they are more than a row."""
    size: int | None = None
    """Side of the images."""
    mean: tuple[float, ...] = ()
    """Of each channel, of pixels in [0, 1]."""
    std: tuple[float, ...] = ()
    length: int | None = None
    """Tokens of a text that are read."""

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "columns": None if self.columns is None else self.columns.as_dict()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Preparation:
        """The inverse of `as_dict`, with lists for tuples.

        ValueError, TypeError or KeyError for what no training writes.
        """
        names = [one.name for one in fields(cls) if one.name in values]
        found: dict[str, Any] = {
            name: tuple(values[name]) if isinstance(values[name], list) else values[name] for name in names
        }
        if found.get("columns") is not None:
            found["columns"] = TableReading.from_dict(found["columns"])
        made = cls(**found)
        made._check_values()
        return made

    def _check_values(self) -> None:
        is_known = self.kind in get_args(Kind) and len(self.classes) >= 2 and _are(str, self.classes)
        of_kind = {
            "rows": lambda: (
                _is_count(self.features)
                and self._learnt in (None, self.features)
                and all(map(_is_count, self.shape))
                and (not self.shape or math.prod(self.shape) == self.features)
            ),
            "text": lambda: _is_count(self.length),
            "image": lambda: _is_count(self.size) and _are_channels(self.mean, self.std),
        }
        if not is_known or not of_kind[self.kind]() or not self._has_columns_of_its_kind:
            raise ValueError("it is not how the inputs of a model are prepared")

    @property
    def _learnt(self) -> int | None:
        """Inputs that the columns of a table become; None for other data."""
        inputs = self.columns and self.columns.inputs
        return len(inputs.names) if isinstance(inputs, TableInputs) else None

    @property
    def _has_columns_of_its_kind(self) -> bool:
        return self.columns is None or (self.kind == "rows") == isinstance(self.columns.inputs, TableInputs)

    def check(self, kind: Kind, inputs: Any, where: str) -> None:
        """DataError for inputs that the model does not take."""
        if kind != self.kind:
            raise DataError(
                f"{where} has {WORDS[kind]}, and the model was trained on {WORDS[self.kind]}: give {WORDS[self.kind]}"
            )
        if kind == "rows" and self.shape and tuple(inputs.shape[1:]) != self.shape:
            there, here = ("×".join(map(str, shape)) for shape in (inputs.shape[1:], self.shape))
            raise DataError(
                f"{where} has samples of {there} numbers, and the model was trained on {here}: give the same"
            )
        numbers = math.prod(inputs.shape[1:]) if kind == "rows" else None
        if numbers != self.features:
            raise DataError(
                f"{where} has {numbers} numbers in a row, and the model was trained on {self.features}: give the same "
                "columns in the same order"
            )
        texts = len(self.columns.names) if kind == "text" and self.columns else 0
        if texts and len(inputs) and len(inputs[0]) != texts:
            raise DataError(
                f"{where}: a sample has {len(inputs[0])} texts, and the model was trained on {texts}: give tuples of "
                "as many"
            )

    def apply(self, inputs: Any, tokenizer: Any, device: torch.device) -> Any:
        """Some of the inputs, as `DataSplit` has them, as the model takes them. The tokenizer is for texts."""
        if self.kind == "image":
            assert self.size is not None
            pixels = pixels_of(inputs, self.size).to(device).permute(0, 2, 3, 1)
            return Normalization(self.mean, self.std, device=device)(pixels)
        if self.kind == "text":
            assert self.length is not None
            found = tokens.tokenize(inputs, tokenizer, self.length)
            return {name: tensor.to(device) for name, tensor in found.items()}
        return (inputs if self.shape else inputs.flatten(1)).to(device)  # once all numbers were trained on as rows


def pixels_of(inputs: Any, size: int) -> Tensor:
    """Pixels or encoded images, as squares of that side: uint8 (N, 3, size, size)."""
    if not isinstance(inputs, Tensor):
        return pictures.decode(inputs, size)
    if tuple(inputs.shape[2:]) == (size, size):
        return inputs
    pieces = [inputs[start : start + 500].float() for start in range(0, len(inputs), 500)]
    scaled = [F.interpolate(piece, (size, size), mode="bilinear", antialias=True) for piece in pieces]
    return torch.cat(scaled).round().clamp(0, 255).to(torch.uint8)


def _is_count(value: Any) -> bool:
    return type(value) is int and value > 0


def _are(kind: type, values: Any) -> bool:
    return all(type(value) is kind for value in values)


def _are_channels(mean: Any, std: Any) -> bool:
    return len(mean) == len(std) == 3 and _are(float, (*mean, *std)) and all(value > 0 for value in std)
