"""A lock on a run's folder: while somebody works there, no other run begins there, nor the run's next life."""

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
"""Bytes that are read of it."""
POLL_S = 0.1
CLOSED = (errno.EACCES, errno.EPERM, errno.EISDIR, errno.ELOOP, errno.ENXIO)
"""Errors for a file that is there and not to be opened: somebody else's, a folder, a link, a socket."""
BUSY = "processes of a run still work in this folder: it goes on, or its last points are being sent"
"""Why a command that needs the folder to itself is refused."""


def user_name(number: int) -> str:
    """The name of a user; its number where the machine knows none, as in a container."""
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)


def refusal(hold: FolderLock, what: str, instead: str) -> UserError:
    """The refusal of a command that needs the folder to itself: who holds it, or why its lock cannot be opened.

    Args:
        what, instead: of the :class:`UserError`; of a lock that cannot be opened it is said what opens it, and before
            ``instead``.
    """
    if hold.shut is not None:
        return UserError(what, hold.shut.why, f"{hold.shut.instead}; or {instead}")
    who = hold.holder()
    return UserError(what, f"{BUSY} ({who})" if who else BUSY, instead)


@dataclass(frozen=True)
class Shut:
    """A lock's file that cannot be opened: why, and which command helps. Nobody need work in its folder."""

    why: str
    instead: str


def _shut(path: Path) -> Shut | None:
    """Why that file cannot be opened; None: it is not there, and the folder takes none."""
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
    """One process's lock on a run's folder.
    Launcher, workers, servers, and who sends the points, share it; a run begins with it alone.

    The lock is on the file ``.lock`` in the folder, which its owner alone can open: on the folder itself anybody could
    have it who may read the folder, and NFS has no locks for folders. Where the file system has no locks, or takes no
    file, everybody gets what he asks for. Nobody gets it where the file is there and cannot be opened.

    Args:
        make: the file is made if it is not there; otherwise nobody holds the folder.
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
        """Write into the file who holds the folder."""
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
        """Who holds the folder, as its file tells: ``process 12 of user eva on host gpu3, since 2026-01-02 03:04``; ''
        if it does not."""
        try:
            parsed = json_text.loads(os.pread(self.descriptor, LONGEST, 0))
            since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(parsed["since"]))
            who = f"process {int(parsed['pid'])} of user {parsed['user']} on host {parsed['host']}, since {since}"
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
            return self.shut is None
        try:
            fcntl.flock(self.descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True

    def send(self, way: socket.socket, message: bytes) -> None:
        """Send a message with this lock, which holds from now on until the receiver has left it, also when this process
        is killed.

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
            waiting: called once, before it is waited.
        """
        until = time.monotonic() + patience_s
        if self.take():
            return True
        if self.shut is not None:  # which no waiting changes
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
            False if it is lost: the run's next life has begun.
        """
        until = time.monotonic() + patience_s
        while not self.take() and time.monotonic() < until:
            if not self.share():  # one that is not taken is lost where it was shared
                return False
            time.sleep(POLL_S)
        return self.share()

    def leave(self) -> None:
        """Release the lock."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
