"""Prepared folders in the user's cache: each is made once, by one of many processes.

    absent -> unfinished (NAME.part-PID-RANDOM) -> whole (NAME, with its note ``complete.json``)

A process that finds no note takes the lock ``NAME.lock``, reads again, and prepares. The note is written last, and the
folder is renamed as a whole; so what has the name is whole, and it never changes. A killed process leaves an unfinished
folder, which the next holder of the lock removes.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trainer.errors import UserError
from trainer.host import cache, json_text
from trainer.host.cache import cache_root

__all__ = ["MARKER", "cache_folder", "cache_root", "known", "locked", "prepare_once", "replacing_folder"]

MARKER = "complete.json"


def cache_folder(kind: str, files: Iterable[Path]) -> Path:
    """The folder in the cache for data prepared from these files; its name changes when one of the files changes."""
    about = [(str(path.absolute()), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return cache_root() / kind / hashlib.blake2b(json.dumps(about).encode(), digest_size=12).hexdigest()


@contextmanager
def replacing_folder(target: Path) -> Iterator[Path]:
    """Context manager: yields a new folder to prepare data in, which replaces ``target`` unless an error occurs.

    The caller holds the target's lock. What a killed process left is removed.
    """
    for leftover in [*target.parent.glob(f"{target.name}.part-*"), target]:
        if leftover.exists():
            shutil.rmtree(leftover)
    part = target.with_name(f"{target.name}.part-{os.getpid()}-{secrets.token_hex(4)}")
    try:
        yield part
        os.replace(part, target)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def known(target: Path) -> dict[str, Any] | None:
    """Read the note (JSON) of a prepared folder; None if the folder does not exist.

    Raises:
        UserError: another user could put something there, or the note cannot be read now.
    """
    cache.check_data(target)
    try:
        return json_text.read(target / MARKER)  # type: ignore[no-any-return]
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    except OSError as error:  # an unreadable note is not a missing one: the folder must not be prepared again
        raise UserError(
            str(target / MARKER),
            f"cannot be read: {error.strerror}",
            "another folder for prepared data (TRAINER_CACHE=FOLDER), or the same command when it can be read",
        ) from error


def prepare_once(target: Path, make: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    """Prepare a folder with ``make`` unless it exists, in one of several processes; returns the folder's note.

    Args:
        make: fills the new folder, and returns its note (JSON).

    Raises:
        UserError: another user could put something there, or this one can only read there and it has not been made.
    """
    found = known(target)
    if found is not None:
        return found
    with locked(target):
        found = known(target)
        if found is None:
            with replacing_folder(target) as part:
                part.mkdir()
                found = make(part)
                (part / MARKER).write_text(json.dumps(found))
    return found


@contextmanager
def locked(target: Path, waiting: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Context manager: holds the lock under which a folder is prepared; makes its parent folders.

    Args:
        waiting: called once, before this process waits for another one.

    Raises:
        UserError: another user could put something there, or this one can only read there.
    """
    from filelock import FileLock, Timeout

    cache.make(target.parent)
    lock = FileLock(target.with_name(f"{target.name}.lock"))
    try:
        try:
            lock.acquire(timeout=0)
        except Timeout:
            waiting()
            lock.acquire()
    except PermissionError as error:
        raise cache.read_only(target.parent) from error
    try:
        yield
    finally:
        lock.release()
