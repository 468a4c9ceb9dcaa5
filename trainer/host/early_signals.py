"""Ends a command that gets a signal before its job takes signals, e.g. while it imports torch, or that prints its last
lines to a reader who takes none. Imports nothing heavy.

A handler that raised would do so in the middle of somebody's import, where C++ or a bare ``except`` loses the
exception. So this one says why, and ends the process. Nothing needs closing then: until a job begins, a command has
written nothing but caches, and what it has started (the tracking process) ends with it.
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
"""A scheduler's requests: the same command does it all again."""
OTHERS = {signal.SIGINT: 130, signal.SIGHUP: 130, signal.SIGQUIT: 130}


AGAIN_S = 1.0
"""A signal so soon after the first is the same one: a scheduler signals a process group, and its launcher passes it
on."""


class EarlyHandler:
    """The signal handler of a command until its job begins, and again after the job.

    The job has had its end then, so the first signal changes nothing, and a further one ends the process. The first one
    does, too, if the output is not taken (a pager that waits, a stopped terminal): nothing else but SIGKILL would.

    Attributes:
        pid: the command's process; forks that set no handlers of their own end as by default.
        code: the command's exit code, once its job has one. Before, it is that of the signal.
        first_at: when a signal has come after the job; None: none has.
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
        """The handler while a job is closed, which nothing disturbs, unless its output is not taken."""
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
    """Whether a byte for standard output or standard error would be taken at once."""
    try:
        return len(select.select([], descriptors, [], 0)[1]) == len(descriptors)
    except (OSError, ValueError):  # closed: who writes gets an error at once
        return True


def _say(sentence: str) -> None:
    """Print a process's last sentence, after what it has printed, as far as that is taken at once."""
    with suppress(Exception):  # nobody may take it
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
"""Of this process, once it has taken its signals."""


def take() -> None:
    """Install the handler for every signal that is not ignored. For the main function of a command, before all other
    imports."""
    _HERE[:] = [EarlyHandler(os.getpid())]
    for number in (*TRY_AGAIN, *OTHERS):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _HERE[0])


def leave_to_job() -> None:
    """From now on the job's own handlers count; a signal that comes after these are gone finds a job that has ended."""
    for handler in _HERE:
        handler.job_began, handler.code = True, None


def job_ended(code: int) -> None:
    """The command has its exit code; what follows are its last lines."""
    for handler in _HERE:
        handler.code = code


def while_closing() -> Callable[[int, FrameType | None], None] | signal.Handlers:
    """The signal handler while a job is closed; nobody's but a command's process may be ended."""
    return _HERE[0].while_closing if _HERE else signal.SIG_IGN


def is_early(handler: Callable[..., object] | int | None) -> bool:
    """Whether a signal has the early handler."""
    return isinstance(handler, EarlyHandler)
