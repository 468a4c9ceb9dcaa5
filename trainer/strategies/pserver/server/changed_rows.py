"""Marks the rows of a table that have changed since the last full part of a checkpoint, and keeps the ids that were
removed."""

from __future__ import annotations

import numpy as np


class ChangedRows:
    """Which rows of a table have changed since :meth:`begin`, a byte a slot; before that nothing is marked, at no
    cost."""

    def __init__(self) -> None:
        self._marks: np.ndarray | None = None
        self._gone: list[np.ndarray] = []

    @property
    def counts(self) -> bool:
        """Whether changes are marked."""
        return self._marks is not None

    @property
    def count(self) -> int:
        """Changed rows that are in the table."""
        return 0 if self._marks is None else int(np.count_nonzero(self._marks))

    def nbytes(self) -> int:
        """Bytes of the marks and of the removed ids."""
        return (0 if self._marks is None else self._marks.nbytes) + sum(ids.nbytes for ids in self._gone)

    def begin(self, capacity: int) -> None:
        """Mark changes from now on, of slots below that number."""
        self._marks, self._gone = np.zeros(capacity, dtype=np.bool_), []

    def end(self) -> None:
        """Mark no more changes, and forget those that were marked."""
        self._marks, self._gone = None, []

    def grow(self, capacity: int) -> None:
        """Make room for slots below that number."""
        if self._marks is not None:
            self._marks = np.pad(self._marks, (0, capacity - len(self._marks)))

    def changed(self, slots: np.ndarray) -> None:
        """Mark the rows in these slots (N,) as changed."""
        if self._marks is not None:
            self._marks[slots] = True

    def removed(self, slots: np.ndarray, ids: np.ndarray) -> None:
        """Keep the ids of these slots (N,), whose rows are being removed.

        Args:
            ids: of all slots.
        """
        if self._marks is not None and len(slots):
            self._marks[slots] = False
            self._gone.append(ids[slots])
            if self.gone_count > len(self._marks):  # nobody saves
                self.end()

    def slots(self) -> np.ndarray:
        """The slots (count,) of changed rows."""
        assert self._marks is not None
        return np.flatnonzero(self._marks)

    @property
    def gone_count(self) -> int:
        """How many ids were removed; one may count twice."""
        return sum(map(len, self._gone))

    def gone(self) -> tuple[np.ndarray, ...]:
        """The ids that were removed, in any order; some may be there twice, or be in the table again."""
        return tuple(self._gone)
