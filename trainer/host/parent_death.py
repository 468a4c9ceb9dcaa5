"""Ends a process when another one (its launcher) dies, so that no process is left behind."""

from __future__ import annotations

import os
import threading
from multiprocessing import connection


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
