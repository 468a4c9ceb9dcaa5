"""A worker's part in what a run leaves: tables merged into the model, and the servers' persistables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import nn

from trainer.strategies.pserver.protocol import snapshot
from trainer.strategies.pserver.protocol.messages import Message, Verb, text
from trainer.strategies.pserver.worker.client import Client
from trainer.strategies.pserver.worker.remote_model import RemoteTable
from trainer.strategies.pserver.worker.start import ROWS_AT_ONCE
from trainer.wording import counted

SAVE_S = 3600


@contextmanager
def merged_tables(
    tables: Sequence[RemoteTable], rows: Callable[[RemoteTable, np.ndarray], torch.Tensor], limit: int
) -> Iterator[None]:
    """While it lasts, the model holds tables of at most ``limit`` values; larger tables are left out, with a warning.

    Args:
        rows: rows (U, D) of ids (U,) of a table, waited for.
    """
    filled = []
    for table in tables:
        if table.rows is None or table.rows * table.dim > limit:
            size = "any number of" if table.rows is None else f"{table.rows:,}"
            print(f"table {table.name} ({size} rows of {table.dim}) is left out of model.safetensors (strategy.export_limit); the persistables hold its rows", flush=True)  # fmt: skip
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
    """Every server writes its part; then they are complete."""
    target = snapshot.begin(folder)
    body = text({"folder": str(target)})
    client.wait([client.ask(s, Message(Verb.SAVE, records=[body])) for s in client.servers], patience_s=SAVE_S)
    snapshot.complete(target, len(client.servers))
    print(f"persistables of {counted(len(client.servers), 'server')}: {folder}", flush=True)
