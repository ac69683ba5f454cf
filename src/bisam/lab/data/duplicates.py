"""Samples of one's own data that are in two parts: a test on what was trained on says little."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from torch import Tensor

from bisam.lab.data.own_dataset import DataSplit, OwnDataset


def notes(dataset: OwnDataset) -> list[str]:
    """A line for each part that has samples of the training part."""
    known = {*_digests(dataset.train)}
    parts = {"validation": dataset.validation, "test": dataset.test}
    counts = {
        name: (sum(digest in known for digest in _digests(part)), len(part))
        for name, part in parts.items()
        if part is not None
    }
    return [
        f"{count} of {whole} {name} samples have the same inputs as a training sample: if they are copies, as of "
        "oversampling, remove them, because accuracies come out too high"
        for name, (count, whole) in counts.items()
        if count
    ]


def _digests(part: DataSplit) -> Iterator[bytes]:
    """One for the inputs of each sample."""
    if isinstance(part.inputs, Tensor):
        rows = part.inputs.contiguous().numpy().reshape(len(part), -1)
        return (hashlib.blake2b(row.tobytes(), digest_size=16).digest() for row in rows)
    return (hashlib.blake2b(_content(one), digest_size=16).digest() for one in part.inputs)


def _content(one: object) -> bytes:
    """The bytes of an image, or texts."""
    return repr(one).encode() if isinstance(one, tuple) else bytes(one)  # type: ignore[call-overload]
