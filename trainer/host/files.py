"""Writes files that appear complete or not at all, begins files without following links, and knows how many bytes a
disk takes."""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PART = re.compile(r"^\.(.+)\.\d+-[0-9a-f]{8}$")
"""What a file is called until it takes its place; a process that was killed leaves it."""
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
"""Errors of a disk that takes nothing more for now."""
REFUSED = (*FULL, errno.EACCES, errno.EPERM)
"""Errors of writing while a disk is full, or while a folder may not be written to."""
PRIVATE, COMMON = 0o600, 0o666
"""Modes of new files: for their owner's eyes alone; for whomever the umask allows."""


def is_part(name: object) -> bool:
    """Whether that is the name of a file which was to be written to take its place; what a user's own code cannot read
    has others."""
    return isinstance(name, (str, Path)) and PART.match(Path(name).name) is not None


@contextmanager
def if_the_disk_takes() -> Iterator[None]:
    """Context manager: what a full disk or a read-only folder refuses is left out, and ends nobody."""
    try:
        yield
    except OSError as error:
        if error.errno not in REFUSED:
            raise


@contextmanager
def replacing(path: Path, mode: int = COMMON) -> Iterator[Path]:
    """Context manager: yields a new empty file to write, which replaces ``path`` unless an error occurs.

    A reader sees the old file or the new, never a part. A link that lies at the path is replaced, not followed.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}")
    os.close(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode))
    try:
        yield part
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def replace_file(path: Path, text: str, private: bool = False) -> None:
    """Write a text file that replaces the old one as a whole.

    Args:
        private: it holds a config, so it is for its owner's eyes alone (0600).
    """
    with replacing(path, PRIVATE if private else COMMON) as part:
        part.write_text(text, encoding="utf-8", errors="backslashreplace")


def start_empty(path: Path) -> int:
    """Make an empty file at ``path`` in place of what is there; a link's target stays. Returns its bytes, 0."""
    path.unlink(missing_ok=True)
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666))
    return 0


def go_on(path: Path) -> int:
    """Prepare a file to be appended to; anything but a regular file is replaced by an empty one. Returns its bytes."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return start_empty(path)
    found = os.fstat(descriptor)
    os.close(descriptor)
    if stat.S_ISREG(found.st_mode):
        return found.st_size
    return start_empty(path)


def start(path: Path, goes_on: bool) -> int:
    """Prepare a file to be written, following no link: empty, or with ``goes_on`` as it is. Returns its bytes."""
    return go_on(path) if goes_on else start_empty(path)


def free_disk(folder: Path) -> int:
    """The bytes that can still be written to the disk of a folder, which need not exist yet."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free
