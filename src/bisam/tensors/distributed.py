"""Several ranks: which gradients are averaged over them, and when."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bisam.tensors.buckets import is_sharded, kind
from bisam.tensors.gradients import Gradients

T = TypeVar("T")


def ranks() -> int:
    """The number of processes that train together."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


class GradientSync:
    """Which backward passes of a model average their gradients over the ranks.

    `sharpness="local"` perturbs each rank by its own gradient (the SAM paper's m-sharpness), so the ascent needs no
    averaging at all; `"global"` perturbs all ranks alike. None is local for DistributedDataParallel, and global where
    the parameters are sharded, because no rank holds a gradient of its own there.
    """

    def __init__(self, model: nn.Module | None, sharpness: str | None) -> None:
        if sharpness not in (None, "local", "global"):
            raise ValueError(f'sharpness must be "local", "global" or None, got {sharpness!r}')
        modules = list(model.modules()) if model is not None else []
        self.replicas = [m for m in modules if isinstance(m, nn.parallel.DistributedDataParallel)]
        _refuse_flat_shards(modules)
        params: list[Any] = [param for module in modules for param in module.parameters(recurse=False)]
        self._meshes = [param.device_mesh for param in params if is_sharded(param)]
        self._sharded = bool(self._meshes)
        if sharpness == "local" and self._sharded:
            raise ValueError(
                'sharpness="local" has no meaning for sharded parameters: no rank holds a whole gradient of its own. '
                'Use sharpness="global"'
            )
        if sharpness == "local" and ranks() > 1 and not self.replicas:
            raise ValueError(
                'sharpness="local" keeps DistributedDataParallel from averaging the ascent gradient, and needs to see '
                "it: give the wrapped model, as in SAM(base, DistributedDataParallel(model))"
            )
        self.is_local = sharpness != "global" and not self._sharded
        if self.is_local:
            _refuse_local(self.replicas)
        self.gathering = [m for m in modules if self._sharded and hasattr(m, "reshard")]
        """Modules of FSDP2, which keep gathered copies of the weights."""
        self.has_warned_of_separate_models = False
        """Whether the user was warned that each rank trains a model of its own."""

    @property
    def is_alone(self) -> bool:
        return not self.replicas and not self._sharded and ranks() == 1

    @property
    def overlaps(self) -> bool:
        """Whether DistributedDataParallel averages a pass while it is computed.

        With find_unused_parameters it would count the parameters that passes without averaging have used, so then
        `average` does it.
        """
        return not any(replica.find_unused_parameters for replica in self.replicas)

    @property
    def reuses_gradient_memory(self) -> bool:
        """Whether a later backward pass may write into gradients that were taken away."""
        return any(replica.gradient_as_bucket_view for replica in self.replicas)

    @property
    def has_averaged_last_pass(self) -> bool:
        """Whether DistributedDataParallel averages the gradients of the last forward pass: it was not in no_sync()."""
        return ranks() > 1 and any(replica.require_forward_param_sync for replica in self.replicas)

    @property
    def perturbs_each_rank(self) -> bool:
        """Whether each rank has a perturbation of its own, or there is one rank only."""
        return not self._sharded and (self.is_local or ranks() == 1)

    @property
    def may_miss_replicas(self) -> bool:
        """Whether there are several ranks, each to be perturbed by itself, and no DistributedDataParallel is known."""
        return self.is_local and ranks() > 1 and not self.replicas

    @property
    def averages(self) -> bool:
        """Whether the ranks, if there are several, end up with the same gradients."""
        return ranks() == 1 or bool(self.replicas) or self._sharded

    def of_first(self, value: T) -> T:
        """The first rank's value, in all ranks that train this model together: a decision that they must share."""
        groups = [self._group] if self.replicas else _groups_of(self._meshes[:1])
        for group in groups:
            box = [value]
            dist.broadcast_object_list(box, dist.get_global_rank(group, 0), group=group)
            value = box[0]
        return value

    def unrecordable(self) -> str | None:
        """The reason why a CUDA graph cannot hold the collectives of a step; None if it can."""
        if self._sharded:
            return "FSDP2 gathers and frees sharded parameters from the host: use DistributedDataParallel"
        if not self.replicas:
            return "several processes train, and the model is not wrapped by DistributedDataParallel"
        for replica in self.replicas:
            if (backend := _backend(replica)) != "nccl":
                return f"only NCCL's collectives can be recorded, and DistributedDataParallel's backend is {backend}"
            if replica.find_unused_parameters:
                return "find_unused_parameters=True decides on the host what to average: use False"
            if replica.static_graph:
                return "static_graph=True postpones averaging to the end of a pass: use False"
            if replica._comm_hooks or replica.mixed_precision is not None:
                return "communication hooks and mixed_precision of DistributedDataParallel run code on the host"
        return None

    def prepare_recording(self) -> None:
        """Keep DistributedDataParallel from timing passes: in each hundredth it would wait for the device."""
        for replica in self.replicas:
            replica._set_ddp_runtime_logging_sample_rate(2**31 - 1)  # type: ignore[no-untyped-call]

    def forget_gathered(self) -> None:
        """The weights were moved: what FSDP2 has gathered of them is out of date."""
        for module in self.gathering:
            module.reshard()  # type: ignore[operator]

    def during(self, *, averaged: bool) -> AbstractContextManager[Any]:
        """The context of one forward-backward: whether DistributedDataParallel averages its gradients."""
        stack = ExitStack()
        if not averaged:
            _refuse_unaveraged(self.replicas)
            for replica in self.replicas:
                stack.enter_context(replica.no_sync())
        return stack

    def average(self, params: Sequence[Tensor], gradients: Gradients) -> Gradients:
        """The mean over the ranks, of what DistributedDataParallel did not average: a sum of several closures."""
        if not self.replicas:
            return gradients
        _refuse_join(self.replicas)
        ours = {id(param) for replica in self.replicas for param in _averaged_by(replica)}
        if not self.overlaps:
            ours &= self._used_on_any_rank(params, gradients)
        found = list(gradients)
        for index, param in enumerate(params):
            if id(param) in ours and found[index] is None and param.requires_grad:
                found[index] = torch.zeros_like(param)
        _average_([g for p, g in zip(params, found, strict=True) if g is not None and id(p) in ours], self._group)
        for (
            replica
        ) in self.replicas:  # as after a pass that it averages: the next one begins with the first rank's buffers
            replica.require_forward_param_sync = True
        return found

    def _used_on_any_rank(self, params: Sequence[Tensor], gradients: Gradients) -> set[int]:
        kinds = [0 if gradient is None else 1 if gradient.layout is torch.strided else 2 for gradient in gradients]
        most_and_least = torch.tensor([kinds, [-kind for kind in kinds]]).to(params[0].device)
        dist.all_reduce(most_and_least, dist.ReduceOp.MAX, group=self._group)
        most, least = most_and_least.tolist()
        if any(high == 2 and low != -2 for high, low in zip(most, least, strict=True)):
            raise RuntimeError(
                "a parameter has a sparse gradient on some ranks only, which cannot be averaged: build its layer with "
                "sparse=False"
            )
        return {id(param) for param, used in zip(params, most, strict=True) if used}

    @property
    def _group(self) -> Any:
        return self.replicas[0].process_group


def _groups_of(meshes: Sequence[Any]) -> list[Any]:
    return [mesh.get_group(dimension) for mesh in meshes for dimension in range(mesh.ndim)]


def _backend(replica: nn.parallel.DistributedDataParallel) -> str:
    """The backend that averages the gradients of the replica's device: a group may have one for each kind."""
    device = next(replica.parameters()).device
    return str(replica.process_group._get_backend(device).name())


def _averaged_by(replica: nn.parallel.DistributedDataParallel) -> list[Tensor]:
    ignored = replica.parameters_to_ignore
    return [p for name, p in replica.module.named_parameters() if p.requires_grad and name not in ignored]


def _average_(tensors: Sequence[Tensor], group: Any) -> None:
    """The mean over the ranks of a group, in place, in one all-reduce for each type and device."""
    kinds: dict[tuple[Any, ...], list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.layout, *kind(tensor)), []).append(tensor)
    size = dist.get_world_size(group)
    for (layout, *_), found in kinds.items():
        if layout is not torch.strided:
            for tensor in found:
                dist.all_reduce(tensor.div_(size), group=group)
            continue
        flat = torch.cat([tensor.flatten() for tensor in found])
        dist.all_reduce(flat.div_(size), group=group)
        parts = torch.split(flat, [tensor.numel() for tensor in found])
        torch._foreach_copy_(found, [part.view_as(tensor) for part, tensor in zip(parts, found, strict=True)])


def _refuse_local(replicas: Sequence[nn.parallel.DistributedDataParallel]) -> None:
    """What DistributedDataParallel cannot do in a step whose first pass it does not average."""
    if any(replica.static_graph for replica in replicas):
        raise ValueError(
            "DistributedDataParallel with static_graph=True averages in its first pass, which is an ascent that "
            'each rank makes by itself: use sharpness="global", or static_graph=False'
        )


def _refuse_unaveraged(replicas: Sequence[nn.parallel.DistributedDataParallel]) -> None:
    """A first pass without averaging, in which static_graph=True would fail an assertion of torch."""
    if any(replica.static_graph and not replica._static_graph_delay_allreduce_enqueued for replica in replicas):
        raise ValueError(
            "DistributedDataParallel with static_graph=True averages in its first pass, and this step averages after "
            "its passes: it has several closures, accumulate=, micro-batches or find_unused_parameters=True. Use "
            "static_graph=False"
        )


def _refuse_join(replicas: Sequence[nn.parallel.DistributedDataParallel]) -> None:
    """Averaging that a rank without batches does not take part in."""
    if any(replica._join_config.enable for replica in replicas):
        raise RuntimeError(
            "DistributedDataParallel.join() stands in for a rank that has run out of batches only where gradients are "
            "averaged during a pass, and this step averages after its passes: it has several closures, accumulate=, "
            "micro_batch= or find_unused_parameters=True. Give every rank the same number of "
            "batches, or remove these options"
        )


def _refuse_flat_shards(modules: Sequence[nn.Module]) -> None:
    """Shards that look like whole parameters: of FSDP's first version, and of DistributedDataParallel(device_mesh=)."""
    if any(hasattr(param, "_st_info") for module in modules for param in module.parameters(recurse=False)):
        raise TypeError(
            "DistributedDataParallel with device_mesh= has replaced the DTensors of tensor parallelism by plain local "
            "shards: each rank would divide by the norm of its own. Use fully_shard (FSDP2) with the mesh instead"
        )
    if any(cls.__name__ == "FullyShardedDataParallel" for module in modules for cls in type(module).__mro__):
        raise TypeError(
            "the model is wrapped by FullyShardedDataParallel, whose shards look like whole parameters: each rank "
            "would divide by the norm of its own. Use fully_shard (FSDP2) instead"
        )
