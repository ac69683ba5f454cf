"""The nets that benchmarks run on."""

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class ConvNet(nn.Module):
    """A plain convolutional net: `depth` convolutions with batch norm and a linear layer; 53 make 160 tensors."""

    def __init__(self, width: int = 16, depth: int = 53, classes: int = 10) -> None:
        super().__init__()
        channels = [3] + [width] * depth
        self.convolutions = nn.ModuleList(
            nn.Conv2d(a, b, 3, padding=1, bias=False) for a, b in itertools.pairwise(channels)
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(depth))
        self.head = nn.Linear(width, classes, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            y = F.relu(norm(convolution(x)))
            x = x + y if x.shape == y.shape else y
        return self.head(x.mean((2, 3)))


def perceptron(width: int, depth: int, inputs: int = 64, classes: int = 10) -> nn.Module:
    widths = [inputs] + [width] * depth
    hidden = [layer for a, b in itertools.pairwise(widths) for layer in (nn.Linear(a, b), nn.GELU())]
    return nn.Sequential(*hidden, nn.Linear(width, classes))


class Transformer(nn.Module):
    """A small encoder over 16 tokens, without dropout."""

    def __init__(self, width: int = 128, depth: int = 4, classes: int = 10) -> None:
        super().__init__()
        self.embed = nn.Linear(4, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x.unflatten(-1, (16, 4)))
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(-2))


class Block(nn.Module):
    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(-3, -2) for t in self.qkv(self.norm_1(x)).chunk(3, -1))
        weights = torch.softmax(q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5, -1)
        x = x + self.out((weights @ v).transpose(-3, -2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))
