"""A lock on a run's folder: while somebody works there, no other run begins there, nor the run's next life."""

from __future__ import annotations

import fcntl
import json
import os
import pwd
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from trainer.host import files, json_text
from trainer.visible import one_line

FILE = ".lock"
LONGEST = 1000
"""Bytes that are read of it."""
LOOK_S = 0.1
BUSY = "processes of a run still work in this folder: it goes on, or its last points are being sent"
"""Why a command that needs the folder to itself is refused."""


def user_name(number: int) -> str:
    """The name of a user; its number where the machine knows none, as in a container."""
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)


def busy(hold: Hold) -> str:
    """Why a command is refused that needs the folder to itself, and who holds it."""
    who = hold.holder()
    return f"{BUSY} ({who})" if who else BUSY


class Hold:
    """One process's lock on a run's folder.
    Launcher, workers, servers, and who sends the points, share it; a run begins with it alone.

    The lock is on the file ``.lock`` in the folder, which its owner alone can open: on the folder itself anybody could have it who
    may read the folder, and NFS has no locks for folders. Where the file system has no locks, everybody gets what he asks for.

    Args:
        make: the file is made if it is not there; otherwise nobody holds the folder.
    """

    def __init__(self, run_dir: Path, make: bool = True) -> None:
        self.path, self.descriptor, self.foreign = run_dir / FILE, -1, False
        try:
            self.descriptor = os.open(self.path, os.O_RDWR | os.O_NOFOLLOW | os.O_CREAT * make, files.PRIVATE)
        except PermissionError:
            self.foreign = self.path.exists()
        except OSError:
            pass

    def sign(self) -> None:
        """Write into the file who holds the folder."""
        told = {"pid": os.getpid(), "host": socket.gethostname(), "user": user_name(os.geteuid()), "since": time.time()}
        with suppress(OSError):
            os.ftruncate(self.descriptor, 0)
            os.pwrite(self.descriptor, json.dumps(told).encode(), 0)

    def holder(self) -> str:
        """Who holds the folder, as its file tells: ``process 12 of user eva on host gpu3, since 2026-01-02 03:04``; '' if it does not."""
        if self.foreign:
            return f"user {user_name(self.path.stat().st_uid)}, who owns {self.path}"
        try:
            told = json_text.loads(os.pread(self.descriptor, LONGEST, 0))
            since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(told["since"]))
            who = f"process {int(told['pid'])} of user {told['user']} on host {told['host']}, since {since}"
        except (OSError, ValueError, TypeError, KeyError, OverflowError):
            return ""
        return one_line(who)

    def share(self) -> bool:
        """Take the lock together with others; returns False if somebody holds it alone."""
        return self._lock(fcntl.LOCK_SH)

    def take(self) -> bool:
        """Take the lock alone; returns False if somebody else holds it."""
        return self._lock(fcntl.LOCK_EX)

    def _lock(self, kind: int) -> bool:
        if self.descriptor < 0:
            return not self.foreign
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
        hold.path, hold.descriptor, hold.foreign = Path(FILE), descriptor, False
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
