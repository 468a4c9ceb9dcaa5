"""Notices on a GPU that other workers do not come to an exchange. The process goes on while its GPU waits for them.

An exchange on GPUs returns when it is queued. The process then waits somewhere else: for the numbers of a line, at a
copy, or in the launch of a kernel, which CUDA delays while about 1,000 others are queued. So a thread watches.

States of a meeting, and who moves it:

    queued     the process has queued its exchanges, and an event behind them (:meth:`GpuWatch.queued`)
    done       the thread has found that the event is done
    overdue    the event was not done within ``limit_s``, and neither was a meeting before it: the thread calls the roll
    raised     the process polls an event, or comes to the next meeting, and raises the error
    sent       the process has done neither within ``RAISE_S``: it is stuck in CUDA. The thread sends the error to the
               launcher and ends the process

What always holds: NCCL has more time than ``limit_s``. When its time is over, it ends the workers that wait.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from trainer.errors import RunFailed
from trainer.host.patience import Patience

if TYPE_CHECKING:
    import torch

POLL_S = 0.5
"""Longest time between two checks of the thread."""
RAISE_S = 5.0
"""Longest time in which the process itself can raise the error."""
QUICKEST_S, SLOWEST_S = 0.0002, 0.005
"""Shortest and longest time between two polls of an event that the process waits for."""
PART = 20
"""It polls again after 1/20 of its time so far."""


class Queued(NamedTuple):
    """A meeting whose exchanges are queued.

    Attributes:
        number: of the meeting, from 1. done: returns whether the GPU has come to its end.
    """

    number: int
    meeting: str
    done: Callable[[], bool]


class GpuWatch:
    """Watches the meetings of a worker on a GPU.

    Args:
        limit_s: longest time until the GPU comes to the end of a meeting.
        error: makes the error for an overdue meeting, from its name, the seconds and its number; calls the roll.
        send: sends an error to the launcher.
        leave: ends the process.
    """

    def __init__(
        self,
        limit_s: float,
        error: Callable[[str, float, int], RunFailed],
        send: Callable[[BaseException], object],
        leave: Callable[[], object] = lambda: os._exit(1),
    ) -> None:
        self.limit_s, self.error, self.send, self.leave = limit_s, error, send, leave
        self._queue: deque[Queued] = deque()
        self._overdue: RunFailed | None = None
        self._raised, self._closed = threading.Event(), threading.Event()
        threading.Thread(target=self._watch, daemon=True, name="gpu-watch").start()

    def queued(self, number: int, meeting: str, done: Callable[[], bool]) -> None:
        """Note that a meeting's exchanges are queued."""
        self._queue.append(Queued(number, meeting, done))

    def check(self) -> None:
        """Raise the error of an overdue meeting.

        Raises:
            RunFailed: there is one.
        """
        if self._overdue is not None:
            self._raised.set()
            raise self._overdue

    def wait_for(self, event: torch.cuda.Event) -> None:
        """Poll until an event is done.

        Raises:
            RunFailed: a meeting is overdue.
        """
        began = time.monotonic()
        while not event.query():
            self.check()
            time.sleep(min(SLOWEST_S, max(QUICKEST_S, (time.monotonic() - began) / PART)))

    def close(self) -> None:
        """Stop watching."""
        self._closed.set()

    def _watch(self) -> None:
        patience, first = Patience(self.limit_s), None
        while not self._closed.wait(min(POLL_S, self.limit_s / 20)):
            try:
                while self._queue and self._queue[0].done():
                    self._queue.popleft()
            except RuntimeError:  # of CUDA, which the process meets as well
                return
            if not self._queue or self._queue[0] is not first:
                patience, first = Patience(self.limit_s), self._queue[0] if self._queue else None
            elif patience.left() <= 0.0:
                self._end(self._queue[0], patience.waited)
                return

    def _end(self, overdue: Queued, waited_s: float) -> None:
        """Have the process raise the error, or send it and end the process."""
        self._overdue = error = self.error(overdue.meeting, waited_s, overdue.number)
        until = time.monotonic() + RAISE_S
        while not self._raised.is_set() and not self._closed.is_set():
            if (left := until - time.monotonic()) <= 0.0:
                print(error, flush=True)
                with suppress(OSError, RuntimeError):  # the launcher is gone, and this process follows it
                    self.send(error)
                self.leave()
                return
            self._raised.wait(min(left, POLL_S))
