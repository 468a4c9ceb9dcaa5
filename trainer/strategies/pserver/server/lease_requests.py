"""LEASE and FENCE: a worker asks for a block of the epoch, and takes over what a lost worker has left."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from trainer.strategies.pserver.protocol.messages import Kind, Malformed, Message, Record, Verb, text, within
from trainer.strategies.pserver.server.answers import failed, not_arrived
from trainer.strategies.pserver.server.epoch_blocks import NOBODY, Answer, Holder, Leases, Progress
from trainer.strategies.pserver.server.members import Members, workers

NEVER_CAME = 0
"""The life of a worker that this server has not heard of."""


class LeaseRequests:
    """The server's handlers of LEASE and FENCE, and which pushes of leased blocks are applied here.

    Args:
        leases: the blocks; server 0 hands them out.
        lose: declares a worker lost. read_notes: reads the notes that tell who is lost.
        patience_s: how long nothing may move while somebody waits for a block.
        now: the clock.
    """

    def __init__(
        self,
        leases: Leases,
        members: Members,
        lose: Callable[[int, str], None],
        read_notes: Callable[[], None],
        patience_s: float,
        now: Callable[[], float],
    ) -> None:
        self.leases, self.members, self.lose, self.patience_s, self.now = leases, members, lose, patience_s, now
        self.read_notes = read_notes
        self.progress = Progress()
        self.answered: dict[int, tuple[int, int, Message]] = {}
        self.moved = now()

    def lease(self, message: Message) -> Message:
        """LEASE: hand out a block of the epoch. A copy of a request gets the remembered answer."""
        rank, incarnation, number = message.rank, message.incarnation, message.number
        if (before := self.answered.get(rank)) and before[:2] >= (incarnation, number):
            return before[2]
        body = message.mapping()
        done = [int(b) for b in body["done"]]
        holder = Holder(rank, self.members.all[rank].life)
        answer = self.leases.ask(holder, int(body["epoch"]), int(body["blocks"]), done)
        if answer is not None or done:
            self.moved = self.now()
        if answer is None:  # the worker asks again; a block may take long, as long as its holder's pushes come
            if self.now() - self.moved > self.patience_s:
                holders = self.leases.holders()
                limit = within(self.patience_s, self.patience_s)
                why = not_arrived(workers(holders), "the end of a block of work", limit)
                return failed(why, missing=holders)
            answer = Answer()
        fence = [answer.before.rank, answer.before.life] if answer.before else []
        body = {"block": answer.block, "fence": fence, "over": answer.over, "again": answer.again}
        reply = Message(Verb.DONE, records=[text(body)])
        self.answered[rank] = incarnation, number, reply
        return reply

    def fence(self, message: Message) -> Message:
        """FENCE: a worker takes over a block; answers which batches of the block are applied here. The life of its
        former holder is fenced. If the holder is not known, every life is fenced that is over by the notes."""
        body = message.mapping()
        rank, life, epoch, block = (int(body[k]) for k in ("rank", "life", "epoch", "block"))
        if rank != NOBODY:
            self._end_life(rank, life)
        else:
            self.read_notes()
        applied = [[epoch, block, start, stop] for start, stop in self.progress.of(epoch, block)]
        return Message(Verb.DONE, records=[Record(Kind.WORK, np.array(applied, dtype=np.int64).reshape(-1, 4))])

    def _end_life(self, rank: int, life: int) -> None:
        if not 0 <= rank < len(self.members.all):
            raise Malformed(f"there is no worker {rank}")
        member = self.members.all[rank]
        self.members.fence(rank, life)
        if member.present and member.life in (life, NEVER_CAME):
            self.lose(rank, "another worker has taken over its work")

    def go_on(self, progress: Iterable[Mapping[str, Any]], leases: Mapping[str, Any]) -> None:
        """Go on from what servers have saved of blocks and of the pushes of them.

        Args:
            progress: of each server whose rows and parameters may be here now. A batch that one of them has applied
                counts as applied: no parameter sees it twice.
        """
        for of_server in progress:
            self.progress.load(**of_server)
        self.leases.load(len(self.members.all), **leases)

    def applied(self, work: np.ndarray) -> None:
        """Note that the batches (N, 4) of blocks have been pushed and applied."""
        self.progress.mark(work)
        if len(work):
            self.moved = self.now()

    def stood_still(self) -> None:
        """Start to count anew: all workers stood still together, so that none hangs and none has pushed meanwhile."""
        self.moved = self.now()

    def away(self, seconds: float) -> None:
        """Add the seconds in which the server was busy or stopped; do not count them as a standstill of the workers."""
        self.moved += seconds
