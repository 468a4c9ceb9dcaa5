"""Finds the Criteo files that a path, folder or pattern means."""

from __future__ import annotations

import glob
from pathlib import Path
from typing import Any

from trainer.data.folder_walk import distinct
from trainer.data.regular_files import GZIP, open_regular
from trainer.errors import UserError, why
from trainer.wording import some, typed


def find(paths: Any, key: str) -> list[Path]:
    """Find the click-log files of a path, folder, pattern or list of these: each real file once, sorted by name.

    Raises:
        UserError: something means no file; an empty file; a name that ends in .gz without being such.
    """
    found = distinct(_meant(paths, key))[0]
    for path in found:
        _check(path, key)
    return found


def duplicate_names(*paths: Any) -> str:
    """Return a sentence about Criteo files that are given under several names, or '' if there are none."""
    others = [name for one in paths if one is not None for name in distinct(_meant(one, "data.path"))[1]]
    return f"{len(others)} names of the same files are passed over: {some(others)}" if others else ""


def _meant(paths: Any, key: str) -> list[Path]:
    found: set[Path] = set()
    for one in paths if isinstance(paths, (list, tuple)) else [paths]:
        path = Path(str(one)).expanduser()
        if path.is_dir():
            files = [p for p in path.iterdir() if not p.is_dir() and not p.name.startswith((".", "_"))]
        else:
            files = [path] if path.exists() else [Path(p) for p in glob.glob(str(path)) if not Path(p).is_dir()]
        if not files:
            reason = "is a folder without files" if path.is_dir() else "there is no such file, folder or pattern"
            raise UserError(f"{key}={one}", reason, f"{key}=FILE, FOLDER or PATTERN with rows in Criteo's format")
        found.update(p.absolute() for p in files)
    return sorted(found)


def _check(path: Path, key: str) -> None:
    try:
        with open_regular(path) as file:
            start = file.read(len(GZIP))
    except OSError as error:
        raise UserError(f"{key}={path}", why(error)) from error
    if not start:
        raise UserError(f"{key}={path}", "is empty")
    if path.suffix == ".gz" and start != GZIP:
        raise UserError(
            f"{key}={path}", "ends in .gz and is no gzip file", f"{typed(key, path.with_suffix(''))} if it is text"
        )
