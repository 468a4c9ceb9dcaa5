"""The files of a run's part on a host, in the queue's folder: its lock, what was begun, and the exit code."""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path


class PartFiles:
    """The files of one part.

    Args:
        home: the queue's folder. number: of the run. host: name of the host.
    """

    def __init__(self, home: Path, number: int, host: str) -> None:
        stem = f"{home}/runs/{number}.{host}"
        self.alive, self.code, self.begun = Path(f"{stem}.alive"), Path(f"{stem}.code"), Path(f"{stem}.begun")
        self.config = Path(f"{stem}.config")

    def clear(self) -> None:
        """Remove what an earlier life has left."""
        for path in (self.code, self.begun):
            path.unlink(missing_ok=True)

    def held(self) -> int | None:
        """Take the lock; returns its descriptor, which the run's processes inherit; None: a process of it lives."""
        return locked(self.alive)

    def _noted(self) -> tuple[int, int]:
        """Process group and life of what was started last; zeros: nothing was."""
        try:
            group, life = self.begun.read_text().split()
            return int(group), int(life)
        except (OSError, ValueError):
            return 0, 0

    def group(self) -> int:
        """Return the process group that was started last; 0: none."""
        return self._noted()[0]

    def life(self) -> int:
        """Return the life that was begun last; 0: none."""
        return self._noted()[1]

    def exit_code(self) -> int | None:
        """Return the exit code that the run has left; None: it has left none."""
        with suppress(OSError, ValueError):
            return int(self.code.read_text())
        return None

    def signal(self, number: int) -> bool:
        """Send a signal to the run's processes, which are a group of their own; returns whether there are any yet."""
        group = self.group()
        try:
            if group:
                os.killpg(group, number)
        except OSError:
            return False
        return bool(group)


def locked(path: Path) -> int | None:
    """Take the lock of a file for as long as the descriptor is open that is returned; None: another process has it."""
    lock = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    return lock
