"""What a data set is, and what is known of each before it is read."""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

MEAN_TOLERANCE = 0.01  # of a channel's mean: the test images of CIFAR-10 are off by 0.004, swapped channels by 0.045


class DataError(ValueError):
    """Files that are missing, damaged or of something else."""


@dataclass(frozen=True, eq=False)
class Images:
    """Pixels, uint8 (N, C, H, W), and their labels, int64 (N)."""

    pixels: Tensor
    labels: Tensor

    def __post_init__(self) -> None:
        if self.pixels.dtype != torch.uint8 or self.pixels.ndim != 4:
            raise ValueError(f"pixels must be uint8 (N, C, H, W), got {self.pixels.dtype} {tuple(self.pixels.shape)}")
        if self.labels.dtype != torch.int64 or self.labels.shape != self.pixels.shape[:1]:
            raise ValueError(
                f"labels must be int64, one of each of {len(self.pixels)} images, "
                f"got {self.labels.dtype} {tuple(self.labels.shape)}"
            )

    def __len__(self) -> int:
        return len(self.labels)

    @cached_property
    def checksum(self) -> str:
        """sha256 of shape, pixels and labels, in hexadecimal."""
        digest = hashlib.sha256(repr(tuple(self.pixels.shape)).encode())
        for tensor in (self.pixels, self.labels):
            digest.update(tensor.cpu().contiguous().numpy().data)
        return digest.hexdigest()


@dataclass(frozen=True, eq=False)
class DataSet:
    """Training and test images of so many classes; mean and standard deviation of each channel, of pixels in [0, 1]."""

    name: str
    train: Images
    test: Images
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @cached_property
    def checksum(self) -> str:
        """sha256 of the decoded contents of both splits, in hexadecimal."""
        return hashlib.sha256(f"train {self.train.checksum} test {self.test.checksum}".encode()).hexdigest()


@dataclass(frozen=True)
class Facts:
    """A data set as its publishers describe it.

    `size` is the side of its square images, None where they are of any size; `files` how the names of a split's Parquet
    files begin. `balanced`: every class has as many samples as every other. `whole`: all of it, not a part of it that
    is for trying things out. `checksum`: that of the `DataSet`, where somebody has seen it whole.
    """

    name: str
    classes: int
    samples: Mapping[str, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    size: int | None
    hub: str | None = None
    image: str = "image"
    label: str = "label"
    files: Mapping[str, str] = field(default_factory=lambda: {"train": "train", "test": "test"})
    balanced: bool = False
    whole: bool = True
    checksum: str | None = None


DATA_SETS: dict[str, Facts] = {
    facts.name: facts
    for facts in (
        Facts(
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
        Facts(
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
        Facts(
            "imagenet",
            classes=1000,
            samples={"train": 1_281_167, "test": 50_000},
            mean=(0.485, 0.456, 0.406),
            std=(0.229, 0.224, 0.225),
            size=None,
            hub="ILSVRC/imagenet-1k",
            files={"train": "train", "test": "validation"},  # the labels of its test split are not published
        ),
        Facts(
            "digits",
            classes=10,
            samples={"train": 1197, "test": 600},
            mean=(0.3048,),
            std=(0.3755,),
            size=8,
        ),
    )
}


def known(name: str, *, partial: bool = False) -> Facts:
    """The facts of the data set of that name, ours or the hub's; of any part of it, if that will do.

    >>> known("uoft-cs/cifar100").classes
    100
    """
    for facts in DATA_SETS.values():
        if name in (facts.name, facts.hub):
            return replace(facts, whole=False) if partial else facts
    near = difflib.get_close_matches(name.lower(), DATA_SETS, n=3, cutoff=0.5)
    hint = f"the nearest names are {', '.join(near)}; " if near else ""
    raise ValueError(f"no data set is called {name!r}: {hint}there are {', '.join(DATA_SETS)}")


def check(images: Images, facts: Facts, split: str, where: str) -> None:
    """Refuse what has the form of that data set but cannot be it."""
    if not facts.whole:
        return
    if facts.balanced:
        counts = torch.bincount(images.labels, minlength=facts.classes)
        expected = len(images) // facts.classes
        wrong = counts.ne(expected).nonzero().flatten().tolist()
        if wrong:
            raise DataError(
                f"{where}: class {wrong[0]} has {int(counts[wrong[0]])} samples in the {split} split and {facts.name} "
                f"has {expected} of each: these labels are of something else, get the files again"
            )
    sums = images.pixels.sum((0, 2, 3), dtype=torch.int64).double()
    means = (sums / (255 * images.pixels[:, 0].numel())).tolist()
    if any(abs(found - mean) > MEAN_TOLERANCE for found, mean in zip(means, facts.mean, strict=True)):
        told = ", ".join(f"{mean:.3f}" for mean in means)
        raise DataError(
            f"{where}: the channels of the {split} split have means {told} and those of {facts.name} have "
            f"{', '.join(map(str, facts.mean))}: these images are of something else, get the files again"
        )


def check_whole(data: DataSet, facts: Facts, where: str, cache: Path) -> None:
    """Refuse what is not bit for bit that data set, in its order, if we know what that is."""
    if facts.whole and facts.checksum is not None and data.checksum != facts.checksum:
        raise DataError(
            f"{where}: the decoded contents have the sha256 {data.checksum[:12]}… and those of {facts.name} have "
            f"{facts.checksum[:12]}…: images or labels are damaged or in another order. Get the files again, and "
            f"remove {cache}, where they are kept decoded"
        )
