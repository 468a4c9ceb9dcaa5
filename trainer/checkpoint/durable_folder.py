"""A folder of files that exists complete or not at all, whenever the machine stops.

Files are written into ``<folder>.partial``, each with a seal (its size and checksum) beside it. When all are there, a
marker with all seals is written, and ``.partial`` is renamed to the folder's name. An older folder of that name is
``<folder>.previous`` until then; :func:`whole` finds it if the machine stops in between.
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
"""Longest file name, in bytes."""
TIMES = 10
"""Most tries to remove or replace a folder, while other processes write into it or replace it."""


def begin(folder: Path) -> Path:
    """Before a folder is written: remove files of an earlier, incomplete write. Returns the folder."""
    for _ in range(TIMES):
        remove(partial_of(folder))
        if not partial_of(folder).exists():
            break
    return folder


def write(folder: Path, name: str, write_to: Callable[[Path], Any]) -> None:
    """Write one file of a durable folder, with its seal. The folder exists after :func:`complete` only.

    Args:
        folder: an older folder of that name stays as it is until then.
        write_to: called with the path of a temporary file, which it writes.

    Raises:
        UserError: there is a folder of that name with other content.
    """
    check_own(folder)
    partial = partial_of(folder)
    if partial.is_symlink():
        raise UserError(str(partial), "it is a link, which is not followed", f"rm {quoted(str(partial))}")
    make_folder(partial)
    path = partial / name
    seal_of(path).unlink(missing_ok=True)  # an old seal must never lie beside a new file
    durable(path, write_to)
    durable_text(seal_of(path), json.dumps(fingerprint(path)))


def adopt(folder: Path, name: str, seal: Mapping[str, Any]) -> None:
    """Seal a file that is a hard link to a sealed file, without reading it again."""
    path = partial_of(folder) / name
    sync(path)
    sync(path.parent)
    durable_text(seal_of(path), json.dumps(seal))


def seals(folder: Path, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The seals of written files of a folder to come, by name.

    Raises:
        UserError: a file is incomplete.
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
    """Whether a file of the folder to come is complete."""
    path = partial_of(folder) / name
    return path.is_file() and seal_of(path).is_file()


def complete(folder: Path, names: Sequence[str], version: int, place: Path | None = None) -> None:
    """Write the marker and rename the folder: all written files appear at once. Called once, at the end.

    Args:
        version: of the files' format, which :func:`whole` compares.
        place: the final folder, if ``folder`` is one of several names for it; None: ``folder``.

    Raises:
        UserError: a file is missing or damaged, or there is a folder of that name with other content.
    """
    place = place or folder
    check_own(place)
    partial = partial_of(folder)
    durable_text(partial / MARKER, _marker(seals(folder, names), version))
    for path in partial.iterdir():  # seals, and incomplete files
        if path.name not in (*names, MARKER):
            path.unlink(missing_ok=True)
    put_in_place(partial, place)


def put_in_place(partial: Path, folder: Path) -> None:
    """Rename a folder whose files are synced to its final name; an older one is ``.previous`` meanwhile."""
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
    """Check a durable folder; returns it, or its ``.previous`` if the machine stopped while it was replaced.

    A folder that is replaced meanwhile is checked again.

    Args:
        verify: also compare each file's checksum; sizes are always compared.
        but: name of a file that is not checked.

    Raises:
        UserError: the folder is missing, incomplete, damaged, or of another format version; the error names the file.
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
    """The seals in a folder's marker, by file name.

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
    """Whether a value is a valid file name: no path, not ``.`` or ``..``, at most 255 bytes."""
    if not isinstance(name, str) or name in ("", ".", "..") or "/" in name or "\0" in name:
        return False
    try:
        return len(os.fsencode(name)) <= LONGEST_NAME
    except UnicodeError:
        return False


def bytes_of(folder: Path, name: str = "") -> int:
    """The bytes of all files in a folder, or of its file ``name``; 0 for missing ones."""
    paths = [folder / name] if name else list(folder.iterdir()) if folder.is_dir() else []
    return sum(path.stat().st_size for path in paths if path.is_file())


def marker_of(folder: Path) -> bytes:
    """The content of a folder's marker, which differs between folders; empty: it cannot be read."""
    try:
        return (folder / MARKER).read_bytes()
    except OSError:
        return b""


def check_own(folder: Path) -> None:
    """Refuse to replace a folder that has content and no marker.

    Raises:
        UserError: the folder is such a one.
    """
    if folder.exists() and not (folder / MARKER).is_file() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(str(folder), "it holds something that is not a snapshot", "a new or empty folder")


def refused(path: Path, why: str) -> UserError:
    """The error for a file of a durable folder that cannot be used."""
    return UserError(str(path), why, f"the folder of a complete snapshot, one that holds {MARKER}")


def partial_of(folder: Path) -> Path:
    """The folder in which a folder's files are written until it is complete."""
    return folder.with_name(f"{folder.name}.partial")


def life_folder(final: Path, life: str) -> Path:
    """The folder in which one life of a run writes the checkpoint ``final``.

    A host that is suspended while it writes may wake in the next life, while others write the checkpoint of the same
    update. The woken host still writes into the folder of its own life, which no process completes.

    Args:
        life: name of the life, which all its processes know; empty: the run can have one life only.
    """
    return final.with_name(f"{final.name}.{life}") if life else final


def final_folder(folder: Path) -> Path:
    """The checkpoint that a folder of :func:`life_folder` becomes."""
    return folder.with_name(folder.name.partition(".")[0])


def previous_of(folder: Path) -> Path:
    """The name of an older folder while it is replaced."""
    return folder.with_name(f"{folder.name}.previous")


def seal_of(path: Path) -> Path:
    """The file with the seal of a file, until the marker is written."""
    return path.with_suffix(".seal")


def fingerprint(path: Path) -> dict[str, Any]:
    """The seal of a file: its size and checksum."""
    with path.open("rb") as file:
        checksum = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
    return {"bytes": path.stat().st_size, "blake2b": checksum}


def make_folder(folder: Path) -> None:
    """Make a folder and its parents, with fsync; they may exist."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        sync(path.parent)


def remove(path: Path) -> None:
    """Remove a folder with its content, a file, or a link itself; errors are ignored."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
        return
    with contextlib.suppress(OSError):
        path.unlink()


def durable_text(path: Path, text: str) -> None:
    """Write a text file as :func:`durable` does."""
    durable(path, lambda temporary: temporary.write_text(text))


def durable(path: Path, write_to: Callable[[Path], Any]) -> None:
    """Write a file with fsync and rename, so that it exists complete or not at all. Only its owner can read it."""
    temporary = path.with_name(f"{path.name}.{secrets.randbelow(10**12)}.tmp")
    os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, PRIVATE))
    write_to(temporary)
    sync(temporary)
    os.replace(temporary, path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Call fsync for a file, or for the names in a folder."""
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
