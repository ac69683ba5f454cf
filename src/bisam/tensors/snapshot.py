"""What a step saves and restores: weights, buffers, random numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from bisam.tensors import buckets


def forget_derived() -> None:
    """Drop what torch has computed from weights before they changed: autocast's low-precision copies of them, and the
    tensors of `parametrize.cached()`.
    """
    torch.clear_autocast_cache()
    parametrize._cache.clear()


def modules_of(model: nn.Module | None) -> list[nn.Module]:
    """The modules of a model, each once. This runs in every step: torch's own walk, which names them, takes longer."""
    found: dict[nn.Module, None] = {}
    waiting: list[nn.Module | None] = [model]
    while waiting:
        module = waiting.pop()
        if module is not None and module not in found:
            found[module] = None
            waiting += module._modules.values()
    return list(found)


class Snapshot:
    """Copies of tensors, restored by copying: subtracting ε would leave the weights off by an ulp.

    The copies stay allocated between steps, so that a step allocates nothing.
    """

    def __init__(self) -> None:
        self.copies: list[Tensor] = []
        self.originals: list[Tensor] | None = None
        """The tensors that were saved, until they are restored."""
        self._kinds: list[list[int]] = []
        self._by_owner: dict[Tensor, Tensor] = {}

    def save(self, tensors: Sequence[Tensor], owners: Sequence[Tensor] = ()) -> None:
        """Copy the tensors. `copies_of` finds a copy by its owner: the parameter, or the DTensor of the shard."""
        if not _alike(self.copies, tensors):
            self.copies = []  # freed before the new ones are allocated
            self.copies = [torch.empty_like(tensor) for tensor in tensors]
            self._kinds = _indices_by_kind(self.copies)
        self._by_owner = dict(zip(owners, self.copies, strict=False))
        self._copy(self.copies, tensors)
        self.originals = list(tensors)  # last: an interrupted copy must not be restored

    def copies_of(self, owners: Sequence[Tensor]) -> list[Tensor]:
        return [self._by_owner[owner] for owner in owners]

    def restore(self) -> None:
        if self.originals:
            self._copy(self.originals, self.copies)
        self.forget()

    def restore_sizes(self) -> None:
        """Give tensors that were resized in place, as observers of quantisation do, the size that they had."""
        for original, copy in zip(self.originals or [], self.copies, strict=False):
            if original.shape != copy.shape:
                original.resize_(copy.shape)

    def forget(self) -> None:
        """Do not restore what was saved."""
        self.originals = None
        self._by_owner = {}

    def _copy(self, to: Sequence[Tensor], source: Sequence[Tensor]) -> None:
        for indices in self._kinds:  # one foreach call each: of mixed types, it would be a loop
            torch._foreach_copy_([to[i] for i in indices], [source[i] for i in indices])


class BufferSnapshot:
    """Saves and restores the buffers of a model, so that what the second pass writes to them is undone.

    They are those of every module, whatever its class. A buffer that the pass replaced by another tensor (`self.mean =
    …` rather than an update in place) becomes the original object again; one that it created is removed.
    """

    def __init__(self, model: nn.Module | None) -> None:
        self._model = model
        self._tables: list[tuple[dict[str, Tensor | None], dict[str, Tensor | None]]] = []
        self._values = Snapshot()
        self._early = False

    @property
    def copies(self) -> list[Tensor]:
        return self._values.copies

    def save_early(self) -> None:
        """Save now and skip the next `save`: what happens in between is undone too."""
        self._early = False
        self.save()
        self._early = True

    def forget(self) -> None:
        """Do not restore what was saved."""
        self._early = False
        self._tables = []
        self._values.forget()

    def save(self) -> None:
        if self._early:
            self._early = False
            return
        self._tables = [(module._buffers, dict(module._buffers.items())) for module in modules_of(self._model)]
        buffers = [buffer for _, table in self._tables for buffer in table.values() if buffer is not None]
        self._values.save(buckets.locals_of(buffer for buffer in buffers if _is_writable(buffer)))

    def are_replaced(self) -> bool:
        """Whether a module has put another tensor in the place of one that was saved."""
        return any(_differ(current, saved) for current, saved in self._tables)

    def restore(self) -> None:
        for current, saved in self._tables:
            _restore_entries(current, saved)
        self._tables = []
        self._values.restore_sizes()
        self._values.restore()


class RandomState:
    """The state of torch's random generators on the CPU and on the devices that hold the parameters."""

    def __init__(self, devices: set[torch.device]) -> None:
        self._cpu = torch.get_rng_state()
        self._devices = {device: _generator_state(device) for device in devices if device.type in _WITH_GENERATORS}

    def restore(self) -> None:
        torch.set_rng_state(self._cpu)
        for device, state in self._devices.items():
            module: Any = torch.get_device_module(device)
            module.set_rng_state(state, *_named(device))


_WITH_GENERATORS = ("cuda", "xpu", "mps")


def _generator_state(device: torch.device) -> Tensor:
    module: Any = torch.get_device_module(device)
    state: Tensor = module.get_rng_state(*_named(device))
    return state


def _named(device: torch.device) -> list[torch.device]:
    """The device as an argument: MPS has one, whose functions take none."""
    return [] if device.type == "mps" else [device]


def _differ(current: dict[str, Tensor | None], saved: dict[str, Tensor | None]) -> bool:
    return {*current.keys()} != {*saved} or any(current[name] is not buffer for name, buffer in saved.items())


def _restore_entries(current: dict[str, Tensor | None], saved: dict[str, Tensor | None]) -> None:
    """One by one: the table of a TorchScript module is no dict, and cannot be cleared."""
    for name in [name for name in current.keys() if name not in saved]:  # noqa: SIM118 - nor can that one be iterated
        del current[name]
    for name, buffer in saved.items():
        if name not in current or current[name] is not buffer:
            current[name] = buffer


def _is_writable(tensor: Tensor) -> bool:
    """Not sparse, not expanded and not of inference mode: such a tensor is replaced, by a module or by us."""
    return (
        tensor.layout is torch.strided
        and not tensor.is_inference()
        and (tensor.is_contiguous() or 0 not in tensor.stride())
    )


def _alike(copies: Sequence[Tensor], tensors: Sequence[Tensor]) -> bool:
    return len(copies) == len(tensors) and all(
        a.shape == b.shape and a.dtype == b.dtype and a.device == b.device for a, b in zip(copies, tensors, strict=True)
    )


def _indices_by_kind(tensors: Sequence[Tensor]) -> list[list[int]]:
    kinds: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, tensor in enumerate(tensors):
        kinds.setdefault((tensor.device, tensor.dtype), []).append(index)
    return list(kinds.values())
