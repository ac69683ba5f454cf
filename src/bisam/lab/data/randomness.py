"""Random numbers by key: each purpose, seed and epoch has a stream of its own, the same on every device."""

from __future__ import annotations

import hashlib

import torch


def mixed(purpose: str, *numbers: int) -> int:
    """64 bits that depend on all of the key.

    >>> mixed("order", 0, 1) == mixed("order", 0, 1), mixed("order", 0, 1) == mixed("order", 1, 0)
    (True, False)
    """
    return int.from_bytes(hashlib.sha256(repr((purpose, *map(int, numbers))).encode()).digest()[:8], "little")


def generator(purpose: str, *numbers: int) -> torch.Generator:
    """torch's generator on the CPU, at the beginning of that key's stream."""
    return torch.Generator().manual_seed(mixed(purpose, *numbers))
