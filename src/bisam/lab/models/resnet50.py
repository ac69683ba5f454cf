"""ResNet-50 of He et al., *Deep Residual Learning for Image Recognition*, CVPR 2016, for 224×224 images."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from bisam.lab.models.initialization import he_convolutions, zero_linear_biases


class Bottleneck(nn.Module):
    """1×1, 3×3 and 1×1 convolutions to 4 · width channels; the stride is the 3×3's, in the paper the first 1×1's."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.norm3 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Sequential()
        if inputs != outputs:
            projection = nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False)
            self.shortcut = nn.Sequential(projection, nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        branch = F.relu(self.norm1(self.conv1(x)))
        branch = F.relu(self.norm2(self.conv2(branch)))
        return F.relu(self.norm3(self.conv3(branch)) + self.shortcut(x))


class ResNet50(nn.Module):
    """3, 4, 6 and 3 bottlenecks of width 64, 128, 256 and 512. Initial weights: He, fan out.

    The BiSAM authors' code has a 3×3 first convolution; here it is the paper's, 7×7.
    """

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False)
        self.norm = nn.BatchNorm2d(64)
        self.pool = nn.MaxPool2d(3, stride=2, padding=1)
        self.blocks = nn.Sequential()
        inputs = 64
        for width, blocks in zip((64, 128, 256, 512), (3, 4, 6, 3), strict=True):
            for i in range(blocks):
                self.blocks.append(Bottleneck(inputs, width, stride=2 if i == 0 and width > 64 else 1))
                inputs = 4 * width
        self.classifier = nn.Linear(inputs, classes)
        he_convolutions(self, "fan_out")
        zero_linear_biases(self)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.pool(F.relu(self.norm(self.conv(x)))))
        return self.classifier(x.mean((2, 3)))
