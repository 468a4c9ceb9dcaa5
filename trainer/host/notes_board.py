"""A board of short notes (key and text) between the processes of a run, which nobody else can write to.

On one host a board is a private folder. Between hosts it is a part of host 0's store, which has no password: each note
carries a keyed hash (BLAKE2b) of its key, time and text, and notes without a valid hash are ignored.
"""

from __future__ import annotations

import datetime
import hashlib
import hmac
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable
from urllib.parse import quote

from trainer.host import descriptors
from trainer.host.patience import Patience

FOREVER = datetime.timedelta(days=3650)
QUICKEST_S, SLOWEST_S = 0.005, 0.2
"""Shortest and longest time between two polls of a wait."""
PART = 20
"""A wait polls again after 1/20 of its time so far."""
MAC = 32
VERDICT = "verdict"


class NoNote(RuntimeError):
    """The error for a note that did not come in time, or for a lost board (torch's stores raise RuntimeError too)."""


class FolderLost(NoNote):
    """The error for a board's folder that cannot be used any more; its message is a sentence for users."""


def wait_until(there: Callable[[], bool], what: str, seconds: float, pause_s: float = QUICKEST_S) -> None:
    """Poll until ``there`` returns true, at first often.

    Args:
        pause_s: shortest time between two polls.

    Raises:
        NoNote: it did not within ``seconds``, not counting the time in which this process was stopped.
    """
    patience = Patience(seconds, time.monotonic)
    while not there():
        if patience.left() <= 0.0:
            raise NoNote(f"{what}: not there within {seconds:g} s")
        time.sleep(max(pause_s, min(SLOWEST_S, patience.waited / PART)))


class Board(Protocol):
    """Protocol of a key-value board between the processes of a run; torch.distributed's stores have its methods."""

    def set(self, key: str, value: str) -> Any:
        """Write a note under a key, replacing an older one. A reader finds it as soon as this method has returned."""

    def get(self, key: str) -> bytes:
        """Wait for the note under a key, and return it."""

    def check(self, keys: list[str]) -> bool:
        """Whether all these keys have notes."""

    def wait(self, keys: list[str], timeout: datetime.timedelta = ...) -> Any:
        """Wait until all these keys have notes.

        Raises:
            RuntimeError: they are not in time, or the board is gone.
        """


def verdict(
    board: Board, rank: int, size: int, own: str, of: Callable[[list[bytes]], str], timeout: datetime.timedelta
) -> str:
    """What process 0 concludes from a note of each process; collective, with messages in proportion to their number.

    Args:
        own: the note of this process. of: the conclusion from the notes of all, by rank.

    Raises:
        RuntimeError: some process did not leave its note in time, or the board is gone.
    """
    board.set(str(rank), own)
    if rank == 0:
        everybody = [str(number) for number in range(size)]
        board.wait(everybody, timeout)
        board.set(VERDICT, of([board.get(number) for number in everybody]))
    board.wait([VERDICT], timeout)
    return board.get(VERDICT).decode()


class OwnBoard(Board, Protocol):
    """Protocol of a board that only processes of the run can write to."""

    def clone(self) -> OwnBoard:
        """Return the same board for use in another thread."""

    def under(self, prefix: str) -> OwnBoard:
        """Return a part of this board, whose keys get a prefix."""

    def within(self, seconds: float) -> OwnBoard:
        """Return the same board for requests that together may take so long; then they raise :class:`NoNote`."""

    def find(self, key: str) -> bytes | None:
        """Return the note under a key at once; None: there is none."""


@runtime_checkable
class Patient(Protocol):
    """Protocol of a store with a limit on the wait for its answers."""

    def within(self, seconds: float) -> Any:
        """Return the same store for requests that together may take so long."""


class FolderBoard:
    """A board between processes of one host: one file per note, in a folder for this user alone (mode 0700).

    A file appears complete, and no lock is held: a stopped or killed process blocks no other one.
    """

    def __init__(self, folder: Path, prefix: str = "") -> None:
        self.folder, self.prefix = folder, prefix

    def under(self, prefix: str) -> FolderBoard:
        """Return a part of this board in the same folder, whose keys get a prefix."""
        return FolderBoard(self.folder, f"{self.prefix}{prefix}/")

    def clone(self) -> FolderBoard:
        """Return this board itself: files can be used from any thread."""
        return self

    def within(self, seconds: float) -> FolderBoard:
        """Return this board itself: requests to it do not wait."""
        return self

    def set(self, key: str, value: str) -> None:
        """Write a note to its file, which appears complete."""
        from trainer.host import private

        try:
            descriptors.in_reserve(lambda: private.write(self._path(key), value))
        except OSError as error:
            raise FolderLost(
                f"the launcher's temporary folder {self.folder} cannot be written: {error.strerror} "
                f"(TMPDIR=FOLDER names another place for it)"
            ) from error

    def get(self, key: str) -> bytes:
        """Wait for a note's file, and return its content."""
        from trainer.host import private

        self.wait([key])
        return descriptors.in_reserve(lambda: private.read(self._path(key))).encode()

    def find(self, key: str) -> bytes | None:
        """Return the content of a note's file; None: there is none."""
        return self.get(key) if self.check([key]) else None

    def check(self, keys: Sequence[str]) -> bool:
        """Whether the files of all these notes exist."""
        return all(self._path(key).is_file() for key in keys)

    def wait(self, keys: Sequence[str], timeout: datetime.timedelta = FOREVER) -> None:
        """Poll until the files of all these notes exist."""

        def there() -> bool:
            if not (found := self.check(keys)) and not self.folder.is_dir():
                raise FolderLost("the launcher's folder is gone")
            return found

        wait_until(there, ", ".join(keys), timeout.total_seconds())

    def _path(self, key: str) -> Path:
        return self.folder / quote(self.prefix + key, safe="")


class SealedBoard:
    """A board in a torch.distributed store that strangers can write to; notes without a valid hash do not count.

    A note counts if its hash is made with the run's secret, and if it is not older than the last valid note that was
    read under its key. Otherwise the last valid note counts, if there is one.

    Args:
        store: where the notes lie.
        secret: the run's; notes of other runs do not count.
    """

    def __init__(self, store: Any, secret: bytes, prefix: str = "board/") -> None:
        self.store, self.prefix = store, prefix
        self.key = hashlib.blake2b(b"board", key=secret, digest_size=MAC).digest()
        self._secret = secret
        self._seen: dict[str, tuple[int, str]] = {}
        self._written: dict[str, int] = {}
        self._reported: set[str] = set()

    def under(self, prefix: str) -> SealedBoard:
        """Return a part of this board in the same store, whose keys get a prefix."""
        return SealedBoard(self.store, self._secret, f"{self.prefix}{prefix}/")

    def clone(self) -> SealedBoard:
        """Return the same board with its own connection, for use in another thread."""
        return SealedBoard(self.store.clone(), self._secret, self.prefix)

    def within(self, seconds: float) -> SealedBoard:
        """Return the same board, with less patience where its store has any."""
        store = self.store.within(seconds) if isinstance(self.store, Patient) else self.store
        return SealedBoard(store, self._secret, self.prefix)

    def set(self, key: str, value: str) -> None:
        """Write a note with a hash made with the run's secret, and a later time than the note before."""
        self.send(key, value)
        self.store.check([self.prefix + key])  # waits until the note is written: a TCPStore works in order

    def send(self, key: str, value: str) -> None:
        """Write a note as :meth:`set` does, without waiting: the process that keeps the store may be stopped."""
        if key not in self._written:
            self._latest(key)
        before = max(self._written.get(key, 0), self._seen.get(key, (0, ""))[0])
        self._written[key] = at = max(time.time_ns(), before + 1)
        self.store.set(self.prefix + key, f"{self._seal(key, at, value)} {at} {value}")

    def get(self, key: str) -> bytes:
        """Wait for a note with a valid hash, and return it."""
        self.wait([key])
        return self._seen[key][1].encode()

    def find(self, key: str) -> bytes | None:
        """Return the note with a valid hash; None: there is none."""
        found = self._latest(key)
        return None if found is None else found.encode()

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all these keys have notes with valid hashes."""
        return all(self._latest(key) is not None for key in keys)

    def wait(self, keys: Sequence[str], timeout: datetime.timedelta = FOREVER) -> None:
        """Poll until all these keys have notes with valid hashes."""
        missing = list(keys)

        def there() -> bool:
            while missing and self._latest(missing[0]) is not None:
                missing.pop(0)
            return not missing

        wait_until(there, ", ".join(keys), timeout.total_seconds())

    def forged(self, key: str) -> bool:
        """Whether a key has a note, but none with a valid hash."""
        return bool(self.store.check([self.prefix + key])) and self._latest(key) is None

    def _latest(self, key: str) -> str | None:
        """The valid note under a key now; None: there is none."""
        if self.store.check([self.prefix + key]):
            self._accept(key, self.store.get(self.prefix + key))
        return self._seen[key][1] if key in self._seen else None

    def _accept(self, key: str, raw: bytes) -> None:
        """Remember a note with a valid hash that is not older than the last one; report others."""
        try:
            seal, written, value = raw.decode().split(" ", 2)
            at = int(written)
        except ValueError:
            return self._report(key)
        if not hmac.compare_digest(seal.encode(), self._seal(key, at, value).encode()):
            return self._report(key)
        if at >= self._seen.get(key, (at, ""))[0]:
            self._seen[key] = at, value
        return None

    def _report(self, key: str) -> None:
        """Report an invalid note, once for each key."""
        if key not in self._reported:
            self._reported.add(key)
            print(f"ATTENTION: {key} in the launcher's store is not of this run and is ignored", flush=True)

    def _seal(self, key: str, at: int, value: str) -> str:
        text = b"\0".join(part.encode() for part in (self.prefix + key, str(at), value))
        return hashlib.blake2b(text, key=self.key, digest_size=MAC).hexdigest()
