"""The data sets, by name: one `DataSet` each. A new one is one more entry of `DATA_SETS`."""

from __future__ import annotations

import difflib
from dataclasses import replace

from bisam.lab.data.dataset import DataSet
from bisam.lab.data.digits import digits

DATA_SETS: dict[str, DataSet] = {
    dataset.name: dataset
    for dataset in (
        DataSet(
            "cifar10",
            classes=10,
            samples={"train": 50_000, "test": 10_000},
            mean=(0.4914, 0.4822, 0.4465),
            std=(0.2470, 0.2435, 0.2616),
            size=32,
            hub="uoft-cs/cifar10",
            image="img",
            balanced=True,
            checksum="141080e395612a413c57ebed9dacda3380c6c2219dedffc779be4642ede1d96f",
        ),
        DataSet(
            "cifar100",
            classes=100,
            samples={"train": 50_000, "test": 10_000},
            mean=(0.5071, 0.4865, 0.4409),
            std=(0.2673, 0.2564, 0.2762),
            size=32,
            hub="uoft-cs/cifar100",
            image="img",
            label="fine_label",
            balanced=True,
        ),
        DataSet(
            "imagenet",
            classes=1000,
            samples={"train": 1_281_167, "test": 50_000},
            mean=(0.485, 0.456, 0.406),
            std=(0.229, 0.224, 0.225),
            size=None,
            hub="ILSVRC/imagenet-1k",
            files={"train": "train", "test": "validation"},  # the labels of its test split are not published
        ),
        DataSet(
            "digits",
            classes=10,
            samples={"train": 1197, "test": 600},
            mean=(0.3048,),
            std=(0.3755,),
            size=8,
            load=digits,
        ),
    )
}


def is_registered(name: str) -> bool:
    return any(name in (dataset.name, dataset.hub) for dataset in DATA_SETS.values())


def find_dataset(name: str, *, partial: bool = False) -> DataSet:
    """The data set of that name, ours or the hub's; with `partial`, any part of it is accepted.

    >>> find_dataset("uoft-cs/cifar100").classes
    100
    """
    for dataset in DATA_SETS.values():
        if name in (dataset.name, dataset.hub):
            return replace(dataset, whole=False) if partial else dataset
    near = difflib.get_close_matches(name.lower(), DATA_SETS, n=3, cutoff=0.5)
    hint = f"the nearest names are {', '.join(near)}; " if near else ""
    raise ValueError(f"unknown data set {name!r}: {hint}choose from {', '.join(DATA_SETS)}")
