"""What a step runs: the samples that share one ε, as closures for each pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from bisam.engine.checks import Closure


class Work(Protocol):
    """The samples that share one ε, as closures for each pass. Gradients of the closures add up, over `divisor`."""

    share: float | Tensor
    """The weight of its descent gradient in that of the step."""
    divisor: int

    def ascent(self) -> Sequence[Closure]: ...
    def descent(self) -> Sequence[Closure]: ...
    def plain(self) -> Sequence[Closure]: ...


@dataclass
class Given:
    """Closures that the user gave, one for each part of the batch: the same in every pass."""

    closures: Sequence[Closure]
    divisor: int
    share: float | Tensor = 1.0

    def ascent(self) -> Sequence[Closure]:
        return self.closures

    descent = plain = ascent
