"""What a step runs: the samples that share one ε, as closures for each pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from bisam.engine.batch import Planned
from bisam.engine.checks import Closure


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


Work = Given | Planned
"""The samples that share one ε, as closures for each pass, whose gradients add up.

Ranks may have different numbers of parts and of closures, so who averages gradients depends on neither number, but on
`is_whole`: whether the step has no other work, on any rank.
"""
