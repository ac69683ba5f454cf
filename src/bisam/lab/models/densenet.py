"""DenseNet of Huang et al., *Densely Connected Convolutional Networks*, CVPR 2017, for 32×32 images."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Layer(nn.Module):
    """x, and `growth` channels computed from it by way of 4 · growth (DenseNet-B)."""

    def __init__(self, inputs: int, growth: int) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(inputs)
        self.conv1 = nn.Conv2d(inputs, 4 * growth, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(4 * growth)
        self.conv2 = nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        new = self.conv1(F.relu(self.norm1(x)))
        new = self.conv2(F.relu(self.norm2(new)))
        return torch.cat([x, new], 1)


class Transition(nn.Module):
    """Half the channels (DenseNet-C) at half the resolution."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(inputs)
        self.conv = nn.Conv2d(inputs, inputs // 2, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.avg_pool2d(self.conv(F.relu(self.norm(x))), 2)


class DenseNet(nn.Module):
    """DenseNet-121 with a 3×3 first convolution and no pooling after it. Initial weights are torch's."""

    def __init__(self, classes: int, growth: int = 32, layers: Sequence[int] = (6, 12, 24, 16)) -> None:
        super().__init__()
        channels = 2 * growth
        self.conv = nn.Conv2d(3, channels, 3, padding=1, bias=False)
        self.blocks = nn.Sequential()
        for i, count in enumerate(layers):
            if i > 0:
                self.blocks.append(Transition(channels))
                channels //= 2
            for _ in range(count):
                self.blocks.append(Layer(channels, growth))
                channels += growth
        self.norm = nn.BatchNorm2d(channels)
        self.classifier = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.blocks(self.conv(x))))
        return self.classifier(x.mean((2, 3)))
