"""Maps row ids to storage slots, whole arrays at a time, by a direct array or an open-addressing hash table."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from trainer.hashing import mixed

EMPTY = -1  # never used: a search ends here
GONE = -2  # held an id that was removed: a search passes, a new id may move in
SMALLEST = 16
AHEAD = np.arange(1, 9)  # places looked at together after the first: about one cache line of ids


DIRECT = 1 << 24
"""Tables of at most so many rows have an array of all their ids, of 4 bytes each."""


class Index(ABC):
    """Base class of the maps from row ids (int64, from 0) to storage slots 0, 1, 2, ..."""

    def __init__(self) -> None:
        self._count = 0
        self._free = np.empty(0, dtype=np.int64)  # slots given back, reused from the end
        self.high = 0  # slots ever given out: all slots are below it

    def __len__(self) -> int:
        return self._count

    @abstractmethod
    def nbytes(self) -> int:
        """The bytes that the index's arrays take."""

    @abstractmethod
    def ids(self) -> np.ndarray:
        """The ids present (len,), in the order of :meth:`slots`."""

    @abstractmethod
    def slots(self) -> np.ndarray:
        """The slots (len,) of :meth:`ids`."""

    @abstractmethod
    def find(self, ids: np.ndarray) -> np.ndarray:
        """The slots (N,) of these ids (N,), -1 for absent ones.

        Raises:
            ValueError: an id below 0.
        """

    @abstractmethod
    def _put(self, ids: np.ndarray, slots: np.ndarray) -> None:
        """Remember absent ids."""

    @abstractmethod
    def _drop(self, ids: np.ndarray) -> np.ndarray:
        """Forget ids; the slots of those that were present."""

    def add(self, ids: np.ndarray) -> np.ndarray:
        """Return the slots (N,) of these unique ids (N,), adding those that are absent.

        New ids take the slots given back by :meth:`remove` first, then consecutive ones from ``high``.

        Raises:
            ValueError: an id below 0.
        """
        slots = self.find(ids)
        absent = (slots < 0).nonzero()[0]
        if len(absent):
            slots[absent] = fresh = self._take(len(absent))
            self._put(ids[absent], fresh)
            self._count += len(absent)
        return slots

    def remove(self, ids: np.ndarray) -> np.ndarray:
        """Remove these unique ids (N,), present or not; returns the slots set free (M,)."""
        slots = self._drop(_checked(ids))
        self._count -= len(slots)
        self._free = np.concatenate([self._free, slots])
        return slots

    def _take(self, count: int) -> np.ndarray:
        """Slots (count,) that are not in use."""
        reused = min(count, len(self._free))
        fresh = np.arange(self.high, self.high + count - reused)
        self.high += count - reused
        slots = np.concatenate([self._free[len(self._free) - reused :][::-1], fresh])
        self._free = self._free[: len(self._free) - reused].copy() if reused else self._free
        return slots


def index_of(rows: int | None) -> Index:
    """Make the index for a table of ``rows`` rows; None: for any ids."""
    return HashIndex() if rows is None or rows > DIRECT else DirectIndex(rows)


class DirectIndex(Index):
    """The index for ids below ``rows``: an array with a place for each id."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self._slots = np.full(rows, -1, dtype=np.int32)

    def nbytes(self) -> int:
        return self._slots.nbytes + self._free.nbytes

    def ids(self) -> np.ndarray:
        return (self._slots >= 0).nonzero()[0]

    def slots(self) -> np.ndarray:
        return self._slots[self._slots >= 0].astype(np.int64)

    def find(self, ids: np.ndarray) -> np.ndarray:
        return self._slots.take(_checked(ids)).astype(np.int64)

    def _put(self, ids: np.ndarray, slots: np.ndarray) -> None:
        self._slots[ids] = slots

    def _drop(self, ids: np.ndarray) -> np.ndarray:
        slots = self.find(ids)
        self._slots[ids] = -1
        return slots[slots >= 0]


class HashIndex(Index):
    """The index for any ids (int64, 0..2^63-1): hashing with linear probing, at most half full (Knuth, vol. 3, 6.4).

    The probes of one call advance together: a round looks at the next places of every id that is still searching, so
    the number of Python steps follows the longest probe, not the number of ids.
    """

    def __init__(self) -> None:
        super().__init__()
        self._keys = np.full(SMALLEST, EMPTY, dtype=np.int64)
        self._slots = np.full(SMALLEST, -1, dtype=np.int64)  # -1 wherever no id lies, so that absent ids read -1
        self._used = 0  # places that are not EMPTY

    def nbytes(self) -> int:
        return self._keys.nbytes + self._slots.nbytes + self._free.nbytes

    def ids(self) -> np.ndarray:
        return self._keys[self._keys >= 0]

    def slots(self) -> np.ndarray:
        return self._slots[self._keys >= 0]

    def find(self, ids: np.ndarray) -> np.ndarray:
        slots: np.ndarray = self._slots.take(self._search(_checked(ids)))
        return slots

    def _put(self, ids: np.ndarray, slots: np.ndarray) -> None:
        self._reserve(len(ids))
        self._insert(ids, slots)

    def _drop(self, ids: np.ndarray) -> np.ndarray:
        places = self._search(ids)
        places = places[self._keys[places] >= 0]
        slots: np.ndarray = self._slots[places]
        self._keys[places] = GONE
        self._slots[places] = -1
        return slots

    def _search(self, ids: np.ndarray) -> np.ndarray:
        """(N,) places: that of the id, or the EMPTY one where its search ended."""
        mask = len(self._keys) - 1
        places = _home(ids, mask)
        keys = self._keys.take(places)
        searching = ((keys != ids) & (keys != EMPTY)).nonzero()[0]
        while len(searching):
            at = (places[searching][:, None] + AHEAD) & mask
            keys = self._keys.take(at)
            ends = (keys == ids[searching][:, None]) | (keys == EMPTY)
            first, each = ends.argmax(axis=1), np.arange(len(searching))
            ended = ends[each, first]
            places[searching] = np.where(ended, at[each, first], at[:, -1])
            searching = searching[~ended]
        return places

    def _insert(self, ids: np.ndarray, slots: np.ndarray) -> None:
        """Put absent ids where room is. Of several that want one place, the last written stays and the others go on."""
        mask = len(self._keys) - 1
        at = _home(ids, mask)
        while len(ids):
            before = self._keys[at]
            room = before < 0
            self._keys[at[room]] = ids[room]
            settled = self._keys[at] == ids
            self._slots[at[settled]] = slots[settled]
            self._used += int(np.count_nonzero(before[settled] == EMPTY))
            going = ~settled
            ids, slots, at = ids[going], slots[going], (at[going] + 1) & mask

    def _reserve(self, more: int) -> None:
        """Room for that many more ids: a new table without the removed ones, double the size where need be.

        It leaves at least 1/32 of its places to spare, or ids that come and go at the brim would rebuild it each time.
        """
        if 2 * (self._used + more) <= len(self._keys):
            return
        ids, slots = self.ids(), self.slots()
        needed = 2 * (self._count + more)
        capacity = max(SMALLEST, 1 << (needed + needed // 32).bit_length())
        self._keys = np.full(capacity, EMPTY, dtype=np.int64)
        self._slots = np.full(capacity, -1, dtype=np.int64)
        self._used = 0
        self._insert(ids, slots)


def _home(ids: np.ndarray, mask: int) -> np.ndarray:
    """(N,) the place where the search for each id begins."""
    return (mixed(ids.view(np.uint64)) & np.uint64(mask)).view(np.int64)


def _checked(ids: np.ndarray) -> np.ndarray:
    """The ids; an id below 0 would be taken for the marks of the table."""
    if len(ids) and ids.min() < 0:
        raise ValueError(f"row ids are 0..2^63-1, not {ids.min()}")
    return ids
