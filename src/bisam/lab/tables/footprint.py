"""The memory of a run, counted from its model: no weight is drawn and nothing is computed."""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from bisam.lab.config import Config
from bisam.lab.data import DATA_SETS
from bisam.lab.methods import METHODS
from bisam.lab.models import MODELS, build

SIDE = 224
"""Side of the images of a streamed data set, which are cropped to it."""


def estimated_mib(config: Config) -> float | None:
    """Peak memory of an eager step; None for a model, data set or method that is not registered.

    It is reached when a backward pass begins: weights and momentum, for methods that perturb one copy of the weights,
    and all that the forward pass has saved; or, of a model with more weights than that, when it ends, with gradients.
    Libraries' workspaces and the data set on the device come on top.
    """
    if config.model not in MODELS or config.data not in DATA_SETS or config.method not in METHODS:
        return None
    samples = min(config.batch, config.micro_batch or config.batch)
    weights, saved = _counted(config.model, config.data, samples, config.precision == "bf16")
    copies = 3 if METHODS[config.method].perturbs else 2
    gradients = weights if samples == config.batch else 2 * weights  # those of the micro-batches before are kept
    return (copies * weights + max(saved, gradients)) / 2**20


@cache
def _counted(model: str, data: str, samples: int, bf16: bool) -> tuple[int, int]:
    """Bytes of the weights, and of the other tensors that a forward pass saves for its backward pass."""
    dataset = DATA_SETS[data]
    side = dataset.size or SIDE
    with FakeTensorMode():
        net = build(model, dataset.classes)
        x = torch.empty(samples, len(dataset.mean), side, side)
        y = torch.empty(samples, dtype=torch.long)
        own = {param.untyped_storage()._cdata for param in net.parameters()}
        saved: dict[int, int] = {}

        def note(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata not in own:
                saved[storage._cdata] = storage.nbytes()  # once, also where several operations save it
            return tensor

        with (
            torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor),
            torch.autocast("cpu", torch.bfloat16, enabled=bf16),
        ):
            _loss = F.cross_entropy(net(x).float(), y)  # keeps what was saved alive while it is counted
        return sum(param.nbytes for param in net.parameters()), sum(saved.values())
