"""The networks of the paper, by name: for 32×32 images, except ResNet-50 for 224×224; and the demo's, for 8×8."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import nn

from bisam.lab.config import suggestion
from bisam.lab.models.densenet import DenseNet
from bisam.lab.models.digitsnet import DigitsNet
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


def build(name: str, classes: int) -> nn.Module:
    """A new network of that name, with weights drawn from torch's global generator.

    >>> sum(p.numel() for p in build("resnet20", 10).parameters())
    269722
    """
    if name not in MODELS:
        raise ValueError(f"no model is called {name!r}: {suggestion(name, MODELS)}")
    return MODELS[name](classes)
