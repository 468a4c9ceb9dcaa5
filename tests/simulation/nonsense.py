"""Messages that no worker sends, each with a word of the reason for which a server has to refuse it."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import numpy as np

from trainer.strategies.pserver.protocol.messages import CREATES, HOLDS, Kind, Message, Record, Verb, text
from trainer.strategies.pserver.server.shard import Shard

NO_WORKER = 99
NO_LIFE = 2
"""Lives are odd numbers."""
ANSWERED = ""
"""Instead of a reason: it is no mistake of the sender's, whose message may be late."""


class Nonsense:
    """Makes them for one server.

    Args:
        shard: what it keeps. mode: of the run. next_push: a number that the worker's next push may have. first: it is
        worker 0. saved: something was saved. comes: a worker that waits to be let in, if one does; None: an ADMIT would
        wait for the HELLO of
            a life that this server has never heard of.
    """

    def __init__(self, shard: Shard, mode: str, next_push: int, first: bool, saved: bool, comes: int | None) -> None:
        self.shard, self.mode, self.next_push, self.first, self.saved = shard, mode, next_push, first, saved
        self.comes = comes
        self.numbers = Record(Kind.NUMBERS, np.array([0.0, 1.0, 1e9]))  # rows would be as old as that
        self.dense = np.ones(len(shard.vector))

    def drawn(self, random: Random) -> tuple[Message, str]:
        """One of them: the message, and what the answer has to tell."""
        grave: list[Callable[[], tuple[Message, str]]] = [
            self.far,
            self.flags_of_a_push,
            self.flags_of_a_pull,
            self.not_finite,
        ]
        grave += [self.negative] * bool(self.shard.tables)
        if random.random() < 0.5:
            return random.choice(grave)()
        return random.choice([*self._pushes(), *self._rows(), *self._others()])

    # --- what may do harm ------------------------------------------------------------------------------------------

    def far(self) -> tuple[Message, str]:
        """A push far ahead of all others."""
        return self._push(self.numbers, Record(Kind.DENSE, self.dense), sequence=1 << 40), "push"

    def flags_of_a_push(self) -> tuple[Message, str]:
        """A push with flags that mean nothing."""
        return self._push(self.numbers, Record(Kind.DENSE, self.dense), flags=1 << 9), "flags"

    def flags_of_a_pull(self) -> tuple[Message, str]:
        """A pull with flags of another mode, which would make a row."""
        wild = 1 << 9 if self.mode == "geo" else HOLDS
        ids = [Record(Kind.IDS, np.array([n]), 1) for n in self._own_row()]
        return Message(Verb.PULL, flags=wild | CREATES, records=ids), "flags"

    def not_finite(self) -> tuple[Message, str]:
        """A push with a value that is none."""
        self.dense[-1] = np.nan
        return self._push(self.numbers, Record(Kind.DENSE, self.dense)), "finite"

    def negative(self) -> tuple[Message, str]:
        """A row below 0."""
        return self._pull(-1), "negative"

    # --- what has another shape, or no meaning ---------------------------------------------------------------------

    def _pushes(self) -> list[tuple[Message, str]]:
        """Pushes whose numbers, values or work cannot be."""

        def numbers(*values: float) -> Record:
            return Record(Kind.NUMBERS, np.array(values))

        def work(*row: int) -> Record:
            return Record(Kind.WORK, np.array([row]))

        dense = Record(Kind.DENSE, self.dense)
        return [
            (self._push(self.numbers, dense, sequence=0), "without a number"),
            (self._push(dense), "without NUMBERS"),
            (self._push(numbers(0.0, 1.0), dense), "without its numbers"),
            (self._push(Record(Kind.NUMBERS, np.array([1, 2, 3])), dense), "without its numbers"),
            (self._push(numbers(-1.0, 1.0, 1.0), dense), "numbers -1"),
            (self._push(numbers(0.0, 1.0, 1.0, 1000.0), dense), "of 1000 gradients"),
            (self._push(self.numbers, Record(Kind.DENSE, np.ones(len(self.dense) + 1))), "dense values for"),
            (self._push(self.numbers, Record(Kind.DENSE, np.ones(len(self.dense), dtype=np.int64))), "values of int64"),
            (self._push(self.numbers, dense, work(0, 0, 1)), "work of"),
            (self._push(self.numbers, dense, work(0, 0, 2, 1)), "no batches"),
            (self._push(self.numbers, dense, work(0, -1, 0, 1)), "negative numbers"),
        ]

    def _rows(self) -> list[tuple[Message, str]]:
        """Rows that are not in order, not in the table, not here, or of another width."""
        if not self.shard.tables:
            return []
        own, foreign = self._own_row(), self._foreign_row()
        of_an_own = [Record(Kind.IDS, np.array(own), 1), Record(Kind.ROWS, np.full((len(own), 2), 1.0), 1)]
        endless = [Record(Kind.IDS, np.array(own), 1), Record(Kind.ROWS, np.full((len(own), 1), np.inf), 1)]
        found = [
            (self._pull(2, 1), "not ascending"),
            (self._pull(1 << 40), "has rows"),
            (self._pull(1, table=9), "ids of table 9"),
        ]
        found += [
            (self._push(self.numbers, *of_an_own), "rows"),
            (self._push(self.numbers, *endless), "finite"),
        ] * bool(own)
        return found + [(self._pull(*foreign), "another server")] * bool(foreign)

    def _others(self) -> list[tuple[Message, str]]:
        """Requests besides pushes and pulls."""

        def asks(verb: Verb, told: object, **header: int) -> Message:
            return Message(verb, records=[text(told)], **header)

        found = [
            (asks(Verb.FENCE, {"rank": NO_WORKER, "life": 1, "epoch": 0, "block": 0}), "no worker"),
            (asks(Verb.LEASE, ["no mapping"]), "no mapping"),
            (asks(Verb.SHRINK, {"age": 0}), "age 0"),
            (asks(Verb.RATE, {"scale": (0.5, float("nan"))[self.next_push % 2]}), "a rate of"),
            (asks(Verb.SAVE, {"folder": "../elsewhere"}), "not in the run's folder"),
            (Message(Verb.FETCH, clock=-2), "FETCH from -2"),
            (Message(Verb.DONE), "no answer"),
            (Message(Verb.ADMIT, clock=NO_WORKER, sequence=1), "no worker"),
            (Message(Verb.MEET, clock=1 << 30, records=[Record(Kind.NUMBERS, np.ones(1))]), "while the latest is"),
            (
                Message(Verb.MEET, clock=1 << 30, records=[Record(Kind.NUMBERS, np.ones(1, dtype=np.float32))]),
                "are float64",
            ),
        ]
        if self.comes is not None:
            found.append((Message(Verb.ADMIT, clock=self.comes, sequence=NO_LIFE), ANSWERED))
        if not self.first:
            found.append((asks(Verb.START, {"last": True}), "worker 0's to make"))
        if not self.saved:
            found.append((Message(Verb.FETCH), "not saved"))
        if self.mode == "sync":
            found.append(self._commit())
        return found

    def _commit(self) -> tuple[Message, str]:
        """The norm of a whole gradient that is none. What is drawn is one request: seeds that find defects go on to
        find them."""
        norms, why = [
            (np.ones(2), "without its norm"),
            (np.full(1, np.nan), "finite"),
            (np.full(1, np.inf), "finite"),
            (np.full(1, -1.0), "the norm -1"),
        ][self.next_push % 4]
        return Message(Verb.COMMIT, records=[Record(Kind.NUMBERS, norms)]), why

    # --- parts of them ---------------------------------------------------------------------------------------------

    def _push(self, *records: Record, sequence: int | None = None, flags: int = 0) -> Message:
        number = self.next_push if sequence is None else sequence
        return Message(Verb.PUSH, sequence=number, flags=flags, records=[*records])

    def _pull(self, *ids: int, table: int = 1) -> Message:
        return Message(Verb.PULL, flags=CREATES, records=[Record(Kind.IDS, np.array(ids), table)])

    def _own_row(self) -> list[int]:
        """A row that is at home here and that nobody has touched."""
        if not self.shard.tables:
            return []
        ids = np.arange(len(self.shard.vector) + 1)
        return ids[self.shard.owns(1, ids)][-1:].tolist()

    def _foreign_row(self) -> list[int]:
        """A row that is at home at another server, if there is one."""
        ids = np.arange(len(self.shard.vector) + 1)
        return ids[~self.shard.owns(1, ids)][-1:].tolist()
