"""Which rows of a worker others have changed since its last request (Geo: workers exchange differences)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from trainer.checkpoint.streamed import Streamed, rows_of

NOBODY = -1


class Changes:
    """Which rows of a table have changed since the last request of each worker: per slot the last version and its
    writer, per worker the slots it holds.

    Two versions are enough: a worker other than the last writer looks at the last version, the last writer at that of
    the others. It takes 20 bytes a slot and one more per worker.
    """

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self._version = np.zeros(0, dtype=np.int64)
        self._writer = np.zeros(0, dtype=np.int32)
        self._version_of_others = np.zeros(0, dtype=np.int64)
        self._held = np.zeros((workers, 0), dtype=np.bool_)

    def nbytes(self) -> int:
        """Bytes of its arrays."""
        return sum(a.nbytes for a in (self._version, self._writer, self._version_of_others, self._held))

    def grow(self, capacity: int) -> None:
        """Make room for slots below that number."""
        more = capacity - len(self._version)
        if not more:
            return
        zeros = np.zeros(more, dtype=np.int64)
        self._version = np.concatenate((self._version, zeros))
        self._writer = np.concatenate((self._writer, np.full(more, NOBODY, dtype=np.int32)))
        self._version_of_others = np.concatenate((self._version_of_others, zeros))
        self._held = np.concatenate((self._held, np.zeros((self.workers, more), dtype=np.bool_)), axis=1)

    def clear(self, slots: np.ndarray) -> None:
        """These slots (N,) get other rows: nobody has written or holds them."""
        self._version[slots] = self._version_of_others[slots] = 0
        self._writer[slots] = NOBODY
        self._held[:, slots] = False

    def hold(self, worker: int, slots: np.ndarray) -> None:
        """Note that a worker has a copy of these slots (N,)."""
        self._held[self._known(worker), slots] = True

    def forget(self, worker: int) -> None:
        """Note that a worker has no copy of anything."""
        self._held[self._known(worker)] = False

    def wrote(self, writer: int, slots: np.ndarray, version: int) -> None:
        """Note that a worker changed these slots (N,); versions start at 1 and do not fall."""
        before = self._writer[slots]
        others = slots[before != self._known(writer)]
        self._version_of_others[others] = self._version[others]
        self._version[slots] = version
        self._writer[slots] = writer

    def news(self, worker: int, cursor: int) -> np.ndarray:
        """The slots (N,) that a worker holds and that others changed after version ``cursor``."""
        slots = np.flatnonzero((self._version > cursor) & self._held[self._known(worker)])
        by_others = (self._writer[slots] != worker) | (self._version_of_others[slots] > cursor)
        news: np.ndarray = slots[by_others]
        return news

    def state(self, slots: Callable[[], np.ndarray], count: int) -> dict[str, Streamed]:
        """Versions and writers (count,) of these slots in their order, and their holders (workers, count)."""
        held = Streamed((self.workers, count), self._held.dtype, lambda: [self._held.take(slots(), axis=1)])
        return {
            "version": rows_of(self._version, slots, count),
            "writer": rows_of(self._writer, slots, count),
            "version_of_others": rows_of(self._version_of_others, slots, count),
            "held": held,
        }

    def load(
        self,
        slots: np.ndarray,
        version: np.ndarray,
        writer: np.ndarray,
        version_of_others: np.ndarray,
        held: np.ndarray,
    ) -> None:
        """Restore a :meth:`state` of the same number of workers."""
        self._version[slots], self._writer[slots], self._version_of_others[slots] = version, writer, version_of_others
        self._held[:, slots] = held

    def _known(self, worker: int) -> int:
        """The worker; a negative one would silently be counted from the end."""
        if not 0 <= worker < self.workers:
            raise ValueError(f"worker {worker} of a table made for {self.workers}")
        return worker
