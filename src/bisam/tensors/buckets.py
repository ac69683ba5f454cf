"""Tensors that are handled together: buckets of parameters, shards of DTensors, norms and inner products.

Elementwise work (perturb, save, restore) runs on each rank's own shard; only a norm combines the shards of all ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter


def is_sharded(tensor: Tensor) -> bool:
    """Whether this is a DTensor. Decided by a method of its class: importing torch.distributed.tensor is slow."""
    tensor_class = type(tensor)
    if tensor_class is Parameter or tensor_class is Tensor:  # looking for an attribute that a class lacks is slow
        return False
    return hasattr(tensor_class, "full_tensor")


def locals_of(tensors: Iterable[Tensor]) -> list[Tensor]:
    return [local(tensor) for tensor in tensors]


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that lives in this process, sharing its storage."""
    return tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def full(tensor: Tensor) -> Tensor:
    """The whole of a tensor, the same on every rank."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def kind(tensor: Tensor) -> tuple[Any, ...]:
    """What the tensors of one foreach operation must have in common."""
    return (tensor.device, tensor.dtype, tensor.device_mesh if is_sharded(tensor) else None)  # type: ignore[attr-defined]


def norm_of(buckets: Iterable[list[Tensor]]) -> Tensor:
    """‖·‖₂ of all tensors of all buckets and, for sharded ones, of all shards; in float32 at least."""
    parts = [_bucket_norm(bucket) for bucket in buckets if bucket]
    if len(parts) == 1:
        return parts[0]
    return torch.linalg.vector_norm(torch.stack([part.to(parts[0].device) for part in parts]))


def norm(tensors: Iterable[Tensor]) -> Tensor:
    """‖·‖₂ of tensors of any devices and types."""
    return norm_of(by_kind(tensors))


def widest(device: torch.device) -> torch.dtype:
    """The widest floating-point type of a device: MPS has no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def by_kind(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Cut so that each list can be one foreach operation."""
    kinds: dict[tuple[Any, ...], list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault(kind(tensor), []).append(tensor)
    return [*kinds.values()]


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
        if is_sharded(part):  # added up first: one all-reduce instead of one a tensor
            mesh = kind(part)[-1]
            shards[mesh] = shards[mesh] + part if mesh in shards else part
        else:
            parts.append(part)
    parts += map(full, shards.values())
    return torch.stack([part.to(parts[0].device) for part in parts]).sum()


def _tensor_dot(x: Tensor, y: Tensor) -> Tensor:
    if is_sharded(x) or x.dtype in (torch.float16, torch.bfloat16):
        return (x.float() * y.float() if x.dtype.itemsize < 4 else x * y).sum()
    if all(tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last) for tensor in (x, y)):
        x, y = x.permute(0, 2, 3, 1), y.permute(0, 2, 3, 1)  # in the order of memory: flattened without a copy
    if x.is_complex():  # as of the pairs of real numbers that they are
        return torch.vdot(x.flatten(), y.flatten()).real
    return torch.dot(x.flatten(), y.flatten())  # unlike a product and its sum, it needs no memory


@dataclass
class Bucket:
    """Parameters of one group that share device and type, with their ascent gradients; together one foreach call.

    `params`, `gradients` and `weights` (the saved copies of the parameters) are this rank's shards, where parameters
    are sharded. Compute norms from `whole_gradients`. `owners` are the parameters themselves. A perturbation may write
    to `params`: ε is added to what it leaves there.
    """

    options: dict[str, Any]
    radius: float | Tensor
    owners: list[Tensor] = field(default_factory=list)
    params: list[Tensor] = field(default_factory=list)
    unsettled: list[Tensor] = field(default_factory=list)
    whole_gradients: list[Tensor] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)
    state: Mapping[Tensor, Mapping[str, Any]] = field(default_factory=dict)
    """The base optimizer's, of all parameters."""
    factor: Tensor | None = None
    """`factor · unsettled` are the gradients. Multiplying is left to `move`, where it costs nothing."""

    def use(self, gradients: Sequence[Tensor]) -> None:
        """Take these, one for each parameter, as the gradients."""
        self.unsettled, self.whole_gradients, self.factor = [local(g) for g in gradients], list(gradients), None

    def multiply(self, factor: float | Tensor) -> None:
        """Multiply the gradients, when they are read."""
        if self.factor is not None:
            self.factor = self.factor * factor
        elif isinstance(factor, Tensor):
            self.factor = factor
        else:  # made on the device: a graph cannot copy it there
            self.factor = torch.full((), factor, dtype=widest(self.params[0].device), device=self.params[0].device)

    @property
    def states(self) -> list[Mapping[str, Any]]:
        """The base optimizer's state of each parameter, empty before its first step."""
        return [self.state.get(owner, {}) for owner in self.owners]

    @property
    def gradients(self) -> list[Tensor]:
        """The gradients, multiplied by what `multiply` was given."""
        if self.factor is not None and self.unsettled:
            torch._foreach_mul_(self.unsettled, self.factor.to(self.unsettled[0].device))
        self.factor = None
        return self.unsettled

    def settle(self) -> None:
        """Multiply the gradients by what `multiply` was given, now."""
        _ = self.gradients

    def move(self) -> None:
        """Add the gradients to the parameters: ε to w."""
        if not self.params:
            return
        if self.factor is None or not self._is_one_kernel():
            torch._foreach_add_(self.params, self.gradients)
        else:  # a step of plain gradient ascent reads and writes everything once
            torch._fused_sgd_(
                self.params,
                self.unsettled,
                [],
                lr=self.factor.to(self.params[0].device, torch.float32),
                weight_decay=0.0,
                momentum=0.0,
                dampening=0.0,
                nesterov=False,
                maximize=True,
                is_first_step=False,
            )

    def _is_one_kernel(self) -> bool:
        """Whether torch's fused kernel takes them: CUDA, not float64, each gradient laid out as its parameter."""
        first = self.params[0]
        return (
            first.is_cuda
            and first.dtype in (torch.float32, torch.float16, torch.bfloat16)
            and all(
                p.stride() == g.stride() and p.dtype == g.dtype
                for p, g in zip(self.params, self.unsettled, strict=True)
            )
        )

    def leave_out(self, params: Sequence[Tensor]) -> None:
        """Do not perturb these."""
        out = {id(param) for param in params}
        keep = [id(owner) not in out for owner in self.owners]
        for name in ("owners", "params", "unsettled", "whole_gradients", "weights"):
            setattr(self, name, [item for item, kept in zip(getattr(self, name), keep, strict=False) if kept])


def into_buckets(
    groups: Sequence[dict[str, Any]],
    radii: Sequence[float | Tensor],
    gradients: Sequence[Tensor | None] | None,
    state: Mapping[Tensor, Mapping[str, Any]] | None = None,
) -> list[Bucket]:
    """The parameters of the groups that are perturbed, cut so that each bucket is one foreach call.

    `gradients` are those of all parameters, in order: parameters without one are left out. None takes every parameter
    that requires a gradient, without gradients. `state` is the base optimizer's.
    """
    buckets: dict[tuple[Any, ...], Bucket] = {}
    position = 0
    for index, (group, radius) in enumerate(zip(groups, radii, strict=True)):
        params = group["params"]
        found = [None] * len(params) if gradients is None else gradients[position : position + len(params)]
        position += len(params)
        if is_zero(group["rho"]):
            continue
        for param, gradient in zip(params, found, strict=True):
            if not param.requires_grad if gradients is None else gradient is None:
                continue
            if gradient is not None and gradient.layout is not torch.strided:
                raise RuntimeError(
                    f"a parameter of shape {tuple(param.shape)} in group {index} has a sparse gradient, which "
                    "cannot be perturbed. Build its layer with sparse=False, or put it into a group with rho=0."
                )
            key = (index, *kind(param))
            if key not in buckets:
                buckets[key] = Bucket(group, radius, state=state or {})
            bucket = buckets[key]
            bucket.owners.append(param)
            bucket.params.append(local(param))
            if gradient is not None:
                bucket.unsettled.append(local(gradient))
                bucket.whole_gradients.append(gradient)
    return list(buckets.values())


def all_zero(groups: Iterable[dict[str, Any]]) -> bool:
    """Whether no group is perturbed."""
    return all(is_zero(group["rho"]) for group in groups)


def is_zero(option: float | Tensor) -> bool:
    """Whether ρ or η of a group is 0. A tensor counts as non-zero: reading it would wait for the device."""
    return not isinstance(option, Tensor) and option == 0
