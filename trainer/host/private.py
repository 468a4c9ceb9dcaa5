"""Folders and files for this user alone, and checks whether other users could have written to a path."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import stat
import tempfile
from pathlib import Path

from trainer.errors import UserError
from trainer.host.files import PRIVATE, replacing
from trainer.host.in_use import HERE, remove_unused
from trainer.host.text_checks import NO_TEXT

MARK = ".held"
"""The mark of a temporary folder, by which its process holds it (:mod:`trainer.host.in_use`)."""
LONGEST_TEMPORARY = 60
"""Longest path of a temporary folder, in bytes: Unix sockets in folders below need paths of at most 107."""
ROOT = 0
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def scratch(prefix: str) -> Path:
    """Make a new folder for temporary files that only this user can enter (mode 0700).

    This process holds it until its end. Folders that killed processes of this user have left are removed first.
    """
    root = Path(temporary_root())
    for left in _own_folders(root, prefix):
        remove_unused(left, MARK, left.with_name(f"{prefix}{secrets.token_hex(8)}"))
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=root))
    mark = folder / f"{MARK}.new"  # renamed once it is locked: a folder without a mark is not removed
    mark.touch(PRIVATE)
    HERE.hold(mark)
    HERE.moved(mark, mark.rename(folder / MARK))
    return folder


def discard(folder: Path) -> None:
    """Remove a folder of :func:`scratch`."""
    HERE.release(folder / MARK)
    shutil.rmtree(folder, ignore_errors=True)


def _own_folders(root: Path, prefix: str) -> list[Path]:
    """This user's folders with that prefix and a mark."""
    found = []
    with contextlib.suppress(OSError), os.scandir(root) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                if entry.name.startswith(prefix) and is_private(path := Path(entry.path)) and (path / MARK).is_file():
                    found.append(path)
    return found


def temporary_root() -> str:
    """The folder for private temporary folders: the system's, or one whose path is short enough for Unix sockets.

    Raises:
        UserError: no folder can be written, or other users can rename files in each of them.
    """
    try:
        usual = tempfile.gettempdir()
    except FileNotFoundError as error:
        raise UserError(
            f"TMPDIR={os.environ.get('TMPDIR', '')}",
            "no folder for temporary files can be written, /tmp and /var/tmp neither",
            "TMPDIR=FOLDER of your own",
        ) from error
    # new folders are made there
    safe = [folder for folder in (usual, "/tmp", "/var/tmp") if _keeps(folder)]  # nosec B108
    if not safe:
        raise UserError(
            f"TMPDIR={usual}",
            "other users can rename what lies there (its mode lacks the sticky bit)",
            "TMPDIR=FOLDER of your own",
        )
    return next((folder for folder in safe if _takes_sockets(folder)), safe[0])


def check_sockets() -> None:
    """Refuse to start processes with Unix sockets if no temporary folder allows these.

    Raises:
        UserError: all paths are too long, or not UTF-8.
    """
    if _takes_sockets(folder := temporary_root()):
        return
    size = len(os.fsencode(folder))
    wrong = (
        f"its path has {size} bytes, and Unix sockets need one of {LONGEST_TEMPORARY} at most"
        if size > LONGEST_TEMPORARY
        else "its path is not UTF-8, and those of Unix sockets are"
    )
    why = f"{wrong}; /tmp and /var/tmp cannot be written safely"
    raise UserError(
        f"TMPDIR={folder}", why, f"TMPDIR=FOLDER of your own, with a path of at most {LONGEST_TEMPORARY} bytes"
    )


def _takes_sockets(folder: str) -> bool:
    """Whether sockets can be made below: the kernel limits their paths, and ZeroMQ and torch need UTF-8."""
    return len(os.fsencode(folder)) <= LONGEST_TEMPORARY and NO_TEXT.search(folder) is None


def _keeps(folder: str) -> bool:
    """Whether this user can make folders there that no other user can rename."""
    try:
        found = os.stat(folder)
    except OSError:
        return False
    alone = not found.st_mode & OTHERS_WRITE or found.st_mode & stat.S_ISVTX
    return bool(alone) and found.st_uid in (os.geteuid(), ROOT) and os.access(folder, os.W_OK | os.X_OK)


def is_own(folder: Path) -> bool:
    """Whether a path is a folder (and no link) that belongs to this user and that no other user can write to."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & OTHERS_WRITE


def is_private(folder: Path) -> bool:
    """Whether a path is a folder (and no link) that no other user can even enter."""
    return is_own(folder) and not folder.lstat().st_mode & (stat.S_IRWXG | stat.S_IRWXO)


def write(path: Path, text: str, mode: int = PRIVATE) -> None:
    """Write a whole file that only this user can read, unless ``mode`` says otherwise; a link is replaced."""
    with replacing(path, mode) as part:
        part.write_text(text)


def read(path: Path) -> str:
    """Read a text file that belongs to this user, following no link.

    Raises:
        OSError: it is missing, a link, or not this user's.
    """
    with open(_opened(path)) as file:
        return file.read()


def read_unshared(path: Path) -> bytes:
    """Read a file that belongs to this user and that no other user can write to, following no link.

    A user who may write to its folder can replace it, but not by a file that belongs to this user.

    Raises:
        OSError: it is missing, a link, not this user's, or others can write to it.
    """
    with open(_opened(path), "rb") as file:
        if os.fstat(file.fileno()).st_mode & OTHERS_WRITE:
            raise PermissionError(f"other users can write to {path}")
        return file.read()


def _opened(path: Path) -> int:
    """Open a file of this user's; the open file is checked, so that a replaced name does not matter."""
    number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    found = os.fstat(number)
    if found.st_uid != os.geteuid() or not stat.S_ISREG(found.st_mode):
        os.close(number)
        raise PermissionError(f"{path} is no file of this user's")
    return number
