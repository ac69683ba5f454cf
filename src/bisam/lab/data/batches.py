"""Batches of any tensors, and epochs of a chosen number of steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from bisam.lab.data.randomness import generator
from bisam.lab.data.shards import WHOLE, Shard


class Batched(Protocol):
    """Batches of an epoch, reproducible from its number, from any of them on."""

    shard: Shard
    """The part of each batch that `epoch` yields; its length is that of whole batches."""

    def __len__(self) -> int: ...
    def epoch(self, number: int, *, start: int = 0) -> Iterator[tuple[Any, Tensor]]: ...


@dataclass
class Loaders:
    """Batches of training, validation and test."""

    train: Batched
    validation: Batched
    test: Batched


class TensorBatches:
    """Rows of a tensor, or of a dict of tensors, with their labels. Order depends on seed and epoch only.

    With `trim`, tokens are cut to the longest text of each batch, as its attention mask has it.

    >>> batches = TensorBatches(torch.arange(6.0).view(3, 2), torch.arange(3), batch=2, device="cpu", seed=0)
    >>> [len(y) for _, y in batches.epoch(0)]
    [2, 1]
    """

    def __init__(
        self,
        inputs: Tensor | dict[str, Tensor],
        labels: Tensor,
        *,
        batch: int,
        device: torch.device | str,
        seed: int,
        shuffle: bool = False,
        drop_last: bool = False,
        trim: bool = False,
    ) -> None:
        self._device = torch.device(device)
        self._inputs = _each(inputs, lambda tensor: tensor.to(self._device))
        self._labels = labels.to(self._device)
        self.batch, self.seed, self.shuffle, self.drop_last, self.trim = batch, seed, shuffle, drop_last, trim
        self.shard = WHOLE

    def __len__(self) -> int:
        count = len(self._labels)
        return count // self.batch if self.drop_last else -(-count // self.batch)

    def epoch(self, number: int, *, start: int = 0) -> Iterator[tuple[Any, Tensor]]:
        """The batches of that epoch, from batch `start` on, each what it would be in a whole epoch."""
        count = len(self._labels)
        draws = generator("batches", self.seed, number)
        order = torch.randperm(count, generator=draws) if self.shuffle else torch.arange(count)
        order = order.to(self._device)
        for place in range(start, len(self)):
            rows = order[self.shard.rows(place * self.batch, min((place + 1) * self.batch, count))]
            inputs = _each(self._inputs, lambda tensor, rows=rows: tensor.index_select(0, rows))
            yield self._trimmed(inputs), self._labels.index_select(0, rows)

    def _trimmed(self, inputs: Any) -> Any:
        if not self.trim or not isinstance(inputs, dict) or "attention_mask" not in inputs:
            return inputs
        if len(inputs["attention_mask"]) == 0:  # of a rank, where there are fewer texts than ranks
            return inputs
        longest = int(inputs["attention_mask"].sum(1).max())
        return {name: tensor[:, :longest] for name, tensor in inputs.items()}


class Rounds:
    """Epochs of a chosen number of steps: the batches of the inner epochs, one after the other.

    >>> batches = TensorBatches(torch.arange(4.0).view(4, 1), torch.arange(4), batch=2, device="cpu", seed=0)
    >>> rounds = Rounds(batches, 3)
    >>> [y.tolist() for _, y in rounds.epoch(0)], [y.tolist() for _, y in rounds.epoch(1, start=1)]
    ([[0, 1], [2, 3], [0, 1]], [[0, 1], [2, 3]])
    """

    def __init__(self, batches: Batched, steps: int) -> None:
        self._batches, self._steps = batches, steps

    @property
    def shard(self) -> Shard:
        return self._batches.shard

    @shard.setter
    def shard(self, shard: Shard) -> None:
        self._batches.shard = shard

    def __len__(self) -> int:
        return self._steps if len(self._batches) else 0

    def epoch(self, number: int, *, start: int = 0) -> Iterator[tuple[Any, Tensor]]:
        place, end = number * self._steps + start, (number + 1) * self._steps
        while place < end:
            inner, first = divmod(place, len(self._batches))
            for batch in self._batches.epoch(inner, start=first):
                if place == end:
                    return
                yield batch
                place += 1


def _each(inputs: Any, change: Any) -> Any:
    return {name: change(tensor) for name, tensor in inputs.items()} if isinstance(inputs, dict) else change(inputs)
