"""Which samples of one's own data are tested: a part that was given, or one that is held out."""

from __future__ import annotations

import re
from collections.abc import Iterable

import torch
from torch import Tensor

from bisam.lab.data.images import DataError
from bisam.lab.data.own_dataset import DataSplit
from bisam.lab.data.randomness import generator

TEST = 0.2
"""Part of the samples that is held out for the test where there is no test part."""

WORDS = {
    "train": ("train", "training", "trainval"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
"""Names of the parts of a data set, as folders, files and the hub have them."""


def split_of(name: str) -> str | None:
    """The part that a folder or a file belongs to, by its name.

    >>> split_of("train-00000-of-00002"), split_of("val"), split_of("cats")
    ('train', 'validation', None)
    """
    first = re.split(r"[-_.]", name.lower())[0]
    return next((part for part, words in WORDS.items() if first in words), None)


def splits_of(names: Iterable[str]) -> dict[str, str]:
    """The name of each part among these; of several for one part, the first.

    >>> splits_of(["train", "validation_matched", "validation_mismatched"])
    {'train': 'train', 'validation': 'validation_matched'}
    """
    found: dict[str, str] = {}
    for name in names:
        part = split_of(name)
        if part is not None:
            found.setdefault(part, name)
    return found


def roles(parts: dict[str, DataSplit], where: str, log: list[str]) -> tuple[DataSplit, DataSplit | None, DataSplit]:
    """The training, validation and test part.

    A validation part without a test part is tested, as is usual with published data sets whose test labels are secret:
    each seed then validates on a part of the training data. Without both, `TEST` of all samples are held out.
    """
    for name, part in parts.items():
        if not len(part):
            raise DataError(f"{where}: the {name} part has no samples: add some, or remove it")
    train = parts["train"]
    if "test" in parts:
        return train, parts.get("validation"), parts["test"]
    if "validation" in parts:
        log.append("there is no test part: the validation part is tested, and each seed validates on training samples")
        return train, None, parts["validation"]
    kept, held = stratified_split(train.labels, TEST)
    log.append(f"there is no test part: {len(held)} of {len(train)} samples are held out for the test, the same always")
    return train.rows(kept), None, train.rows(held)


def stratified_split(labels: Tensor, fraction: float, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Indices of the others and of that fraction of each class, at least one of each; ascending.

    >>> kept, held = stratified_split(torch.tensor([0] * 8 + [1] * 2), 0.25)
    >>> len(kept), torch.tensor([0] * 8 + [1] * 2)[held].tolist()
    (7, [0, 0, 1])
    """
    order = torch.randperm(len(labels), generator=generator("held out", seed))
    _, counts = torch.unique(labels, return_counts=True)
    by_class = torch.split(order[labels[order].sort(stable=True).indices], counts.tolist())
    held = [members[: max(1, round(fraction * len(members)))] for members in by_class]
    chosen = torch.zeros(len(labels), dtype=torch.bool)
    chosen[torch.cat(held)] = True
    return (~chosen).nonzero().flatten(), chosen.nonzero().flatten()
