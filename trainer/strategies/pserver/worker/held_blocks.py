"""A worker's leased blocks: which batches its next push covers, and which blocks it has finished."""

# States of a batch of a leased block: leased -> computed -> under way -> acknowledged by all servers.
# States of a block: held -> at its end (its last batch is computed) -> finished (nothing of it is computed or under
# way).
# Who moves them: `note` (computed, at its end), `take_computed` (a push is made), `acknowledged` (all servers have
# answered it).
#
# What must always hold:
# - A push names all batches that it covers, and a server takes it as a whole or knows it as a whole. So a push ends
#   wherever what some server has of the block begins or ends (`_cuts`, `must_push`), and what is computed of other
#   blocks is pushed before a block is begun of which only some servers have a part (`torn`, or taken over with a
#   fence).
# - A block is reported as finished after all servers have acknowledged all its pushes: what is lost with this worker is
#   known to be lost.

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trainer.strategies.contract import Lease
from trainer.strategies.pserver.protocol.index_intervals import Intervals
from trainer.strategies.pserver.protocol.messages import Kind, Message, Record, Verb, text
from trainer.strategies.pserver.worker.client import Client

NOBODY = -1
"""In place of the rank of a lost worker: the block is of an earlier run, and no life must be ended."""


@dataclass(frozen=True)
class Handed:
    """The answer of server 0 to a LEASE.

    Attributes:
        block: -1: none is free now. fence: rank and life of the lost worker that had the block; empty: none had it.
        over: the epoch is over. again: the block was leased at a checkpoint, and servers may have a part of it.
    """

    block: int
    fence: Sequence[int]
    over: bool
    again: bool


class PushedBatches:
    """The batches of leased blocks that one push covers."""

    def __init__(self, work: list[list[int]]) -> None:
        self.blocks = {block for _, block, _, _ in work}
        self.records = [Record(Kind.WORK, np.array(work, dtype=np.int64))] if work else []


class HeldBlocks:
    """Keeps account of this worker's leased blocks.

    A block is done when its last batch is pushed and all pushes that cover any batch of it are acknowledged by all
    servers.

    Attributes:
        must_push: a push must end with the current batch, because some server's part of the block ends there.
        torn: in the last lease, a server lacks batches that another server has.
    """

    def __init__(self, client: Client) -> None:
        self.client = client
        self.must_push = self.torn = False
        self._computed: list[list[int]] = []
        self._under_way: Counter[int] = Counter()  # pushes by block that are not acknowledged
        self._at_their_end: set[int] = set()
        self._done: list[int] = []
        self._cuts: dict[tuple[int, int], set[int]] = {}

    def note(self, work: tuple[int, int, int, bool] | None) -> None:
        """Note that a batch is computed now: its epoch, block, number in it, and whether it is the block's last."""
        if work is None:
            return
        epoch, block, index, last = work
        if self._computed and self._computed[-1][:2] == [epoch, block] and self._computed[-1][3] == index:
            self._computed[-1][3] = index + 1
        else:
            self._computed.append([epoch, block, index, index + 1])
        if last:
            self._at_their_end.add(block)
        self.must_push = index + 1 in self._cuts.get((epoch, block), ())

    def take_computed(self) -> PushedBatches:
        """Return the batches that a push covers now, and clear them."""
        pushed, self._computed = PushedBatches(self._computed), []
        self._under_way.update(pushed.blocks)
        return pushed

    def acknowledged(self, pushed: PushedBatches) -> None:
        """Note that all servers have acknowledged a push."""
        self._under_way.subtract(pushed.blocks)
        for block in pushed.blocks:
            if block in self._at_their_end and not self._under_way[block] and not self._pending(block):
                self.finished(block)

    def finished(self, block: int) -> None:
        """Note that no more batches of a block will be pushed."""
        self._at_their_end.discard(block)
        self._done.append(block)

    def _pending(self, block: int) -> bool:
        return any(computed[1] == block for computed in self._computed)

    def ask(self, epoch: int, blocks: int) -> Handed | None:
        """Report finished blocks to server 0 and ask for another one; None if there is none just now."""
        self.client.take()
        done, self._done = self._done, []
        request = {"epoch": epoch, "blocks": blocks, "done": done}
        [answer] = self.client.wait([self.client.ask(0, Message(Verb.LEASE, records=[text(request)]))])
        handed = Handed(**answer.mapping())
        return None if handed.block < 0 and not handed.over else handed

    def lease(self, epoch: int, handed: Handed) -> Lease:
        """Make the lease of a block, which starts at the first batch that a server lacks.

        Batches that this worker had computed before a checkpoint are not computed again.
        """
        block, start, self.torn = handed.block, 0, False
        if handed.fence:
            rank, life = handed.fence
            start = self._begin(epoch, block, rank, life)
            print(f"takes over block {block} of worker {rank} from its batch {start} on", flush=True)
        elif handed.again:
            computed = {first: stop for e, b, first, stop in self._computed if (e, b) == (epoch, block)}
            start = self._begin(epoch, block, NOBODY, 0)
            start = computed.get(start, start)
            self.torn = any(bound > start for bound in self._cuts[epoch, block])
        return Lease(block, start, lambda: None if self._pending(block) else self.finished(block))

    def state(self) -> dict[str, Any]:
        """The batches computed and not yet pushed, for :meth:`load`."""
        return {"computed": self._computed, "at_their_end": sorted(self._at_their_end)}

    def load(self, computed: Iterable[Iterable[int]], at_their_end: Iterable[int]) -> None:
        """Restore what :meth:`state` returned."""
        self._computed = [list(work) for work in computed]
        self._at_their_end = set(at_their_end)

    def _begin(self, epoch: int, block: int, rank: int, life: int) -> int:
        """End the life that had the block, at all servers; returns the first batch that a server lacks.

        A server must either lack or know all batches of a push. So pushes end at each bound of a server's part.
        """
        body = {"rank": rank, "life": life, "epoch": epoch, "block": block}
        asks = [self.client.ask(s, Message(Verb.FENCE, records=[text(body)])) for s in self.client.servers]
        answers = [answer.need(Kind.WORK).tolist() for answer in self.client.wait(asks)]
        applied = [Intervals((start, stop) for _, _, start, stop in rows) for rows in answers]
        start = min(intervals.first_gap() for intervals in applied)
        self._cuts = {known: cuts for known, cuts in self._cuts.items() if known[0] == epoch}
        self._cuts[epoch, block] = {bound for intervals in applied for part in intervals for bound in part}
        return start
