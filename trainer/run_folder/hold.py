"""Who works in a run's folder holds it, so that no other run begins there, and the run's next life waits for the end of this one."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

LOOK_S = 0.1


class Hold:
    """One process's hold of a folder. Launcher, workers, servers, and who sends the points, share it; a run begins with it alone.

    Where the file system has no locks, everybody gets what he asks for.
    """

    def __init__(self, run_dir: Path) -> None:
        self.descriptor = -1
        with suppress(OSError):
            self.descriptor = os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY)

    def share(self) -> bool:
        """Hold it together with others; returns whether nobody has it alone."""
        return self._lock(fcntl.LOCK_SH)

    def take(self) -> bool:
        """Hold it alone; returns whether nobody else holds it."""
        return self._lock(fcntl.LOCK_EX)

    def _lock(self, kind: int) -> bool:
        if self.descriptor < 0:
            return True
        try:
            fcntl.flock(self.descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True

    def take_within(self, patience_s: float, waiting: Callable[[], None]) -> bool:
        """As ``take``, tried for some time.

        Args:
            waiting: called once, before it is waited.
        """
        until = time.monotonic() + patience_s
        if self.take():
            return True
        waiting()
        while time.monotonic() < until:
            time.sleep(LOOK_S)
            if self.take():
                return True
        return False

    def leave(self) -> None:
        """Let others hold it."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
