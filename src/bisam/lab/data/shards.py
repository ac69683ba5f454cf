"""The part of each batch that one of several processes reads."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shard:
    """One of `count` parts. Together they have the rows of the whole batch, in order; each in its own process."""

    number: int = 0
    count: int = 1

    def rows(self, start: int, end: int) -> slice:
        """Of the rows from `start` to `end`: parts differ by one row at most.

        >>> [Shard(number, 2).rows(10, 17) for number in range(2)]
        [slice(10, 13, None), slice(13, 17, None)]
        """
        size = end - start
        return slice(start + self.number * size // self.count, start + (self.number + 1) * size // self.count)


WHOLE = Shard()
