"""The rows of a server's table with admission or eviction, counted a second time from pushes, pulls and what is to be
shrunk."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.simulation.world import Violation
from trainer.strategies.pserver.protocol.messages import CREATES, Kind, Message, Verb
from trainer.strategies.pserver.server.admission import Probability

if TYPE_CHECKING:
    from tests.simulation.servers import SimulatedServer

TABLE = 1
SHARED = 0
"""The row that every piece touches; piece n has row n + 1 as well."""
SCALES = 1e-8
"""Dense values may travel as int8 with a scale: 127 times what single precision makes of 1/127 is 1 - 3.7e-9. Rows
never do."""


@dataclass
class Row:
    """A row, or an id that waits to become one: its value, how often it was pushed while it waited, and its age."""

    value: float
    seen: int
    touched: int


class Rows:
    """What must be in the table.

    Attributes:
        there: rows by id. waiting: ids that are no rows yet.
    """

    def __init__(self, server: SimulatedServer) -> None:
        self.server, self.there, self.waiting = server, dict[int, Row](), dict[int, Row]()
        self.count = int(server.scenario.options.get("count", 1))
        self.chance = Probability(server.scenario.options.get("probability", 1.0))
        self.before: np.ndarray | None = None
        self.seen = -1, -1
        self.aged = False

    def _begin(self, shard: Any) -> None:
        """What is there from the start on, or from a checkpoint."""
        table, scenario = shard.tables[TABLE], self.server.scenario
        self.mine = shard.owns(TABLE, np.arange(scenario.batches * scenario.epochs + 1))
        self.before, self.aged = shard.vector.numpy().copy(), self.server.machine.parameters.age > 0
        self.there = {i: Row(value, 0, touched) for i, (value, touched) in _rows_of(table).items()}
        self.waiting = {i: Row(0.0, seen, touched) for i, (seen, touched) in _waiting_of(table).items()}

    def look(self) -> None:
        """A push may have been taken: its rows move as the dense values do."""
        parameters = self.server.machine.parameters
        shard = parameters.shard
        if shard is None or not parameters.ready or self.seen == (shard.version, parameters.age):
            return
        self.seen = shard.version, parameters.age
        if self.before is None:
            self._begin(shard)
            return
        if not self.aged and parameters.age:  # data with a time of their own: what came before has the first one
            self.aged = True
            if self.server.scenario.timed:
                for row in self.there.values():
                    row.touched = parameters.age
        vector = shard.vector.numpy()
        change = vector - self.before
        if not change.any():
            return
        self.before = vector.copy()
        pieces = self.server.scenario.batches * self.server.scenario.epochs
        for i, value in self._of(change[:pieces], shard):  # of the first vector; the others move alike
            self._pushed(i, value, parameters.age)

    def _of(self, change: np.ndarray, shard: Any) -> Iterator[tuple[int, float]]:
        """The rows here that belong to a change of the dense values."""
        touched = np.flatnonzero(abs(change) > 0.01)
        mine = self.mine
        if mine[SHARED]:
            yield SHARED, float(change[touched].sum())
        yield from ((i + 1, float(change[i])) for i in touched.tolist() if mine[i + 1])

    def _pushed(self, i: int, value: float, age: int) -> None:
        row = self.there.get(i)
        if row is None:
            row = self.waiting.pop(i, None) or Row(0.0, 0, age)
            row.seen += 1
            row.touched = max(row.touched, age)
            if not self._admits(i, row.seen):
                self.waiting[i] = row
                return
            row.touched = age
            self.there[i] = row
        row.value += value
        row.touched = max(row.touched, age)

    def _admits(self, i: int, seen: int) -> bool:
        """By the count; where it is drawn, by the product's own function, which depends on nothing else."""
        if self.chance.p == 1.0:
            return seen >= self.count
        shard: Any = self.server.machine.parameters.shard
        key = shard.tables[TABLE]._admission_key
        return bool(self.chance.admits(key, np.array([i]), np.array([seen]))[0])

    def answered(self, request: Message, answer: Message) -> None:
        """A request was done.

        Raises:
            Violation: other rows were removed than must be.
        """
        age = self.server.machine.parameters.age
        if request.verb == Verb.PULL and request.flags & CREATES:
            for ids in (r.array.tolist() for r in request.records if r.kind == Kind.IDS):
                for i in ids:
                    if i in self.there:
                        self.there[i].touched = max(self.there[i].touched, age)
                    elif self.count == 1 and self.chance.p == 1.0:
                        self.there[i] = Row(0.0, 0, age)
        elif request.verb == Verb.SHRINK and answer.first(Kind.TEXT) is not None:
            self._shrinks(age - int(request.mapping()["age"]), int(answer.mapping()["removed"]))

    def _shrinks(self, older: int, removed: int) -> None:
        old = [i for i, row in self.there.items() if row.touched < older and older > 0]
        if removed != len(old):
            raise Violation(f"{self.server.name} has removed {removed} rows, and {old} are too old")
        for i in old:
            del self.there[i]
        self.waiting = {i: row for i, row in self.waiting.items() if row.touched >= older or older <= 0}

    def check(self) -> None:
        """The table has these rows with these values and ages, and the others wait.

        Raises:
            Violation: it has not.
        """
        shard = self.server.machine.parameters.shard
        if shard is None or self.before is None:
            return
        self._compare(
            "row", {i: (row.value, row.touched) for i, row in self.there.items()}, _rows_of(shard.tables[TABLE])
        )
        self._compare(
            "waiting id",
            {i: (row.seen, row.touched) for i, row in self.waiting.items()},
            _waiting_of(shard.tables[TABLE]),
        )

    def _compare(self, what: str, own: dict[int, tuple[float, int]], told: dict[int, tuple[float, int]]) -> None:
        for i in sorted({*own, *told}):
            mine, found = own.get(i), told.get(i)
            near = mine and found and abs(mine[0] - found[0]) <= 1e-6 + SCALES * abs(mine[0])
            if not near or mine[1] != found[1]:
                raise Violation(f"{self.server.name}: {what} {i} is {found} (value or count, age), and must be {mine}")


def _rows_of(table: Any) -> dict[int, tuple[float, int]]:
    ids, slots = table._index.ids(), table._index.slots()
    values = zip(table._rows.numpy()[slots, 0].tolist(), table._touched[slots].tolist(), strict=True)
    return dict(zip(ids.tolist(), values, strict=True))


def _waiting_of(table: Any) -> dict[int, tuple[float, int]]:
    waiting = table._waiting
    ids, slots = waiting._index.ids(), waiting._index.slots()
    values = zip(waiting._seen[slots].tolist(), waiting._touched[slots].tolist(), strict=True)
    return dict(zip(ids.tolist(), values, strict=True))
