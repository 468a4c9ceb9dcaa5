"""Which ids become rows of a table: rare ones can wait until they were seen often enough, or until they are drawn."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import numpy as np
import torch

from trainer.checkpoint import streamed
from trainer.checkpoint.streamed import Streamed
from trainer.hashing import mixed
from trainer.strategies.pserver.tables.index import HashIndex

GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class Admission(Protocol):
    """The server's rule for which ids become rows of a table."""

    def admits(self, key: np.uint64, ids: np.ndarray, seen: np.ndarray) -> np.ndarray:
        """(N,) bool: which of these absent ids (N,) become rows, each pushed for the ``seen``-th time (N,), from 1.

        The answer for an id depends on nothing else, so that any number of servers gives the same.
        """


@dataclass(frozen=True)
class Count:
    """The server's rule that admits an id at its k-th push, which is the first to be applied."""

    k: int

    def __post_init__(self) -> None:
        if self.k < 1:
            raise ValueError(f"a row is admitted from its first push at the earliest, not from push {self.k}")

    def admits(self, key: np.uint64, ids: np.ndarray, seen: np.ndarray) -> np.ndarray:
        return seen >= self.k


@dataclass(frozen=True)
class Probability:
    """The server's rule that admits an absent id at each push with probability p, drawn from (key, id, seen)."""

    p: float

    def __post_init__(self) -> None:
        if not 0 < self.p <= 1:
            raise ValueError(f"the probability of admission is above 0 and at most 1, not {self.p}")

    def admits(self, key: np.uint64, ids: np.ndarray, seen: np.ndarray) -> np.ndarray:
        drawn = mixed(mixed(ids.astype(np.uint64) + key) + seen.astype(np.uint64) * GOLDEN)
        return (drawn >> np.uint64(11)) * 2.0**-53 < self.p


class Waiting:
    """Ids that were pushed and are not rows yet: how often and when last. Around 50 bytes an id, whatever the table's
    dim."""

    def __init__(self) -> None:
        self._index = HashIndex()
        self._seen = np.zeros(0, dtype=np.int64)
        self._touched = np.zeros(0, dtype=np.int64)

    def __len__(self) -> int:
        return len(self._index)

    def nbytes(self) -> int:
        """Bytes of its arrays."""
        return self._index.nbytes() + self._seen.nbytes + self._touched.nbytes

    def sight(self, ids: np.ndarray, clock: int) -> np.ndarray:
        """Count one more push of these unique ids (N,) at that clock. Returns how often each was seen by now, (N,)."""
        slots = self._slots(ids)
        self._seen[slots] += 1
        self._touched[slots] = np.maximum(self._touched[slots], clock)
        seen: np.ndarray = self._seen[slots]
        return seen

    def remove(self, ids: np.ndarray) -> None:
        """Forget these unique ids; seen again, they count from 1."""
        freed = self._index.remove(ids)
        self._seen[freed] = self._touched[freed] = 0

    def shrink(self, older_than: int) -> int:
        """Forget ids last seen before that clock. Returns how many."""
        old = self._index.ids()[self._touched[self._index.slots()] < older_than]
        self.remove(old)
        return len(old)

    def state(self) -> dict[str, Streamed]:
        """``waiting_ids`` ascending, ``waiting_seen`` and ``waiting_touched``, all (N,) int64."""
        ids = cache(lambda: np.sort(self._index.ids()))
        slots = cache(lambda: self._index.find(ids()))
        count = len(self)
        return {
            "waiting_ids": Streamed((count,), np.dtype(np.int64), lambda: [ids()]),
            "waiting_seen": streamed.rows_of(self._seen, slots, count),
            "waiting_touched": streamed.rows_of(self._touched, slots, count),
        }

    def load(self, state: Mapping[str, torch.Tensor], owned: Callable[[np.ndarray], np.ndarray]) -> None:
        """Take over the ids of a :meth:`state` that belong to this server."""
        ids = state["waiting_ids"].numpy()
        keep = owned(ids)
        slots = self._slots(ids[keep])
        self._seen[slots] = state["waiting_seen"].numpy()[keep]
        self._touched[slots] = state["waiting_touched"].numpy()[keep]

    def _slots(self, ids: np.ndarray) -> np.ndarray:
        slots = self._index.add(ids)
        if self._index.high > len(self._seen):
            more = max(self._index.high, 2 * len(self._seen)) - len(self._seen)
            self._seen, self._touched = (np.pad(column, (0, more)) for column in (self._seen, self._touched))
        return slots
