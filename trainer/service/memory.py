"""The memory that a run takes: of a process and all that it has started, as the kernel accounts it.

Pages of files do not count, because the kernel gives them back when memory is short. A page that several processes
share counts once (the proportional set size of ``/proc/PID/smaps_rollup``).
"""

from __future__ import annotations

from pathlib import Path

import psutil

COUNTED = ("Pss_Anon:", "Pss_Shmem:")


def of_tree(number: int) -> int:
    """Return the bytes of a process and its descendants; 0 if it is gone."""
    try:
        parent = psutil.Process(number)
        return sum(_of(process.pid) for process in (parent, *parent.children(recursive=True)))
    except psutil.Error:
        return 0


def _of(number: int) -> int:
    try:
        lines = [line.split() for line in Path(f"/proc/{number}/smaps_rollup").read_text().splitlines()]
    except OSError:  # it has ended meanwhile
        return 0
    return sum(int(line[1]) << 10 for line in lines if line[0] in COUNTED)
