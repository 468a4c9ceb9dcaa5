"""Measures how fast a folder's disk takes what is synced to it, with a file that has no name and is gone afterwards."""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from trainer.host.folder_checks import nearest

FIRST, MOST = 1 << 20, 1 << 24
"""Bytes of the first and of the largest try."""
LONG_ENOUGH_S = 0.02
"""A try that has taken so long tells the speed, and is the last one."""


def rate(folder: Path, size: int, clock: Callable[[], float] = time.perf_counter) -> float:
    """Bytes per second in which files are written, synced and summed up as those of a checkpoint are.

    Tries of 1, 4 and 16 MiB, none larger than what is to be written, until one takes 20 ms: altogether a tenth of a
    second on a disk that takes 50 MB a second.

    Args:
        folder: the nearest folder to it that exists is used, and nothing is left there.
        size: bytes that are to be written there.

    Raises:
        OSError: the disk is full or read-only.
    """
    tried = min(FIRST, max(1, size))
    with tempfile.TemporaryFile(dir=nearest(folder), buffering=0) as file:
        while True:
            block = os.urandom(tried)  # a file system may compress zeros
            began = clock()
            file.write(block)
            os.fsync(file.fileno())
            hashlib.blake2b(block)
            took = max(clock() - began, 1e-6)
            if took >= LONG_ENOUGH_S or tried in (size, MOST) or size <= FIRST:
                return tried / took
            tried = min(4 * tried, MOST, size)
