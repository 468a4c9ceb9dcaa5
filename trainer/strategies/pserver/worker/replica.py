"""pserver_geo: a worker's own copy of the table rows it has used, with optimizer state and the servers' base values."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import torch

from trainer.strategies.pserver.tables.index import index_of
from trainer.strategies.pserver.tables.kernels import Kernel
from trainer.strategies.pserver.tables.row_arrays import gather, put

SMALLEST = 1024
REMEMBERED = 4
"""Arrays of ids whose slots are known: this batch's, the next one's, and those of a step that looks rows up twice."""


class Replica:
    """A worker's own copy of one table's rows, for pserver_geo.
    Per row D values, S columns of optimizer state, D of the base, in one storage.

    Args:
        dim: D. dtype: of everything. kernel: the local sparse optimizer. num_rows: of the table, where it has an end.
    """

    def __init__(self, dim: int, dtype: torch.dtype, kernel: Kernel, num_rows: int | None) -> None:
        self.dim, self.kernel, self.num_rows = dim, kernel, num_rows
        self.width = dim + kernel.state_columns(dim)
        self.index = index_of(num_rows)
        self.rows = torch.zeros((SMALLEST, self.width + dim), dtype=dtype)
        self.ids = np.zeros(SMALLEST, dtype=np.int64)
        self.dirty: list[np.ndarray] = []
        self.steps = 0
        self.found: deque[tuple[np.ndarray, np.ndarray]] = deque(maxlen=REMEMBERED)

    def state(self) -> dict[str, Any]:
        """The replica for :meth:`load`: ids (N,) in slot order, rows (N, 2D + S), which are dirty (N,), the steps, the
        rule."""
        high = self.index.high
        dirty = np.zeros(high, dtype=np.bool_)
        for part in self.dirty:
            dirty[part] = True
        rows, rule = self.rows[:high], self.kernel.name
        return {"ids": self.ids[:high], "rows": rows, "dirty": dirty, "steps": self.steps, "rule": rule}

    def load(self, ids: np.ndarray, rows: torch.Tensor, dirty: np.ndarray, steps: int, rule: str = "") -> None:
        """Restore what :meth:`state` returned, into an empty replica; of another rule without the optimizer's state."""
        self.insert(ids, rows[:, : self.dim])
        slots = self.slots(ids)
        if rule and rule != self.kernel.name:
            steps, fresh = 0, gather(self.rows, slots)
            rows = torch.cat([rows[:, : self.dim], fresh[:, self.dim : self.width], rows[:, -self.dim :]], dim=1)
        put(self.rows, slots, rows)
        self.dirty, self.steps = [slots[dirty]], steps

    def slots(self, ids: np.ndarray) -> np.ndarray:
        """The slots (U,) of unique ids that are all in the replica."""
        for known, slots in self.found:
            if known is ids:
                return slots
        slots = self.index.find(ids)
        self.found.append((ids, slots))
        return slots

    def missing(self, ids: np.ndarray) -> np.ndarray:
        """Those of these unique ids (U,) that are not in the replica."""
        slots = self.index.find(ids)
        absent: np.ndarray = ids[slots < 0]
        if not len(absent):
            self.found.append((ids, slots))
        return absent

    def insert(self, ids: np.ndarray, values: torch.Tensor) -> None:
        """Insert rows that are new to the replica, with the servers' values (U, D)."""
        slots = self.index.add(ids)
        if self.index.high > len(self.rows):
            capacity = max(self.index.high, 2 * len(self.rows))
            rows = torch.zeros((capacity, self.rows.shape[1]), dtype=self.rows.dtype)
            rows[: len(self.rows)] = self.rows
            self.ids = np.pad(self.ids, (0, capacity - len(self.ids)))
            self.rows = rows
        fresh = torch.full((len(ids), self.rows.shape[1]), self.kernel.initial, dtype=self.rows.dtype)
        fresh[:, : self.dim] = values
        fresh[:, self.width :] = values
        put(self.rows, slots, fresh)
        self.ids[slots] = ids

    def look_up(self, ids: np.ndarray) -> torch.Tensor:
        """Return the values (U, D) of ids that are in the replica."""
        return gather(self.rows, self.slots(ids))[:, : self.dim].contiguous()

    def update(self, ids: np.ndarray, gradients: torch.Tensor, lr: float) -> None:
        """Update these unique rows by one local step; a step without rows counts, too."""
        self.steps += 1
        if not len(ids):
            return
        slots = self.slots(ids)
        rows = gather(self.rows, slots)
        self.kernel.apply(rows[:, : self.dim], rows[:, self.dim : self.width], gradients, lr, self.steps)
        put(self.rows, slots, rows)
        self.dirty.append(slots)

    def differences(self, share: float) -> tuple[np.ndarray, torch.Tensor, torch.Tensor]:
        """The rows changed since the last exchange: ids (N,), differences * share (N, D), differences (N, D).
        Ids ascend; a difference is values - base."""
        changed = np.zeros(self.index.high, dtype=np.bool_)  # np.unique of all steps' slots takes ten times as long
        for part in self.dirty:
            changed[part] = True
        slots = np.flatnonzero(changed)
        self.dirty = []
        ids = self.ids[slots]
        order = np.argsort(ids)
        rows = gather(self.rows, slots[order])
        moved = rows[:, : self.dim] - rows[:, self.width :]
        return ids[order], moved * share, moved

    def fold(
        self, pushed: tuple[np.ndarray, torch.Tensor, torch.Tensor], ids: np.ndarray, values: torch.Tensor, settle: bool
    ) -> None:
        """Take over the servers' values: of pushed rows that nobody else changed, and of rows changed by others.

        A row's value moves by what the servers gained beyond its own difference. ``settle``: it takes the servers'
        value.
        """
        own, shares, moved = pushed
        if len(own):
            slots = self.index.find(own)
            rows = gather(self.rows, slots)
            base = rows[:, self.width :] + shares
            rows[:, : self.dim] = base if settle else rows[:, : self.dim] + (shares - moved)
            rows[:, self.width :] = base
            put(self.rows, slots, rows)
        if len(ids):
            found = self.index.find(ids)
            here = found >= 0
            slots = found[here]
            values = values[torch.from_numpy(here)]
            rows = gather(self.rows, slots)
            rows[:, : self.dim] = values if settle else rows[:, : self.dim] + (values - rows[:, self.width :])
            rows[:, self.width :] = values
            put(self.rows, slots, rows)
