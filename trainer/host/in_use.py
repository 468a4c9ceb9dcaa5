"""Locks on folders of a shared cache, so that no process removes a folder that another process uses.

A process holds a folder by a shared lock on a file in it, its mark. To remove the folder, a process takes an exclusive
lock on the mark, which fails while another process holds it. A process that gets its lock checks that the mark still
lies under its path: the folder may have been removed in between.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


class InUse:
    """The folders that this process holds. On a file system without locks, no folder is held, and none is removed."""

    def __init__(self) -> None:
        self._held: dict[Path, int] = {}

    def hold(self, mark: Path) -> bool:
        """Hold the folder of this mark until :meth:`leave` or the end of this process.

        Returns False if another process has removed the folder.
        """
        try:
            descriptor = os.open(mark, os.O_RDONLY)
        except FileNotFoundError:
            return False
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        if not _lies_at(descriptor, mark):
            os.close(descriptor)
            return False
        self.release(mark)
        self._held[mark] = descriptor
        return True

    def moved(self, mark: Path, to: Path) -> None:
        """Note that a held mark was renamed."""
        if (descriptor := self._held.pop(mark, None)) is not None:
            self._held[to] = descriptor

    def leave(self) -> None:
        """Release all folders."""
        for mark in list(self._held):
            self.release(mark)

    def release(self, mark: Path) -> None:
        """Release the folder of this mark."""
        if (descriptor := self._held.pop(mark, None)) is not None:
            os.close(descriptor)


HERE = InUse()
"""The folders of this process. The launcher holds prepared data for all processes of its run."""


@contextmanager
def left_at_the_end() -> Iterator[None]:
    """Context manager: at its end, all folders are released."""
    try:
        yield
    finally:
        HERE.leave()


def remove_unused(folder: Path, mark: str, aside: Path) -> None:
    """Remove a folder unless a process holds it.

    Args:
        mark: name of its mark. A folder without a mark is the rest of an interrupted removal.
        aside: path to which it is renamed before it is removed, so that no process sees a part of it.
    """
    try:
        descriptor = os.open(folder / mark, os.O_RDWR)  # NFS gives no exclusive lock on a file that is only read
    except FileNotFoundError:
        shutil.rmtree(folder, ignore_errors=True)
        return
    except OSError:
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _lies_at(descriptor, folder / mark):
            os.replace(folder, aside)
            shutil.rmtree(aside, ignore_errors=True)
    except OSError:  # it is in use, or cannot be locked or moved
        pass
    finally:
        os.close(descriptor)


def _lies_at(descriptor: int, path: Path) -> bool:
    """Whether an open file is the one at the path now."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False
