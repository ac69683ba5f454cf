"""Tensors that may be spread over processes: FSDP2's DTensors, and DDP's decision when to average gradients.

Elementwise work (perturb, save, restore) runs on each rank's own shard; only a norm needs to hear of the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


def is_sharded(tensor: Tensor) -> bool:
    """Whether this is a DTensor. Its class is asked for a method: importing torch.distributed.tensor is slow."""
    return hasattr(type(tensor), "full_tensor")


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that lives in this process, sharing its storage."""
    return tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def full(tensor: Tensor) -> Tensor:
    """The whole of a tensor, the same on every rank."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def kind(tensor: Tensor) -> tuple[Any, ...]:
    """What the tensors of one foreach operation must have in common."""
    return (tensor.device, tensor.dtype, tensor.device_mesh if is_sharded(tensor) else None)  # type: ignore[attr-defined]


def norm(buckets: Iterable[list[Tensor]]) -> Tensor:
    """‖·‖₂ of all tensors of all buckets and, for sharded ones, of all shards; in float32 at least."""
    parts = [_bucket_norm(bucket) for bucket in buckets if bucket]
    if len(parts) == 1:
        return parts[0]
    return torch.linalg.vector_norm(torch.stack([part.to(parts[0].device) for part in parts]))


def _bucket_norm(bucket: list[Tensor]) -> Tensor:
    half = bucket[0].dtype in (torch.float16, torch.bfloat16)
    if is_sharded(bucket[0]):
        # one at a time: foreach has no wider type for shards, and all of them in float32 would be two more copies
        norms = [tensor.float().norm() for tensor in bucket] if half else torch._foreach_norm(bucket, 2)
        return full(torch.linalg.vector_norm(torch.stack(norms)))
    norms = torch._foreach_norm(bucket, 2, dtype=torch.float32) if half else torch._foreach_norm(bucket, 2)
    return torch.linalg.vector_norm(torch.stack(norms))


def dot(a: Sequence[Tensor], b: Sequence[Tensor]) -> Tensor:
    """⟨a, b⟩ over all tensors and, for sharded ones, all shards; in float32 at least."""
    parts: list[Tensor] = []
    shards: dict[Any, Tensor] = {}
    for x, y in zip(a, b, strict=True):
        part = _tensor_dot(x, y)
        if is_sharded(part):  # added up before the ranks hear of each other, once
            mesh = kind(part)[-1]
            shards[mesh] = shards[mesh] + part if mesh in shards else part
        else:
            parts.append(part)
    parts += map(full, shards.values())
    return torch.stack([part.to(parts[0].device) for part in parts]).sum()


def _tensor_dot(x: Tensor, y: Tensor) -> Tensor:
    if is_sharded(x) or x.dtype in (torch.float16, torch.bfloat16):
        return (x.float() * y.float() if x.dtype.itemsize < 4 else x * y).sum()
    if x.is_complex():  # as of the pairs of real numbers that they are
        return torch.vdot(x.flatten(), y.flatten()).real
    return torch.dot(x.flatten(), y.flatten())  # unlike a product and its sum, it needs no memory


def _average_(tensors: Sequence[Tensor], group: Any) -> None:
    """The mean over the ranks of a group, in place, in one all-reduce for each type and device."""
    buckets: dict[tuple[Any, ...], list[Tensor]] = {}
    for tensor in tensors:
        buckets.setdefault(kind(tensor), []).append(tensor)
    for bucket in buckets.values():
        flat = torch.cat([tensor.flatten() for tensor in bucket])
        dist.all_reduce(flat.div_(dist.get_world_size(group)), group=group)
        parts = torch.split(flat, [tensor.numel() for tensor in bucket])
        torch._foreach_copy_(bucket, [part.view_as(tensor) for part, tensor in zip(parts, bucket, strict=True)])


def ranks() -> int:
    """How many processes train together."""
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
        self._replicas = [m for m in modules if isinstance(m, nn.parallel.DistributedDataParallel)]
        _refuse_flat_shards(modules)
        self._sharded = any(
            is_sharded(parameter) for module in modules for parameter in module.parameters(recurse=False)
        )
        if sharpness == "local" and self._sharded:
            raise ValueError(
                'sharpness="local" has no meaning for sharded parameters: no rank holds a whole gradient of its own. '
                'Use sharpness="global"'
            )
        if sharpness == "local" and ranks() > 1 and not self._replicas:
            raise ValueError(
                'sharpness="local" keeps DistributedDataParallel from averaging the ascent gradient, and needs to see '
                "it: give the wrapped model, as in SAM(base, DistributedDataParallel(model))"
            )
        self.is_local = sharpness != "global" and not self._sharded
        if self.is_local and any(replica.static_graph for replica in self._replicas):
            raise ValueError(
                "DistributedDataParallel with static_graph=True averages in its first pass, which is an ascent that "
                'each rank makes by itself: use sharpness="global", or leave static_graph away'
            )
        self._gathering = [m for m in modules if self._sharded and hasattr(m, "reshard")]

    @property
    def is_alone(self) -> bool:
        return not self._replicas and not self._sharded and ranks() == 1

    @property
    def reuses_gradient_memory(self) -> bool:
        """Whether a later backward pass may write into gradients that were taken away."""
        return any(replica.gradient_as_bucket_view for replica in self._replicas)

    @property
    def perturbs_each_rank(self) -> bool:
        """Whether each rank has a perturbation of its own, or there is one rank only."""
        return not self._sharded and (self.is_local or ranks() == 1)

    @property
    def leaves_ascent_to_each_rank(self) -> bool:
        """Whether the gradients of an ascent pass differ between ranks."""
        return bool(self._replicas) and self.is_local and ranks() > 1

    @property
    def averages(self) -> bool:
        """Whether the ranks, if there are several, end up with the same gradients."""
        return ranks() == 1 or bool(self._replicas) or self._sharded

    @property
    def averages_what_is_used(self) -> bool:
        """Whether DistributedDataParallel averages those alone that were used since it last did: then each part of a
        step that has passes in between is to be averaged by itself."""
        return any(replica.find_unused_parameters for replica in self._replicas)

    @property
    def wants_zeros(self) -> bool:
        """Whether parameters must have a gradient before a pass that averages, be it zeros: of one that an ascent has
        used, which did not average, DistributedDataParallel believes that it has one."""
        return self.is_local and self.averages_what_is_used

    def forget_gathered(self) -> None:
        """The weights were moved: what FSDP2 has gathered of them is out of date."""
        for module in self._gathering:
            module.reshard()  # type: ignore[operator]

    def average_(self, params: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The mean over the ranks, where each may have gradients of other parameters; sparse ones stay as they are."""
        whole = [
            torch.zeros_like(param) if gradient is None and param.requires_grad else gradient
            for param, gradient in zip(params, gradients, strict=True)
        ]
        dense = [gradient for gradient in whole if gradient is not None and gradient.layout is torch.strided]
        _average_(dense, self._replicas[0].process_group)
        return whole

    def during(self, *, averaged: bool) -> AbstractContextManager[Any]:
        """The context of one forward-backward: whether its gradients, and those they are added to, are averaged."""
        stack = ExitStack()
        if not averaged:
            for replica in self._replicas:
                stack.enter_context(replica.no_sync())
        return stack


def _refuse_flat_shards(modules: Sequence[nn.Module]) -> None:
    """FSDP's first version keeps flat shards that look like whole parameters."""
    if any(cls.__name__ == "FullyShardedDataParallel" for module in modules for cls in type(module).__mro__):
        raise TypeError(
            "the model is wrapped by FullyShardedDataParallel, whose shards look like whole parameters: each rank "
            "would divide by the norm of its own. Use fully_shard (FSDP2) instead"
        )
