"""What a variant remembers between steps, and how it travels in a state dict."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from bisam.tensors import buckets


class Memory:
    """Tensors by name for each parameter, and a random generator: what a part of a variant keeps between steps."""

    def __init__(self) -> None:
        self.tensors: dict[str, dict[Tensor, Tensor]] = {}
        # one of our own, on the CPU: a checkpoint resumes its numbers, whatever else draws from torch, on any device.
        # Another seed than torch's, or it would repeat the numbers that the weights were initialised with
        self.generator = torch.Generator().manual_seed((torch.initial_seed() ^ 0x5A4D) % 2**63)

    def of(self, name: str, params: Sequence[Tensor]) -> list[Tensor]:
        """The tensor of that name of each parameter, zeros at first; this rank's shard, where there are shards.

        It is kept as a DTensor there, so that a checkpoint can gather it.
        """
        zeros = self._table(
            name, params, lambda param: torch.zeros_like(param.detach(), dtype=_dtype_of_gradient(param))
        )
        return buckets.locals_of(zeros)

    def counts(self, name: str, params: Sequence[Tensor]) -> list[Tensor]:
        """A number for each parameter, 0 at first, on its device: the same on every rank."""
        return self._table(
            name, params, lambda param: torch.zeros((), dtype=_dtype_of_gradient(param).to_real(), device=param.device)
        )

    def _table(self, name: str, params: Sequence[Tensor], first: Callable[[Tensor], Tensor]) -> list[Tensor]:
        table = self.tensors.setdefault(name, {})
        for param in params:
            if param not in table:
                table[param] = first(param)
        return [table[param] for param in params]

    def state_dict(self, params: Sequence[Tensor]) -> dict[str, Any]:
        index = {param: i for i, param in enumerate(params)}
        # a parameter that the optimizer has no longer may be remembered
        tensors = {name: {index[p]: t for p, t in table.items() if p in index} for name, table in self.tensors.items()}
        return {"tensors": tensors, "generator": self.generator.get_state()}

    @classmethod
    def from_state_dict(cls, state: dict[str, Any], params: Sequence[Tensor]) -> Memory:
        """What `state_dict` gave, checked, for these parameters."""
        memory = cls()
        try:
            memory.generator.set_state(state["generator"].cpu())
            for name, table in state["tensors"].items():
                memory.tensors[name] = {params[i]: _fitted(tensor, params[i]) for i, tensor in table.items()}
        except (KeyError, IndexError, TypeError, AttributeError, RuntimeError) as error:
            raise ValueError(f"the checkpoint's memory is damaged or of another model: {error!r}") from error
        return memory

    def __getstate__(self) -> dict[str, Any]:
        return {"tensors": self.tensors, "generator": self.generator.get_state()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.tensors = state["tensors"]
        self.generator = torch.Generator()
        self.generator.set_state(state["generator"])


def _fitted(tensor: Tensor, param: Tensor) -> Tensor:
    shapes = (param.shape, buckets.local(param.detach()).shape)
    if tensor.shape not in (*shapes, ()):  # the last is a count's
        raise TypeError(f"a tensor of shape {tuple(tensor.shape)} for a parameter of shape {tuple(param.shape)}")
    dtype = _dtype_of_gradient(param)
    return tensor.to(device=param.device, dtype=dtype if tensor.is_complex() else dtype.to_real(), copy=True)


def _dtype_of_gradient(param: Tensor) -> torch.dtype:
    """That of the parameter, unless its `grad_dtype` is another, as for float32 gradients of bfloat16 weights."""
    return getattr(param, "grad_dtype", None) or param.dtype
