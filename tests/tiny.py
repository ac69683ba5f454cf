"""The smallest training: a few random images, a tiny network, and a progress that requests a stop."""

import torch
from torch import nn

from bisam.lab.data import Images, ImageSplits
from bisam.lab.data.sources import InMemory
from bisam.lab.training.progress import Progress

BATCHES = 4
"""Of 8 images each, in an epoch of `tiny_images`."""


def tiny_images(classes=10, tested=10):
    """Random images of CIFAR's shape."""
    draws = torch.Generator().manual_seed(0)

    def images(count):
        pixels = torch.randint(0, 256, (count, 3, 32, 32), dtype=torch.uint8, generator=draws)
        return Images(pixels, torch.randint(classes, (count,), generator=draws))

    return InMemory(ImageSplits("tiny", images(40), images(tested), classes, (0.5,) * 3, (0.25,) * 3))


NET = f"{__file__}:net"
"""The smallest network with a convolution and batch statistics, as `Config.model` names it."""


def net(classes):
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, stride=4), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(256, classes)
    )


def net_with_dropout(classes):
    return nn.Sequential(nn.Dropout(0.5), net(classes))


class StopRequesting(Progress):
    """Requests a stop after `steps` steps, or as soon as a run is finished; never, if neither is given."""

    def __init__(self, steps=None, *, at_finish=False):
        super().__init__()
        self.stopping, self._left, self._at_finish = [], steps, at_finish

    def step(self, number):
        if self._left is not None:
            self._left -= 1
            self.stopping += ["SIGTERM"] * (self._left == 0)

    def finish(self, config, result):
        super().finish(config, result)
        self.stopping += ["SIGTERM"] * self._at_finish
