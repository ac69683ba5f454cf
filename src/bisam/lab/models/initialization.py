"""The weights that networks start from."""

from __future__ import annotations

from typing import Literal

from torch import nn


def he_convolutions(model: nn.Module, mode: Literal["fan_in", "fan_out"]) -> None:
    """Draw convolutions from N(0, 2/fan) of He et al. 2015, with biases 0; other layers keep torch's weights."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode=mode, nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)


def zero_linear_biases(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
