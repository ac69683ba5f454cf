"""Batches of images that live on the device: crop, flip, cutout and normalisation are a few kernels there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from bisam.lab.data.randomness import generator
from bisam.lab.data.shards import WHOLE

PIXELS_AT_ONCE = 2**20
"""Pixels of the batches that are put together at a time: eight of 128 images of 32×32. Larger batches come singly."""

_Drawn = tuple[Tensor, Tensor | None]
"""Order, first pixel and direction of each crop; corners of the squares to cut out, if any."""


class Normalization:
    """uint8 (B, H, W, C) → (pixel/255 − mean)/std, (B, C, H, W)."""

    def __init__(
        self,
        mean: Sequence[float],
        std: Sequence[float],
        *,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        channels_last: bool = True,
    ) -> None:
        if not all(value > 0 for value in std):
            raise ValueError(f"std must be positive, got {tuple(std)}")
        self._shift = _moved(255 * torch.tensor(mean, dtype=torch.float32), device).view(1, -1, 1, 1)
        self._scale = _moved(1 / (255 * torch.tensor(std, dtype=torch.float32)), device).view(1, -1, 1, 1)
        self._dtype, self._channels_last = dtype, channels_last

    def __call__(self, pixels: Tensor) -> Tensor:
        x = pixels.permute(0, 3, 1, 2)
        if not self._channels_last:
            x = x.contiguous()
        return (x - self._shift).mul_(self._scale).to(self._dtype)


class Batches:
    """Images and labels, cut into batches that are put together on the device.

    With `augment`, samples come in random order, and each is padded with `padding` black pixels on every side, cropped
    to its size at a random place, mirrored with probability ½ (`flip`), and, after normalisation and with probability
    `cutout_probability`, has a square of side `cutout` set to 0 (DeVries and Taylor 2017). The square's centre is any
    pixel, so it is clipped at the border. `shuffle` is the order alone.

    Order and augmentation depend on seed and epoch only, and are the same on every device. All random numbers of an
    epoch are drawn at once, at the end of the epoch before it, while the device is busy; nothing waits for the device.

    >>> images, labels = torch.zeros(10, 3, 32, 32, dtype=torch.uint8), torch.arange(10)
    >>> batches = Batches(images, labels, batch=4, mean=[0.5] * 3, std=[0.25] * 3, device="cpu", seed=0, augment=True)
    >>> [(tuple(x.shape), len(y)) for x, y in batches.epoch(0)]
    [((4, 3, 32, 32), 4), ((4, 3, 32, 32), 4)]
    """

    def __init__(
        self,
        images: Tensor,
        labels: Tensor,
        *,
        batch: int,
        mean: Sequence[float],
        std: Sequence[float],
        device: torch.device | str,
        seed: int,
        augment: bool,
        padding: int = 4,
        flip: bool = True,
        cutout: int = 0,
        cutout_probability: float = 0.5,
        shuffle: bool | None = None,
        drop_last: bool = True,
        dtype: torch.dtype = torch.float32,
        channels_last: bool = True,
    ) -> None:
        if images.dtype != torch.uint8 or images.ndim != 4 or labels.shape != images.shape[:1]:
            raise ValueError(
                f"images must be uint8 (N, C, H, W) with a label each, got {images.dtype} {tuple(images.shape)} and "
                f"labels {tuple(labels.shape)}"
            )
        side = min(images.shape[2:])
        if augment and padding > side:
            raise ValueError(f"padding={padding} leaves most crops of {side}×{side} black: set {side} at most")
        if augment and cutout >= 2 * side:
            raise ValueError(f"cutout={cutout} covers images of {side}×{side} wherever it is: set less than {2 * side}")
        channels = images.shape[1]
        if not len(mean) == len(std) == channels:
            raise ValueError(f"mean and std must have {channels} values, one a channel, got {len(mean)} and {len(std)}")
        if batch < 1:
            raise ValueError(f"batch must be positive, got {batch}")
        if padding < 0 or cutout < 0:
            raise ValueError(f"padding and cutout must not be negative, got {padding} and {cutout}")
        if not 0 <= cutout_probability <= 1:
            raise ValueError(f"cutout_probability must be in [0, 1], got {cutout_probability}")
        self.device = torch.device(device)
        self.shard = WHOLE
        self.batch, self.seed, self.drop_last = batch, seed, drop_last
        self.augment, self.flip = augment, augment and flip
        self.padding, self.cutout = (padding, cutout) if augment else (0, 0)
        self.cutout_probability = cutout_probability
        self.shuffle = augment if shuffle is None else shuffle
        self._height, self._width = images.shape[2:]
        stored = images.to(self.device).permute(0, 2, 3, 1)
        p = self.padding
        self._pixels = F.pad(stored, (0, 0, p, p, p, p)).contiguous()  # zeros before normalisation: black
        self._labels = labels.to(self.device)
        self._normalize = Normalization(mean, std, device=self.device, dtype=dtype, channels_last=channels_last)
        self._stride = self._width + 2 * p
        self._down = torch.arange(self._height, device=self.device).view(-1, 1)
        self._across = torch.arange(self._width, device=self.device)
        self._rows_down = self._down * self._stride
        self._ahead: dict[int, _Drawn] = {}  # the epoch after the one that has ended

    def __len__(self) -> int:
        count = len(self._labels)
        return count // self.batch if self.drop_last else -(-count // self.batch)

    def epoch(self, number: int, *, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches of that epoch, from batch `start` on, each what it would be in a whole epoch."""
        if not 0 <= start <= len(self):
            raise ValueError(f"start must be in 0 … {len(self)}, the number of batches, got {start}")
        return self._random(number, start) if self.augment or self.shuffle else self._in_order(start)

    def _in_order(self, start: int) -> Iterator[tuple[Tensor, Tensor]]:
        for rows in self._slices(start):
            yield self._normalize(self._pixels[rows]), self._labels[rows].clone()

    def _random(self, number: int, start: int) -> Iterator[tuple[Tensor, Tensor]]:
        plan, holes = self._ahead.pop(number) if number in self._ahead else self._drawn(number)
        pixels = self._pixels.view(-1, self._pixels.shape[-1])
        for several in self._neighbours(start):
            rows = slice(several[0].start, several[-1].stop)
            order, first, step = plan[:, rows]
            places = torch.addcmul(first.view(-1, 1, 1) + self._rows_down, step.view(-1, 1, 1), self._across)
            x = self._normalize(pixels.index_select(0, places.view(-1)).view(*places.shape, -1))
            if holes is not None:
                x = x.masked_fill_(self._inside(holes[:, rows]), 0)
            labels = self._labels.index_select(0, order)
            for one in several:
                own = slice(one.start - rows.start, one.stop - rows.start)
                yield x[own], labels[own]
        self._ahead = {number + 1: self._drawn(number + 1)}

    def _drawn(self, number: int) -> _Drawn:
        """All that is random in an epoch: for each image its place in the order, its crop, and what is cut out."""
        count, p = len(self._labels), self.padding
        draws = generator("batches", self.seed, number)
        order = torch.randperm(count, generator=draws) if self.shuffle else torch.arange(count)
        top, left = torch.randint(2 * p + 1, (2, count), generator=draws)
        mirrored = torch.randint(2, (count,), generator=draws) * int(self.flip)
        # where the first pixel of each crop is, and whether the next one is to its right or to its left
        area = (self._height + 2 * p) * self._stride
        first = order * area + top * self._stride + left + mirrored * (self._width - 1)
        plan = _moved(torch.stack([order, first, 1 - 2 * mirrored]), self.device)
        return plan, self._holes(draws) if self.cutout else None

    def _neighbours(self, start: int) -> Iterator[list[slice]]:
        """The rows of a few batches at a time: to launch as many kernels for each would keep the host busy."""
        waiting: list[slice] = []
        most = PIXELS_AT_ONCE // (self.batch * self._height * self._width) if self.shard == WHOLE else 1
        for rows in self._slices(start):
            waiting.append(rows)
            if len(waiting) >= most:
                yield waiting
                waiting = []
        if waiting:
            yield waiting

    def _slices(self, start: int) -> Iterator[slice]:
        for number in range(start, len(self)):
            yield self.shard.rows(number * self.batch, min((number + 1) * self.batch, len(self._labels)))

    def _holes(self, draws: torch.Generator) -> Tensor:
        """Upper left corners of the squares to cut out, before clipping; outside of the image where none is cut."""
        count = len(self._labels)
        centres = [torch.randint(side, (count,), generator=draws) for side in (self._height, self._width)]
        corners = torch.stack(centres) - self.cutout // 2
        is_cut = torch.rand(count, generator=draws) < self.cutout_probability
        return _moved(torch.where(is_cut, corners, -self.cutout), self.device)

    def _inside(self, corners: Tensor) -> Tensor:
        top, left = corners.view(2, -1, 1, 1, 1)
        down, across = self._down - top, self._across - left
        return (down >= 0) & (down < self.cutout) & (across >= 0) & (across < self.cutout)


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on the device, without synchronizing."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
