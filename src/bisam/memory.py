"""What a variant remembers between steps, and how it travels in a state dict."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bisam import sharding


class Memory:
    """Tensors by name for each parameter, and one random generator: what a part of a variant keeps between steps."""

    def __init__(self) -> None:
        self.tensors: dict[str, dict[Tensor, Tensor]] = {}
        self.generators: dict[str, torch.Generator] = {}

    def of(self, name: str, params: Sequence[Tensor]) -> list[Tensor]:
        """The tensor of that name of each parameter, zeros at first; this rank's shard, where there are shards."""
        table = self.tensors.setdefault(name, {})
        for param in params:
            if param not in table:
                table[param] = torch.zeros_like(sharding.local(param.detach()))
        return [table[param] for param in params]

    def generator(self, device: torch.device) -> torch.Generator:
        """A generator of our own: a checkpoint resumes the same random numbers, whatever else draws from torch."""
        if str(device) not in self.generators:
            self.generators[str(device)] = torch.Generator(device).manual_seed(torch.initial_seed() % 2**63)
        return self.generators[str(device)]

    def state_dict(self, params: Sequence[Tensor]) -> dict[str, Any]:
        index = {param: i for i, param in enumerate(params)}
        return {
            "tensors": {name: {index[p]: t for p, t in table.items()} for name, table in self.tensors.items()},
            "generators": {device: generator.get_state() for device, generator in self.generators.items()},
        }

    def load_state_dict(self, state: dict[str, Any], params: Sequence[Tensor]) -> None:
        self.tensors = {
            name: {params[i]: t.to(device=params[i].device, dtype=params[i].dtype, copy=True) for i, t in table.items()}
            for name, table in state["tensors"].items()
        }
        self._set_generators(state["generators"])

    def __getstate__(self) -> dict[str, Any]:
        numbers = {device: generator.get_state() for device, generator in self.generators.items()}
        return {"tensors": self.tensors, "generators": numbers}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]
        self.tensors = state["tensors"]
        self._set_generators(state["generators"])

    def _set_generators(self, states: dict[str, Tensor]) -> None:
        self.generators = {}
        for device, numbers in states.items():
            self.generator(torch.device(device)).set_state(numbers.cpu())
