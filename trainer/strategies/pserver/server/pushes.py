"""PUSH and COMMIT: gradients or differences, applied once however often they come."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np

from trainer.strategies.pserver.protocol.messages import Malformed, Message, Verb
from trainer.strategies.pserver.server import checks
from trainer.strategies.pserver.server.lease_requests import LeaseRequests
from trainer.strategies.pserver.server.ledger import Ledger
from trainer.strategies.pserver.server.members import Members
from trainer.strategies.pserver.server.parameters import Parameters
from trainer.strategies.pserver.server.rules import Push, Rule
from trainer.strategies.pserver.server.shard import Shard


class Pushes:
    """The server's handlers of PUSH and COMMIT.

    Args:
        waits: whether this very message has come before and waits for its answer.
        count: ``pushes`` and ``duplicates`` are counted there.
        ledger: told of what is applied.
    """

    def __init__(
        self,
        parameters: Parameters,
        members: Members,
        work: LeaseRequests,
        waits: Callable[[Message], bool],
        count: Counter[str],
        ledger: Ledger,
    ) -> None:
        self.ledger = ledger
        self.parameters, self.members, self.work, self.waits, self.count = parameters, members, work, waits, count

    def push(self, message: Message) -> Message:
        """PUSH: apply a push if it is new. Its answer is the same however often it comes."""
        shard, rule = self.parameters.opened()
        mark = self.members.all[message.rank].watermark
        mark.check(message.sequence)
        if message.flags & ~rule.push_flags:
            raise Malformed(f"flags {message.flags} of a push in this mode")
        work = checks.work(message)
        numbers = checks.numbers(message, self.parameters.most_merged)
        applied = False
        if not mark.seen(message.sequence):
            applied = self._take(message, rule, self._decoded(message, shard, numbers), work)
        elif not self.waits(message):
            self.count["duplicates"] += 1
        return rule.answer(message, applied)

    def _decoded(self, message: Message, shard: Shard, numbers: checks.Numbers) -> Push:
        dense, rows = checks.dense(shard, message), checks.rows(shard, message)
        if self.parameters.finite_only:
            checks.finite(shard, dense, rows)
        return Push(
            rank=message.rank,
            sequence=message.sequence,
            samples=numbers.samples,
            dense=dense,
            rows=rows,
            basis=numbers.basis,
            clock=message.clock,
            age=numbers.age,
            merged=numbers.merged,
            denominator=numbers.denominator,
        )

    def _take(self, message: Message, rule: Rule, push: Push, work: np.ndarray) -> bool:
        """Returns whether its values were taken. Nothing that can fail comes after the mark: what is marked is
        applied."""
        duplicate = self.work.progress.is_applied(work)
        self.members.all[message.rank].watermark.mark(message.sequence)
        push.age = self.parameters.grow_older(push.age)
        self.work.applied(work)
        if message.flags:
            rule.signal(message)
        elif duplicate:
            self.count["duplicates"] += 1
            rule.duplicate(push)
        else:
            rule.push(push)
            self.ledger(push, work)
            self.count["pushes"] += 1
            return True
        return False

    def commit(self, message: Message) -> Message:
        """COMMIT, of two-phase clipping: take the step, now that the norm over all servers is known."""
        shard, rule = self.parameters.opened()
        rule.commit(message.clock, checks.norm(message, self.parameters.finite_only))
        return Message(Verb.DONE, clock=shard.version)
