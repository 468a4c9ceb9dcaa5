"""How far a process is, where the one that has started it sees that at once: a file of three numbers, mapped into memory."""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import NamedTuple

FORM = struct.Struct("=qqq")


class Beat(NamedTuple):
    """What a pulse shows: updates done, signs of life since the last one, and signs of life in all."""

    update: int = 0
    since: int = 0
    total: int = 0


class Pulse:
    """A process's own.

    Args:
        path: of the file, which is there; empty: nobody looks.
    """

    def __init__(self, path: str = "") -> None:
        self.beat = Beat()
        self.memory: mmap.mmap | None = None
        if path:
            with open(path, "r+b") as file:
                self.memory = mmap.mmap(file.fileno(), FORM.size)

    def sign(self) -> None:
        """Something is done that is no update: a forward pass, a batch of a validation."""
        self._put(Beat(self.beat.update, self.beat.since + 1, self.beat.total + 1))

    def update(self, done: int) -> None:
        """So many updates are done."""
        self._put(Beat(done, 0, self.beat.total + 1))

    def _put(self, beat: Beat) -> None:
        self.beat = beat
        if self.memory is not None:
            FORM.pack_into(self.memory, 0, *beat)


def of(folder: Path, role: str, rank: int) -> Path:
    """The file of a process's pulse."""
    return folder / f"pulse.{role}.{rank}"


def make(path: Path) -> Path:
    """Make the pulse file of a process that is to be started, which maps it into memory."""
    path.write_bytes(bytes(FORM.size))
    return path


def look(path: Path) -> Beat:
    """How far a process is; it has not begun where there is no such file."""
    try:
        return Beat(*FORM.unpack(path.read_bytes()))
    except (OSError, struct.error):
        return Beat()
