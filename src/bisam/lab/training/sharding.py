"""Whether each rank has the whole model or, by FSDP2, a part of every parameter; and the state that both have.

A whole state is that of one process, so any number of ranks can load it, with shards or without.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

import bisam
from bisam.tensors.buckets import full, is_sharded

State = dict[str, Any]
LISTS = (nn.ModuleList, nn.Sequential)


class WholeModel:
    """Every rank has the whole model: one process, and DistributedDataParallel."""

    is_sharded = False

    def weights(self, model: nn.Module) -> dict[str, Tensor]:
        """Copies of the model's weights, to be kept."""
        return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}

    def load_weights(self, model: nn.Module, weights: Mapping[str, Tensor]) -> None:
        model.load_state_dict(weights)

    def kept(self, weights: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
        """Weights that were read, where `weights` leaves them."""
        return {name: tensor.to(device) for name, tensor in weights.items()}

    def state(self, model: nn.Module, optimizer: bisam.SharpnessAware) -> tuple[dict[str, Tensor], State]:
        """State dicts of the model and of the optimizer."""
        return model.state_dict(), optimizer.state_dict()

    def load_optimizer(self, optimizer: bisam.SharpnessAware, state: State) -> None:
        optimizer.load_state_dict(state)

    def outline(self, state: State) -> State:
        """What another rank needs of a run's state to load it together with the first one."""
        return state


class ShardedModel(WholeModel):
    """Each rank has a part of every parameter. All ranks call these together, and the first one has what they return.

    The other ranks have dicts without weights, and tensors without data.
    """

    is_sharded = True

    def weights(self, model: nn.Module) -> dict[str, Tensor]:
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

        found: dict[str, Any] = get_model_state_dict(
            model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
        )
        return found

    def load_weights(self, model: nn.Module, weights: Mapping[str, Tensor]) -> None:
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
        from torch.distributed.fsdp import FSDPModule

        for module in model.modules():
            if isinstance(module, FSDPModule):  # what an evaluation has gathered would be taken for the parameters
                module.reshard()
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(model, dict(weights), options=options)

    def kept(self, weights: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
        return dict(weights)

    def state(self, model: nn.Module, optimizer: bisam.SharpnessAware) -> tuple[dict[str, Tensor], State]:
        weights = self.weights(model)

        def whole(_: int, value: Tensor) -> Tensor:
            if not is_sharded(value):
                raise ValueError(
                    f"{type(optimizer).__name__} keeps a plain tensor for a part of a parameter, which cannot be "
                    "gathered for a checkpoint: remove --shard"
                )
            return full(value).to("cpu" if weights else "meta")

        # not torch's get_optimizer_state_dict: it steps an optimizer that has no state yet, and weight decay times w
        # is its momentum then
        return weights, _mapped(optimizer.state_dict(), whole)

    def load_optimizer(self, optimizer: bisam.SharpnessAware, state: State) -> None:
        from torch.distributed.tensor import distribute_tensor

        params: list[Any] = [param for group in optimizer.param_groups for param in group["params"]]

        def part(number: int, value: Tensor) -> Tensor:
            param = params[number]
            there = torch.empty_like(value, device=param.device) if value.is_meta else value.to(param.device)
            return distribute_tensor(there, param.device_mesh, param.placements)

        optimizer.load_state_dict(_mapped(state, part))

    def outline(self, state: State) -> State:
        weights = state["best"]["weights"]
        return {
            **state,
            "model": {},
            "best": {**state["best"], "weights": None if weights is None else {}},
            "optimizer": _mapped(state["optimizer"], lambda _, value: value.to("meta")),
        }


def shard(model: nn.Module, ranks: int) -> None:
    """Cut the parameters of the model, in place: those of each block together, and the others together."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]  # fully_shard takes no other
    mesh = init_device_mesh(next(model.parameters()).device.type, (ranks,))
    for block in blocks(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def blocks(model: nn.Module) -> list[nn.Module]:
    """The modules that are gathered one at a time: those of a list with several of one class. Inner ones come first.

    >>> layer = nn.TransformerEncoderLayer(4, 1)
    >>> len(blocks(nn.TransformerEncoder(layer, 3, enable_nested_tensor=False))), len(blocks(layer))
    (3, 0)
    """
    lists = [module for module in model.modules() if isinstance(module, LISTS)]
    return list({id(block): block for one in reversed(lists) for block in _alike(one)}.values())


def _alike(members: nn.ModuleList | nn.Sequential) -> Iterator[nn.Module]:
    """Members with layers of their own, of a class that another one has too; a list among them has its own blocks."""
    counts = Counter(type(member) for member in members)
    for member in members:
        if counts[type(member)] > 1 and not isinstance(member, LISTS) and any(True for _ in member.children()):
            yield member


def _mapped(state: State, function: Callable[[int, Tensor], Tensor]) -> State:
    """A state dict with function(number of the parameter, tensor) of what base optimizer and variant keep for each.

    A single number of a parameter stays as it is.
    """

    def each(number: int, value: Any) -> Any:
        return function(number, value) if isinstance(value, Tensor) and value.dim() else value

    entries = {
        number: {name: each(number, value) for name, value in entry.items()} for number, entry in state["state"].items()
    }
    if "sharpness" not in state:
        return {**state, "state": entries}
    memory = {
        part: {**kept, "tensors": {name: _of_each(table, each) for name, table in kept["tensors"].items()}}
        for part, kept in state["sharpness"]["memory"].items()
    }
    return {**state, "state": entries, "sharpness": {**state["sharpness"], "memory": memory}}


def _of_each(table: Mapping[int, Any], function: Callable[[int, Any], Any]) -> dict[int, Any]:
    return {number: function(number, value) for number, value in table.items()}
