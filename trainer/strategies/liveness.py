"""Finds missing workers: a worker of a collective that has timed out calls the roll, and a thread in each one answers.

Notes of a roll call, and who leaves them. Each costs one message for each worker, so that all of them grow as N:

    call         any worker whose collective has timed out: how far the others must have come
    answer/RANK  the thread of each worker that sees the call: how far its worker has come
    missing      the collector: the workers that are not so far, or have not answered in two seconds

The collector is the thread of worker 0. If that one does not answer either, it is that of the first worker that does.
All who have called wait for its note.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque

import torch.distributed as dist

from trainer.host.notes_board import SLOWEST_S, NoNote, OwnBoard, wait_until
from trainer.host.patience import Patience

ANSWER_S = 2.0
STORE_S = 3.0
NOTED_S = 1.5
"""Longest wait for the collector's note, after the time for answers: then the collector has gone meanwhile."""
LOOK_S = 0.5
"""Time between two checks, in a wait for answers, whether this process was stopped meanwhile."""
POLL_S, NOTED_POLL_S = 0.05, 0.1
"""Time between two polls of the collector for answers, and of the others for its note."""
POLLS_PER_S = 1000
"""Polls of all waiting workers together, for up to 1,000 of them."""
CALL, ANSWER, MISSING = "call", "answer/{}", "missing"


class RollCall:
    """One worker's part in finding missing workers: a thread answers even when the main thread is stuck.

    A worker that only came late must not be named as missing. The errors of the collectives cannot tell the difference.

    Args:
        store: of the group's workers, for this alone.
        rank, size: of this worker in the group.

    Attributes:
        reached: 1 in a meeting and 0 elsewhere; on a GPU the number of meetings that the worker has entered, because it
        leaves them before they are done.
    """

    def __init__(self, store: OwnBoard, rank: int, size: int) -> None:
        self.store = store
        self.rank = rank
        self.size = size
        self.reached = 0
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._answer, daemon=True, name="roll-call")
        self._thread.start()

    def _answer(self) -> None:
        try:
            own = self.store.clone()
            while not own.check([CALL]):
                if self._left.wait(self._pause_of(SLOWEST_S)):
                    return
            if self._left.is_set():
                return
            own.set(ANSWER.format(self.rank), str(self.reached))
            if self.rank == 0:
                self._collect(own, ANSWER_S)
            elif not self._left.wait(ANSWER_S) and not own.check([MISSING]) and self._is_first(own):
                self._collect(own, 0.0)
        except (RuntimeError, dist.DistError):
            pass  # the launcher is gone, and this process follows it

    def _pause_of(self, least_s: float) -> float:
        """Seconds between two polls. Worker 0, which collects, sees a call first."""
        return max(least_s, min(ANSWER_S / 2, self.size / POLLS_PER_S)) if self.rank else least_s

    def _is_first(self, store: OwnBoard) -> bool:
        """Whether no worker before this one has answered. Where worker 0 has, this is one message."""
        return not any(store.check([ANSWER.format(rank)]) for rank in range(self.rank))

    def _collect(self, store: OwnBoard, patience_s: float) -> None:
        store.set(MISSING, json.dumps(self._collected(store, patience_s)))

    def _collected(self, store: OwnBoard, patience_s: float) -> list[int]:
        """Read all answers, of which the last may come in ``patience_s``; returns who is missing.

        Of those that are not so far, these are the last ones: on GPUs others may wait for them in an earlier meeting.
        """
        wanted, reached, to_come = int(store.get(CALL)), dict[int, int](), deque(range(self.size))
        patience = Patience(patience_s, time.monotonic)
        while to_come and patience.left() > 0.0:
            if (answer := store.find(ANSWER.format(to_come[0]))) is None:
                time.sleep(POLL_S)
            else:
                reached[to_come.popleft()] = int(answer)
        for rank in to_come:  # they have answered while one before them did not
            if (answer := store.find(ANSWER.format(rank))) is not None:
                reached[rank] = int(answer)
        last = min((far for far in reached.values() if far < wanted), default=None)
        return [rank for rank in range(self.size) if rank not in reached or reached[rank] == last]

    def missing(self, wanted: int = 1) -> list[int]:
        """After a timeout of a collective: find the workers that have not come so far, or do not answer in two seconds.

        Args:
            wanted: a worker is there if it has ``reached`` so much. 1: it is in any collective.

        Raises:
            TimeoutError: the store does not answer: its host is gone, or cannot be reached.
            RuntimeError, DistError: the launcher that serves the store is gone.
        """
        found: list[list[int] | Exception] = []

        def ask() -> None:
            try:  # on a connection of its own: a store that does not answer blocks its caller for ever
                found.append(self._ask(self.store.clone(), wanted))
            except (RuntimeError, dist.DistError) as error:
                found.append(error)

        asking = threading.Thread(target=ask, daemon=True, name="roll-call-asking")
        asking.start()
        patience = Patience(ANSWER_S + STORE_S, time.monotonic)
        while asking.is_alive() and (left := patience.left()) > 0.0:
            asking.join(min(LOOK_S, left))
        if not found:
            raise TimeoutError("the store does not answer")
        if isinstance(found[0], Exception):
            raise found[0]
        return found[0]

    def _ask(self, store: OwnBoard, wanted: int) -> list[int]:
        if not store.check([CALL]):
            store.set(CALL, str(wanted))
        try:
            wait_until(lambda: store.check([MISSING]), MISSING, ANSWER_S + NOTED_S, self._pause_of(NOTED_POLL_S))
        except NoNote:
            return self._collected(store, 0.0)
        found: list[int] = json.loads(store.get(MISSING))
        return found

    def end(self) -> None:
        """Stop answering. Workers that ask later wait, so that the error of this one is reported first."""
        self._left.set()
        self._thread.join(ANSWER_S)
