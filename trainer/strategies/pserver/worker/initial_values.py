"""The START request of the first worker: which parameters the servers keep, and their initial values."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from trainer.strategies.pserver.protocol.compression import encode
from trainer.strategies.pserver.protocol.layout import Layout
from trainer.strategies.pserver.protocol.messages import Kind, Message, Record, Verb, text
from trainer.strategies.pserver.worker.client import Client
from trainer.strategies.pserver.worker.remote_model import DenseMap, RemoteTable

ROWS_AT_ONCE = 1 << 16


def send_start(client: Client, dense: DenseMap, tables: Sequence[RemoteTable], dtype: torch.dtype) -> None:
    """Send the servers their layouts and dense values, then rows of torch's own tables, which they cannot draw."""
    bulky = [t for t in tables if t.start is not None]
    layout_of = layouts(dense, tables, dtype, len(client.servers))
    client.wait([client.ask(s, _layout(layout_of[s], dense.values(s), last=not bulky)) for s in client.servers])
    for table in bulky:
        _send_rows(client, table, last=table is bulky[-1])
    for table in bulky:
        table.start = None


def layouts(dense: DenseMap, remote: Sequence[RemoteTable], dtype: torch.dtype, servers: int) -> list[Layout]:
    """What START tells each server of its part of the model: the :class:`Layout` of dense pieces, tables and learning
    rates."""
    specs = [t.spec for t in remote]
    name = str(dtype).removeprefix("torch.")
    return [
        Layout(
            name,
            [(p.name, p.start, p.stop) for p in dense.pieces[s]],
            specs,
            [(n, r.lr, r.decays) for n, r in dense.groups[s] if n],
        )
        for s in range(servers)
    ]


def _layout(layout: Layout, values: torch.Tensor, last: bool) -> Message:
    plain = {**layout.plain(), "last": last}
    return Message(Verb.START, records=[text(plain), *encode(values, Kind.DENSE, 0)])


def _send_rows(client: Client, table: RemoteTable, last: bool) -> None:
    assert table.start is not None
    for first in range(0, len(table.start), ROWS_AT_ONCE):
        ids = np.arange(first, min(first + ROWS_AT_ONCE, len(table.start)))
        body = text({"last": last and first + len(ids) == len(table.start)})
        requests = []
        for server, places in enumerate(table.split(ids)):
            own = np.ascontiguousarray(ids[places])
            rows = encode(table.start[torch.from_numpy(own)].contiguous(), Kind.ROWS, table.number)
            message = Message(Verb.START, records=[body, Record(Kind.IDS, own, table.number), *rows])
            requests.append(client.ask(server, message))
        client.wait(requests)
