"""Residual networks of the CIFAR section of He et al., *Deep Residual Learning for Image Recognition*, CVPR 2016."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor, nn

from bisam.lab.models.initialization import he_convolutions

if TYPE_CHECKING:
    from bisam.lab.models.fused.residual import Network


def shortcut(x: Tensor, channels: int) -> Tensor:
    """Option A: every second pixel of x, with channels of zeros around its own; x itself if its channels suffice.

    The paper leaves open where the zeros go; as in the BiSAM authors' code, half are before and half after.
    """
    missing = channels - x.shape[1]
    if missing == 0:
        return x
    # not x[:, :, ::2, ::2], the same numbers: its gradient is never channels_last
    pixels = F.avg_pool2d(x, 1, stride=2)
    return F.pad(pixels, (0, 0, 0, 0, missing // 2, missing - missing // 2))


class BasicBlock(nn.Module):
    """Two 3×3 convolutions beside a parameter-free shortcut; the first has stride 2 where the channels grow."""

    def __init__(self, inputs: int, channels: int) -> None:
        super().__init__()
        self.channels = channels
        self.conv1 = nn.Conv2d(inputs, channels, 3, stride=1 if inputs == channels else 2, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        branch = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(branch)) + shortcut(x, self.channels))


class ResNet(nn.Module):
    """6n + 2 layers: n blocks each of 16, 32 and 64 channels.

    Initial weights as in the BiSAM authors' code: He, fan in, for convolutions and for the linear layer.
    """

    def __init__(self, depth: int, classes: int) -> None:
        super().__init__()
        if depth < 8 or depth % 6 != 2:
            raise ValueError(f"depth must be 6n + 2, such as 20, 32 or 56, got {depth}")
        self.conv = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(16)
        widths = [width for width in (16, 32, 64) for _ in range(depth // 6)]
        self.blocks = nn.Sequential(*(BasicBlock(inputs, channels) for inputs, channels in pairwise([16, *widths])))
        self.classifier = nn.Linear(64, classes)
        he_convolutions(self, "fan_in")
        nn.init.kaiming_normal_(self.classifier.weight)
        self.is_fused = False

    def forward(self, x: Tensor) -> Tensor:
        if self.is_fused:
            fused = self.as_kernels()
            if fused.fits(x):
                return self.classifier(fused(x))
        x = self.blocks(F.relu(self.norm(self.conv(x))))
        return self.classifier(x.mean((2, 3)))

    def fuse(self) -> None:
        """Compute training passes on a GPU, under autocast to bfloat16, by a few Triton kernels a layer."""
        self.is_fused = True

    def as_kernels(self) -> Network:
        """The layers that are there now, without the classifier: a module may have been replaced since `fuse`."""
        from bisam.lab.models.fused.residual import FusedLayer, Network  # which imports Triton

        layers = [FusedLayer(self.conv, self.norm, input=-1)]
        for block in self.blocks:
            assert isinstance(block, BasicBlock)
            last = len(layers) - 1
            layers.append(FusedLayer(block.conv1, block.norm1, input=last))
            layers.append(FusedLayer(block.conv2, block.norm2, input=last + 1, shortcut=last))
        return Network(layers, [self.conv, self.norm, *self.blocks.modules()])
