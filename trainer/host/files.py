"""Writes files that appear complete or not at all, opens files without following links, and measures free space."""

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
"""Names of temporary files, before they replace the final file; a killed process leaves them."""
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
"""Errors of a full or read-only disk."""
REFUSED = (*FULL, errno.EACCES, errno.EPERM)
"""Errors of a full disk, or of a folder that may not be written."""
PRIVATE, COMMON = 0o600, 0o666
"""Modes of new files: readable by the owner alone; as the umask allows."""


def is_part(name: object) -> bool:
    """Whether a name is that of a temporary file of :func:`replacing`."""
    return isinstance(name, (str, Path)) and PART.match(Path(name).name) is not None


@contextmanager
def if_the_disk_takes() -> Iterator[None]:
    """Context manager: errors of a full disk or a read-only folder are ignored."""
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
        private: only its owner can read it (0600).
    """
    with replacing(path, PRIVATE if private else COMMON) as part:
        part.write_text(text, encoding="utf-8", errors="backslashreplace")


def start_empty(path: Path) -> int:
    """Make an empty file, replacing a file or a link; the link's target stays. Returns its bytes, 0."""
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
    """Prepare a file to be written, following no link; ``goes_on`` keeps its content. Returns its bytes."""
    return go_on(path) if goes_on else start_empty(path)


def free_disk(folder: Path) -> int:
    """The bytes that can still be written to the disk of a folder, which need not exist yet."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free
