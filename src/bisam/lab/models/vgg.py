"""VGG of Simonyan and Zisserman, *Very Deep Convolutional Networks*, ICLR 2015, with batch norm, for 32×32 images."""

from __future__ import annotations

from torch import Tensor, nn

from bisam.lab.models.initialization import he_convolutions


class VGG(nn.Module):
    """VGG19-BN: sixteen 3×3 convolutions, then three linear layers.

    The linear layers have 512 units, 4096 in the paper: five poolings leave 512 numbers of a 32×32 image. That, dropout
    before the first two and convolutions with a bias, which batch norm undoes, are as in the BiSAM authors' code. So
    are the initial weights: He, fan out, for convolutions, and torch's for linear layers.
    """

    def __init__(self, classes: int, dropout: float = 0.5) -> None:
        super().__init__()
        self.features = nn.Sequential()
        inputs = 3
        for channels, convolutions in ((64, 2), (128, 2), (256, 4), (512, 4), (512, 4)):
            for _ in range(convolutions):
                self.features.extend([nn.Conv2d(inputs, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU()])
                inputs = channels
            self.features.append(nn.MaxPool2d(2))
        self.classifier = nn.Sequential(
            nn.Dropout(dropout),
            nn.Linear(512, 512),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(512, 512),
            nn.ReLU(),
            nn.Linear(512, classes),
        )
        he_convolutions(self, "fan_out")

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).flatten(1))
