"""Data at addresses of fsspec (``s3://``, ``gs://``, ``https://``, ``file://``): copied once to the user's cache.

CACHE/remote/blobs/HASH     one file; HASH of its address, size, and etag or time: a changed file is another blob
CACHE/remote/views/HASH/    hard links to the blobs of a folder, under their names; HASH of all of them
CACHE/remote/seen/HASH      the view that an address had when it was last reached

A blob is written under another name and renamed when it is whole. A view is made by one process at a time, and others
wait for it. After a kill, whole blobs are not copied again. If an address cannot be reached, the view in ``seen`` is
used, with a warning.
"""

from __future__ import annotations

import contextlib
import glob
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.checkpoint.remote import file_system, is_address, reason
from trainer.data.prepared import prepare_once
from trainer.data.source import digest_of
from trainer.errors import UserError
from trainer.host import cache
from trainer.host.cache import cache_root
from trainer.host.files import replace_file
from trainer.visible import one_line
from trainer.wording import counted, some

VERSIONS = ("ETag", "etag", "md5Hash", "LastModified", "Last-Modified", "last_modified", "mtime", "updated", "created")
"""Names of properties that change with a file's content, in the file systems of fsspec."""
TOGETHER = 64
"""Files that are asked for at a time."""
REACHABLE = "an address that can be reached with this account"
WEB = ("http", "https")
"""File systems that do not list folders."""


def public(address: str) -> str:
    """An address without what may be a secret: user, password and query."""
    if not is_address(address):
        return address
    scheme, _, rest = address.partition("://")
    place = rest.partition("?")[0]
    host, slash, path = place.partition("/")
    return one_line(f"{scheme}://{host.rpartition('@')[2]}{slash}{path}")


def local_path(path: str, key: str) -> str:
    """The path of a file on this machine: an address is copied first.

    Raises:
        UserError: there is no such file, or it cannot be copied.
    """
    if not is_address(path):
        return path
    folder, name = _split(path)
    return os.path.join(local_folder(folder, key, [name]), _name(name))


def local_images(paths: Sequence[str], root: str) -> tuple[str, dict[str, str]]:
    """The folder on this machine that paths of images lead from, and where images with an address of their own lie.

    Raises:
        UserError: an address cannot be reached.
    """
    by_folder: dict[str, list[tuple[str, str]]] = {}
    for path in filter(is_address, paths):
        folder, name = _split(path)
        by_folder.setdefault(folder, []).append((path, name))
    copies: dict[str, str] = {}
    for folder, found in by_folder.items():
        place = local_folder(folder, "data.image", sorted({name for _, name in found}))
        copies |= {path: os.path.join(place, _name(name)) for path, name in found}
    relative = sorted({path for path in paths if not is_address(path)})
    return (local_folder(root, "data.root", relative) if relative else root), copies


def _split(address: str) -> tuple[str, str]:
    """The folder of an address, and the rest: a name, and a query if there is one."""
    place, question, query = address.partition("?")
    folder, _, name = place.rpartition("/")
    return folder, name + question + query


def local_folder(path: str, key: str, names: Sequence[str] | None = None) -> str:
    """The path of a folder on this machine: the files at an address are copied first.

    Args:
        names: of the files in the folder that are copied, those that there are; None: all below it.

    Raises:
        UserError: there are no such files, or they cannot be copied.
    """
    if not is_address(path):
        return path
    what = f"{key}={public(path)}"
    seen = cache_root() / "remote" / "seen" / digest_of(path, names)
    files, root = file_system(path, what)
    try:
        infos = _infos(files, root, path, names)
    except FileNotFoundError:
        infos = {}
    except Exception as error:
        copy = seen.read_text() if seen.is_file() else ""
        if not copy or not Path(copy).is_dir():
            raise UserError(what, _public_reason(error, path), REACHABLE) from error
        print(f"ATTENTION: {public(path)} cannot be reached; the copy in {copy} is used", flush=True)
        return copy
    if not infos:
        raise UserError(what, f"there is no such {'file' if names else 'folder'}", f"{key}=ADDRESS of what is there")
    blobs = {name: _blob(path, name, info) for name, info in infos.items()}
    view = cache_root() / "remote" / "views" / digest_of(sorted((name, blob.name) for name, blob in blobs.items()))

    def make(folder: Path) -> dict[str, Any]:
        _copy(files, root, path, infos, blobs, what)
        for name, blob in blobs.items():
            place = folder / _name(name)
            place.parent.mkdir(parents=True, exist_ok=True)
            os.link(blob, place)
        return {"address": public(path), "files": len(blobs)}

    prepare_once(view, make)
    cache.make(seen.parent)
    replace_file(seen, str(view), private=True)
    return str(view)


def found_by(patterns: Sequence[str], key: str) -> list[Path]:
    """The files on this machine that patterns of ``glob`` mean, of paths and addresses, each once, sorted.

    Raises:
        UserError: an address cannot be reached, or its folder is a pattern.
    """
    found = {Path(path) for pattern in patterns if not is_address(pattern) for path in glob.glob(pattern)}
    by_folder: dict[str, set[str]] = {}
    for folder, name in map(_split, filter(is_address, patterns)):
        by_folder.setdefault(folder, set()).add(name)
    for folder, names in by_folder.items():
        what = f"{key}={public(folder)}"
        if glob.has_magic(folder):
            raise UserError(what, "the folder of an address is no pattern", f"{key}='ADDRESS/train-*.tar'")
        files, root = file_system(folder, what)
        exact = {name for name in names if not glob.has_magic(name.partition("?")[0])}
        try:
            for pattern in names - exact:
                exact |= {path.rsplit("/", 1)[-1] for path in files.glob(f"{root}/{pattern}")}
        except Exception as error:
            raise UserError(what, _public_reason(error, folder), REACHABLE) from error
        view = local_folder(folder, key, sorted(exact)) if exact else ""
        found |= {path for name in exact if (path := Path(view, _name(name))).is_file()}
    return sorted(found)


def _infos(files: Any, root: str, address: str, names: Sequence[str] | None) -> dict[str, Mapping[str, Any]]:
    """The files by their names below the folder, with what the file system says of them."""
    if names is None and address.partition(":")[0] in WEB:
        raise UserError(public(address), "a web site does not list its folders", "a table (data=table), or s3://...")
    if names is None or (len(names) > TOGETHER and address.partition(":")[0] not in WEB):
        listed = files.find(root, detail=True)
        found = {path[len(root) :].lstrip("/"): info for path, info in listed.items()}
        return found if names is None else {name: found[name] for name in names if name in found}
    known = {}
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            known[name] = files.info(f"{root}/{name}")
    return known


def _blob(address: str, name: str, info: Mapping[str, Any]) -> Path:
    """The path of a file in the cache."""
    version = [str(info[key]) for key in VERSIONS if info.get(key) is not None]
    return cache_root() / "remote" / "blobs" / digest_of(public(address), _name(name), info.get("size"), version)


def _name(name: str) -> str:
    """A file's name below its folder.

    Raises:
        UserError: it leads out of the folder.
    """
    name = name.partition("?")[0]
    if os.path.isabs(name) or ".." in Path(name).parts:
        raise UserError(one_line(name), "is a name that leads out of its folder")
    return name


def _copy(
    files: Any, root: str, address: str, infos: Mapping[str, Mapping[str, Any]], blobs: Mapping[str, Path], what: str
) -> None:
    """Copy the files that are not in the cache.

    Raises:
        UserError: one cannot be copied, or is cut short.
    """
    wanted = [name for name, blob in blobs.items() if not blob.is_file()]
    folder = cache_root() / "remote" / "blobs"
    cache.make(folder)
    said = _Progress(public(address), len(wanted), sum(int(infos[name].get("size") or 0) for name in wanted))
    for start in range(0, len(wanted), TOGETHER):
        names = wanted[start : start + TOGETHER]
        parts = [folder / f".part-{secrets.token_hex(8)}" for _ in names]
        try:
            files.get([f"{root}/{name}" for name in names], [str(part) for part in parts])
            short = [
                name
                for name, part in zip(names, parts, strict=True)
                if (size := infos[name].get("size")) is not None and part.stat().st_size != size
            ]
            if short:
                raise UserError(what, f"{counted(len(short), 'file')} came with another size: {some(short)}")
            for name, part in zip(names, parts, strict=True):
                os.replace(part, blobs[name])
            said.copied(len(names), sum(blobs[name].stat().st_size for name in names))
        except UserError:
            raise
        except Exception as error:
            raise UserError(what, _public_reason(error, address), REACHABLE) from error
        finally:
            for part in parts:
                part.unlink(missing_ok=True)


def _public_reason(error: BaseException, address: str) -> str:
    """Why an address fails, without its secrets."""
    if public(address) == address:
        return reason(error)
    return f"{type(error).__name__} (the message may hold a secret of the address)"


class _Progress:
    """Says how far a copy has come, at most every two seconds."""

    def __init__(self, address: str, files: int, size: int) -> None:
        self.address, self.files, self.size, self.done, self.bytes = address, files, size, 0, 0
        self.last = time.monotonic()
        if files:
            print(f"copying {counted(files, 'file')} ({size / 1e6:,.1f} MB) from {address} to the cache", flush=True)

    def copied(self, files: int, size: int) -> None:
        """Count files that are whole."""
        self.done, self.bytes = self.done + files, self.bytes + size
        if time.monotonic() - self.last > 2 and self.done < self.files:
            self.last = time.monotonic()
            print(f"copied {self.done} of {counted(self.files, 'file')}, {self.bytes / 1e6:,.1f} MB", flush=True)
