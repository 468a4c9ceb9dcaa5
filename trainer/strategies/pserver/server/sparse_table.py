"""One server's rows of an embedding table: made on first touch, updated with their optimizer state, saved and
loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache

import numpy as np
import torch

from trainer.checkpoint import streamed
from trainer.checkpoint.streamed import Streamed
from trainer.strategies.pserver.server.admission import Admission, Waiting
from trainer.strategies.pserver.server.changed_rows import ChangedRows
from trainer.strategies.pserver.server.changes import Changes
from trainer.strategies.pserver.tables.index import index_of
from trainer.strategies.pserver.tables.kernels import Kernel
from trainer.strategies.pserver.tables.row_arrays import gather, put
from trainer.weights.fresh_rows import RowInit, draw_rows, table_key
from trainer.weights.server_files import REMOVED

SMALLEST = 64  # rows of a table's first storage


class SparseTable:
    """A server's rows of one table by id: D values and S optimizer columns lie in one storage row.

    Ids of a call are int64 arrays (U,) without repeats; values and gradients are tensors (U, D) of the table's dtype.
    A clock is what the caller counts, steps or event time, from 0; it is never read from the machine.

    Args:
        name: the table's, as in the model; with the seed it decides the fresh rows.
        dim: D, columns.
        dtype: of values and optimizer state.
        seed: the run's.
        init: how fresh rows are drawn.
        kernel: the sparse optimizer.
        admission: which ids become rows when pushed; None: all do, when pulled already.
        num_rows: ids are below it; None: any of 0..2^63-1.
        workers: how many use :meth:`add`, :meth:`hold` and :meth:`refresh`; 0: none, at no cost.
    """

    def __init__(
        self,
        name: str,
        dim: int,
        dtype: torch.dtype,
        seed: int,
        init: RowInit,
        kernel: Kernel,
        *,
        admission: Admission | None = None,
        num_rows: int | None = None,
        workers: int = 0,
    ) -> None:
        self.name, self.dim, self.dtype, self.init, self.kernel = name, dim, dtype, init, kernel
        self.admission, self.num_rows = admission, num_rows
        self.dropped = 0  # gradients of ids that were not admitted
        self.began = 0  # the version at which the kernel made its first step, unless it is that of a former run
        self._key = table_key(seed, name)
        self._admission_key = table_key(seed, f"{name}/admission")
        self._index = index_of(num_rows)
        self._rows = torch.empty((SMALLEST, dim + kernel.state_columns(dim)), dtype=dtype)
        self._ids = np.zeros(SMALLEST, dtype=np.int64)  # of each slot, while it is in use
        self._touched = np.zeros(SMALLEST, dtype=np.int64)
        self._newest = 0  # the greatest clock of a touch
        self.since = ChangedRows()
        self._waiting = Waiting()
        self._changes = Changes(workers)
        self._changes.grow(SMALLEST if workers else 0)

    def __len__(self) -> int:
        return len(self._index)

    def pull(self, ids: np.ndarray, create: bool = True, clock: int = 0) -> torch.Tensor:
        """The values (U, D) of rows, as a copy. With ``create=False``, for evaluation, absent rows are drawn and not
        kept.

        Raises:
            ValueError: an id outside of the table.
        """
        slots = self._find(ids)
        absent = (slots < 0).nonzero()[0]
        if len(absent) and create and self.admission is None:
            slots[absent] = self._make(ids[absent])
            absent = absent[:0]
        if create:
            self._touch(slots[slots >= 0] if len(absent) else slots, clock)
        values = gather(self._rows, np.maximum(slots, 0) if len(absent) else slots)[:, : self.dim].contiguous()
        if len(absent):
            values[torch.from_numpy(absent)] = self._draw(ids[absent])
        return values

    def push(self, ids: np.ndarray, gradients: torch.Tensor, lr: float, step: int, clock: int) -> None:
        """Update rows with their gradients (U, D), already summed over the batch.

        Args:
            lr: learning rate of this update.
            step: number of this update of the whole table by this kernel, from 1 and the same on all servers, for Adam.

        Raises:
            ValueError: an id outside of the table, or gradients of another shape.
        """
        slots, gradients = self._admitted(ids, self._checked(ids, gradients), clock)
        rows = gather(self._rows, slots)
        values, state = (
            rows[:, : self.dim].contiguous(),
            rows[:, self.dim :].contiguous(),
        )  # kernels are faster on these
        self.kernel.apply(values, state, gradients, lr, step)
        put(self._rows, slots, torch.cat((values, state), dim=1) if state.shape[1] else values)

    def assign(self, ids: np.ndarray, values: torch.Tensor, clock: int = 0) -> None:
        """Set rows to these values (U, D) with fresh optimizer state, past the admission."""
        values = self._checked(ids, values)
        slots = self._find(ids)
        absent = slots < 0
        slots[absent] = self._add(ids[absent])
        if self.admission is not None:
            self._waiting.remove(ids[absent])
        self._write(slots, values)
        self._touch(slots, clock)

    def add(self, ids: np.ndarray, deltas: torch.Tensor, writer: int, version: int, clock: int = 0) -> None:
        """Add a worker's differences (U, D) to rows, as that version (from 1, not falling); the worker holds them
        now."""
        slots, deltas = self._admitted(ids, self._checked(ids, deltas), clock)
        rows = gather(self._rows, slots)
        rows[:, : self.dim] += deltas
        put(self._rows, slots, rows)
        self._changes.wrote(writer, slots, version)
        self._changes.hold(writer, slots)

    def hold(self, worker: int, ids: np.ndarray) -> None:
        """Note that a worker has a copy of those of these rows that exist."""
        slots = self._find(ids)
        self._changes.hold(worker, slots[slots >= 0])

    def refresh(self, worker: int, cursor: int) -> tuple[np.ndarray, torch.Tensor]:
        """The rows that a worker holds and others changed after version ``cursor``: ids (N,) ascending, values (N,
        D)."""
        slots = self._changes.news(worker, cursor)
        ids = self._ids[slots]
        order = np.argsort(ids)
        return ids[order], gather(self._rows, slots[order])[:, : self.dim].contiguous()

    def forget(self, worker: int) -> None:
        """Note that a worker has no copy of any row, as after its restart."""
        self._changes.forget(worker)

    def shrink(self, older_than: int) -> int:
        """Drop rows and waiting ids last touched before that clock. Returns how many rows.

        A touch is a push, or a pull with ``create=True``, with its clock. A dropped row comes back as a fresh one.
        """
        ids, slots = self._index.ids(), self._index.slots()
        freed = self._index.remove(ids[self._touched[slots] < older_than])
        if self._changes.workers:
            self._changes.clear(freed)
        self.since.removed(freed, self._ids)
        self._waiting.shrink(older_than)
        return len(freed)

    def count_from(self, clock: int) -> None:
        """Stamp all rows that are here with that clock, which is the first that there is."""
        self._touch(self._index.slots(), clock)

    def state(self, increment: bool = False) -> dict[str, Streamed]:
        """The rows for a snapshot: ``ids`` (N,) ascending, ``rows`` (N, D + S), ``touched`` (N,), and who waits; they
        are looked up when they are written.

        It depends on the rows alone, not on the order in which they came. What workers hold is not part of it.

        Args:
            increment: of the rows that have changed since ``since`` began alone; and ``removed`` (R,), ids that went
                since then.
        """
        if increment:
            ids, count = cache(lambda: np.sort(self._ids[self.since.slots()])), self.since.count
            more = {REMOVED: Streamed((self.since.gone_count,), np.dtype(np.int64), self.since.gone)}
        else:
            ids, count, more = cache(lambda: np.sort(self._index.ids())), len(self), {}
        slots = cache(lambda: self._index.find(ids()))
        return {
            "ids": Streamed((count,), np.dtype(np.int64), lambda: [ids()]),
            "rows": streamed.rows_of(self._rows.numpy(), slots, count),
            "touched": streamed.rows_of(self._touched, slots, count),
            **more,
            **self._waiting.state(),
        }

    def count_changes(self) -> None:
        """Mark changed rows from now on, for :meth:`state` with ``increment``."""
        self.since.begin(len(self._rows))

    @property
    def increment_bytes(self) -> int:
        """Bytes of what :meth:`state` with ``increment`` has, but for who waits."""
        return self.since.count * self.row_bytes + 8 * self.since.gone_count

    @property
    def row_bytes(self) -> int:
        """Bytes of a row in a snapshot: its values and state, its id and its age."""
        return self._rows.shape[1] * self._rows.element_size() + 16

    def load(self, state: Mapping[str, torch.Tensor], owned: Callable[[np.ndarray], np.ndarray]) -> None:
        """Take over those rows of a :meth:`state` that belong to this server; so any server reads any files.

        Args:
            owned: ids (N,) to bool (N,), whether a row belongs here.

        Raises:
            ValueError: rows of another width or type: the dim, the dtype or the optimizer were others.
        """
        if state["rows"].shape[1:] != self._rows.shape[1:] or state["rows"].dtype != self.dtype:
            raise ValueError(
                f"table {self.name}: rows of {state['rows'].shape[1]} columns and {state['rows'].dtype} do not fit "
                f"{self._rows.shape[1]} and {self.dtype}, {self.dim} values with those of {self.kernel.name}"
            )
        ids = state["ids"].numpy()
        keep = owned(ids)
        slots = self._add(ids[keep])
        put(self._rows, slots, state["rows"][torch.from_numpy(keep)])
        self._touched[slots] = touched = state["touched"].numpy()[keep]
        self._newest = max(self._newest, int(touched.max(initial=0)))
        self._waiting.load(state, owned)

    def with_fresh_state(self, rows: torch.Tensor) -> torch.Tensor:
        """Saved rows of another rule: their values (N, D), with the state (N, S) at which this rule begins."""
        state = torch.full((len(rows), self.kernel.state_columns(self.dim)), self.kernel.initial, dtype=rows.dtype)
        return torch.cat([rows[:, : self.dim], state], dim=1)

    def copies(self) -> dict[str, Streamed]:
        """Which workers hold which rows and who wrote them last, in the order of :meth:`state`'s ids."""
        return self._changes.state(cache(lambda: self._index.find(np.sort(self._index.ids()))), len(self))

    def load_copies(self, state: Mapping[str, torch.Tensor]) -> None:
        """Go on from :meth:`copies` of a table whose rows were these."""
        slots = self._index.find(np.sort(self._index.ids()))
        self._changes.load(slots, **{name: part.numpy() for name, part in state.items()})

    def memory(self) -> dict[str, float]:
        """The sizes for statistics: ``rows``, ids ``waiting``, ``bytes`` of all arrays, and ``bytes_per_row``."""
        own = self._rows.nbytes + self._ids.nbytes + self._touched.nbytes + self._index.nbytes() + self.since.nbytes()
        total = own + self._changes.nbytes() + self._waiting.nbytes()
        return {
            "rows": len(self),
            "waiting": len(self._waiting),
            "bytes": total,
            "bytes_per_row": total / max(1, len(self)),
        }

    def _admitted(self, ids: np.ndarray, updates: torch.Tensor, clock: int) -> tuple[np.ndarray, torch.Tensor]:
        """Slots (N,) and updates (N, D) of the rows that exist or are let in now; the rest is dropped and counted."""
        slots = self._find(ids)
        absent = (slots < 0).nonzero()[0]
        if len(absent):
            slots[absent] = self._let_in(ids[absent], clock)
            kept = (slots >= 0).nonzero()[0]
            if len(kept) < len(slots):
                self.dropped += len(slots) - len(kept)
                slots, updates = slots[kept], updates[torch.from_numpy(kept)]
        self._touch(slots, clock)
        return slots, updates

    def _let_in(self, ids: np.ndarray, clock: int) -> np.ndarray:
        """(N,) slots of these absent ids (N,), -1 for those that go on waiting."""
        if self.admission is None:
            return self._make(ids)
        admitted = self.admission.admits(self._admission_key, ids, self._waiting.sight(ids, clock))
        self._waiting.remove(ids[admitted])
        slots = np.full(len(ids), -1)
        slots[admitted] = self._make(ids[admitted])
        return slots

    def _make(self, ids: np.ndarray) -> np.ndarray:
        """(N,) slots of fresh rows for these absent ids (N,)."""
        slots = self._add(ids)
        self._write(slots, self._draw(ids))
        return slots

    def _add(self, ids: np.ndarray) -> np.ndarray:
        """(N,) slots for these ids (N,), with room in all arrays; nothing is left of the rows that had them before."""
        slots = self._index.add(ids)
        if self._index.high > len(self._rows):
            old, capacity = len(self._rows), max(self._index.high, 2 * len(self._rows))
            rows = torch.empty((capacity, self._rows.shape[1]), dtype=self.dtype)
            rows[:old] = self._rows
            self._rows = rows
            self._ids, self._touched = (np.pad(column, (0, capacity - old)) for column in (self._ids, self._touched))
            self._changes.grow(capacity if self._changes.workers else 0)
            self.since.grow(capacity)
        self._ids[slots] = ids
        self._touched[slots] = 0
        self.since.changed(slots)
        if self._changes.workers:
            self._changes.clear(slots)
        return slots

    def _write(self, slots: np.ndarray, values: torch.Tensor) -> None:
        """Values (N, D) with fresh optimizer state, in one copy."""
        rows = torch.full((len(slots), self._rows.shape[1]), self.kernel.initial, dtype=self.dtype)
        rows[:, : self.dim] = values
        put(self._rows, slots, rows)

    def _draw(self, ids: np.ndarray) -> torch.Tensor:
        """(N, D) fresh rows of these ids (N,)."""
        return torch.from_numpy(draw_rows(self._key, ids, self.dim, self.init)).to(self.dtype)

    def _touch(self, slots: np.ndarray, clock: int) -> None:
        """The clock of late messages may be behind: the last touch is the greatest one. Whatever changes a row touches
        it."""
        self.since.changed(slots)
        if clock >= self._newest:
            self._newest = clock
            self._touched[slots] = clock
        else:
            self._touched[slots] = np.maximum(self._touched[slots], clock)

    def _find(self, ids: np.ndarray) -> np.ndarray:
        if self.num_rows is not None and len(ids) and ids.max() >= self.num_rows:
            raise ValueError(f"table {self.name} has rows 0..{self.num_rows - 1}, not {ids.max()}")
        return self._index.find(ids)

    def _checked(self, ids: np.ndarray, values: torch.Tensor) -> torch.Tensor:
        if values.shape != (len(ids), self.dim):
            raise ValueError(f"table {self.name}: {tuple(values.shape)} values for {len(ids)} rows of {self.dim}")
        return values.to(self.dtype)
