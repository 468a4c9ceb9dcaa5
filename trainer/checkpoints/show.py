"""``python -m trainer.checkpoints list``, ``show`` and ``verify``: print facts about checkpoints, without torch."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from rich.table import Table

from trainer.checkpoint import durable_folder, store
from trainer.errors import UserError
from trainer.planning.resume import CHECKPOINTS
from trainer.terminal.screen import Screen


def _all_of(path: Path) -> list[Path]:
    """Find all checkpoints of a run folder or of a folder of checkpoints, newest first; or the one that is named.

    Raises:
        UserError: there is none.
    """
    path = path.expanduser().absolute()
    if store.NAME.fullmatch(path.name) and not path.is_file() and path in store.found(path.parent):
        return [path]
    for folder in (path / CHECKPOINTS, path):
        if found := store.found(folder):
            return found
    why = "there is no checkpoint in it" if path.is_dir() else "there is no such folder"
    raise UserError(str(path), why, "the folder of a run, e.g. outputs/RECIPE/TIME")


def one(path: Path) -> Path:
    """Find one undamaged checkpoint: the one that the path names, else the newest undamaged one of the run.

    Raises:
        UserError: there is none.
    """
    found = _all_of(path)
    if len(found) == 1:
        return store.check(found[0])
    newest = store.newest_whole(found[0].parent, lambda line: Screen().print(line))
    if newest is None:
        raise UserError(str(path), "none of its checkpoints is whole", f"python -m trainer.checkpoints verify {path}")
    return newest


def listed(path: Path) -> int:
    """Print a table of a run's checkpoints, one line each. Returns exit code 0."""
    table = table_of("step", "epoch", "metric", "value", "size", "age")
    table.add_column("state", overflow="fold")
    found = _all_of(path)
    latest = _latest(found[0].parent)
    for folder in found:
        state = _damage(folder, verify=False) or "whole"
        state = f"{state}, latest" if folder.name == latest else state
        table.add_row(*_told(folder), size(_bytes_of(folder)), _age(folder), state)
    screen = Screen()
    screen.print(str(found[0].parent))
    screen.print(table)
    return 0


def table_of(*columns: str) -> Table:
    """An empty table with these columns for a list of checkpoints; all but the metric's are aligned to the right."""
    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="left" if column == "metric" else "right", no_wrap=True)
    return table


def cells(about: store.About) -> tuple[str, str, str, str]:
    """A checkpoint's cells in the printed table: step, epoch, name of the watched metric and its value."""
    value = about.watched.value
    return str(about.step), str(about.epoch), about.watched.metric, "" if value is None else f"{value:.5g}"


def _told(folder: Path) -> tuple[str, str, str, str]:
    """The same of a folder; of a damaged one the step alone."""
    step = folder.name.removeprefix("step-").lstrip("0") or "0"
    try:
        about = store.about(store.check(folder, verify=False))
    except UserError:
        return step, "", "", ""
    return cells(about)


def _latest(checkpoints: Path) -> str:
    try:
        return (checkpoints / store.LATEST).read_text().strip()
    except (OSError, ValueError):
        return ""


def _damage(folder: Path, verify: bool) -> str:
    """Return what is damaged in a checkpoint, as ``FILE: reason``, or '' if it is whole; ``verify``: by checksums."""
    try:
        store.check(folder, verify)
    except UserError as error:
        return f"{Path(error.what).name}: {error.why}"
    return ""


def verified(path: Path) -> int:
    """Check every file of every checkpoint of a run, and print the result. Returns exit code 1 if one is damaged."""
    screen, broken = Screen(), 0
    for folder in _all_of(path):
        if found := _damage(folder, verify=True):
            broken = 1
            screen.print(f"{folder.name}  DAMAGED  {found}")
        else:
            screen.print(
                f"{folder.name}  whole  {len(durable_folder.files(store.check(folder, False), store.FORMAT))} files"
            )
    return broken


def shown(folder: Path) -> int:
    """Print everything about one checkpoint: position, metric, versions, files and config. Returns exit code 0."""
    about, screen = store.about(folder), Screen()
    watched = about.watched
    screen.facts(
        str(folder),
        [
            ("step", f"{about.step} of {about.total_steps}"),
            ("epoch", f"{about.epoch}, after {about.update} of its updates"),
            ("samples", f"{about.samples}"),
            (watched.metric, "not measured after this update" if watched.value is None else f"{watched.value:.6g}"),
            ("strategy", about.strategy),
            ("workers", f"{about.workers}, {about.global_batch_size} samples in an update"),
            ("versions", ", ".join(f"{name} {version}" for name, version in about.versions.items())),
            ("written", f"{_age(folder)} ago"),
        ],
    )
    screen.facts(
        "Files", [(name, size(_bytes_of(folder, name))) for name in durable_folder.files(folder, store.FORMAT)]
    )
    screen.facts("Config", [])
    screen.print(yaml.safe_dump(dict(about.config), sort_keys=False, allow_unicode=True).rstrip())
    return 0


def _bytes_of(folder: Path, name: str = "") -> int:
    """The size in bytes of a checkpoint's folder, or of the file ``name`` in it."""
    paths = [folder / name] if name else list(folder.iterdir()) if folder.is_dir() else []
    return sum(path.stat().st_size for path in paths if path.is_file())


def size(count: int) -> str:
    """A number of bytes as text for the table of checkpoints, such as ``1.3 GB``."""
    for unit, least in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= least:
            return f"{count / least:.1f} {unit}"
    return f"{count} B"


def _age(folder: Path) -> str:
    """The time since a checkpoint was completed, as text such as ``5 min``; '' if it never was."""
    marker = folder / durable_folder.MARKER
    if not marker.is_file():
        return ""
    seconds = max(0.0, time.time() - marker.stat().st_mtime)
    for unit, least in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= least:
            return f"{seconds / least:.0f} {unit}"
    return f"{seconds:.0f} s"


def position(about: store.About) -> Mapping[str, Any]:
    """What ``show`` and ``diff`` tell of a checkpoint's progress: step, epoch, update, samples, strategy, ..."""
    names = ("step", "epoch", "update", "samples", "strategy", "workers", "global_batch_size")
    return {**{name: getattr(about, name) for name in names}, about.watched.metric: about.watched.value}
