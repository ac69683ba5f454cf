"""Data of one's own for classification: its parts, its kind and its classes."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import pyarrow as pa
import torch
from torch import Tensor

from bisam.lab.data.table_reading import TableReading

Kind = Literal["image", "rows", "text"]

UNBALANCED = 1.5
"""Largest class by smallest class from which measures beside accuracy are reported."""


@dataclass(frozen=True, eq=False)
class DataSplit:
    """Inputs and labels, int64 (N).

    Inputs are pixels, uint8 (N, 3, H, W), or encoded images; numbers, float32 (N, F) or with more axes, or the columns
    of a table, from which these are read when the training part is known; or tuples of texts.
    """

    inputs: Any
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def rows(self, rows: Tensor) -> DataSplit:
        if isinstance(self.inputs, Tensor):
            return DataSplit(self.inputs[rows], self.labels[rows])
        if isinstance(self.inputs, pa.Table):
            return DataSplit(self.inputs.take(pa.array(rows.numpy())), self.labels[rows])
        return DataSplit([self.inputs[row] for row in rows.tolist()], self.labels[rows])

    @cached_property
    def checksum(self) -> str:
        digest = hashlib.sha256(self.labels.numpy().tobytes())
        if isinstance(self.inputs, Tensor):
            digest.update(repr(tuple(self.inputs.shape)).encode())
            digest.update(self.inputs.contiguous().numpy().data)
            return digest.hexdigest()
        for one in self.inputs:
            for piece in one if isinstance(one, tuple) else [one]:
                content = piece.encode() if isinstance(piece, str) else bytes(piece)
                digest.update(len(content).to_bytes(8, "little") + content)
        return digest.hexdigest()


@dataclass(frozen=True, eq=False)
class OwnDataset:
    """A data set of one's own. Without a validation part, each seed takes one from the training part."""

    name: str
    kind: Kind
    train: DataSplit
    test: DataSplit
    classes: Sequence[str]
    """Names of the classes."""
    validation: DataSplit | None = None
    notes: Sequence[str] = field(default_factory=list)
    """Lines about what was assumed or left out."""
    columns: TableReading | None = None
    """How a table was read; None for other data."""

    @property
    def features(self) -> int | None:
        """Numbers of a sample; None for other kinds."""
        return math.prod(self.train.inputs.shape[1:]) if self.kind == "rows" else None

    @cached_property
    def counts(self) -> Tensor:
        """Training samples of each class."""
        return torch.bincount(self.train.labels, minlength=len(self.classes))

    @property
    def is_unbalanced(self) -> bool:
        return bool(self.counts.max() > UNBALANCED * self.counts.min())

    @cached_property
    def checksum(self) -> str:
        """sha256 of the contents of all parts, in hexadecimal."""
        parts = {"train": self.train, "validation": self.validation, "test": self.test}
        text = " ".join(f"{name} {part.checksum}" for name, part in parts.items() if part is not None)
        return hashlib.sha256(text.encode()).hexdigest()
