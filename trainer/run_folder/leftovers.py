"""The files that a run leaves in its folder; they are removed before another run, which must not read them."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trainer.errors import UserError
from trainer.host.files import PART

FILES = re.compile(
    r"(metrics|sent)\.jsonl|(result|status|tracking|plan|model|classes|lives)\.json|config\.yaml|example\.npz|skeleton\.pkl|predictions\.csv"
    r"|model(_ema)?\.safetensors|(server|status|profile)\.\d+\.json|nonfinite(\.\d+)?\.json|trace\.\d+\.json\.gz|(worker|server)log\.\d+"
    r"|ledger\.\d+\.tsv(\.before\.\d+)?"
    r"|(curves|servers)\.png|(best_)?((confusion|scatter|labels)\.png|per_(class|label)\.csv|mistakes\.(csv|png))|validation\.(last|best)\.npz"
)
"""Files in a run's folder, or in ``host.N`` below it."""
CHECKPOINTS, BEST = "checkpoints", re.compile(r"best\.safetensors|latest")
SNAPSHOT = re.compile(r"(persistables(\.by-\d+)?|(aside-)?step-\d{9,}(\.[0-9a-f]{16})?)(\.partial|\.previous)?")
PIECE = re.compile(
    r"((server|worker|full)-\d+|best)\.(safetensors(\.failed)?|seal)|(index|checkpoint)\.(json|seal)|COMPLETE|.*\.\d+\.tmp|\.tmp\w{6}"
)
"""Files in a snapshot of the parameter servers, or in a checkpoint."""
TRIALS = ".batch_size"
"""Folder of failed trials (data.batch_size=auto)."""
HYDRA = ".hydra"
HOST = re.compile(r"host\.(\d+)")
WRITTEN_TO = ("predict.output", "resume.path")
"""Keys whose value is no file to read, or a file that stays."""


def clear(run_dir: Path, hosts: int | None = None) -> bool:
    """Remove the files of an earlier run, following no link; returns whether there were any.

    Args:
        hosts: number of hosts of the run that begins; their launchers clear their own folders ``host.N``. None:
            ``run_dir`` is such a folder.
    """
    found = False
    for checkpoints in _folders(run_dir, re.compile(CHECKPOINTS)):
        for snapshot in _folders(checkpoints, SNAPSHOT):
            found |= _clear_files(snapshot, PIECE)
            _drop(snapshot)
        found |= _clear_files(checkpoints, BEST)
        _drop(checkpoints)
    for trials in _folders(run_dir, re.compile(re.escape(TRIALS))):
        shutil.rmtree(trials)
        found = True
    for host in _folders(run_dir, HOST):
        if hosts is not None and int(host.name.partition(".")[2]) >= hosts:
            found |= _clear_files(host, FILES)
            _drop(host)
    return _clear_files(run_dir, FILES) or found  # last: status.json shows that the checkpoints may be removed


def check_reads(config: Mapping[str, Any], run_dir: Path, place: str) -> None:
    """Refuse a run whose config names a file that the run would remove first.

    Args:
        place: the key of the folder: ``hydra.run.dir``, or ``hydra.sweep.dir`` for all jobs of a sweep.

    Raises:
        UserError: the config names such a file.
    """
    folder = os.path.realpath(run_dir)
    for key, value in _texts(config):
        if key in WRITTEN_TO or not _there(value):
            continue
        below = Path(os.path.realpath(os.path.expanduser(value)))
        parts = below.relative_to(folder).parts if below.is_relative_to(folder) else ()
        if place == "hydra.sweep.dir" and parts and parts[0].isdecimal():
            parts = parts[1:] or (CHECKPOINTS,)
        if _of_a_run(parts) or (key == "weights" and below.is_relative_to(folder)):
            raise UserError(
                f"{key}={value}", f"lies in the run's own folder {run_dir}, which is written anew", f"{place}=ANOTHER"
            )


def _texts(node: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield each text in a nested config with its key."""
    if isinstance(node, str):
        yield key, node
    elif isinstance(node, Mapping):
        for name, value in node.items():
            yield from _texts(value, f"{key}.{name}" if key else str(name))
    elif isinstance(node, (list, tuple)):
        for number, value in enumerate(node):
            yield from _texts(value, f"{key}[{number}]")


def _there(value: str) -> bool:
    """Whether a path exists; so does a snapshot of which only ``.previous`` exists."""
    path = os.path.expanduser(value)
    return bool(value) and (os.path.lexists(path) or os.path.lexists(f"{path}.previous"))


def _of_a_run(parts: tuple[str, ...]) -> bool:
    """Whether a path below a run's folder is, contains or lies in a file that a run leaves."""
    if not parts:
        return False
    if parts[0] == CHECKPOINTS:
        return len(parts) == 1 or bool(BEST.fullmatch(parts[1]) or SNAPSHOT.fullmatch(parts[1]))
    return parts[0] == HYDRA or bool(HOST.fullmatch(parts[0]) or (len(parts) == 1 and FILES.fullmatch(parts[0])))


def _clear_files(folder: Path, names: re.Pattern[str]) -> bool:
    """Remove files and links of these names, and their temporary parts; folders stay."""
    named = [path for path in _entries(folder) if names.fullmatch(PART.sub(r"\1", path.name))]
    found = [path for path in named if path.is_symlink() or path.is_file()]
    for path in found:
        path.unlink(missing_ok=True)
    return bool(found)


def _folders(folder: Path, names: re.Pattern[str]) -> list[Path]:
    """The folders of these names, without links."""
    return [path for path in _entries(folder) if names.fullmatch(path.name) and path.is_dir() and not path.is_symlink()]


def _entries(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _drop(folder: Path) -> None:
    """Remove a folder if it is empty."""
    with contextlib.suppress(OSError):
        folder.rmdir()
