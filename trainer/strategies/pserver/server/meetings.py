"""MEET: sums over the present workers, at which they meet."""

# States of a sum: open -> complete -> forgotten. Sums are numbered from 1, and the next one opens when the latest is
# complete. There are two rows of them: those of the training, and those at which all stop for a checkpoint.
# Who moves it: MEET of the last present worker completes it, and so does the loss of the last missing one, because all
# waiting requests are tried again then. The KEPT sums before the latest are remembered for copies of requests.
#
# What must always hold:
# - A sum has each present worker once, added in the order of the ranks. All get the same answer: values, and who was
#   present.
# - What a lost worker had brought counts, unless its next life was let in before the sum was complete (`forget`).

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from trainer.strategies.pserver.protocol.messages import STOPS, Kind, Malformed, Message, Record, Verb
from trainer.strategies.pserver.server.answers import NotYet, failed
from trainer.strategies.pserver.server.members import Members

KEPT = 2
"""Sums before the latest that are remembered, for copies of requests."""


@dataclass
class Total:
    """One sum so far: what each worker has brought; once all have come, the sum and who takes part from then on."""

    brought: dict[int, np.ndarray] = field(default_factory=dict)
    value: np.ndarray | None = None
    present: list[int] = field(default_factory=list)


class Meetings:
    """Where workers meet in the course of the training, and where they meet when all stop. Who waits at the one can go
    to the other meanwhile.

    Args:
        stopped: called when all have stood still.
    """

    def __init__(self, members: Members, stopped: Callable[[], None]) -> None:
        self.usual, self.stops, self.stopped = Totals(members), Totals(members), stopped

    def meet(self, message: Message) -> Message:
        """MEET: a worker brings its values; ``clock`` is the number of the sum. Answered when all have come."""
        if not message.flags & STOPS:
            return self.usual.meet(message)
        answer = self.stops.meet(message)
        self.stopped()
        return answer

    def forget(self, rank: int) -> None:
        """Another life of this worker takes part now: it will bring its own values."""
        self.usual.forget(rank)
        self.stops.forget(rank)


class Totals:
    """The server's handler of MEET: sums over the present workers, numbered from 1; an arrival may come twice."""

    def __init__(self, members: Members) -> None:
        self.members = members
        self.open: dict[int, Total] = {}
        self.latest = 0

    def meet(self, message: Message) -> Message:
        """A worker brings its values."""
        values = message.need(Kind.NUMBERS)
        if values.dtype != np.float64 or values.ndim != 1:
            raise Malformed("values of a meeting are float64")
        if message.clock < self.latest - KEPT:
            return failed(f"meeting {message.clock} is over")  # a late copy: its worker has the answer
        total = self._arrive(message.clock, message.rank, values)
        if total.value is None:
            raise NotYet(self._missing(total), "a sum over the workers")
        present = Record(Kind.IDS, np.array(total.present, dtype=np.int64))
        return Message(Verb.DONE, clock=message.clock, records=[Record(Kind.NUMBERS, total.value), present])

    def _arrive(self, number: int, rank: int, values: np.ndarray) -> Total:
        """A worker brings its values (N,) float64; the last one completes the sum, in the order of the ranks.

        Raises:
            Malformed: a sum that cannot be yet, or values of another length than the others'.
        """
        total = self._numbered(number)
        if any(v.shape != values.shape for r, v in total.brought.items() if r != rank):
            raise Malformed(f"meeting {number}: {values.shape} values of worker {rank}")
        if total.value is None:
            total.brought[rank] = np.array(values, dtype=np.float64)
        if total.value is None and not self._missing(total):
            vectors = [total.brought[r] for r in sorted(total.brought)]
            total.value, total.present = np.sum(vectors, axis=0), self.members.present()
        return total

    def forget(self, rank: int) -> None:
        """What a worker has brought to sums that are not complete does not count."""
        for total in self.open.values():
            if total.value is None:
                total.brought.pop(rank, None)

    def _numbered(self, number: int) -> Total:
        latest = self.latest
        over = latest == 0 or self.open[latest].value is not None
        if not max(1, latest - KEPT) <= number <= latest + over:
            raise Malformed(f"meeting {number} while the latest is {latest}")
        if number not in self.open:
            for old in [n for n in self.open if n < number - KEPT]:
                del self.open[old]
            self.open[number] = Total()
            self.latest = number
        return self.open[number]

    def _missing(self, total: Total) -> list[int]:
        return [rank for rank in self.members.present() if rank not in total.brought]
