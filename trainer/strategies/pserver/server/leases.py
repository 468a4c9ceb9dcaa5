"""Work is leased: server 0 hands out blocks of an epoch; a block ends only when its pushes are acknowledged."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np


@dataclass
class Epoch:
    """One epoch's blocks: not handed out yet, out (block -> worker), finished, left behind by lost workers."""

    number: int
    blocks: int
    next: int = 0
    out: dict[int, int] = field(default_factory=dict)
    finished: set[int] = field(default_factory=set)
    orphans: list[tuple[int, int]] = field(default_factory=list)
    dropped: set[int] = field(default_factory=set)

    @property
    def over(self) -> bool:
        """Nothing is left to do or to wait for."""
        return len(self.finished) + len(self.dropped) >= self.blocks


@dataclass(frozen=True)
class Answer:
    """``block``: the lease, with the worker that left it behind (-1: nobody); ``over``: no block and none will come."""

    block: int = -1
    before: int = -1
    over: bool = False


class Leases:
    """The blocks of the present epoch.

    Args:
        take_over: the blocks of a lost worker are given to others; False: they are dropped for this epoch.
    """

    def __init__(self, take_over: bool = True) -> None:
        self.take_over = take_over
        self.epoch = Epoch(-1, 0)
        self.dropped = 0
        self.taken_over = 0

    def ask(self, rank: int, epoch: int, blocks: int, done: list[int]) -> Answer | None:
        """A worker reports blocks whose pushes are acknowledged and asks for another; None: it has to wait."""
        if epoch > self.epoch.number:
            self.epoch = Epoch(epoch, blocks)
        if epoch < self.epoch.number:
            return Answer(over=True)
        now = self.epoch
        for block in done:
            if now.out.get(block) == rank:
                del now.out[block]
                now.finished.add(block)
        if now.orphans:
            block, before = now.orphans.pop(0)
            now.out[block] = rank
            self.taken_over += 1
            return Answer(block, before)
        if now.next < now.blocks:
            block, now.next = now.next, now.next + 1
            now.out[block] = rank
            return Answer(block)
        return Answer(over=True) if now.over else None

    def holders(self) -> list[int]:
        """Workers that have a block."""
        return sorted(set(self.epoch.out.values()))

    def lose(self, rank: int) -> None:
        """A worker is gone: its blocks go to others, or are dropped."""
        now = self.epoch
        for block in sorted(b for b, holder in now.out.items() if holder == rank):
            del now.out[block]
            if self.take_over:
                now.orphans.append((block, rank))
            else:
                now.dropped.add(block)
                self.dropped += 1


class Progress:
    """How far this server has applied each block. A worker that takes over a block starts where the pushes ended."""

    def __init__(self) -> None:
        self.epoch = -1
        self.next: dict[int, int] = {}

    def covered(self, work: np.ndarray) -> bool:
        """Whether all of it (rows of epoch, block, start, stop in batches) is applied already."""
        return len(work) > 0 and all(
            e < self.epoch or (e == self.epoch and stop <= self.next.get(block, 0))
            for e, block, _, stop in work.tolist()
        )

    def mark(self, work: np.ndarray) -> None:
        """It is applied now."""
        for epoch, block, _, stop in work.tolist():
            if epoch > self.epoch:
                self.epoch, self.next = epoch, {}
            if epoch == self.epoch:
                self.next[block] = max(stop, self.next.get(block, 0))

    def of(self, epoch: int, block: int) -> int:
        """Batches of a block that are applied."""
        return self.next.get(block, 0) if epoch == self.epoch else 0
