"""One sample through a model: whether it accepts the data, and the sizes of layers that are open until then."""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from bisam.lab.config import Config
from bisam.lab.data.sources import Source
from bisam.plan import Batch


def output_of_one(model: nn.Module, batch: Batch, config: Config) -> Any:
    """The output for the first of these samples, in evaluation mode. ValueError if the model does not accept it."""
    model.eval()
    try:
        output = batch.rows(slice(0, 1)).run(model)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        what = "×".join(map(str, batch.x.shape[1:])) if isinstance(batch.x, Tensor) else ", ".join(batch.x)
        kind = "images" if isinstance(batch.x, Tensor) and batch.x.ndim == 4 else "inputs"
        raise ValueError(f"{config.model} does not accept the {kind} of {config.data}, {what}: {error}") from None
    model.train()
    return output


def with_sizes(model: nn.Module, config: Config, source: Source) -> nn.Module:
    """The same model. Lazy layers, such as nn.LazyLinear, have the sizes of the data, and draw their weights now."""
    if any(is_lazy(tensor) for tensor in chain(model.parameters(), model.buffers())):
        validation = source.loaders(config, torch.device("cpu")).validation
        with torch.no_grad():
            output_of_one(model, Batch(*next(iter(validation.epoch(0)))), config)
    return model
