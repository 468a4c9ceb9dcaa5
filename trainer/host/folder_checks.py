"""Checks, without writing, whether a run's folder can be made: its parents, the length of its path, free disk space."""

from __future__ import annotations

import os
from pathlib import Path

from trainer.errors import UserError

LEAST = 1 << 20
"""Bytes that the smallest run writes."""
LONGEST_INSIDE = 100
"""Bytes of the longest path below a run's folder, ``checkpoints/persistables/...``."""


def check_working_folder() -> None:
    """Refuse a working folder that was removed.

    Raises:
        UserError: it was removed.
    """
    try:
        os.getcwd()
    except FileNotFoundError as error:
        what = f"the working folder {os.environ.get('PWD', '')}".rstrip()
        raise UserError(what, "was removed while this shell was in it", "cd FOLDER, and the command again") from error


def check_folder(folder: Path, key: str, needed: int = LEAST, here: bool = True) -> None:
    """Refuse a folder that cannot be made or written, or whose disk has too little room.

    Args:
        key: the config key that names the folder.
        needed: fewest bytes that will be written.
        here: the folder is on this machine; for another machine only the name is checked.

    Raises:
        UserError: the folder cannot be used.
    """
    what, instead = f"{key}={folder}", f"{key}=ANOTHER_FOLDER"
    if "\0" in str(folder):
        raise UserError(what, "holds a NUL, which no path does", instead)
    if not here:
        return
    try:
        there = nearest(folder)
        longest = os.pathconf(there, "PC_NAME_MAX")
        too_long = next((p for p in folder.parts if len(os.fsencode(p)) > longest), None)
        if too_long is not None:
            raise UserError(
                what,
                (
                    f"the name {too_long[:20]}... has {len(os.fsencode(too_long))} bytes, and the file system "
                    f"takes {longest}"
                ),
                instead,
            )
        if len(os.fsencode(folder)) + LONGEST_INSIDE > os.pathconf(there, "PC_PATH_MAX"):
            raise UserError(what, "the path is too long for the files in it", instead)
        if not there.is_dir():
            raise UserError(what, f"{there} is {'a file' if there.is_file() else 'no folder'}", instead)
        if not os.access(there, os.W_OK | os.X_OK):
            read_only = os.statvfs(there).f_flag & os.ST_RDONLY
            why = "is on a file system that is read-only" if read_only else "may not be written by this user"
            raise UserError(what, f"{there} {why}", instead)
        _check_room(there, what, needed, instead)
    except OSError as error:  # a loop of links, a server that is gone
        raise UserError(what, f"cannot be looked at: {error.strerror}", instead) from error


def nearest(folder: Path) -> Path:
    """The folder or its nearest existing parent; a broken link raises OSError."""
    while not os.path.lexists(folder):
        folder = folder.parent
    os.stat(folder)
    return folder


def _check_room(there: Path, what: str, needed: int, instead: str) -> None:
    disk = os.statvfs(there)
    free = disk.f_bavail * disk.f_frsize
    if not (disk.f_blocks or disk.f_files):  # /proc and its like
        raise UserError(what, "the file system there takes no files", instead)
    if disk.f_blocks and free < needed:
        raise UserError(
            what, f"{free / 2**20:.1f} MiB are free there, and the run leaves {needed / 2**20:.0f} MiB or more", instead
        )
    if disk.f_files and not disk.f_favail:
        raise UserError(what, "the file system there takes no further file", instead)
