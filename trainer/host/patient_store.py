"""A torch.distributed store on another host, with a limit on how long to wait for its answers (torch has none)."""

from __future__ import annotations

import datetime
import queue
import threading
from collections.abc import Callable
from typing import Any

from trainer.errors import first_line
from trainer.host.notes_board import FOREVER, NoNote

LONGEST_S = 10_000_000.0
"""Of a wait that has no end: what a lock takes."""


class PatientStore:
    """A torch.distributed store with a limit on how long to wait for answers: a broken network reports nothing.

    A thread does what is asked, so that a store that does not answer blocks that thread and not its caller.

    Args:
        store: torch's.
        name: of the store, in messages.
        patience_s: longest wait for an answer.
    """

    def __init__(self, store: Any, name: str, patience_s: float) -> None:
        self.store, self.name, self.patience_s = store, name, patience_s
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], queue.SimpleQueue[Any]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def clone(self) -> PatientStore:
        """Return the same store with its own connection."""
        return PatientStore(self._ask(self.store.clone), self.name, self.patience_s)

    def within(self, seconds: float) -> PatientStore:
        """Return the same store for questions that are given up after so long."""
        return PatientStore(self.store, self.name, min(self.patience_s, seconds))

    def set(self, key: str, value: str) -> None:
        """Set a key of the store, within the time limit."""
        self._ask(lambda: self.store.set(key, value))

    def add(self, key: str, amount: int) -> int:
        """Add ``amount`` to a number in the store, within the time limit; returns the sum."""
        return int(self._ask(lambda: self.store.add(key, amount)))

    def get(self, key: str) -> bytes:
        """Wait for a key of the store and return its value, within the time limit."""
        return bytes(self._ask(lambda: self.store.get(key)))

    def check(self, keys: list[str]) -> bool:
        """Whether the store has all these keys; answered within the time limit."""
        return bool(self._ask(lambda: self.store.check(keys)))

    def wait(self, keys: list[str], timeout: datetime.timedelta = FOREVER) -> None:
        """Wait until the store has all these keys; the time limit comes on top of ``timeout``."""
        self._ask(lambda: self.store.wait(keys, timeout), timeout.total_seconds())

    def _ask(self, job: Callable[[], Any], more_s: float = 0.0) -> Any:
        """The answer.

        Raises:
            NoNote: there was none in time, or the store is gone.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=_work, args=(self._jobs,), daemon=True, name="patient-store")
            self._thread.start()
        box: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._jobs.put((job, box))
        try:
            answer, error = box.get(timeout=min(LONGEST_S, self.patience_s + more_s))
        except queue.Empty:
            raise NoNote(f"{self.name} did not answer within {self.patience_s:g} s (strategy.timeout_s)") from None
        if error is not None:
            raise NoNote(f"{self.name}: {first_line(error)}") from error
        return answer

    def __del__(self) -> None:
        self._jobs.put(None)


def _work(jobs: queue.SimpleQueue[tuple[Callable[[], Any], queue.SimpleQueue[Any]] | None]) -> None:
    """Do one job after the other; nothing is kept of a job that is done, so that its store can be closed."""
    while (job := jobs.get()) is not None:
        do, box = job
        try:
            box.put((do(), None))
        except Exception as error:
            box.put((None, error))
        del job, do, box
