"""A worker's part in exports and checkpoints: merges tables into the model, and has servers write their parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from trainer.checkpoint import durable_folder
from trainer.checkpoint.writer import leave_failure
from trainer.errors import RunFailed
from trainer.strategies.pserver.protocol import snapshot, snapshot_parts
from trainer.strategies.pserver.protocol.messages import APART, SAVE_S, Kind, Message, Verb, text
from trainer.strategies.pserver.worker.client import Client
from trainer.strategies.pserver.worker.initial_values import ROWS_AT_ONCE
from trainer.strategies.pserver.worker.remote_model import RemoteTable
from trainer.strategies.pserver.worker.requests import Fenced
from trainer.weights.server_files import part_name
from trainer.wording import counted


@contextmanager
def merged_tables(
    tables: Sequence[RemoteTable], rows: Callable[[RemoteTable, np.ndarray], torch.Tensor], limit: int
) -> Iterator[None]:
    """Context manager: the model to export holds the rows of its server tables of at most ``limit`` values.
    Larger tables are left out with a warning.

    Args:
        rows: waits for and returns the rows (U, D) of ids (U,) of a table.
    """
    filled = []
    for table in tables:
        if table.rows is None or table.rows * table.dim > limit:
            size = "any number of" if table.rows is None else f"{table.rows:,}"
            print(
                (
                    f"table {table.name} ({size} rows of {table.dim}) is left out of model.safetensors "
                    f"(strategy.export_limit); the persistables hold its rows"
                ),
                flush=True,
            )
            continue
        weight = torch.empty((table.rows, table.dim), dtype=table.dtype)
        for first in range(0, table.rows, ROWS_AT_ONCE):
            ids = np.arange(first, min(first + ROWS_AT_ONCE, table.rows))
            weight[first : first + len(ids)] = rows(table, ids)
        table.module.weight = nn.Parameter(weight)
        filled.append(table)
    try:
        yield
    finally:
        for table in filled:
            table.detach()


def save_persistables(client: Client, folder: Path) -> None:
    """Have every server write its part of the persistables, fetch parts from other hosts, and complete them.

    Args:
        folder: in a folder of the run's folder.
    """
    written = snapshot.begin(folder, client.rank)
    try:
        apart = save_parts(client, written, checkpoint=False)
        snapshot.complete(written, len(client.servers), folder)
    except BaseException:
        durable_folder.begin(written)
        raise
    _done_with(client, apart)
    print(f"persistables of {counted(len(client.servers), 'server')}: {folder}", flush=True)


def save_checkpoint(client: Client, folder: Path, behind: bool) -> None:
    """In the worker that saves: have every server write its part of a checkpoint.

    Args:
        folder: in a folder of the run's folder. behind: servers on this host answer requests while they write.
    """
    try:
        apart = save_parts(client, folder, checkpoint=True, behind=behind)
        _done_with(client, apart)
    except Fenced:
        raise
    except (RunFailed, OSError) as error:  # a full disk: there is no checkpoint this time
        for server in client.servers:
            leave_failure(folder, part_name(server), f"the servers' parts cannot be written: {error}")


def save_parts(client: Client, folder: Path, checkpoint: bool, behind: bool = False) -> list[int]:
    """In the worker that saves: have every server write its part, and fetch parts from other hosts; returns the servers
    of the fetched parts.

    Raises:
        RunFailed: a server does not say that it saves its part, or its part is not here in time.
    """
    until = client.connections.now() + SAVE_S
    where = {"folder": "/".join(folder.parts[-2:]), "mark": snapshot_parts.mark(folder)}
    body = text(where | {"checkpoint": checkpoint, "behind": behind})
    asked = [client.ask(s, Message(Verb.SAVE, records=[body])) for s in client.servers]
    answers = client.settle(asked, SAVE_S)
    apart = [server for server, answer in zip(client.servers, answers, strict=True) if answer.flags & APART]
    for server in apart:
        snapshot_parts.receive(folder, server, partial(_fetch, client, until, server))
    return apart


def _done_with(client: Client, servers: Sequence[int]) -> None:
    """Tell the servers whose parts were fetched that these have arrived."""
    for server in servers:
        client.settle([client.ask(server, Message(Verb.FETCH, clock=snapshot_parts.DONE_WITH))])


def _fetch(client: Client, until: float, server: int, first: int) -> tuple[Mapping[str, Any], np.ndarray]:
    """Seal and bytes of a part; the others wait for this worker no longer than until then."""
    if client.connections.now() > until:
        raise RunFailed(f"the part of {client.names[server]} was not here within {SAVE_S:g} s")
    [answer] = client.settle([client.ask(server, Message(Verb.FETCH, clock=first))])
    return answer.mapping(), answer.need(Kind.DENSE)
