"""Folders of the user's cache that are made once: whole under their name, or not there at all."""

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

MARKER = "complete.json"


def cache_root() -> Path:
    """The trainer's own folder, absolute: $TRAINER_CACHE, else $XDG_CACHE_HOME/trainer, else ~/.cache/trainer."""
    if own := os.environ.get("TRAINER_CACHE"):
        return Path(own).expanduser().absolute()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared).expanduser().absolute() / "trainer"
    return Path.home() / ".cache" / "trainer"


def place_of(kind: str, files: Iterable[Path]) -> Path:
    """Where what is made of these files lies; another place when one has changed."""
    about = [(str(path.absolute()), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return cache_root() / kind / hashlib.blake2b(json.dumps(about).encode(), digest_size=12).hexdigest()


@contextmanager
def beside(target: Path) -> Iterator[Path]:
    """A folder to make and fill, which takes the target's place at the end; with an error nothing is left of it.

    Who calls holds the target's lock. What a killed process left is removed.
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
    """What was noted of a folder when it was made; None when it is not there."""
    try:
        return json.loads((target / MARKER).read_text())  # type: ignore[no-any-return]
    except (OSError, ValueError):
        return None


def made_once(target: Path, make: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    """What is noted of the folder, which is made unless it is there. Several processes may ask at once; one makes it.

    Args:
        make: creates and fills a folder, and returns what is to be noted (JSON).
    """
    from filelock import FileLock

    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(target.with_name(f"{target.name}.lock")):
        found = known(target)
        if found is None:
            with beside(target) as part:
                found = make(part)
                (part / MARKER).write_text(json.dumps(found))
    return found
