"""The worker's side of PULL: writes dense values into the model and passes rows to a forward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from trainer.strategies.pserver.protocol.compression import decode
from trainer.strategies.pserver.protocol.messages import CREATES, HOLDS, WANTS_DENSE, Kind, Message, Record, Verb
from trainer.strategies.pserver.worker.client import Client
from trainer.strategies.pserver.worker.remote_model import DenseMap, RemoteTable
from trainer.strategies.pserver.worker.requests import Request


@dataclass
class Fetched:
    """A pull of this worker that is under way.

    Attributes:
        requests: one for each server with wanted values.
        asked: by table, the ids (U,), and for each server the positions of its ids in them.
        dense: the dense parameters are requested.
        rows: by table, after they were received.
    """

    requests: list[Request]
    asked: dict[int, tuple[np.ndarray, list[np.ndarray]]]
    dense: bool
    rows: dict[int, torch.Tensor] = field(default_factory=dict)


class WorkerPulls:
    """Makes a worker's pulls from all servers.

    Args:
        tables: the model's, by number from 1.
        holds: this worker keeps copies of rows, so that servers must report changed rows.

    Attributes:
        versions: versions of the last received dense parameters, by server.
    """

    def __init__(
        self, client: Client, dense: DenseMap, tables: Sequence[RemoteTable], dtype: torch.dtype, holds: bool
    ) -> None:
        self.client, self.dense, self.tables, self.dtype = client, dense, tables, dtype
        self.hold_flag = HOLDS if holds else 0
        self.servers = len(client.servers)
        self.versions = [0] * self.servers

    def fetch(self, wanted: Mapping[int, np.ndarray], dense: bool, clock: int, flags: int = CREATES) -> Fetched:
        """Request rows by table number and the dense parameters, without waiting.

        Args:
            clock: the update that the parameters must contain.
        """
        asked = {n: (ids, self.tables[n - 1].split(ids)) for n, ids in wanted.items()}
        flags |= (self.hold_flag if flags & CREATES else 0) | (WANTS_DENSE if dense else 0)
        requests = []
        for server in self.client.servers:
            records = [
                Record(Kind.IDS, ids if self.servers == 1 else np.ascontiguousarray(ids[places[server]]), n)
                for n, (ids, places) in asked.items()
            ]
            if dense or any(len(r.array) for r in records):
                message = Message(Verb.PULL, clock=clock, flags=flags, records=records)
                requests.append(self.client.ask(server, message))
        return Fetched(requests, asked, dense)

    def receive(self, fetched: Fetched) -> dict[int, torch.Tensor]:
        """Wait for a pull: write the dense parameters into the model and return rows (U, D) by table."""
        self.client.wait(fetched.requests)
        rows: dict[int, torch.Tensor] = {}
        for request in fetched.requests:
            assert request.answer is not None
            if fetched.dense:
                self._write(request.server, request.answer)
            self._collect(rows, fetched, request.server, request.answer)
        for number, (ids, _) in fetched.asked.items():
            rows.setdefault(number, torch.empty((len(ids), self.tables[number - 1].dim), dtype=self.dtype))
        fetched.rows = rows
        return rows

    def _write(self, server: int, answer: Message) -> None:
        self.versions[server] = answer.clock
        array = answer.first(Kind.DENSE)
        if array is not None:
            self.dense.write(server, decode(array, None, self.dtype))

    def _collect(self, rows: dict[int, torch.Tensor], fetched: Fetched, server: int, answer: Message) -> None:
        """Put a server's rows at the positions of their ids."""
        for number, (ids, places) in fetched.asked.items():
            array = answer.first(Kind.ROWS, number)
            if array is None:
                continue
            values = decode(array, None, self.dtype)
            if self.servers == 1:
                rows[number] = values
                continue
            if number not in rows:
                rows[number] = torch.empty((len(ids), values.shape[1]), dtype=self.dtype)
            rows[number][torch.from_numpy(places[server])] = values
