"""The worker's side of PUSH: splits its gradients or differences into one message per server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from trainer.strategies.pserver.protocol.compression import Feedback, encode
from trainer.strategies.pserver.protocol.messages import Kind, Message, Record, Verb
from trainer.strategies.pserver.worker.remote_model import RemoteTable

Rows = dict[int, tuple[np.ndarray, torch.Tensor]]
"""By table number: unique ids (U,) and gradients or differences (U, D)."""


@dataclass
class WholePush:
    """A push of this worker before it is split into a part for each server.

    Attributes:
        dense: by server, its part (n,). rows: by table.
        samples: number behind the gradients. clock: this worker's steps. age: time stamp of the rows.
        bases: by server, the version of the parameters behind the gradients.
        work: the record of the covered leased batches, if any.
        merged: number of summed gradients. denominator: sync divides by it; None: by the samples.
    """

    dense: list[torch.Tensor]
    rows: Rows
    samples: float
    clock: int
    age: int
    bases: list[int]
    work: list[Record]
    merged: int = 1
    denominator: float | None = None


class PushEncoder:
    """Encodes a worker's pushes as messages, one for each server.

    Args:
        tables: the model's, by number from 1.
        wire: form of the values: full, bf16, fp16, or int8 (rounding errors are added to the next push).
    """

    def __init__(self, tables: Sequence[RemoteTable], servers: int, wire: str) -> None:
        self.tables, self.servers, self.wire = tables, servers, wire
        self.row_form = "bf16" if wire == "int8" else wire
        self.feedback = [Feedback(wire) for _ in range(servers)]

    def messages(self, push: WholePush) -> list[Message]:
        """Return the messages of a push, one for each server."""
        places = {n: self.tables[n - 1].split(ids) for n, (ids, _) in push.rows.items()}
        return [
            Message(Verb.PUSH, clock=push.clock, records=self._records(push, server, places))
            for server in range(self.servers)
        ]

    def state(self) -> list[dict[int, torch.Tensor]]:
        """The rounding errors to add to the next push, by server."""
        return [feedback.errors for feedback in self.feedback]

    def load(self, state: Sequence[Mapping[int, torch.Tensor]]) -> None:
        """Restore what :meth:`state` returned."""
        for feedback, errors in zip(self.feedback, state, strict=True):
            feedback.errors = dict(errors)

    def _records(self, push: WholePush, server: int, places: dict[int, list[np.ndarray]]) -> list[Record]:
        divided_by = push.samples if push.denominator is None else push.denominator
        numbers = [push.bases[server], push.samples, push.age, push.merged, divided_by]
        records = [Record(Kind.NUMBERS, np.array(numbers, dtype=np.float64)), *push.work]
        if push.dense[server].numel():
            records += self._dense(push.dense[server], server)
        for number, (ids, values) in push.rows.items():
            if self.servers > 1:
                own = places[number][server]
                ids, values = np.ascontiguousarray(ids[own]), values[torch.from_numpy(own)]
            if len(ids):
                rows = encode(values.contiguous(), Kind.ROWS, number, self.row_form)
                records += [Record(Kind.IDS, ids, number), *rows]
        return records

    def _dense(self, values: torch.Tensor, server: int) -> list[Record]:
        if self.wire == "int8":
            return self.feedback[server].encode(values, Kind.DENSE, 0)
        return encode(values, Kind.DENSE, 0, self.wire)
