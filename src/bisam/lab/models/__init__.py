"""Networks by name: the paper's, for 32×32 images, except ResNet-50 for 224×224; the demo's, for 8×8; and others."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import nn

from bisam.lab import spec
from bisam.lab.config import suggestion
from bisam.lab.models import from_file, from_timm, from_transformers
from bisam.lab.models.densenet import DenseNet
from bisam.lab.models.digitsnet import DigitsNet
from bisam.lab.models.perceptron import Perceptron
from bisam.lab.models.resnet import ResNet
from bisam.lab.models.resnet50 import ResNet50
from bisam.lab.models.vgg import VGG
from bisam.lab.models.wide_resnet import WideResNet

MODELS: dict[str, Callable[[int], nn.Module]] = {
    "densenet121": DenseNet,
    "digitsnet": DigitsNet,
    "resnet20": partial(ResNet, 20),
    "resnet32": partial(ResNet, 32),
    "resnet56": partial(ResNet, 56),
    "resnet50": ResNet50,
    "vgg19bn": VGG,
    "wrn28-2": partial(WideResNet, 28, 2),
    "wrn28-10": partial(WideResNet, 28, 10),
}


FOR_ROWS: dict[str, Callable[[int, int], nn.Module]] = {"perceptron": Perceptron}
"""Networks for rows of numbers, from the number of columns and of classes."""

ELSEWHERE: dict[str, Callable[[str, int, bool], nn.Module]] = {
    spec.TIMM: from_timm.build,
    spec.TRANSFORMERS: from_transformers.build,
    spec.PYTHON: from_file.build,
}
"""Where other networks come from: `timm:NAME`, `transformers:NAME-OR-FOLDER`, `file.py:function`.

The last argument is whether they are pretrained.
"""


def build(name: str, classes: int, features: int | None = None, *, pretrained: bool = True) -> nn.Module:
    """A new network of that name, with weights drawn from torch's global generator where they are not pretrained.

    `features` is the number of columns, for rows of numbers. With `pretrained=False` no file of weights is read: for a
    network that gets others.

    >>> sum(p.numel() for p in build("resnet20", 10).parameters())
    269722
    >>> import torch
    >>> build("perceptron", 2, features=30)(torch.zeros(4, 30)).shape
    torch.Size([4, 2])
    """
    source, own = spec.parse_model(name)
    if source in ELSEWHERE:
        return ELSEWHERE[source](own, classes, pretrained)
    if name in FOR_ROWS:
        if features is None:
            raise ValueError(f"{name} is for rows of numbers, and these data have none: use another model")
        return FOR_ROWS[name](features, classes)
    if name.endswith(".py"):
        raise ValueError(f"{name} is a Python file: name the function in it that returns the network, as in {name}:net")
    if name not in MODELS:
        raise ValueError(f"unknown model {name!r}: {suggestion(name, [*MODELS, *FOR_ROWS])}")
    return MODELS[name](classes)
