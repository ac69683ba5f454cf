"""The weights every network here starts from."""

from __future__ import annotations

from torch import nn


def initialize(model: nn.Module) -> None:
    """Convolutions N(0, 2/fan out) of He et al. 2015, batch norms 1 and 0, biases 0, linear weights torch's own."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(module, nn.BatchNorm2d):
            nn.init.ones_(module.weight)
        if isinstance(module, (nn.Conv2d, nn.BatchNorm2d, nn.Linear)) and module.bias is not None:
            nn.init.zeros_(module.bias)
