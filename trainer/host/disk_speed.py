"""Measures the speed of synced writes to a folder's disk, with an unnamed temporary file."""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from trainer.host.folder_checks import nearest

FIRST, MOST = 1 << 20, 1 << 24
"""Bytes of the first and of the largest trial."""
LONG_ENOUGH_S = 0.02
"""A trial of this duration is the last one."""


def rate(folder: Path, size: int, clock: Callable[[], float] = time.perf_counter) -> float:
    """Bytes per second of writing, syncing and hashing a file, as for a checkpoint.

    Trials of 1, 4 and 16 MiB, none larger than ``size``, until one takes 20 ms: 0.1 s altogether at 50 MB/s.

    Args:
        folder: its nearest existing parent is used; no file stays there.
        size: bytes that will be written.

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
