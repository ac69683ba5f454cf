"""The description of a data set, and the checks of its images against it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from bisam.lab.data.images import DataError, Images, ImageSplits

MEAN_TOLERANCE = 0.01  # of a channel's mean: the test images of CIFAR-10 are off by 0.004, swapped channels by 0.045

Loader = Callable[[], tuple[Images, Images]]
"""Returns the training and the test images."""


@dataclass(frozen=True)
class DataSet:
    """A data set as its publishers describe it, and where it comes from: `hub` or `load`, one of the two."""

    name: str
    classes: int
    samples: Mapping[str, int]
    """Number of images in "train" and "test"."""
    mean: tuple[float, ...]
    """Mean of each channel, of pixels in [0, 1]; as many as the images have channels."""
    std: tuple[float, ...]
    size: int | None
    """Side of its square images; None where they have different sizes: then they are streamed from disk."""
    load: Loader | None = None
    """Loads it into memory without files of the hub."""
    hub: str | None = None
    """Its name on the hub, whose Parquet files `image`, `label` and `files` describe."""
    image: str = "image"
    label: str = "label"
    files: Mapping[str, str] = field(default_factory=lambda: {"train": "train", "test": "test"})
    """How the names of a split's files begin."""
    balanced: bool = False
    """Whether every class has the same number of samples."""
    whole: bool = True
    """False for a part of it, to try things out."""
    checksum: str | None = None
    """That of `ImageSplits`, where it has been verified."""

    def __post_init__(self) -> None:
        if (self.load is None) == (self.hub is None):
            found = "neither" if self.load is None else "both"
            raise ValueError(
                f"data set {self.name!r} needs a source, either load= (a function that returns training and test "
                f"images) or hub= (its name on the hub), got {found}"
            )
        if self.load is not None and self.size is None:
            raise ValueError(f"data set {self.name!r} is loaded into memory: give size=, the side of its images")

    @property
    def is_streamed(self) -> bool:
        """Whether it is read from disk during training, since it does not fit into memory."""
        return self.size is None


def check_loaded(images: Images, dataset: DataSet, split: str) -> None:
    """Raise DataError if a `load` function returned images that the data set does not describe."""
    expected = (dataset.samples[split], len(dataset.mean), dataset.size, dataset.size)
    if tuple(images.pixels.shape) != expected:
        raise DataError(
            f"{dataset.name}: load() returned {split} images of shape {tuple(images.pixels.shape)} and the data set "
            f"has {expected}: correct samples, mean or size"
        )
    low, high = (int(images.labels.min()), int(images.labels.max())) if len(images) else (0, 0)
    if not 0 <= low <= high < dataset.classes:
        raise DataError(
            f"{dataset.name}: load() returned {split} labels {low} … {high} and the data set has {dataset.classes} "
            f"classes, 0 … {dataset.classes - 1}"
        )


def check(images: Images, dataset: DataSet, split: str, where: str) -> None:
    """Raise DataError if the class counts or channel means are not those of the data set."""
    if not dataset.whole:
        return
    if dataset.balanced:
        counts = torch.bincount(images.labels, minlength=dataset.classes)
        expected = len(images) // dataset.classes
        wrong = counts.ne(expected).nonzero().flatten().tolist()
        if wrong:
            raise DataError(
                f"{where}: class {wrong[0]} has {int(counts[wrong[0]])} samples in the {split} split and "
                f"{dataset.name} has {expected} of each: these labels are of another data set, get the files again"
            )
    sums = images.pixels.sum((0, 2, 3), dtype=torch.int64).double()
    means = (sums / (255 * images.pixels[:, 0].numel())).tolist()
    if any(abs(value - mean) > MEAN_TOLERANCE for value, mean in zip(means, dataset.mean, strict=True)):
        found = ", ".join(f"{mean:.3f}" for mean in means)
        raise DataError(
            f"{where}: the channels of the {split} split have means {found} and those of {dataset.name} have "
            f"{', '.join(map(str, dataset.mean))}: these images are of another data set, get the files again"
        )


def check_whole(data: ImageSplits, dataset: DataSet, where: str, cache: Path) -> None:
    """Raise DataError if the contents differ from the recorded checksum of the whole data set."""
    if dataset.whole and dataset.checksum is not None and data.checksum != dataset.checksum:
        raise DataError(
            f"{where}: the decoded contents have the sha256 {data.checksum[:12]}… and those of {dataset.name} have "
            f"{dataset.checksum[:12]}…: images or labels are damaged or in another order. Get the files again, and "
            f"remove the cache {cache}"
        )
