"""Which worker keeps the optimizer's state of which parameter, where each keeps it of some (``shard=optimizer``)."""

from __future__ import annotations

from collections.abc import Mapping


def owners(sizes: Mapping[str, int], workers: int) -> dict[str, int]:
    """Give each parameter to a worker, the largest first, to the one that has the fewest numbers so far.

    Args:
        sizes: numbers of each parameter, by name.
    """
    loads, found = [0] * workers, dict[str, int]()
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        found[name] = min(range(workers), key=lambda worker: loads[worker])
        loads[found[name]] += sizes[name]
    return found


def most(sizes: Mapping[str, int], workers: int) -> int:
    """The most numbers that one worker keeps."""
    loads = [0] * workers
    for name, worker in owners(sizes, workers).items():
        loads[worker] += sizes[name]
    return max(loads)
