"""Ends a command that gets a signal before its job takes signals, e.g. while it imports torch. Imports nothing heavy.

A handler that raised would do so in the middle of somebody's import, where C++ or a bare ``except`` loses the exception. So this one
says why, and ends the process. Nothing needs closing then: until a job begins, a command has written nothing but caches, and what
it has started (the tracking process) ends with it.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from types import FrameType

TRY_AGAIN = {signal.SIGTERM: 75, signal.SIGUSR1: 75}
"""A scheduler's requests: the same command does it all again."""
OTHERS = {signal.SIGINT: 130, signal.SIGHUP: 130, signal.SIGQUIT: 130}


class EarlyHandler:
    """The signal handler of a command until its job begins; afterwards it ignores signals, because the job has had its end.

    Attributes:
        pid: the command's process; forks that set no handlers of their own end as by default.
    """

    def __init__(self, pid: int) -> None:
        self.pid, self.job_began = pid, False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """End this process."""
        if os.getpid() != self.pid:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        elif not self.job_began:
            _end(signal.Signals(number))


def _end(number: signal.Signals) -> None:
    with suppress(Exception):  # nobody may take it
        sys.stdout.flush()
    how = "interrupted" if number in OTHERS else "preempted"
    again = "" if number in OTHERS else ". The same command begins again"
    with suppress(OSError):
        os.write(2, f"{how}: got {number.name} before anything was begun: nothing was saved{again}\n".encode())
    os._exit((TRY_AGAIN | OTHERS)[number])


_HERE: list[EarlyHandler] = []
"""Of this process, once it has taken its signals."""


def take() -> None:
    """Install the handler for every signal that is not ignored. For the main function of a command, before all other imports."""
    _HERE[:] = [EarlyHandler(os.getpid())]
    for number in (*TRY_AGAIN, *OTHERS):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _HERE[0])


def leave_to_job() -> None:
    """From now on the job's own handlers count; a signal that comes after these are gone finds a job that has ended."""
    for handler in _HERE:
        handler.job_began = True


def is_early(handler: Callable[..., object] | int | None) -> bool:
    """Whether a signal has the early handler."""
    return isinstance(handler, EarlyHandler)
