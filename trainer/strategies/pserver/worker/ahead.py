"""Fetches the rows of the next batch while the current one is computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from trainer.errors import RunFailed
from trainer.host.transfers import on_its_way
from trainer.strategies.pserver.tables.row_arrays import unique
from trainer.strategies.pserver.worker.pull import Fetched
from trainer.strategies.pserver.worker.remote_model import RemoteTable

Ids = dict[int, tuple[torch.Tensor, np.ndarray, torch.Tensor]]
"""The ids of the next batch by table: as they are, unique (U,), and their positions in these."""


def wanted(coming: Ids) -> dict[int, np.ndarray]:
    """The ids of the rows to fetch ahead for the next batch, by table number."""
    return {n: once for n, (_, once, _) in coming.items()}


class Ahead:
    """Fetches the rows of a worker's next batch while the current batch is computed.

    Args:
        tables: the model's.

    Attributes:
        fetched: requested ids, and their pull. received: from a checkpoint, ids (U,) and rows (U, D) of the next batch,
        by table.
    """

    def __init__(self, tables: Sequence[RemoteTable]) -> None:
        self.tables = tables
        self.fetched: tuple[Ids, Fetched] | None = None
        self.received: tuple[dict[int, np.ndarray], dict[int, torch.Tensor]] | None = None
        self._inputs: Any = None
        self._on_host: Any = None
        self._expected: tuple[Any, Any] | None = None
        self._paths: dict[int, str | None] = {}
        self._rows: dict[tuple[int, int], tuple[torch.Tensor, np.ndarray, torch.Tensor, torch.Tensor]] = {}

    def computing(self, inputs: Any, on_host: Any = None) -> None:
        """Note that a batch with these inputs is computed now; if it was the expected one, the next is unknown.

        Args:
            on_host: the same inputs where the host can read them without a wait for the GPU; None: ``inputs``.
        """
        if self._expected is not None and inputs is self._expected[0]:
            self._expected = None
        self._inputs, self._on_host = inputs, on_host

    def expect(self, inputs: Any, on_host: Any = None) -> None:
        """Note the inputs of the next batch, as in :meth:`computing`."""
        self._expected = inputs, on_host

    def coming(self) -> Ids | None:
        """Return the ids of the next batch, once; None if it is unknown."""
        expected, self._expected = self._expected, None
        return None if expected is None else self._ids_of(*expected)

    def _ids_of(self, inputs: Any, on_host: Any) -> Ids:
        found: Ids = {}
        for table in self.tables:
            path = self._paths.get(table.number)
            if path is not None:
                ids = _input(inputs, path)
                found[table.number] = (ids, *_distinct(ids, path, on_host))
        return found

    def unique(self, table: RemoteTable, ids: torch.Tensor) -> tuple[np.ndarray, torch.Tensor]:
        """Return the distinct ids (U,) of a forward, ascending, and the position of each of its ids, on their device.

        Ids that are an input of the batch are read on the host; others wait for the GPU.
        """
        path = self._paths.get(table.number)
        if self._on_host is None or path is None or _input(self._inputs, path) is not ids:
            return unique(ids)
        return _distinct(ids, path, self._on_host)

    def learn_path(self, table: RemoteTable, ids: torch.Tensor) -> None:
        """Find out which input of a batch holds a table's ids, so that the next batch's rows can be fetched ahead."""
        if table.number in self._paths:
            return
        named = self._inputs.items() if isinstance(self._inputs, dict) else [("", self._inputs)]
        path = next((name for name, value in named if value is ids), None)
        if path is None:
            print(
                f"table {table.name}: its ids are computed inside the model, so its rows cannot be fetched ahead",
                flush=True,
            )
        self._paths[table.number] = path

    def recall(self) -> bool:
        """Use the rows that a checkpoint holds for the batch computed now; returns whether it holds any.

        Raises:
            RunFailed: it has other ids than it had.
        """
        if self.received is None:
            return False
        (asked, rows), self.received = self.received, None
        ids = {n: own for n, own in self._ids_of(self._inputs, self._on_host).items() if n in asked}
        if ids.keys() != asked.keys() or any(not np.array_equal(own[1], asked[n]) for n, own in ids.items()):
            raise RunFailed("the data are others than when the checkpoint was made: its next batch has other ids")
        self.keep(ids, rows)
        return True

    def state(self) -> dict[str, Any]:
        """What has been received for the next batch, for :meth:`load`."""
        received = self.received
        if self.fetched is not None:
            ids, fetched = self.fetched
            received = {n: once for n, (_, once, _) in ids.items()}, fetched.rows
        return {"paths": self._paths, "received": received}

    def load(self, paths: Mapping[int, str | None], received: Any) -> None:
        """Restore what :meth:`state` returned."""
        self._paths = dict(paths)
        self.received = None if received is None else (dict(received[0]), dict(received[1]))

    def keep(self, ids: Ids, rows: Mapping[int, torch.Tensor]) -> None:
        """Keep the rows that were fetched ahead, for the next forward."""
        self._rows = {(n, id(own)): (own, once, places, rows[n]) for n, (own, once, places) in ids.items()}

    def take(self, table: RemoteTable, ids: torch.Tensor) -> tuple[np.ndarray, torch.Tensor, torch.Tensor] | None:
        """Return the rows fetched ahead for a forward's ids, if any: unique ids (U,), positions, rows (U, D); once."""
        ready = self._rows.pop((table.number, id(ids)), None)
        return ready[1:] if ready is not None and ready[0] is ids else None


def _input(inputs: Any, path: str) -> torch.Tensor:
    """The input of a batch with this name; empty: its only one."""
    found: torch.Tensor = inputs[path] if path else inputs
    return found


def _distinct(ids: torch.Tensor, path: str, on_host: Any) -> tuple[np.ndarray, torch.Tensor]:
    """The distinct ids (U,) of an input, read on the host if it is there, and their positions on the input's device."""
    once, positions = unique(ids if on_host is None else _input(on_host, path))
    return once, on_its_way(positions, ids.device)
