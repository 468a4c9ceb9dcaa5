"""Ends a process when another one (its launcher) dies, so that no process is left behind."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from collections.abc import Callable
from multiprocessing import connection

PR_SET_PDEATHSIG = 1
"""prctl(2): the signal that a process gets when its parent dies."""


def end_with(pid: int) -> None:
    """End this process as soon as the process ``pid`` is gone, even by SIGKILL."""

    def watch() -> None:
        try:
            other = os.pidfd_open(pid)
        except ProcessLookupError:
            os._exit(1)
        connection.wait([other])
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="end-with-launcher").start()


def killed_with_parent() -> Callable[[], None]:
    """Return what a new child calls, after a fork or as ``preexec_fn``, to be killed when its parent dies.

    The C library is loaded here: the child of a process with threads may do next to nothing. The parent, which is this
    process, may die before its child can ask for the signal.
    """
    libc, parent = ctypes.CDLL(None), os.getpid()

    def call() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)

    return call
