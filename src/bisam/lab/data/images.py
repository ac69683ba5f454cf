"""Images in memory."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


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
class ImageSplits:
    """Training and test images, with the mean and standard deviation of each channel, of pixels in [0, 1]."""

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
