"""A board in memory: the notes that launchers and servers leave for each other."""

from __future__ import annotations


class Notes(dict[str, str]):
    """As trainer/host/notes_board.py's boards, for one process.

    Attributes:
        changes: so many notes were left.
    """

    changes = 0

    def set(self, key: str, value: str) -> None:
        """Leave a note."""
        self[key] = value
        self.changes += 1

    def check(self, keys: list[str]) -> bool:
        """Whether all these notes are there."""
        return all(key in self for key in keys) if len(keys) > 1 else keys[0] in self

    def get(self, key: str) -> bytes:  # type: ignore[override]
        """Read a note."""
        return self[key].encode()

    def under(self, prefix: str) -> PartOfNotes:
        """A part of this board, whose keys get a prefix."""
        return PartOfNotes(self, prefix)

    def within(self, seconds: float) -> Notes:
        """This board itself: it always answers."""
        return self


class PartOfNotes:
    """Notes whose keys have a prefix."""

    def __init__(self, notes: Notes, prefix: str) -> None:
        self.notes, self.prefix = notes, prefix

    def set(self, key: str, value: str) -> None:
        """Leave a note."""
        self.notes.set(f"{self.prefix}/{key}", value)

    def check(self, keys: list[str]) -> bool:
        """Whether all these notes are there."""
        return all(f"{self.prefix}/{key}" in self.notes for key in keys)

    def get(self, key: str) -> bytes:
        """Read a note."""
        return self.notes.get(f"{self.prefix}/{key}")
