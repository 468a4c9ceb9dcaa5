"""Downloads and unpacks data sets: checks whether their site answers, and words the warning or refusal if it does
not."""

from __future__ import annotations

import os
import shutil
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.config.schema import ArraysData, Flowers102Data
from trainer.errors import UserError
from trainer.host.https import fetch_file, unreachable

ARCHIVES = (".tgz", ".tar.gz")
"""Suffixes of archives that are unpacked; a single packed file (``.gz``) is read as it is."""


@dataclass(frozen=True)
class File:
    """A file of a downloadable data set: its name, and the size and checksum that it must have."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Site:
    """A web site that a data set is fetched from, and its files.

    Attributes:
        name: name of the set.
        address: https address of the folder with its files.
        folder: folder below ``data.root`` in which torchvision expects them.
        files: its files with SHA-256; torchvision has only MD5, and falls back to http.
    """

    name: str
    address: str
    folder: str
    files: tuple[File, ...]

    @property
    def megabytes(self) -> int:
        """Megabytes that a download from this site takes."""
        return round(sum(file.size for file in self.files) / 1e6)

    def stand_in(self, reason: str, instead: str) -> str:
        """Return the warning that other data replace this data set."""
        return (
            f"this is NOT {self.name}, which is not there and cannot be had ({reason}). {instead} instead; "
            "data.on_missing=error refuses, data.root=FOLDER uses yours."
        )


def absent(options: Flowers102Data | ArraysData, site: Site, folder: Path) -> str:
    """Return why a data set that is not in its folder cannot be downloaded, or '' if it can.

    Raises:
        UserError: it cannot, and ``data.on_missing`` is ``error``.
    """
    reason = unreachable(site.address + site.files[-1].name) if options.download else "data.download=false"
    if reason and options.on_missing == "error":
        raise UserError(
            f"data.root={options.root}",
            f"{site.name} is not in {folder} and cannot be downloaded ({reason})",
            f"data.root=FOLDER that holds {folder.name}/, or data.on_missing=embedded",
        )
    return reason


def fetch(options: Flowers102Data | ArraysData, site: Site, present: Callable[[], bool]) -> str:
    """Download a data set into its folder, one process at a time. Returns why that failed, or ''.

    Args:
        present: whether the set is there; another process may have downloaded it meanwhile.

    Raises:
        UserError: it failed, and ``data.on_missing`` is ``error``.
    """
    from filelock import FileLock

    root = Path(options.root)
    root.mkdir(parents=True, exist_ok=True)
    print(f"downloading {site.name} into {root} ({site.megabytes} MB)", flush=True)
    folder = root / site.folder
    try:
        with FileLock(root / f".{site.name.lower().replace(' ', '-')}.lock"):
            if present():
                return ""
            for file in site.files:
                fetch_file(site.address + file.name, folder / file.name, file.size, file.sha256)
            for archive in (file.name for file in site.files if file.name.endswith(ARCHIVES)):
                _unpack(folder / archive)
    except (OSError, tarfile.TarError) as error:
        reason = f"the download broke: {error}"
        if options.on_missing == "error":
            raise UserError(f"data.root={root}", reason, "data.on_missing=embedded") from error
        return reason
    return ""


def _unpack(archive: Path) -> None:
    """Unpack an archive into its folder. Whoever is killed meanwhile leaves no part of a file or folder in its
    place."""
    aside = archive.with_name(f".{archive.name}.unpacking")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        with tarfile.open(archive) as tar:
            filtered: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # from 3.11.4 on
            tar.extractall(aside, **filtered)  # its checksum was checked  # nosec B202
        _move_into(archive.parent, aside)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _move_into(folder: Path, aside: Path) -> None:
    """Move what a folder holds into another; a folder that is there is filled up."""
    for entry in sorted(aside.iterdir()):
        place = folder / entry.name
        if entry.is_dir() and place.is_dir():
            _move_into(place, entry)
        else:
            os.replace(entry, place)
