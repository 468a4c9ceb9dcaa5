"""Finds the data of ``eval RUN [DATA]`` and ``predict RUN INPUT``: the run's own data, from any folder, or DATA."""

from __future__ import annotations

import glob
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.checkpoint.remote import is_address
from trainer.config.redact import command
from trainer.errors import UserError
from trainer.wording import literal, override

PATHS = ("root", "path", "val_path", "test_path")
"""Keys of ``data`` that name files or folders."""


def own_data(
    data: Mapping[str, Any], started_in: str, typed: Sequence[str], asked: str, refuse: bool
) -> dict[str, Any]:
    """The run's data, with relative paths and patterns from the folder in which the run was started.

    Args:
        started_in: that folder; '' if it is not known.
        typed: keys that the user has typed; their paths are relative to the working folder.
        asked: the command without its overrides, for advice.
        refuse: refuse a path that also exists in the working folder. (A prediction reads no such path.)

    Raises:
        UserError: a path exists in both folders.
    """
    changed: dict[str, Any] = {}
    for key, value in data.items():
        if key not in PATHS or f"data.{key}" in typed or "data" in typed or _is_here(started_in):
            continue
        paths = value if isinstance(value, list) else [value]
        there = [_there(path, started_in) for path in paths]
        if there == paths:
            continue
        if refuse and any(isinstance(path, str) and _exists(path) for path in paths):
            listed = ",".join(override("", path)[1:] for path in there)
            instead = command([f"data.{key}={listed if isinstance(value, str) else f'[{listed}]'}"])
            raise UserError(
                f"data.{key}={value}",
                f"is relative to {started_in}, where the run was started, and is there here, too",
                f"{asked} {instead}",
            )
        changed[key] = [literal(path) for path in there] if isinstance(value, list) else literal(there[0])
    return {**data, **changed}


def _is_here(started_in: str) -> bool:
    if not started_in:
        return True
    try:
        return os.path.samefile(started_in, ".")
    except OSError:  # the folder is gone
        return True


def _there(path: Any, started_in: str) -> Any:
    """The absolute path of a run's relative path, if it exists and is not the same file in the working folder."""
    if not isinstance(path, str) or "://" in path or os.path.isabs(os.path.expanduser(path)):
        return path
    there = os.path.join(glob.escape(started_in) if _is_pattern(path) else started_in, path)
    if not _exists(there) or (os.path.exists(path) and os.path.samefile(path, there)):
        return path
    return there


def _is_pattern(path: str) -> bool:
    return glob.has_magic(path) or "{" in path


def _exists(path: str) -> bool:
    """Whether a file or folder exists; for a pattern, whether any does. An address counts as existing."""
    if os.path.exists(path) or is_address(path):
        return True
    from trainer.data.sets.shards import braces

    return _is_pattern(path) and any(glob.glob(name) for name in braces(path))


def other_data(data: Mapping[str, Any], place: str, asked: str, split: str) -> dict[str, Any]:
    """The run's data source for DATA: all rows of files, or the images of a split of a folder.

    Args:
        place: DATA. asked: the command without DATA, for advice.
        split: ``val`` or ``test``, as typed. A folder without validation images gives its test images, or all.

    Raises:
        UserError: the data source reads no folder or file of the user's, or DATA does not exist.
    """
    target = str(data.get("_target_"))
    declared = {key for key in ("root", "path", "val", "val_path", "test_path", "on_missing") if key in data}
    if not {"root", "path"} & declared:
        raise UserError(f"{asked} {command([place])}", f"{target} reads no folder of yours", asked)
    if not _exists(place):
        raise UserError(f"{asked} {command([place])}", "there is no such folder or file", f"{asked} FOLDER")
    if "path" in declared:
        whole: dict[str, Any] = {key: literal(place) for key in ("path", "val_path", "test_path") if key in declared}
        return {**data, **whole, **({"split": None, "root": None} if "split" in data else {})}
    changed: dict[str, Any] = {"root": literal(place)}
    if "val" in declared:
        part = _measured(place) if split != "test" else None
        changed |= {"val": None} if part is None else {"root": literal(os.path.join(place, part)), "val": "."}
    return {**data, **changed, **({"on_missing": "error"} if "on_missing" in declared else {})}


def _measured(place: str) -> str | None:
    """The subfolder to evaluate; ``.``: the whole folder; None: it has training and validation images."""
    from trainer.data.images.listing import class_folders
    from trainer.data.images.split_folders import split_folders

    if not os.path.isdir(place):
        return None
    found = split_folders(class_folders(Path(place)), f"eval RUN {place}")
    if found.train and found.val:
        return None
    part = next(
        (name for name in (found.val, found.test, found.train) if name and class_folders(Path(place, name))), ""
    )
    return part or "."
