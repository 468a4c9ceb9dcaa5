"""Blocks of an epoch's work: who gets which, and who takes over what a lost worker has left."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from trainer.strategies.pserver.protocol.messages import Kind, Malformed, Message, Record, Verb, text
from trainer.strategies.pserver.server.answers import failed, not_arrived
from trainer.strategies.pserver.server.leases import Answer, Leases, Progress
from trainer.strategies.pserver.server.members import Members, workers


class Work:
    """What is handed out, and how far its pushes have got here.

    Args:
        leases: the blocks; server 0 hands them out.
        lose: declares a worker lost.
        patience_s: how long nothing may move while somebody waits for a block.
    """

    def __init__(self, leases: Leases, members: Members, lose: Callable[[int, str], None], patience_s: float) -> None:
        self.leases, self.members, self.lose, self.patience_s = leases, members, lose, patience_s
        self.progress = Progress()
        self.answered: dict[int, tuple[int, int, Message]] = {}
        self.moved = time.monotonic()

    def lease(self, message: Message) -> Message:
        """LEASE: a block of the epoch's work. A copy of a request gets what is remembered: its answer goes nowhere."""
        rank, life, number = message.rank, message.incarnation, message.number
        if (before := self.answered.get(rank)) and before[:2] >= (life, number):
            return before[2]
        told = message.mapping()
        done = [int(b) for b in told["done"]]
        answer = self.leases.ask(rank, int(told["epoch"]), int(told["blocks"]), done)
        if answer is not None or done:
            self.moved = time.monotonic()
        if answer is None:  # the worker asks again; a block may take long, as long as its holder's pushes come
            if time.monotonic() - self.moved > self.patience_s:
                holders = workers(self.leases.holders())
                return failed(not_arrived(holders, "the end of a block of work", self.patience_s))
            answer = Answer()
        fence = [] if answer.before < 0 else [answer.before, self.members.all[answer.before].fenced]
        reply = Message(Verb.DONE, records=[text({"block": answer.block, "fence": fence, "over": answer.over})])
        self.answered[rank] = life, number, reply
        return reply

    def fence(self, message: Message) -> Message:
        """FENCE: a worker takes over a block. Nothing more is taken from the one before; the answer tells how many
        batches of the block are applied here."""
        told = message.mapping()
        rank, life, epoch, block = (int(told[k]) for k in ("rank", "incarnation", "epoch", "block"))
        if not 0 <= rank < len(self.members.all):
            raise Malformed(f"there is no worker {rank}")
        member = self.members.all[rank]
        if member.incarnation <= life and not member.lost:
            self.lose(rank, "another worker has taken over its work")
        done = self.progress.of(epoch, block)
        return Message(Verb.DONE, records=[Record(Kind.NUMBERS, np.array([float(done)]))])

    def applied(self, work: np.ndarray) -> None:
        """Batches (N, 4) of blocks have been pushed."""
        self.progress.mark(work)
        if len(work):
            self.moved = time.monotonic()

    def deaf(self, seconds: float) -> None:
        """The server was busy for so long and took nothing: that is nobody's standing still."""
        self.moved += seconds
