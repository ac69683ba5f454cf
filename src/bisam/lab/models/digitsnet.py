"""A small convolutional net for 8×8 images of one channel: the demo's."""

from __future__ import annotations

from torch import Tensor, nn

from bisam.lab.models.initialization import he_convolutions, zero_linear_biases


class DigitsNet(nn.Module):
    """Three convolutions with batch norm, two poolings, one linear layer. Initial weights: He, fan out."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.features = nn.Sequential()
        for inputs, channels, pooled in ((1, 32, False), (32, 32, True), (32, 64, True)):
            self.features.extend([nn.Conv2d(inputs, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)])
            self.features.append(nn.ReLU())
            if pooled:
                self.features.append(nn.MaxPool2d(2))
        self.classifier = nn.Linear(64 * 2 * 2, classes)
        he_convolutions(self, "fan_out")
        zero_linear_biases(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).flatten(1))
