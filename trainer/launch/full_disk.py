"""Tells on the screen that the disk of a run is full: its processes' logs, from which the screen comes, cannot."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

LOOK_S = 2.0


class FullDisk:
    """Looks now and then whether the disk of a run's folder takes more.

    Args:
        run_dir: the run's folder. say: shows a text to the user. clock: seconds that only go forward.
    """

    def __init__(self, run_dir: Path, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self.run_dir, self.say, self.clock = run_dir, say, clock
        self.looked = clock()
        self.full = ""

    def poll(self) -> None:
        """Look, and tell what has changed."""
        if self.clock() - self.looked < LOOK_S:
            return
        self.looked = self.clock()
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
    except OSError:  # a folder that is gone is told by whoever needs it
        return ""
    if disk.f_flag & os.ST_RDONLY:
        return "is read-only"
    free = disk.f_bavail if os.geteuid() else disk.f_bfree  # root may use what is reserved
    return "is full" if disk.f_blocks and not free else ""
