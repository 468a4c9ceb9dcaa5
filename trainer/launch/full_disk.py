"""Reports a full disk on the screen, because the logs on that disk cannot."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

POLL_S = 2.0


class FullDisk:
    """Polls whether the disk of a run's folder is full.

    Args:
        run_dir: the run's folder. say: shows a text to the user. clock: monotonic seconds.
    """

    def __init__(self, run_dir: Path, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self.run_dir, self.say, self.clock = run_dir, say, clock
        self.polled = clock()
        self.full = ""

    def poll(self) -> None:
        """Check the disk, and report a change."""
        if self.clock() - self.polled < POLL_S:
            return
        self.polled = self.clock()
        before, self.full = self.full, _why_full(self.run_dir)
        if self.full and not before:
            self.say(
                f"\nATTENTION: the disk of {self.run_dir} {self.full}; the training goes on, its points wait, "
                f"lines of logs and checkpoints are left out"
            )
        elif before and not self.full:
            self.say(f"the disk of {self.run_dir} has room again")


def _why_full(folder: Path) -> str:
    try:
        disk = os.statvfs(folder)
    except OSError:  # the processes that need the folder report its loss
        return ""
    if disk.f_flag & os.ST_RDONLY:
        return "is read-only"
    free = disk.f_bavail if os.geteuid() else disk.f_bfree  # root may use the reserved blocks
    return "is full" if disk.f_blocks and not free else ""
