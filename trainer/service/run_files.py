"""Reads files of a run for the API: only what lies in the run's folder, by no link, and with secrets redacted."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Collection, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from trainer.config import redact
from trainer.service.queue import Run

PICTURES = {".png": "image/png", ".jpg": "image/jpeg"}
TEXTS = (".json", ".jsonl", ".yaml", ".csv", ".txt", ".tsv", ".log", "")
"""Suffixes of files that are sent as text, line by line."""
CHUNK, MOST_FILES, MOST_METRICS = 1 << 20, 2000, 4 << 20
LONGEST_LINE = 1 << 20
"""A longer line is sent in pieces."""


class NoSuchFile(Exception):
    """The error for a path that names no regular file in a run's folder."""


def opened(folder: Path, path: str) -> BinaryIO:
    """Open a regular file below a folder, following no link on the way.

    Raises:
        NoSuchFile: there is none, or the path leads elsewhere.
    """
    parts = path.split("/")
    if any(not part or part.startswith(".") or "\0" in part for part in parts):
        raise NoSuchFile
    keep = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
    with ExitStack() as opens:
        try:
            at = os.open(folder, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY)
            opens.callback(os.close, at)
            for part in parts[:-1]:
                at = os.open(part, keep | os.O_DIRECTORY, dir_fd=at)
                opens.callback(os.close, at)
            file = os.open(parts[-1], keep | os.O_NONBLOCK | os.O_NOCTTY, dir_fd=at)
        except (OSError, ValueError) as error:
            raise NoSuchFile from error
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise NoSuchFile
    return os.fdopen(file, "rb")


@dataclass(frozen=True)
class Listed:
    """A file of a run.

    Attributes:
        path: in the run's folder. size: bytes. modified: seconds since 1970.
    """

    path: str
    size: int
    modified: float


def listed(folder: Path) -> list[Listed]:
    """Return the files of a run's folder that can be read, by path; at most ``MOST_FILES``."""
    found: list[Listed] = []
    for at, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(name for name in names if not name.startswith(".")):
            path = Path(at, name)
            with suppress(OSError, UnicodeEncodeError):
                about, shown = path.lstat(), str(path.relative_to(folder))
                shown.encode()
                if stat.S_ISREG(about.st_mode):
                    found.append(Listed(shown, about.st_size, about.st_mtime))
            if len(found) == MOST_FILES:
                return found
    return found


def text_of(folder: Path, path: str, most: int = 8 << 20) -> str:
    """Return the beginning of a file as text, not redacted; '' if there is none.

    Args:
        most: bytes.
    """
    try:
        with opened(folder, path) as file:
            return file.read(most).decode(errors="replace")
    except NoSuchFile:
        return ""


def json_of(folder: Path, path: str) -> Any:
    """Return what a JSON file holds, not redacted; None if there is none, or it is being written."""
    with suppress(ValueError, RecursionError):
        return json.loads(text_of(folder, path))
    return None


def content(file: BinaryIO, is_text: bool, known: Collection[str]) -> Iterator[bytes]:
    """Yield a file, which is closed at the end; of a text each line redacted."""
    with file:
        if not is_text:
            while chunk := file.read(CHUNK):
                yield chunk
            return
        while line := file.readline(LONGEST_LINE):
            yield redact.text(line.decode(errors="replace"), known).encode()


class Tail:
    """Follows a text file, from ``last`` bytes before its end, or from its beginning.

    Args:
        folder, path: of the file, which may come later. known: secrets.
    """

    def __init__(self, folder: Path, path: str, known: Collection[str], last: int | None = None) -> None:
        self.folder, self.path, self.known = folder, path, known
        self.last, self.at, self.rest = last, 0, b""

    def lines(self, over: bool = False) -> list[str]:
        """Return the lines that have come since the last call, without their ends; ``over``: also one without an
        end."""
        with suppress(NoSuchFile), opened(self.folder, self.path) as file:
            size = os.fstat(file.fileno()).st_size
            if self.last is not None:
                self.at = max(0, size - self.last)
                skip, self.last = self.at > 0, None
                file.seek(self.at)
                if skip:
                    self.at += len(file.readline(LONGEST_LINE))
            if size < self.at:  # written anew
                self.at, self.rest = 0, b""
            file.seek(self.at)
            new = file.read(CHUNK)
            self.at += len(new)
            *lines, self.rest = (self.rest + new).split(b"\n")
            if (over and self.at >= size and self.rest) or len(self.rest) > LONGEST_LINE:
                lines, self.rest = [*lines, self.rest], b""
            return [redact.text(line.decode(errors="replace"), self.known) for line in lines]
        return []

    def ended(self) -> bool:
        """Whether everything in the file has been returned."""
        with suppress(NoSuchFile), opened(self.folder, self.path) as file:
            return os.fstat(file.fileno()).st_size <= self.at and not self.rest
        return True


def log_of(run: Run) -> tuple[Path, str]:
    """The folder and path of a run's log: in the run's folder, as a rule."""
    log, folder = Path(run.log), Path(run.folder)
    return (folder, str(log.relative_to(folder))) if log.is_relative_to(folder) else (log.parent, log.name)


@dataclass(frozen=True)
class Points:
    """Points of a run.

    Attributes:
        points: of metrics.jsonl. start, next: bytes of that file before the first and after the last.
    """

    points: list[dict[str, Any]]
    start: int
    next: int


def points(folder: Path, after: int, known: Collection[str]) -> Points:
    """Return the points of a run's ``metrics.jsonl`` after so many of its bytes; from the beginning if it has fewer.

    Args:
        known: secrets.
    """
    found: list[dict[str, Any]] = []
    with suppress(NoSuchFile), opened(folder, "metrics.jsonl") as file:
        start = after if after <= os.fstat(file.fileno()).st_size else 0
        file.seek(start)
        block = file.read(MOST_METRICS)
        block = block[: block.rfind(b"\n") + 1]
        for line in block.splitlines():
            with suppress(ValueError, RecursionError):
                if isinstance(point := json.loads(line, parse_constant=lambda text: None), dict):
                    has_text = not all(value is None or isinstance(value, (int, float)) for value in point.values())
                    found.append(redact.hide(point, known) if has_text else point)
        return Points(found, start, start + len(block))
    return Points(found, 0, 0)
