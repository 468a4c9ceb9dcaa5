"""Refuses a run's folder that contains links, because files written there would land elsewhere."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from trainer.errors import UserError
from trainer.wording import quoted

WRITTEN = tuple(
    """
    *.json *.jsonl *.yaml *.png *.csv *.npz *.pkl *.gz *.safetensors workerlog.* serverlog.* checkpoints host.*
    .hydra .lock
    """.split()
)
"""Names that a run or a sweep writes; links with other names do not matter."""


def check_run_folder(folder: Path, hydras: str | None = None, key: str = "hydra.run.dir") -> None:
    """Refuse a run's folder that contains links through which files would land elsewhere.

    Args:
        hydras: the name of Hydra's folder in it (``hydra.output_subdir``).

    Raises:
        UserError: it has links under names that a run writes.
    """
    for link in _links(folder, (*WRITTEN, hydras) if hydras else WRITTEN):
        raise UserError(
            f"{key}={folder}",
            f"has a link, {link.relative_to(folder)} -> {os.readlink(link)}, and a run does not write through links",
            f"rm {quoted(str(link))}, or {key}=ANOTHER",
        )


def check_sweep_folder(folder: Path, jobs: Sequence[Path], hydras: str | None = None) -> None:
    """Refuse a sweep's folder that contains links, itself or in its jobs' folders.

    Raises:
        UserError: see :func:`check_run_folder`.
    """
    for one in [folder, *jobs]:
        if one.is_symlink() and one != folder:
            raise UserError(
                f"hydra.sweep.dir={folder}",
                f"has a link, {one.name} -> {os.readlink(one)}, and a run does not write through links",
                f"rm {quoted(str(one))}, or hydra.sweep.dir=ANOTHER",
            )
        check_run_folder(one, hydras, "hydra.sweep.dir")


def _links(folder: Path, written: Sequence[str]) -> Iterator[Path]:
    for path in _entries(folder):
        if not any(path.match(pattern) for pattern in written):
            continue
        if path.is_symlink():
            yield path
        elif path.is_dir():
            for above, folders, files in os.walk(path):  # which enters no link
                yield from (one for name in [*folders, *files] if (one := Path(above, name)).is_symlink())


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:  # missing, or no folder: reported where the folder is made
        return []
