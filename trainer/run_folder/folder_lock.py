"""A lock on a run's folder: while a process works there, no other run begins there, nor the run's next life."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import pwd
import socket
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from trainer.errors import UserError
from trainer.host import files, json_text
from trainer.visible import one_line
from trainer.wording import quoted

FILE = ".lock"
LONGEST = 1000
"""Bytes of the lock file that are read."""
POLL_S = 0.1
CLOSED = (errno.EACCES, errno.EPERM, errno.EISDIR, errno.ELOOP, errno.ENXIO)
"""Errors for an existing file that cannot be opened: another user's, a folder, a link, a socket."""
BUSY = "processes of a run still work in this folder: it goes on, or its last points are being sent"
"""The reason for the refusal of a command that needs the folder for itself."""


def user_name(number: int) -> str:
    """The name of a user; its number where the machine knows none, as in a container."""
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)


def refusal(hold: FolderLock, what: str, instead: str) -> UserError:
    """The refusal of a command that needs the folder for itself: who holds the lock, or why it cannot be opened.

    Args:
        what, instead: of the :class:`UserError`. A command that helps with a closed lock is put before ``instead``.
    """
    if hold.shut is not None:
        return UserError(what, hold.shut.why, f"{hold.shut.instead}; or {instead}")
    who = hold.holder()
    return UserError(what, f"{BUSY} ({who})" if who else BUSY, instead)


@dataclass(frozen=True)
class Shut:
    """A lock file that cannot be opened: why, and which command helps."""

    why: str
    instead: str


def _shut(path: Path) -> Shut | None:
    """Why a lock file cannot be opened; None: it does not exist."""
    try:
        found = path.lstat()
    except OSError:
        return None
    file, owner = quoted(str(path)), user_name(found.st_uid)
    if not stat.S_ISREG(found.st_mode):
        kind = "a folder" if stat.S_ISDIR(found.st_mode) else "no ordinary file"
        return Shut(f"{path.name} in it is {kind}, and a run holds its folder by a file of that name", f"rm -r {file}")
    if found.st_uid == os.geteuid():
        return Shut(f"{path.name} in it cannot be opened, and a run holds its folder by it", f"chmod 600 {file}")
    why = f"{path.name} in it belongs to user {owner}, so that nobody else can tell whether a run still works there"
    folder = path.parent.stat()
    may_remove = os.access(path.parent, os.W_OK | os.X_OK, effective_ids=True) and not (
        folder.st_mode & stat.S_ISVTX and folder.st_uid != os.geteuid()
    )
    return Shut(why, f"rm -f {file} ({'you' if may_remove else owner} can), once no run of {owner} works there")


class FolderLock:
    """A process's lock on a run's folder.

    A run begins with the lock taken alone. Then launcher, workers, servers and the recorder share it.

    The lock is on the file ``.lock``, which only its owner can open. (A lock on the folder itself could be taken by
    anybody who may read it, and NFS has none.) On a file system without locks, or in a folder where the file cannot be
    made, every request succeeds. If the file exists and cannot be opened, every request fails.

    Args:
        make: make the file if it does not exist.
    """

    def __init__(self, run_dir: Path, make: bool = True) -> None:
        self.path, self.descriptor = run_dir / FILE, -1
        self.shut: Shut | None = None
        try:
            self.descriptor = os.open(self.path, os.O_RDWR | os.O_NOFOLLOW | os.O_CREAT * make, files.PRIVATE)
        except OSError as error:
            if error.errno in CLOSED:
                self.shut = _shut(self.path)

    def sign(self) -> None:
        """Write this process as holder into the lock file."""
        holder = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "user": user_name(os.geteuid()),
            "since": time.time(),
        }
        with suppress(OSError):
            os.ftruncate(self.descriptor, 0)
            os.pwrite(self.descriptor, json.dumps(holder).encode(), 0)

    def holder(self) -> str:
        """The holder in the lock file: ``process 12 of user eva on host gpu3, since 2026-01-02 03:04``; '' if it is not
        known."""
        try:
            parsed = json_text.loads(os.pread(self.descriptor, LONGEST, 0))
            since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(parsed.get("since")))
            who = f"process {int(parsed['pid'])} of user {parsed['user']} on host {parsed['host']}, since {since}"
        except (OSError, ValueError, TypeError, KeyError, OverflowError):
            return ""
        return one_line(who)

    def share(self) -> bool:
        """Take the lock together with others; returns False if a process holds it alone."""
        return self._lock(fcntl.LOCK_SH)

    def take(self) -> bool:
        """Take the lock alone; returns False if another process holds it."""
        return self._lock(fcntl.LOCK_EX)

    def _lock(self, kind: int) -> bool:
        if self.descriptor < 0:
            return self.shut is None
        try:
            fcntl.flock(self.descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True

    def send(self, way: socket.socket, message: bytes) -> None:
        """Send a message with this lock, which holds until the receiver leaves it, even if this process is killed.

        Args:
            way: a Unix socket; the lock arrives with the message's first byte.
        """
        sent = socket.send_fds(way, [message], [self.descriptor])
        way.sendall(message[sent:])

    @classmethod
    def received(cls, descriptor: int) -> FolderLock:
        """The lock that came with a message."""
        hold = cls.__new__(cls)
        hold.path, hold.descriptor, hold.shut = Path(FILE), descriptor, None
        return hold

    def take_within(self, patience_s: float, waiting: Callable[[], None]) -> bool:
        """Take the lock alone, trying for ``patience_s``; returns whether it was taken.

        Args:
            waiting: called once, before the wait.
        """
        until = time.monotonic() + patience_s
        if self.take():
            return True
        if self.shut is not None:  # waiting does not help
            return False
        waiting()
        while time.monotonic() < until:
            time.sleep(POLL_S)
            if self.take():
                return True
        return False

    def outlast(self, patience_s: float) -> bool:
        """Wait up to ``patience_s`` until nobody else shares the lock, which stays shared.

        Returns:
            False if the lock is lost, because the run's next life has begun.
        """
        until = time.monotonic() + patience_s
        while not self.take() and time.monotonic() < until:
            if not self.share():  # a failed take gives up the shared lock
                return False
            time.sleep(POLL_S)
        return self.share()

    def leave(self) -> None:
        """Release the lock."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
