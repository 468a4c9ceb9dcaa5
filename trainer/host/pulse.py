"""The pulse of a process: a memory-mapped file of three numbers, in which its launcher sees its progress."""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import NamedTuple

FORM = struct.Struct("=qqq")


class Beat(NamedTuple):
    """The numbers of a pulse: updates done, signs of life since the last update, and all signs of life."""

    update: int = 0
    since: int = 0
    total: int = 0


class Pulse:
    """Writes this process's own pulse, which its launcher reads.

    Args:
        path: of the existing file; empty: no launcher reads it.
    """

    def __init__(self, path: str = "") -> None:
        self.beat = Beat()
        self.memory: mmap.mmap | None = None
        if path:
            with open(path, "r+b") as file:
                self.memory = mmap.mmap(file.fileno(), FORM.size)

    def sign(self) -> None:
        """Count a sign of life other than an update: a forward pass, a validation batch."""
        self._put(Beat(self.beat.update, self.beat.since + 1, self.beat.total + 1))

    def update(self, done: int) -> None:
        """Record that ``done`` updates are done."""
        self._put(Beat(done, 0, self.beat.total + 1))

    def _put(self, beat: Beat) -> None:
        self.beat = beat
        if self.memory is not None:
            FORM.pack_into(self.memory, 0, *beat)


def of(folder: Path, role: str, rank: int) -> Path:
    """The path of the pulse file of a process (role, rank)."""
    return folder / f"pulse.{role}.{rank}"


def make(path: Path) -> Path:
    """Create the pulse file of a process that will be started; returns its path."""
    path.write_bytes(bytes(FORM.size))
    return path


def read(path: Path) -> Beat:
    """Read a process's pulse; all zeros if it has no pulse file."""
    try:
        return Beat(*FORM.unpack(path.read_bytes()))
    except (OSError, struct.error):
        return Beat()
