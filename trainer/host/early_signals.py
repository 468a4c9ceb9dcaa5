"""Handles signals of a command outside of its job: before it (while torch is imported), and after it. Imports nothing
heavy.

    command starts -> ``install`` -> ``job_begins`` (the job has handlers of its own) -> ``job_ended`` -> last lines

Before the job, a signal ends the process. After the job, the first signal changes nothing and a second one ends it; the
first one ends it only if nobody reads the output.

A handler that raises would do so inside of an import, where C++ or a bare ``except`` loses the exception. So this
handler prints why, and ends the process. Nothing needs closing: before its job, a command has written only caches, and
the tracking process ends with it.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType

TRY_AGAIN = {signal.SIGTERM: 75, signal.SIGUSR1: 75}
"""Requests of a scheduler, with the exit code for "run the same command again"."""
OTHERS = {signal.SIGINT: 130, signal.SIGHUP: 130, signal.SIGQUIT: 130}


AGAIN_S = 1.0
"""A signal within this time after the first is the same request: a scheduler signals the group and its launcher."""


class EarlyHandler:
    """The signal handler of a command until its job begins, and again after the job.

    After the job, the first signal changes nothing, and a second one ends the process. The first one ends it if nobody
    reads the output (a waiting pager, a stopped terminal), as only SIGKILL would otherwise.

    Attributes:
        pid: the command's process; its forks keep the default handlers.
        code: the command's exit code after its job; None: that of the signal.
        first_at: time of the first signal after the job; None: there was none.
    """

    def __init__(self, pid: int) -> None:
        self.pid, self.job_began = pid, False
        self.code: int | None = None
        self.first_at: float | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """End this process, or note the signal."""
        if self._is_of_fork(number):
            return
        if not self.job_began:
            _end(signal.Signals(number))
        now = time.monotonic()
        if not _is_taken() or (self.first_at is not None and now - self.first_at >= AGAIN_S):
            self._end_late(signal.Signals(number))
        if self.first_at is None:
            self.first_at = now

    def while_closing(self, number: int, frame: FrameType | None) -> None:
        """The handler while a job is closed: it ends the process only if nobody reads the output."""
        if not self._is_of_fork(number) and not _is_taken():
            self._end_late(signal.Signals(number))

    def _is_of_fork(self, number: int) -> bool:
        if os.getpid() == self.pid:
            return False
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)
        return True

    def _end_late(self, number: signal.Signals) -> None:
        _say(f"got {number.name} before all lines were printed")
        os._exit((TRY_AGAIN | OTHERS)[number] if self.code is None else self.code)


def _is_taken(descriptors: tuple[int, ...] = (1, 2)) -> bool:
    """Whether standard output and standard error can be written without waiting."""
    try:
        return len(select.select([], descriptors, [], 0)[1]) == len(descriptors)
    except (OSError, ValueError):  # closed: writing fails at once
        return True


def _say(sentence: str) -> None:
    """Print the process's last sentence after its earlier output, without waiting for a reader."""
    with suppress(Exception):  # the stream may be closed
        if _is_taken((1,)):
            if streams := sys.modules.get("trainer.terminal.streams"):
                streams.LogFile.wipe()
            sys.stdout.flush()
    with suppress(OSError):
        if _is_taken((2,)):
            os.write(2, f"{sentence}\n".encode())


def _end(number: signal.Signals) -> None:
    how = "interrupted" if number in OTHERS else "preempted"
    again = "" if number in OTHERS else ". The same command begins again"
    _say(f"{how}: got {number.name} before anything was begun: nothing was saved{again}")
    os._exit((TRY_AGAIN | OTHERS)[number])


_HERE: list[EarlyHandler] = []
"""The handler of this process, once it is installed."""


def install() -> None:
    """Install the handler for every signal that is not ignored; a command calls this before all other imports."""
    _HERE[:] = [EarlyHandler(os.getpid())]
    for number in (*TRY_AGAIN, *OTHERS):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _HERE[0])


def job_begins() -> None:
    """Note that the job begins, which has handlers of its own."""
    for handler in _HERE:
        handler.job_began, handler.code = True, None


def job_ended(code: int) -> None:
    """Note the command's exit code; only its last lines follow."""
    for handler in _HERE:
        handler.code = code


def while_closing() -> Callable[[int, FrameType | None], None] | signal.Handlers:
    """The signal handler while a job is closed; in processes other than a command, signals are ignored."""
    return _HERE[0].while_closing if _HERE else signal.SIG_IGN


def is_early(handler: Callable[..., object] | int | None) -> bool:
    """Whether a signal handler is the early one."""
    return isinstance(handler, EarlyHandler)
