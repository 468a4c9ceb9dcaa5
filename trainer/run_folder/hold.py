"""A lock on a run's folder: while somebody works there, no other run begins there, nor the run's next life."""

from __future__ import annotations

import fcntl
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

LOOK_S = 0.1
BUSY = "processes of a run still work in this folder: it goes on, or its last points are being sent"
"""Why a command that needs the folder to itself is refused."""


class Hold:
    """One process's lock on a run's folder.
    Launcher, workers, servers, and who sends the points, share it; a run begins with it alone.

    Where the file system has no locks, everybody gets what he asks for.
    """

    def __init__(self, run_dir: Path) -> None:
        self.descriptor = -1
        with suppress(OSError):
            self.descriptor = os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY)

    def share(self) -> bool:
        """Take the lock together with others; returns False if somebody holds it alone."""
        return self._lock(fcntl.LOCK_SH)

    def take(self) -> bool:
        """Take the lock alone; returns False if somebody else holds it."""
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

    def send(self, way: socket.socket, message: bytes) -> None:
        """Send a message with this lock, which holds from now on until the receiver has left it, also when this process is killed.

        Args:
            way: a Unix socket; the lock arrives with the message's first byte.
        """
        sent = socket.send_fds(way, [message], [self.descriptor])
        way.sendall(message[sent:])

    @classmethod
    def received(cls, descriptor: int) -> Hold:
        """The lock that came with a message."""
        hold = cls.__new__(cls)
        hold.descriptor = descriptor
        return hold

    def take_within(self, patience_s: float, waiting: Callable[[], None]) -> bool:
        """Take the lock alone, trying for ``patience_s``; returns whether it was taken.

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

    def outlast(self, patience_s: float) -> bool:
        """Wait up to ``patience_s`` until nobody else shares the lock, which stays shared.

        Returns:
            False if it is lost: the run's next life has begun.
        """
        until = time.monotonic() + patience_s
        while not self.take() and time.monotonic() < until:
            if not self.share():  # one that is not taken is lost where it was shared
                return False
            time.sleep(LOOK_S)
        return self.share()

    def leave(self) -> None:
        """Release the lock."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
