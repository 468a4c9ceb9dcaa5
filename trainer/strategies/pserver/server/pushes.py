"""PUSH and COMMIT: gradients or differences, applied once however often they come."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np

from trainer.strategies.pserver.protocol.codec import encode
from trainer.strategies.pserver.protocol.messages import RESTS, WAKES, Kind, Message, Record, Verb
from trainer.strategies.pserver.server import checks
from trainer.strategies.pserver.server.answers import NotYet
from trainer.strategies.pserver.server.members import Members
from trainer.strategies.pserver.server.parameters import Parameters
from trainer.strategies.pserver.server.rules import Geo, Push, Rule, Ssp, Sync
from trainer.strategies.pserver.server.shard import Shard
from trainer.strategies.pserver.server.work import Work


class Pushes:
    """Takes pushes and answers them.

    Args:
        waits: whether this very message has come before and waits for its answer.
        count: ``pushes`` and ``duplicates`` are counted there.
    """

    def __init__(
        self, parameters: Parameters, members: Members, work: Work, waits: Callable[[Message], bool],
        count: Counter[str],
    ) -> None:  # fmt: skip
        self.parameters, self.members, self.work, self.waits, self.count = parameters, members, work, waits, count
        self.most_merged: int = getattr(parameters.strategy, "max_merge_var_num", 1)

    def push(self, message: Message) -> Message:
        """Take a push if it is new; the answer is the same in any case."""
        shard, rule = self.parameters.opened()
        work = checks.work(message)
        numbers = checks.numbers(message, self.most_merged)
        if not self.members.all[message.rank].watermark.seen(message.sequence):
            self._take(message, rule, self._decoded(message, shard, numbers), work)
        elif not self.waits(message):
            self.count["duplicates"] += 1
        return self._answer(message, shard, rule)

    def _decoded(self, message: Message, shard: Shard, numbers: checks.Numbers) -> Push:
        dense, rows = checks.dense(shard, message), checks.rows(shard, message)
        self.parameters.grow_older(numbers.age)
        return Push(
            message.rank, numbers.samples, dense, rows, numbers.basis, message.clock, self.parameters.age,
            numbers.merged,
        )  # fmt: skip

    def _take(self, message: Message, rule: Rule, push: Push, work: np.ndarray) -> None:
        """Nothing that can fail comes after the mark: what is marked is applied."""
        self.members.all[message.rank].watermark.mark(message.sequence)
        if message.flags and isinstance(rule, Ssp):
            self._rest_or_wake(rule, message)
        elif self.work.progress.covered(work):
            self.count["duplicates"] += 1
        elif not message.flags:
            rule.push(push)
            self.count["pushes"] += 1
        self.work.applied(work)

    def _rest_or_wake(self, rule: Ssp, message: Message) -> None:
        if message.flags & RESTS:
            rule.rest(message.rank)
        else:
            rule.wake(message.rank, message.clock)

    def _answer(self, message: Message, shard: Shard, rule: Rule) -> Message:
        answer = Message(Verb.DONE, clock=shard.version)
        if isinstance(rule, Sync) and rule.clip is not None:
            answer.records.append(self._norm(message, shard, rule))
        if isinstance(rule, Ssp) and message.flags & WAKES:
            answer.clock = rule.clocks[message.rank]
        if isinstance(rule, Geo):
            answer.records += _news(message, shard)
        return answer

    def _norm(self, message: Message, shard: Shard, rule: Sync) -> Record:
        """This server's part of the squared norm of the step, once all workers have pushed."""
        norm = rule.norm(message.clock - 1)
        if norm is None and shard.version < message.clock:
            raise NotYet(rule.awaited(0), "the update of the parameters")
        return Record(Kind.NUMBERS, np.array([norm or 0.0]))

    def commit(self, message: Message) -> Message:
        """COMMIT, of two-phase clipping: the norm over all servers is known, the step can be taken."""
        shard, rule = self.parameters.opened()
        rule.commit(message.clock, checks.norm(message))
        return Message(Verb.DONE, clock=shard.version)


def _news(message: Message, shard: Shard) -> list[Record]:
    """Geo: the dense values as they are now, and the rows that others changed since the worker's cursor.

    The cursor is the version of the last answer that the worker *has*: an answer that was lost loses no row.
    """
    cursor = int(message.need(Kind.NUMBERS)[0])
    records = encode(shard.vector.detach().clone(), Kind.DENSE, 0) if len(shard.vector) else []
    for number, table in shard.tables.items():
        ids, values = table.refresh(message.rank, cursor)
        records += [Record(Kind.IDS, ids, number), *encode(values, Kind.ROWS, number)]
    return records
