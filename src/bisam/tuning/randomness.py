"""Random numbers that do not depend on what a training drew before, and are as they were afterwards."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable

import torch

from bisam.tensors.snapshot import RandomState


class Randomness:
    """torch's random numbers, Python's, and those of the loaders' own generators, while a sweep lasts.

    They are started anew, by a key of its own, for each batch and the step on it. A training that draws twice as often
    as another, as one with two passes does, still sees the same batches.
    """

    def __init__(self, seed: int, *loaders: object) -> None:
        self._seed = int(seed)
        self._generators = [generator for loader in loaders for generator in _generators_of(loader)]

    def __enter__(self) -> Randomness:
        self._torch = RandomState({torch.device("cuda", index) for index in _cuda_devices()})
        self._python = random.getstate()
        self._own = [generator.get_state() for generator in self._generators]
        return self

    def __exit__(self, *_: object) -> None:
        self._torch.restore()
        random.setstate(self._python)
        for generator, state in zip(self._generators, self._own, strict=True):
            generator.set_state(state)

    def start(self, *key: str | int) -> None:
        """Begin the stream of that key."""
        seed = self._mixed(*key)
        # not torch.manual_seed: it would leave a seed behind for a CUDA that is not in use yet
        torch.default_generator.manual_seed(seed)
        for index in _cuda_devices():
            torch.cuda.default_generators[index].manual_seed(seed)
        random.seed(seed)

    def start_pass(self, *key: str | int) -> None:
        """Begin the stream of that key, in the loaders' generators too."""
        self.start(*key)
        for generator in self._generators:
            generator.manual_seed(self._mixed("loader", *key))

    def _mixed(self, *key: str | int) -> int:
        return int.from_bytes(hashlib.sha256(repr((self._seed, *key)).encode()).digest()[:8], "little")


def _cuda_devices() -> Iterable[int]:
    initialized: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return range(torch.cuda.device_count()) if initialized else ()


def _generators_of(loader: object) -> list[torch.Generator]:
    """Those that a DataLoader, or its samplers, were given."""
    sampler, batch_sampler = getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)
    owners = [loader, sampler, batch_sampler, getattr(batch_sampler, "sampler", None)]
    found = [getattr(owner, "generator", None) for owner in owners]
    return list({id(one): one for one in found if isinstance(one, torch.Generator)}.values())
