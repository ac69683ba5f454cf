"""What a step runs: the samples that share one ε, as closures for each pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from bisam.engine.checks import Closure


class Work(Protocol):
    """The samples that share one ε, as closures for each pass, whose gradients add up."""

    share: float | Tensor
    """The weight of its descent gradient in that of the step."""

    # Ranks may have different numbers of parts and of closures, so who averages gradients depends on neither number.
    is_whole: bool
    """Whether the step has no other work, on any rank."""

    @property
    def in_pieces(self) -> bool:
        """Whether it has a list of closures, be it of one."""

    @property
    def needs_label_weights(self) -> bool:
        """Whether its closures are still to be weighted, by their labels."""

    def ascent(self) -> Sequence[Closure]: ...
    def descent(self) -> Sequence[Closure]: ...
    def plain(self) -> Sequence[Closure]: ...


@dataclass
class Given:
    """Closures that the user gave, one for each part of the batch: the same in every pass."""

    closures: Sequence[Closure]
    in_pieces: bool
    share: float | Tensor = 1.0
    is_whole = True

    @property
    def needs_label_weights(self) -> bool:
        return len(self.closures) > 1

    def ascent(self) -> Sequence[Closure]:
        return self.closures

    descent = plain = ascent
