"""A folder of files that is there whole or not at all, wherever the machine stops.

Files are written into ``<folder>.partial``, each with a seal (its size and checksum) beside it. Once all are there, a
marker that holds all seals is written, and ``.partial`` takes the folder's name. An older folder of that name steps
aside as ``<folder>.previous`` until then, where :func:`whole` finds it should the machine stop in between.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.errors import UserError
from trainer.host import json_text
from trainer.host.files import PRIVATE
from trainer.wording import quoted

MARKER = "COMPLETE"


LONGEST_NAME = 255
"""Bytes of a file's name."""
TIMES = 10
"""A folder is removed or replaced so often at most: others may leave a note in it, or replace it, meanwhile."""


def begin(folder: Path) -> Path:
    """Before anybody writes: forget files of a folder that was never completed. Returns the folder."""
    for _ in range(TIMES):
        remove(partial_of(folder))
        if not partial_of(folder).exists():
            break
    return folder


def write(folder: Path, name: str, write_to: Callable[[Path], Any]) -> None:
    """Write one file of a durable folder, with its seal. The folder exists after :func:`complete` only.

    Args:
        folder: an older one there stays as it is until then.
        write_to: is given the path of a temporary file.

    Raises:
        UserError: the folder holds something else.
    """
    check_own(folder)
    partial = partial_of(folder)
    if partial.is_symlink():
        raise UserError(str(partial), "it is a link, which is not followed", f"rm {quoted(str(partial))}")
    make_folder(partial)
    path = partial / name
    seal_of(path).unlink(missing_ok=True)  # the old seal must not vouch for the new file, nor the other way round
    durable(path, write_to)
    durable_text(seal_of(path), json.dumps(fingerprint(path)))


def adopt(folder: Path, name: str, seal: Mapping[str, Any]) -> None:
    """Seal a file that is a link to a file of another sealed folder, without reading it again."""
    path = partial_of(folder) / name
    sync(path)
    sync(path.parent)
    durable_text(seal_of(path), json.dumps(seal))


def seals(folder: Path, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Size and checksum of these files of the folder to come.

    Raises:
        UserError: one was not written to its end.
    """
    partial = partial_of(folder)
    for name in names:
        if not is_written(folder, name):
            raise refused(partial / name, "it was not written to its end")
    found = {name: json_text.read(seal_of(partial / name)) for name in names}
    for name, seal in found.items():
        _check_size(partial / name, seal)
    return found


def is_written(folder: Path, name: str) -> bool:
    """Whether this file of the folder to come was written to its end."""
    path = partial_of(folder) / name
    return path.is_file() and seal_of(path).is_file()


def complete(folder: Path, names: Sequence[str], version: int, place: Path | None = None) -> None:
    """Make a durable folder of the files that were written: all of them, under its name, at once. Called once, at the
    end.

    Args:
        version: of the files' format, which :func:`whole` asks for. place: the folder that it becomes, where several
        may write one and each under a name of its own; None: ``folder``.

    Raises:
        UserError: one is missing or damaged, or the place holds something else.
    """
    place = place or folder
    check_own(place)
    partial = partial_of(folder)
    durable_text(partial / MARKER, _marker(seals(folder, names), version))
    for path in partial.iterdir():  # seals, and files of somebody who did not get to the end
        if path.name not in (*names, MARKER):
            path.unlink(missing_ok=True)
    put_in_place(partial, place)


def put_in_place(partial: Path, folder: Path) -> None:
    """The folder to come, in which all files are synced, takes its name; one of that name steps aside until then."""
    previous = previous_of(folder)
    sync(partial)
    for left in reversed(range(TIMES)):
        try:
            if os.path.lexists(folder):
                remove(previous)
                os.rename(folder, previous)
            os.rename(partial, folder)
            break
        except OSError:  # another process may put its own there at the same moment
            if not left:
                raise
    sync(folder.parent)
    remove(previous)


def whole(folder: Path, version: int, verify: bool = True, but: str = "") -> Path:
    """The complete folder of that name, or the one before it where the machine stopped while it was replaced. Where it
    is replaced just now, the new one.

    Args:
        verify: also read every file once and compare its checksum; sizes are always compared.
        but: a file that is not looked at.

    Raises:
        UserError: there is none, it is incomplete or damaged, or of another format version; it names the file.
    """
    for _ in range(TIMES - 1):
        markers = marker_of(folder), marker_of(previous_of(folder))
        try:
            return _whole(folder, version, verify, but)
        except (UserError, OSError):
            if markers == (marker_of(folder), marker_of(previous_of(folder))):
                raise
    return _whole(folder, version, verify, but)


def _whole(folder: Path, version: int, verify: bool, but: str) -> Path:
    if not folder.exists() and (previous_of(folder) / MARKER).is_file():
        folder = previous_of(folder)
    if not folder.is_dir():
        why = "there is no such folder"
        if parts := sorted(folder.parent.glob(f"{glob.escape(folder.name)}.*partial")):
            why += f"; {parts[0].name} holds parts of a snapshot that was not completed"
        raise refused(folder, why)
    for name, seal in files(folder, version).items():
        if name == but:
            continue
        _check_size(folder / name, seal)
        if verify and fingerprint(folder / name) != seal:
            raise refused(folder / name, "its content is not what was written: the checksum differs")
    return folder


def files(folder: Path, version: int) -> Mapping[str, dict[str, Any]]:
    """The files of a durable folder, as its marker tells them: name -> size and checksum.

    Raises:
        UserError: the marker is missing or damaged, or of another format version.
    """
    path = folder / MARKER
    if not path.is_file():
        raise refused(path, "the file is missing: this is no snapshot, or one that was not completed")
    try:
        marker = json_text.read(path)
        found, checksum = marker.get("format_version"), marker.pop("checksum")
    except (ValueError, TypeError, KeyError, AttributeError):
        raise refused(path, "it is damaged") from None
    if found != version:
        raise refused(path, f"format version {found}; this trainer reads version {version}")
    if checksum != _digest(json.dumps(marker, sort_keys=True).encode()):
        raise refused(path, "it is damaged")
    names = marker.get("files")
    if not isinstance(names, dict) or not all(is_name(name) and isinstance(seal, dict) for name, seal in names.items()):
        raise refused(path, "it does not tell the names of files")
    return names


def is_name(name: object) -> bool:
    """Whether that can be the name of a file in a folder: no path, not the folder itself or the one above, of 255 bytes
    at most."""
    if not isinstance(name, str) or name in ("", ".", "..") or "/" in name or "\0" in name:
        return False
    try:
        return len(os.fsencode(name)) <= LONGEST_NAME
    except UnicodeError:
        return False


def bytes_of(folder: Path, name: str = "") -> int:
    """The size in bytes of a folder with all its files, or of the file ``name`` in it; 0 of what is not there."""
    paths = [folder / name] if name else list(folder.iterdir()) if folder.is_dir() else []
    return sum(path.stat().st_size for path in paths if path.is_file())


def marker_of(folder: Path) -> bytes:
    """The content of a folder's marker, which tells it from every other; empty: it has none that can be read."""
    try:
        return (folder / MARKER).read_bytes()
    except OSError:
        return b""


def check_own(folder: Path) -> None:
    """Refuse to write a durable folder in place of one that is there, holds something, and has no marker.

    Raises:
        UserError: there is such a folder.
    """
    if folder.exists() and not (folder / MARKER).is_file() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(str(folder), "it holds something that is not a snapshot", "a new or empty folder")


def refused(path: Path, why: str) -> UserError:
    """The error for a file of a sealed checkpoint folder that cannot be used: why, and that a complete one holds
    COMPLETE."""
    return UserError(str(path), why, f"the folder of a complete snapshot, one that holds {MARKER}")


def partial_of(folder: Path) -> Path:
    """The folder ``NAME.partial`` in which a checkpoint's files are written until it is sealed."""
    return folder.with_name(f"{folder.name}.partial")


def previous_of(folder: Path) -> Path:
    """Where an older folder of that name steps aside."""
    return folder.with_name(f"{folder.name}.previous")


def seal_of(path: Path) -> Path:
    """Where size and checksum of a file wait for the marker."""
    return path.with_suffix(".seal")


def fingerprint(path: Path) -> dict[str, Any]:
    """Size and checksum of a file."""
    with path.open("rb") as file:
        checksum = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
    return {"bytes": path.stat().st_size, "blake2b": checksum}


def make_folder(folder: Path) -> None:
    """Make a checkpoint's folder and those that it is in, with fsync; they may be there."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        sync(path.parent)


def remove(path: Path) -> None:
    """Remove a checkpoint's folder with all in it, a file, or a link itself; what cannot be removed stays."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
        return
    with contextlib.suppress(OSError):
        path.unlink()


def durable_text(path: Path, text: str) -> None:
    """Write a text file beside a checkpoint with fsync and rename, as :func:`durable`."""
    durable(path, lambda temporary: temporary.write_text(text))


def durable(path: Path, write_to: Callable[[Path], Any]) -> None:
    """Write a checkpoint's file with fsync and rename: under its name the whole file is on the disk, or none.
    It is for its owner's eyes alone, as the run's config.yaml is."""
    temporary = path.with_name(f"{path.name}.{secrets.randbelow(10**12)}.tmp")
    os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, PRIVATE))
    write_to(temporary)
    sync(temporary)
    os.replace(temporary, path)
    sync(path.parent)


def sync(path: Path) -> None:
    """fsync of a checkpoint's file, or of the names in its folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _marker(found: Mapping[str, Any], version: int) -> str:
    body = {"format_version": version, "files": found}
    return json.dumps({**body, "checksum": _digest(json.dumps(body, sort_keys=True).encode())}, indent=1)


def _check_size(path: Path, seal: Mapping[str, Any]) -> None:
    if not path.is_file():
        raise refused(path, "the file is missing")
    if (size := path.stat().st_size) != (written := seal.get("bytes")):
        raise refused(path, f"{size} bytes, but {written} were written")


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()
