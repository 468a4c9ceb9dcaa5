"""Reads points from metrics.jsonl, and finds out which of them a tracker has already."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from trainer.host import json_text
from trainer.tracking.contract import Point

Ahead = Counter[tuple[str, int]]
"""How many points of a name and update a tracker has more than the file had before the present position."""


def points_of(lines: Sequence[bytes]) -> list[Point]:
    """Read the points in lines of metrics.jsonl."""
    read = map(json_text.loads, lines)
    return [Point(name, value, one["step"], one["time"]) for one in read for name, value in one["metrics"].items()]


def batches(new: bytes, most: int) -> Iterator[tuple[list[Point], int]]:
    """Split whole lines of metrics.jsonl into batches of at most ``most`` points; yields each with its bytes."""
    points: list[Point] = []
    size = 0
    for line in new.splitlines(keepends=True):
        more = points_of([line])
        if points and len(points) + len(more) > most:
            yield points, size
            points, size = [], 0
        points += more
        size += len(line)
    if size:
        yield points, size


class Asked:
    """Counts the points that a service has, one name after the other, when a point of that name comes first.

    Args:
        before: the points in metrics.jsonl before the present position.
        sent: asks the service for the updates of all points of a name.
    """

    def __init__(self, before: Iterable[Point], sent: Callable[[str], Iterable[int]]) -> None:
        self.before = Counter((point.name, point.step) for point in before)
        self.sent = sent
        self.names: set[str] = set()
        self.ahead: Ahead = Counter()

    def has(self, point: Point) -> bool:
        """Whether the service has the next point, which then counts as passed."""
        if point.name not in self.names:
            there = Counter((point.name, int(step)) for step in self.sent(point.name))
            self.ahead += there - self.before
            self.names.add(point.name)
        return passed(self.ahead, point)


def passed(ahead: Ahead, point: Point) -> bool:
    """Whether one of the points ahead is this one, which is then taken off."""
    if not ahead[point.name, point.step]:
        return False
    ahead[point.name, point.step] -= 1
    return True
