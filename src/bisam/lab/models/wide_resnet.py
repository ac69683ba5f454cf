"""Wide residual networks of Zagoruyko and Komodakis, *Wide Residual Networks*, BMVC 2016, for 32×32 images."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from bisam.lab.models.initialization import he_convolutions


class WideBlock(nn.Module):
    """Batch norm and ReLU before each of two 3×3 convolutions, dropout between them.

    Where the channels change, the shortcut is a 1×1 convolution of what the first ReLU gives; elsewhere it is x itself.
    """

    def __init__(self, inputs: int, channels: int, stride: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(inputs)
        self.conv1 = nn.Conv2d(inputs, channels, 3, stride=stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.dropout = nn.Dropout(dropout)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        changes = inputs != channels
        self.projection = nn.Conv2d(inputs, channels, 1, stride=stride, bias=False) if changes else None

    def forward(self, x: Tensor) -> Tensor:
        active = F.relu(self.norm1(x))
        branch = F.relu(self.norm2(self.conv1(active)))
        branch = self.conv2(self.dropout(branch))
        return branch + (x if self.projection is None else self.projection(active))


class WideResNet(nn.Module):
    """WRN-depth-widen: 6n + 4 convolutions, n blocks each of 16, 32 and 64 times `widen` channels.

    Initial weights as in the BiSAM authors' code: He, fan in, for convolutions, zeros for the linear layer. The paper's
    dropout is 0 or 0.3.
    """

    def __init__(self, depth: int, widen: int, classes: int, dropout: float = 0.0) -> None:
        super().__init__()
        if depth < 10 or depth % 6 != 4:
            raise ValueError(f"depth must be 6n + 4, such as 16, 28 or 40, got {depth}")
        self.conv = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.blocks = nn.Sequential()
        inputs = 16
        for channels, stride in ((16 * widen, 1), (32 * widen, 2), (64 * widen, 2)):
            for i in range((depth - 4) // 6):
                self.blocks.append(WideBlock(inputs, channels, stride if i == 0 else 1, dropout))
                inputs = channels
        self.norm = nn.BatchNorm2d(inputs)
        self.classifier = nn.Linear(inputs, classes)
        he_convolutions(self, "fan_in")
        nn.init.zeros_(self.classifier.weight)
        nn.init.zeros_(self.classifier.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.blocks(self.conv(x))))
        return self.classifier(x.mean((2, 3)))
