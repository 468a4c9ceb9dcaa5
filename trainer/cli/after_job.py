"""What a command does when the job that it has followed ended before its run: end the run at its trackers, and say how
to go on."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from trainer.checkpoint import store
from trainer.job.result import read_result
from trainer.run_folder import tracking_file
from trainer.run_folder.folder_lock import FolderLock
from trainer.wording import quoted

RESEND_S = 90.0
"""Longest time for the ends of all runs of a job."""
ALIVE_S = 30.0
"""Longest wait for processes of a cancelled job, which Slurm kills after KillWait."""
BEGIN_AGAIN = "there is no checkpoint yet: the same command begins the run again"


def is_open(folder: Path) -> bool:
    """Whether a run is still open at its trackers, because its processes were killed before they could end it."""
    tracked = tracking_file.read(folder)
    if tracked is None or not tracked.trackers:
        return False
    return not read_result(str(folder), "killed", "").tracking


def end_tracking(folders: Sequence[Path]) -> None:
    """Send what the runs of an ended job have left, and their end: KILLED, or that of result.json."""
    until = time.monotonic() + RESEND_S
    for folder in filter(is_open, folders):
        hold = FolderLock(folder, make=False)
        hold.take_within(min(ALIVE_S, max(0.0, until - time.monotonic())), lambda: None)
        hold.leave()
        words = ["-m", "trainer.tracking.recorder", "resend", str(folder)]
        try:
            done = subprocess.run(  # this Python, a fixed module  # nosec B603
                [sys.executable, *words],
                capture_output=True,
                text=True,
                timeout=max(1.0, until - time.monotonic()),
                check=False,
            )
            said, failed = (done.stdout + done.stderr).strip(), done.returncode != 0
        except (OSError, subprocess.TimeoutExpired):
            said, failed = "", True
        if failed:
            said = f"{said}\nlater: python {' '.join(words[:3])} {quoted(str(folder))}".strip()
        print(said, flush=True)


def how_to_go_on(folder: Path, resumes: str, always: bool) -> str:
    """The last line after a job that was interrupted.

    Args:
        folder: of the run. resumes: the line with the command. always: there may be checkpoints that are not here.
    """
    if always or store.newest_whole(folder / store.CHECKPOINTS, verify=False) is not None:
        return resumes
    return BEGIN_AGAIN
