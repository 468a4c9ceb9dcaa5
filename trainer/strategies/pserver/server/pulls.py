"""PULL: parameters, once they are as new as a worker asks for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import numpy as np
import torch

from trainer.strategies.pserver.protocol.compression import encode
from trainer.strategies.pserver.protocol.messages import (
    CREATES,
    HOLDS,
    WANTS_DENSE,
    Kind,
    Malformed,
    Message,
    Record,
    Verb,
)
from trainer.strategies.pserver.server import checks
from trainer.strategies.pserver.server.answers import NotYet
from trainer.strategies.pserver.server.parameters import Parameters
from trainer.strategies.pserver.server.shard import Rows, Shard

BACK = {"int8": "bf16"}
"""``strategy.wire``, where answers go in another form than gradients: int8 needs feedback, which a server has not."""


class Pulls:
    """The server's handler of PULL.

    Args:
        count: ``pulls`` are counted there.
    """

    def __init__(self, parameters: Parameters, count: Counter[str]) -> None:
        self.parameters, self.count = parameters, count
        wire: str = parameters.strategy.wire
        self.form = BACK.get(wire, wire)

    def pull(self, message: Message) -> Message:
        """PULL: answer with the dense vector, and rows by their ids."""
        shard, rule = self.parameters.opened()
        if message.flags & ~rule.pull_flags:
            raise Malformed(f"flags {message.flags} of a pull in this mode")
        if not rule.may_pull(message.clock):
            raise NotYet(rule.awaited(message.clock), "the update of the parameters")
        wanted = {r.table: checks.ids(shard, r.table, r.array) for r in message.records if r.kind == Kind.IDS}
        self.count["pulls"] += 1
        dense = shard.copy() if message.flags & WANTS_DENSE and shard.vector.numel() else None
        rows = self._rows(shard, wanted, message)
        if message.flags & CREATES:
            rule.pulled(message.rank, dense, rows)
        return Message(Verb.DONE, clock=shard.version, records=self._records(dense, rows))

    def _rows(self, shard: Shard, wanted: Mapping[int, np.ndarray], message: Message) -> Rows:
        rows: Rows = {}
        for number, ids in wanted.items():
            table = shard.tables[number]
            rows[number] = ids, table.pull(ids, create=bool(message.flags & CREATES), clock=self.parameters.age)
            if message.flags & HOLDS:
                table.hold(message.rank, ids)
        return rows

    def _records(self, dense: torch.Tensor | None, rows: Rows) -> list[Record]:
        records = [] if dense is None else encode(dense, Kind.DENSE, 0, self.form)
        for number, (_, values) in rows.items():
            records += encode(values, Kind.ROWS, number, self.form)
        return records
