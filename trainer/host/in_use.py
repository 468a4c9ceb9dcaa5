"""Folders in a cache that runs share: one that a process holds is not removed by another.

A process holds a folder by a shared lock on a file in it, its mark. Who would remove the folder needs that lock alone.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


class InUse:
    """The folders that a process holds. Where the file system has no locks, nothing is held and nothing removed."""

    def __init__(self) -> None:
        self._held: dict[Path, int] = {}

    def hold(self, mark: Path) -> bool:
        """Hold the folder that this file marks, until ``leave`` or until this process has ended.

        Returns False if another process has removed the folder: it is to be made anew.
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
        """A mark that is held was renamed."""
        if (descriptor := self._held.pop(mark, None)) is not None:
            self._held[to] = descriptor

    def leave(self) -> None:
        """Hold nothing any more."""
        for mark in list(self._held):
            self.release(mark)

    def release(self, mark: Path) -> None:
        """Hold the folder of this mark no more."""
        if (descriptor := self._held.pop(mark, None)) is not None:
            os.close(descriptor)


HERE = InUse()
"""Of this process: who prepares data for a run holds them for all its processes, for as long as it runs."""


@contextmanager
def left_at_the_end() -> Iterator[None]:
    """Context manager: at its end this process holds no folder any more."""
    try:
        yield
    finally:
        HERE.leave()


def remove_unused(folder: Path, mark: str, aside: Path) -> None:
    """Remove a folder unless a process holds it.

    Args:
        mark: name of the file in it by which it is held. A folder without it is a rest of one that was being removed.
        aside: new path beside it, where it lies while it is removed: nobody sees a part of it in its place.
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
    """Whether an open file is the one that lies at the path now."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False
