"""Folders and files for this user alone, and whether other users could have put something there."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

LONGEST_TEMPORARY = 60
"""Bytes of a folder in which Unix sockets can still be made in folders below: their paths have 108 at most."""


def scratch(prefix: str) -> Path:
    """A new folder for temporary files, which its maker alone may enter (mode 0700)."""
    return Path(tempfile.mkdtemp(prefix=prefix, dir=temporary_root()))


def temporary_root() -> str:
    """The folder for temporary files, or another one where its path is too long for sockets."""
    usual = tempfile.gettempdir()
    for folder in (usual, "/tmp", "/var/tmp"):
        if len(os.fsencode(folder)) <= LONGEST_TEMPORARY and os.access(folder, os.W_OK | os.X_OK):
            return folder
    return usual


def start_empty(path: Path) -> None:
    """Make a file anew under its name. What was there goes; a link's target is left alone."""
    path.unlink(missing_ok=True)
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666))
