"""A torch.distributed store on another host, with a limit on how long to wait for its answers (torch has none)."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from trainer.errors import first_line
from trainer.host.notes_board import NoNote
from trainer.host.patience import Patience

POLL_S = 1.0
"""Time between two checks whether the waiting process itself was stopped."""


class PatientStore:
    """A torch.distributed store with a limit on how long to wait for answers: a broken network reports nothing.

    A thread sends the requests, so that a store that does not answer blocks the thread and not the caller.

    Args:
        store: torch's. name: of the store in messages.
        patience_s: longest wait for an answer, without the time in which this process was stopped.
        by: the config key of that limit, for messages.
    """

    def __init__(
        self,
        store: Any,
        name: str,
        patience_s: float,
        clock: Callable[[], float] = time.monotonic,
        by: str = "strategy.timeout_s",
    ) -> None:
        self.store, self.name, self.patience_s, self.clock, self.by = store, name, patience_s, clock, by
        self._in_all: Patience | None = None
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], queue.SimpleQueue[Any]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def clone(self) -> PatientStore:
        """Return the same store with its own connection, so that no request waits for another one."""
        return self._of(self._of(self.store)._ask(self.store.clone))

    def _of(self, store: Any) -> PatientStore:
        return PatientStore(store, self.name, self.patience_s, self.clock, self.by)

    def within(self, seconds: float) -> PatientStore:
        """Return the same store for requests that together may take so long."""
        store = self._of(self.store)
        store.patience_s = min(self.patience_s, seconds)
        store._in_all = Patience(store.patience_s, self.clock)
        return store

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

    def _ask(self, job: Callable[[], Any]) -> Any:
        """Run a request in the thread, and return its answer.

        Raises:
            NoNote: there was no answer in time, or the store is gone.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=_work, args=(self._jobs,), daemon=True, name="patient-store")
            self._thread.start()
        box: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._jobs.put((job, box))
        patience = self._in_all or Patience(self.patience_s, self.clock)
        while (left := patience.left()) > 0.0:
            with suppress(queue.Empty):
                answer, error = box.get(timeout=min(POLL_S, left))
                break
        else:
            raise NoNote(f"{self.name} did not answer within {self.patience_s:g} s ({self.by})")
        if error is not None:
            raise NoNote(f"{self.name}: {first_line(error)}") from error
        return answer

    def __del__(self) -> None:
        self._jobs.put(None)


def _work(jobs: queue.SimpleQueue[tuple[Callable[[], Any], queue.SimpleQueue[Any]] | None]) -> None:
    """Run jobs one by one; no reference to a finished job is kept, so that its store can be closed."""
    while (job := jobs.get()) is not None:
        do, box = job
        try:
            box.put((do(), None))
        except Exception as error:
            box.put((None, error))
        del job, do, box
