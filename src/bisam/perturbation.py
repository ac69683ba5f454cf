"""From the ascent gradient g to the perturbation ε.

    ε = ρ T² g / ‖T g‖,      T = 1 (SAM, BiSAM)   or   T = |w| + η (ASAM, A-BiSAM)

The norm runs over all perturbed parameters; ρ, T and η may differ between parameter groups.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from bisam import sharding


@dataclass
class Bucket:
    """Parameters of one group that share device and type, with their ascent gradients; together one foreach call.

    `params`, `gradients` and `weights`, the saved copies of the parameters, are this rank's shards where there are
    shards; `whole_gradients` are what a norm has to see. The parameters are free to be written to: whatever a
    perturbation leaves in them is where ε is added.
    """

    options: dict[str, Any]
    params: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)
    whole_gradients: list[Tensor] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)

    def add(self, param: Tensor, gradient: Tensor) -> None:
        self.params.append(sharding.local(param))
        self.gradients.append(sharding.local(gradient))
        self.whole_gradients.append(gradient)


class Perturbation(Protocol):
    """Turns ascent gradients into ε."""

    defaults: dict[str, Any]
    """Options that each parameter group may set for itself, with their values where it does not."""

    def check(self, group: dict[str, Any]) -> None:
        """Raise if a parameter group's options cannot be used."""

    def __call__(self, buckets: Sequence[Bucket]) -> Tensor:
        """Replace the gradients by ε, in place, and return the norm that they were divided by."""


class Ball:
    """The farthest point of a ball along the gradient: round (SAM) or, with `adaptive`, scaled by the weights (ASAM).

    ε = ρ T² g / ‖T g‖ with T = |w| + η in adaptive groups and T = 1 in the others, so that ‖T⁻¹ε‖ = ρ over all groups
    of one ρ. The paper's A-BiSAM has η = 0 and every parameter adaptive; ASAM's own experiments have η = 0.01 and leave
    biases and normalisation layers out, which is `{"params": …, "adaptive": False}` in a parameter group.
    """

    def __init__(self, rho: float | Tensor = 0.05, *, adaptive: bool = False, eta: float = 0.0) -> None:
        self.defaults = {"rho": rho, "adaptive": adaptive, "eta": eta}
        self.check(self.defaults)

    def check(self, group: dict[str, Any]) -> None:
        for name in ("rho", "eta"):
            value = group[name]
            if isinstance(value, Tensor):  # only its shape: reading it would wait for the device
                if value.dim() != 0:
                    raise ValueError(
                        f"{name} must be a number or a tensor with no dimensions, got {tuple(value.shape)}"
                    )
            elif not isinstance(value, (int, float)):
                raise TypeError(f"{name} must be a number, got {value!r}")
            elif not (value >= 0 and math.isfinite(value)):
                raise ValueError(f"{name} must be non-negative and finite, got {value}")

    def __call__(self, buckets: Sequence[Bucket]) -> Tensor:
        for bucket in buckets:
            if bucket.options["adaptive"]:
                _scale_by_weights(bucket)
        norm = sharding.norm(bucket.whole_gradients for bucket in buckets)
        # ε is 0 where the gradient is, and all NaN where it is not finite: then the second pass is not finite either,
        # and whoever guards the update (a GradScaler) skips it, with no need to look at the norm on the host
        unit = torch.where(norm == 0, 0.0, torch.where(norm.isfinite(), 1 / norm, math.nan))
        for bucket in buckets:
            gradients = bucket.gradients
            torch._foreach_mul_(gradients, (bucket.options["rho"] * unit).to(gradients[0].device))
            if bucket.options["adaptive"]:
                torch._foreach_mul_(gradients, bucket.params)
                torch._foreach_copy_(bucket.params, bucket.weights)
        return norm


def _scale_by_weights(bucket: Bucket) -> None:
    """g ← T g, with T = |w| + η left in the parameters' own storage: they are saved, and a third copy is not needed."""
    torch._foreach_abs_(bucket.params)
    if isinstance(bucket.options["eta"], Tensor) or bucket.options["eta"] != 0:
        torch._foreach_add_(bucket.params, bucket.options["eta"])
    torch._foreach_mul_(bucket.gradients, bucket.params)
