"""Which numbers of a range are done, as intervals: a few pairs, however long the range is."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator


class Intervals:
    """A set of integers, kept as disjoint half-open intervals, ascending; neighbours that touch are one.

    Args:
        parts: pairs (start, stop), in any order.
    """

    def __init__(self, parts: Iterable[tuple[int, int]] = ()) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []
        for start, stop in parts:
            self.add(start, stop)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(zip(self._starts, self._stops, strict=True))

    def __len__(self) -> int:
        return len(self._starts)

    def add(self, start: int, stop: int) -> None:
        """Add the numbers from ``start`` to ``stop`` (excluded) to the set."""
        if start >= stop:
            return
        first = bisect_left(self._stops, start)  # the first interval that touches or follows
        last = bisect_right(self._starts, stop)
        if first < last:
            start, stop = min(start, self._starts[first]), max(stop, self._stops[last - 1])
        self._starts[first:last] = [start]
        self._stops[first:last] = [stop]

    def covers(self, start: int, stop: int) -> bool:
        """Whether the set has all of these numbers."""
        place = bisect_right(self._starts, start) - 1
        return start >= stop or (place >= 0 and self._stops[place] >= stop)

    def touches(self, start: int, stop: int) -> bool:
        """Whether the set has any of these numbers."""
        place = bisect_left(self._starts, stop) - 1
        return start < stop and place >= 0 and self._stops[place] > start

    def first_gap(self, start: int = 0) -> int:
        """The first number from ``start`` on that the set does not have."""
        place = bisect_right(self._starts, start) - 1
        return self._stops[place] if place >= 0 and self._stops[place] > start else start
