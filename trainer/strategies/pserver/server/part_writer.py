"""Writes a server's part of a checkpoint in a copy of the process, while the server goes on.

The copy is a fork: the kernel lets both processes have the same pages, and copies a page when the server writes to it.
So the part is of one moment, whatever pushes do meanwhile.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path

from trainer.errors import UserError, why
from trainer.host.parent_death import killed_with_parent
from trainer.host.patience import LONGEST_POLL_S
from trainer.host.signals import signal_name
from trainer.strategies.pserver.server.saving import Tell

STANDARD_STREAMS = 3
"""Descriptors below it stay open in the copy: its output goes to the server's log."""
NOT_TOLD = 2
"""Exit code of a copy that could neither write nor report why."""
STILL_S = 600.0
"""A copy that has used no processor time for so long is killed. A worker that waits for its part gives up after the
same time."""


class Forked:
    """Writes in a copy of this process. One thread uses it.

    The server has threads (ZeroMQ's, the one that watches the launcher), and none of them is in the copy. So the copy
    calls neither ZeroMQ nor torch, closes the descriptors that it was left, ends without any clean-up, and is killed
    with the server.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._copy: int | None = None
        self._killed: set[int] = set()
        """Copies that may not have ended yet: who waits for a disk that does not answer cannot be killed."""
        self._failed: Tell = lambda why: True
        self._checked_at, self._still_s, self._work = 0.0, 0.0, ""

    def begin(self, write: Callable[[], None], failed: Tell) -> None:
        """As :class:`PartWriter`."""
        self._failed, die_with_server = failed, killed_with_parent()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # of a process that has threads
                copy = os.fork()
        except OSError as error:
            failed(f"the server cannot be copied ({why(error)}); checkpoint.background=false needs no copy")
            return
        if copy:
            self._copy, self._checked_at, self._still_s, self._work = copy, self._clock(), 0.0, ""
            return
        code = NOT_TOLD
        with contextlib.suppress(BaseException):
            die_with_server()
            code = _in_copy(write, failed)
        os._exit(code)

    def busy(self) -> bool:
        """As :class:`PartWriter`; a copy that was killed says nothing itself."""
        self._killed = {copy for copy in self._killed if not os.waitpid(copy, os.WNOHANG)[0]}
        if self._copy is None:
            return False
        ended, status = os.waitpid(self._copy, os.WNOHANG)
        if not ended:
            return not self._gives_up(self._copy)
        self._copy = None
        if os.WIFSIGNALED(status):
            hint = " (out of memory?)" if os.WTERMSIG(status) == signal.SIGKILL else ""
            self._failed(f"the process that wrote it was killed by {signal_name(os.WTERMSIG(status))}{hint}")
        elif os.WEXITSTATUS(status) == NOT_TOLD:
            self._failed("the process that wrote it could not tell why here; the server's log may")
        return False

    def _gives_up(self, copy: int) -> bool:
        """Kill a copy that stands still, because it was stopped or its disk does not answer."""
        now, work = self._clock(), processor_time(copy)
        passed, self._checked_at = now - self._checked_at, now
        self._still_s = self._still_s + min(passed, LONGEST_POLL_S) if work == self._work else 0.0
        self._work = work
        if self._still_s <= STILL_S:
            return False
        os.kill(copy, signal.SIGKILL)
        self._killed.add(copy)
        self._copy = None
        self._failed(f"the process that wrote it has done nothing for {STILL_S:g} s, and was killed")
        return True


def processor_time(process: int) -> str:
    """The processor time that the copy which writes a part has used so far, in ticks of user and system; '' where that
    cannot be read."""
    try:
        return " ".join(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[11:13])
    except OSError:
        return ""


def _in_copy(write: Callable[[], None], failed: Tell) -> int:
    """Returns the exit code."""
    gc.disable()  # a collection would write to the pages that are shared
    for number in map(int, os.listdir("/proc/self/fd")):  # where a thousand million may be open, not all are tried
        if number >= STANDARD_STREAMS:
            with contextlib.suppress(OSError):  # that of the list itself
                os.close(number)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # where memory runs out, the kernel ends this process, and not the server
    try:
        write()
    except BaseException as error:
        return 1 if failed(why(error) if isinstance(error, (OSError, UserError)) else repr(error)) else NOT_TOLD
    return 0
