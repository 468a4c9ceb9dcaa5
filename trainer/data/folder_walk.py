"""Walks through folders, each real folder once, however many links lead to it, so that loops of links end."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trainer.data.regular_files import kind_of
from trainer.errors import UserError, why
from trainer.visible import one_line

Identity = tuple[int, int]
"""Device and inode: the same for all names of a file."""

SYSTEM_FOLDERS = {
    "system volume information",
    *"""
    __macosx @eadir @recycle @recently-snapshot @tmp #recycle #snapshot $recycle.bin recycler lost+found __pycache__
    thumbnails thumbnail thumbs _thumbnails _thumbs
    """.split(),
}
"""Folders that systems, file servers and viewers make: their images are copies of others, or deleted ones."""
APPLE_DOUBLE = "._"
"""A file's second part on file systems other than Apple's; it has the name of the first, and its suffix."""


def is_hidden(name: str) -> bool:
    """Whether a file or folder of this name is hidden or a system's own; its contents are no samples."""
    return name.startswith(".") or name.lower() in SYSTEM_FOLDERS


@dataclass(frozen=True)
class FoundFile:
    """A file, link or other entry that :class:`Walk` has found and that is no folder.

    Attributes:
        root: number of the folder below which it was found.
        path: its path, beginning with that folder.
        about: status of the file, or of the link's target; None: the link leads nowhere.
        linked: it was reached by a link.
    """

    root: int
    path: str
    about: os.stat_result | None
    linked: bool = False

    @property
    def broken(self) -> str:
        """Why this entry cannot be read as a file; '' if it can."""
        if self.about is None:
            return "is a link that leads nowhere"
        kind = kind_of(self.about.st_mode)
        return f"is {kind}" if kind else ""


@dataclass
class Walk:
    """Walks through folders and their subfolders, real ones first, then links; each real folder once.

    Attributes:
        entries: what is in them, in no order, without what is hidden.
        hidden: paths of hidden files and folders, and of a system's own; without ``._`` files.
        again: links to folders that are read already, or that lead back, and why; they are not followed.
    """

    entries: list[FoundFile] = field(default_factory=list)
    hidden: list[str] = field(default_factory=list)
    again: list[str] = field(default_factory=list)
    _folders: dict[Identity, str] = field(default_factory=dict)

    def through(self, roots: Sequence[str]) -> Walk:
        """Walk through these folders; one that does not exist counts as empty.

        Raises:
            UserError: a folder may not be read.
        """
        links = [(number, root) for number, root in enumerate(roots) if os.path.islink(root)]
        for number, root in enumerate(roots):
            if os.path.isdir(root) and not os.path.islink(root):
                links += self._below(number, root)
        while links:
            links = [more for number, link in links for more in self._linked(number, link)]
        return self

    def _linked(self, number: int, link: str) -> Iterator[tuple[int, str]]:
        """Add what a link leads to; yields the links inside."""
        try:
            about = os.stat(link)
        except OSError:  # nowhere, or in a circle of links
            self.entries.append(FoundFile(number, link, None, True))
            return
        if kind_of(about.st_mode) != "a folder":
            self.entries.append(FoundFile(number, link, about, True))
        elif leads_back(link):
            self.again.append(f"{one_line(link)} leads back to a folder that it lies in")
        elif known := self._folders.get(_identity(about)):
            self.again.append(f"{one_line(link)} leads to {one_line(known)}, which is read already")
        else:
            yield from self._below(number, link, True)

    def _below(self, number: int, root: str, linked: bool = False) -> list[tuple[int, str]]:
        """Add all of a folder except targets of links; returns the links."""
        links, waiting = [], [root]
        while waiting:
            folder = waiting.pop()
            try:
                about = os.stat(folder)
                if (known := self._folders.setdefault(_identity(about), folder)) != folder:
                    self.again.append(f"{one_line(folder)} is {one_line(known)} by another name")
                    continue
                with os.scandir(folder) as found:
                    entries = sorted(found, key=lambda entry: entry.name)
                for entry in entries:
                    if is_hidden(entry.name):
                        self.hidden += [entry.path] * (not entry.name.startswith(APPLE_DOUBLE))
                    elif entry.is_symlink():
                        links.append((number, entry.path))
                    elif entry.is_dir():
                        waiting.append(entry.path)
                    else:
                        self.entries.append(FoundFile(number, entry.path, entry.stat(), linked))
            except OSError as error:
                raise UserError(one_line(folder), f"cannot be read: {why(error)}") from error
        return links


def leads_back(link: str) -> bool:
    """Whether a link leads to a folder that contains the link, directly or not."""
    target = os.path.realpath(link)
    return os.path.commonpath([target, os.path.realpath(os.path.dirname(link) or ".")]) == target


def distinct(paths: Sequence[Path]) -> tuple[list[Path], list[str]]:
    """Each real file once, by its first name (a link only if it alone leads there); and a sentence per other name."""
    known: dict[Identity, Path] = {}
    for path in sorted(paths, key=lambda path: path.is_symlink()):
        known.setdefault(_identity(os.stat(path)), path)
    kept = set(known.values())
    others = [p for p in paths if p not in kept]
    return sorted(kept), [
        f"{one_line(str(p))} is {one_line(str(known[_identity(os.stat(p))]))} by another name" for p in others
    ]


def _identity(about: os.stat_result) -> Identity:
    return about.st_dev, about.st_ino


def once_each(entries: Sequence[FoundFile]) -> tuple[list[FoundFile], list[str], list[str]]:
    """Sort the entries of a :class:`Walk` into regular files, each once; what is skipped and why; links to nowhere.

    A file's own name comes before links to it, because ``Walk`` finds it first.
    """
    known: dict[Identity, str] = {}
    kept, passed, missing = [], [], []
    for entry in entries:
        if entry.about is None:
            missing.append(one_line(entry.path))
        elif entry.broken:
            passed.append(f"{one_line(entry.path)} {entry.broken}")
        elif (first := known.setdefault(_identity(entry.about), entry.path)) != entry.path:
            passed.append(f"{one_line(entry.path)} is {one_line(first)} by another name")
        else:
            kept.append(entry)
    return kept, passed, missing
