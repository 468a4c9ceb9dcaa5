"""Work is leased: server 0 hands out blocks of an epoch; a block ends only when its pushes are acknowledged."""

# States of a block of the present epoch, at server 0:
#   not handed out -> out -> finished
#                     out -> orphaned -> out       its holder was lost; whoever takes it over fences that life first
#                     out -> dropped               its holder was lost, with data.on_lost_worker=drop
#   kept -> out                                    it was out at the checkpoint from which the run goes on
# Who moves it: LEASE (out, finished), `lose` (orphaned, dropped), `load` (kept). A kept block goes to the worker that
# had it; if that one is lost, or there is no such worker any more, to anybody.
#
# What must always hold:
# - A block has one holder. It is finished when its holder says so, which it does after all servers have acknowledged
#   all its pushes. The next epoch begins when all blocks are finished or dropped.
# - `Progress` counts the applied batches of each block at this server as intervals. Each batch is applied once, whoever
#   pushes it: a push is new as a whole, or known as a whole.

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trainer.strategies.pserver.protocol.index_intervals import Intervals
from trainer.strategies.pserver.protocol.messages import Malformed


@dataclass(frozen=True)
class Holder:
    """Which worker holds a block, and in which of its lives."""

    rank: int
    life: int


NOBODY = -1
"""Rank of no worker: anybody may have the block."""


@dataclass
class Epoch:
    """The blocks of one epoch: not handed out yet, out (block -> holder), finished, orphaned by lost workers, and kept:
    out at the checkpoint from which the run goes on (block -> holder at that time)."""

    number: int
    blocks: int
    next: int = 0
    out: dict[int, Holder] = field(default_factory=dict)
    finished: set[int] = field(default_factory=set)
    orphans: list[tuple[int, Holder]] = field(default_factory=list)
    dropped: set[int] = field(default_factory=set)
    kept: dict[int, int] = field(default_factory=dict)

    @property
    def over(self) -> bool:
        """Whether every block of the epoch is finished or dropped."""
        return len(self.finished) + len(self.dropped) >= self.blocks


@dataclass(frozen=True)
class Answer:
    """The answer to a worker that asks for a block. ``block``, with its lost holder (None: nobody had it). ``over``: no
    block is left and none will come. ``again``: the block was out at the checkpoint, and a part of it may be done."""

    block: int = -1
    before: Holder | None = None
    over: bool = False
    again: bool = False


class Leases:
    """Server 0's ledger of the blocks of the present epoch: who holds which.

    Args:
        take_over: the blocks of a lost worker are given to others; False: they are dropped for this epoch.
    """

    def __init__(self, take_over: bool = True) -> None:
        self.take_over = take_over
        self.epoch = Epoch(-1, 0)
        self.dropped = 0
        self.taken_over = 0

    def ask(self, holder: Holder, epoch: int, blocks: int, done: Iterable[int]) -> Answer | None:
        """Called for a worker that reports finished blocks and asks for another; None: it has to wait."""
        if epoch > self.epoch.number:
            self.epoch = Epoch(epoch, blocks)
        if epoch < self.epoch.number:
            return Answer(over=True)
        now = self.epoch
        for block in done:
            if now.out.get(block) == holder:
                del now.out[block]
                now.finished.add(block)
        kept = [(r == NOBODY, b) for b, r in now.kept.items() if r in (holder.rank, NOBODY)]
        if kept:  # its own first: it may have the rows of its next batch already
            _, own = min(kept)
            del now.kept[own]
            now.out[own] = holder
            return Answer(own, again=True)
        if now.orphans:
            block, before = now.orphans.pop(0)
            now.out[block] = holder
            self.taken_over += 1
            return Answer(block, before)
        if now.next < now.blocks:
            block, now.next = now.next, now.next + 1
            now.out[block] = holder
            return Answer(block)
        return Answer(over=True) if now.over else None

    def holders(self) -> list[int]:
        """Ranks of the workers that hold a block."""
        return sorted({holder.rank for holder in self.epoch.out.values()})

    def lose(self, rank: int) -> None:
        """Give a lost worker's blocks to others, or drop them."""
        now = self.epoch
        self.let_go(rank)
        for block in sorted(b for b, holder in now.out.items() if holder.rank == rank):
            holder = now.out.pop(block)
            if self.take_over:
                now.orphans.append((block, holder))
            else:
                now.dropped.add(block)
                self.dropped += 1

    def let_go(self, rank: int) -> None:
        """Keep no block for a worker any more: the life that had it is over."""
        now = self.epoch
        for block in [b for b, owner in now.kept.items() if owner == rank]:
            if self.take_over:
                now.kept[block] = NOBODY
            else:
                del now.kept[block]
                now.dropped.add(block)
                self.dropped += 1

    def state(self) -> dict[str, Any]:
        """The blocks of the present epoch as plain numbers, for ``load``."""
        now = self.epoch
        owners = {b: holder.rank for b, holder in now.out.items()} | {b: NOBODY for b, _ in now.orphans} | now.kept
        return {
            "epoch": now.number,
            "blocks": now.blocks,
            "next": now.next,
            "finished": list(Intervals((b, b + 1) for b in now.finished)),
            "dropped": sorted(now.dropped),
            "kept": sorted(owners.items()),
        }

    def load(
        self,
        workers: int,
        epoch: int,
        blocks: int,
        next: int,
        finished: Iterable[tuple[int, int]],
        dropped: Iterable[int],
        kept: Iterable[tuple[int, int]],
    ) -> None:
        """Restore a ``state``. Blocks that were out go to their former holders first; those of a rank that does not
        exist any more (``workers``: how many there are), to anybody."""
        done = {block for start, stop in finished for block in range(start, stop)}
        owners = {block: rank if rank < workers else NOBODY for block, rank in kept}
        self.epoch = Epoch(epoch, blocks, next, finished=done, dropped=set(dropped), kept=owners)


class Progress:
    """Which batches of each block of the present epoch are applied at this server.

    A set and not a greatest number: a push that was lost and is sent again comes after pushes that follow it.
    """

    def __init__(self) -> None:
        self.epoch = -1
        self.applied: dict[int, Intervals] = {}

    def is_applied(self, work: np.ndarray) -> bool:
        """Whether all batches of a push (N, 4: epoch, block, start, stop) are applied already.

        Raises:
            Malformed: some of it is and some is not. Such a push cannot be applied, and no worker makes one.
        """
        rows = work.tolist()
        known = [e < self.epoch or (e == self.epoch and self._of(b).covers(start, stop)) for e, b, start, stop in rows]
        if rows and all(known):
            return True
        for (epoch, block, start, stop), applied in zip(rows, known, strict=True):
            if applied or (epoch == self.epoch and self._of(block).touches(start, stop)):
                raise Malformed(
                    f"batches {start} to {stop} of block {block} are applied in part, or others of the push are not"
                )
        return False

    def mark(self, work: np.ndarray) -> None:
        """Note that the batches of a push (N, 4) are applied."""
        for epoch, block, start, stop in work.tolist():
            if epoch > self.epoch:
                self.epoch, self.applied = epoch, {}
            if epoch == self.epoch:
                self.applied.setdefault(block, Intervals()).add(start, stop)

    def state(self) -> dict[str, Any]:
        """Plain numbers, for ``load``."""
        return {"epoch": self.epoch, "applied": {str(b): list(parts) for b, parts in self.applied.items()}}

    def load(self, epoch: int, applied: Mapping[str, Iterable[tuple[int, int]]]) -> None:
        """Restore a ``state``; batches that are applied here already stay applied."""
        if epoch > self.epoch:
            self.epoch, self.applied = epoch, {}
        for block, parts in applied.items() if epoch == self.epoch else ():
            for start, stop in parts:
                self.applied.setdefault(int(block), Intervals()).add(start, stop)

    def of(self, epoch: int, block: int) -> Intervals:
        """The batches of a block that are applied at this server."""
        return self._of(block) if epoch == self.epoch else Intervals()

    def _of(self, block: int) -> Intervals:
        return self.applied.get(block, Intervals())
