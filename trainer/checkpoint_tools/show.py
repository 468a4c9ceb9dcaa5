"""``python -m trainer.checkpoints list``, ``show``, ``verify`` and ``fetch``; needs no torch."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from rich.table import Table

from trainer.checkpoint import durable_folder, store
from trainer.checkpoint.remote import Remote, Retired, named, nothing_at
from trainer.errors import UserError
from trainer.job.fetch_checkpoints import bring
from trainer.run_folder.folder_lock import FolderLock, refusal
from trainer.run_folder.reset_files import CARRIED
from trainer.terminal.screen import Screen
from trainer.wording import since, sized


def listed(path: Path) -> int:
    """Print a table of a run's checkpoints, one line each. Returns exit code 0."""
    table = _table_of("step", "epoch", "metric", "value", "size", "age")
    table.add_column("state", overflow="fold")
    found = store.all_in(path)
    latest = _latest(found[0].parent)
    for folder in found:
        state = _damage(folder) or "whole"
        state = f"{state}, latest" if folder.name == latest else state
        with contextlib.suppress(FileNotFoundError):
            row = (*_cells_of(folder), sized(durable_folder.bytes_of(folder)), _age(folder), state)
            if not _is_retired(folder):
                table.add_row(*row)
    screen = Screen()
    screen.print(str(found[0].parent))
    screen.print(table)
    return 0


def _table_of(*columns: str) -> Table:
    """An empty table with these columns for a list of checkpoints; all but the metric's are aligned to the right."""
    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="left" if column == "metric" else "right", no_wrap=True)
    return table


def _cells(about: store.About) -> tuple[str, str, str, str]:
    """A checkpoint's cells in the printed table: step, epoch, name of the watched metric and its value."""
    value = about.watched.value
    return str(about.step), str(about.epoch), about.watched.metric, "" if value is None else f"{value:.5g}"


def _cells_of(folder: Path) -> tuple[str, str, str, str]:
    """The cells of a checkpoint's folder; a damaged one has only the step."""
    step = folder.name.removeprefix("step-").lstrip("0") or "0"
    try:
        about = store.about(store.check(folder, verify=False))
    except UserError:
        return step, "", "", ""
    return _cells(about)


def _latest(checkpoints: Path) -> str:
    try:
        return (checkpoints / store.LATEST).read_text().strip()
    except (OSError, ValueError):
        return ""


def _is_retired(folder: Path) -> bool:
    """Whether a running run has removed this checkpoint since it was found."""
    return folder not in store.found(folder.parent)


def _damage(folder: Path) -> str:
    """Return what is damaged in a checkpoint, as ``FILE: reason``, or '' if it is whole by the sizes of its files."""
    try:
        store.check(folder, verify=False)
    except UserError as error:
        return _damaged(error)
    return ""


def _damaged(error: UserError) -> str:
    return f"{Path(error.what).name}: {error.why}"


def verified(path: Path) -> int:
    """Check every file of every checkpoint of a run, and print the result. Returns exit code 1 if one is damaged.

    Checkpoints that a running run removes meanwhile are not damaged.
    """
    screen, broken = Screen(), 0
    for folder in store.all_in(path):
        try:
            files = durable_folder.files(store.check(folder), store.FORMAT)
            screen.print(f"{folder.name}  whole  {len(files)} files")
        except (UserError, OSError) as error:
            if _is_retired(folder):
                screen.print(f"{folder.name}  retired meanwhile")
                continue
            if isinstance(error, OSError):
                raise
            broken = 1
            screen.print(f"{folder.name}  DAMAGED  {_damaged(error)}")
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
            ("MLflow run", about.run_id or "none"),
            ("written", f"{_age(folder)} ago"),
        ],
    )
    screen.facts(
        "Files",
        [(name, sized(durable_folder.bytes_of(folder, name))) for name in durable_folder.files(folder, store.FORMAT)],
    )
    screen.facts("Config", [])
    screen.print(yaml.safe_dump(dict(about.config), sort_keys=False, allow_unicode=True).rstrip())
    return 0


def _age(folder: Path) -> str:
    """The time since a checkpoint was completed, as ``5 min``; '' if it is incomplete."""
    marker = folder / durable_folder.MARKER
    if not marker.is_file():
        return ""
    return since(max(0.0, time.time() - marker.stat().st_mtime))


def position(about: store.About) -> Mapping[str, Any]:
    """The facts about a checkpoint that ``show`` and ``diff`` print: step, epoch, update, samples, strategy, ..."""
    names = ("step", "epoch", "update", "samples", "strategy", "workers", "global_batch_size")
    return {**{name: getattr(about, name) for name in names}, about.watched.metric: about.watched.value}


def listed_at(address: str) -> int:
    """Print a table of the checkpoints at a run's remote address, one line each. Returns exit code 0."""
    remote = Remote(address.rstrip("/"))
    if not (found := remote.found()):
        raise nothing_at(address)
    table = _table_of("step", "epoch", "metric", "value", "size")
    for name in found:
        with contextlib.suppress(Retired):
            table.add_row(*_cells(remote.about(name)), sized(remote.size(name)))
    screen = Screen()
    screen.print(remote.address)
    screen.print(table)
    return 0


def fetched(address: str, run_dir: Path) -> int:
    """Fetch a checkpoint from its remote address, with its run's files, into a local run folder. Returns exit code 0.

    Raises:
        UserError: there is none, a run works in that folder, or the folder holds files that the address lacks.
    """
    remote, step = named(address)
    run_dir = run_dir.expanduser().absolute()
    durable_folder.make_folder(run_dir)
    hold = FolderLock(run_dir)
    try:
        if not hold.take():
            raise refusal(hold, str(run_dir), "another folder")
        _check_its_own(remote, run_dir)
        screen = Screen()
        screen.print(f"fetches {remote.address}/{step} ({sized(remote.size(step))})")
        screen.print(str(bring(remote, step, run_dir)))
    finally:
        hold.leave()
    return 0


def _check_its_own(remote: Remote, run_dir: Path) -> None:
    """Check that a folder is of the run at the address, and that the address has the folder's newest checkpoint.

    Raises:
        UserError: the files of another run, or newer ones, would be overwritten.
    """
    there = store.remains(run_dir / store.CHECKPOINTS)
    own_marker = durable_folder.marker_of(there[0]) if there else b""
    if own_marker and own_marker == remote.marker(there[0].name):
        return
    if there:
        why = f"holds a run whose newest checkpoint is {there[0].name}, which is not the one at {remote.address}"
    elif any((run_dir / name).exists() for name in CARRIED):
        why = f"holds a run that has no checkpoint in common with {remote.address}"
    else:
        return
    raise UserError(str(run_dir), why, "another folder, or mv this one away first")
