"""What a disk holds at any moment of a program: after the program was killed, and after the power went.

A killed program leaves what it has done so far. When the power goes, only what was synced is sure to stay: a file's
content by an fsync of the file, its name by an fsync of its folder. Of the rest any part may be gone: what was written,
and what was renamed or removed.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

CHANGES = ("fsync", "link", "rename", "replace", "unlink", "remove", "rmdir", "mkdir")
Entries = dict[int, dict[str, int]]
Contents = dict[int, bytes]


@dataclass(frozen=True)
class Moment:
    """Before a change: folders (inode -> name -> inode) and files (inode -> content), as programs see them and as they
    are synced.

    Attributes:
        change: that comes next.
    """

    change: str
    entries: Entries
    contents: Contents
    synced_entries: Entries
    synced_contents: Contents

    def states(self, root: int) -> Iterator[tuple[str, dict[str, bytes | None]]]:
        """What may be found afterwards: path -> content, or None of a folder; and how it came to that."""
        unsynced = [file for file, content in self.contents.items() if self.synced_contents.get(file) != content]
        half = {**self.contents, **{file: self.contents[file][: len(self.contents[file]) // 2] for file in unsynced}}
        lost = {**self.contents, **{file: self.synced_contents.get(file, b"") for file in unsynced}}
        synced = {**{folder: {} for folder in self.entries}, **self.synced_entries}
        kept = {**dict.fromkeys(self.contents, b""), **self.synced_contents}
        yield "killed", tree(root, self.entries, self.contents)
        yield "killed while it wrote", tree(root, self.entries, half)
        yield "power gone, names kept", tree(root, self.entries, {**kept, **lost})
        yield "power gone", tree(root, synced, kept)
        for folder in self.entries:
            if self.entries[folder] != synced[folder]:
                older, newer = {**self.entries, folder: synced[folder]}, {**synced, folder: self.entries[folder]}
                yield "power gone, one folder's names lost", tree(root, {**synced, **older}, {**kept, **lost})
                yield "power gone, one folder's names kept", tree(root, newer, {**kept, **lost})


def tree(folder: int, entries: Entries, contents: Contents, below: str = "") -> dict[str, bytes | None]:
    """Path -> content, or None of a folder."""
    found: dict[str, bytes | None] = {}
    for name, inode in sorted(entries.get(folder, {}).items()):
        found[below + name] = contents.get(inode)
        if inode in entries:
            found |= tree(inode, entries, contents, f"{below}{name}/")
    return found


def put(state: Mapping[str, bytes | None], folder: Path) -> None:
    """Make these files."""
    folder.mkdir()
    for name, content in state.items():
        if content is None:
            (folder / name).mkdir()
        else:
            (folder / name).write_bytes(content)


class Recorder:
    """Looks at a folder before every change that the program makes in it.

    Attributes:
        moments: so far; root: the folder's inode.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.root = folder, folder.stat().st_ino
        self.moments: list[Moment] = []
        self.held: dict[int, int] = {}
        self.entries, self.contents = self._look()
        self.synced_entries, self.synced_contents = dict(self.entries), dict(self.contents)

    def moment(self, change: str) -> Moment:
        """Now."""
        self.entries, self.contents = self._look()
        return Moment(change, self.entries, self.contents, dict(self.synced_entries), dict(self.synced_contents))

    def synced(self, descriptor: int) -> None:
        """A file or folder was synced."""
        inode = os.fstat(descriptor).st_ino
        self.entries, self.contents = self._look()
        if inode in self.entries:
            self.synced_entries[inode] = self.entries[inode]
        elif inode in self.contents:
            self.synced_contents[inode] = self.contents[inode]

    def _look(self) -> tuple[Entries, Contents]:
        entries: Entries = {}
        contents: Contents = {}
        folders = [self.folder]
        while folders:
            folder = folders.pop()
            here = entries.setdefault(folder.stat().st_ino, {})
            for name in os.listdir(folder):
                path = folder / name
                here[name] = inode = (about := path.lstat()).st_ino
                if inode not in self.held:  # so that no other file gets its number
                    self.held[inode] = os.open(path, os.O_RDONLY)
                if stat.S_ISDIR(about.st_mode):
                    folders.append(path)
                else:
                    contents[inode] = path.read_bytes()
        return entries, contents


@dataclass(frozen=True)
class Found:
    """What a run finds after its death: the folder, where it died, and whether that was after the last change."""

    folder: Path
    where: str
    at_the_end: bool


def deaths(recorder: Recorder, below: Path) -> Iterator[Found]:
    """Each state of the disk once that a death leaves, and all of the end, in folders of their own."""
    seen: set[str] = set()
    for number, moment in enumerate(recorder.moments):
        at_the_end = moment.change == "the end"
        for way, (how, state) in enumerate(moment.states(recorder.root)):
            if str(state) in seen and not at_the_end:
                continue
            seen.add(str(state))
            place = below / f"found-{number}-{way}"
            put(state, place)
            yield Found(place, f"{how} before change {number}, {moment.change}: {sorted(state)}", at_the_end)


@contextmanager
def recorded(folder: Path) -> Iterator[Recorder]:
    """Inside, what the program does in the folder is recorded; nothing else may happen there."""
    recorder, real = Recorder(folder), {name: getattr(os, name) for name in CHANGES}

    def watched(name: str) -> Any:
        def change(*arguments: Any, **options: Any) -> Any:
            recorder.moments.append(recorder.moment(f"{name} {arguments[0]}"))
            done = real[name](*arguments, **options)
            if name == "fsync":
                recorder.synced(arguments[0])
            return done

        return change

    with pytest.MonkeyPatch.context() as patch:
        for name in CHANGES:
            patch.setattr(os, name, watched(name))
        try:
            yield recorder
        finally:
            patch.undo()
            recorder.moments.append(recorder.moment("the end"))
            for descriptor in recorder.held.values():
                os.close(descriptor)
