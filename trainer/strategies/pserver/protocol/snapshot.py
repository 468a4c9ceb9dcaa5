"""Persistables on disk: a folder with one file per server, an index, and a marker written last that vouches for all.

    server-<n>.safetensors   what server n keeps, and its JSON meta in the file's header
    index.json               format version, number of servers, tables, dense pieces, meta
    COMPLETE                 size and checksum of every other file, and a checksum of itself

Parts are written into ``<folder>.partial``, which takes the folder's name once it is complete. An older snapshot of that
name steps aside as ``<folder>.previous`` until then, where :func:`read` finds it should the machine stop in between.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from trainer.errors import UserError

FORMAT = 2
"""2: with mode, optimizer, dtype and the step of the schedule."""
MARKER, INDEX = "COMPLETE", "index.json"


@dataclass(frozen=True)
class Part:
    """One server's file; tensors are mapped into memory and read when asked for."""

    server: int
    path: Path

    @cached_property
    def _file(self) -> Any:
        return safe_open(self.path, framework="pt")  # type: ignore[no-untyped-call]

    @cached_property
    def meta(self) -> dict[str, Any]:
        """What was given to :func:`write_part`."""
        return dict(json.loads(self._file.metadata()["meta"]))

    def keys(self) -> list[str]:
        """Names of its tensors."""
        return list(self._file.keys())

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor by its name."""
        tensor: torch.Tensor = self._file.get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.tensor(name)


@dataclass(frozen=True)
class Snapshot:
    """A complete snapshot.

    Attributes:
        tables: by name, e.g. ``{"dim": 10, "dtype": "float32", "kernel": "adagrad", "rows": 1000}``, rows of all servers.
        dense: the pieces of dense parameters, as the servers described them, each with its ``server``.
        meta: what else server 0 gave; that of each server is in its part.
    """

    folder: Path
    servers: int
    tables: dict[str, dict[str, Any]]
    dense: list[dict[str, Any]]
    meta: dict[str, Any]
    parts: list[Part] = field(default_factory=list)


def begin(folder: Path) -> Path:
    """Before the servers write: forget parts of a save that was never completed. Returns the folder."""
    shutil.rmtree(partial_of(folder), ignore_errors=True)
    return folder


def write_part(folder: Path, server: int, tensors: dict[str, torch.Tensor], meta: dict[str, Any]) -> None:
    """Write what one server keeps. The snapshot exists after :func:`complete` only.

    Args:
        folder: of the snapshot to come; an older one there stays as it is until then.
        meta: JSON. ``tables`` (name -> dim, dtype, kernel, rows here) and ``dense`` (a list of pieces) enter the index.

    Raises:
        UserError: the folder holds something that is not a snapshot.
    """
    _own(folder)
    partial = partial_of(folder)
    partial.mkdir(parents=True, exist_ok=True)
    ready = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    header = {"meta": json.dumps(meta), "format_version": str(FORMAT), "server": str(server)}
    path = partial / part_name(server)
    sealed(path).unlink(missing_ok=True)  # the old seal must not vouch for the new file, nor the other way round
    _durable(path, lambda temporary: save_file(ready, temporary, metadata=header))
    _durable_text(sealed(path), json.dumps(fingerprint(path)))


def complete(folder: Path, servers: int) -> None:
    """Make the parts of servers 0..servers-1 the snapshot of that folder. Called once, after all parts are written.

    Raises:
        UserError: a part is missing or damaged, or two parts describe one table differently.
    """
    _own(folder)
    partial, previous = partial_of(folder), _previous(folder)
    names = [part_name(server) for server in range(servers)]
    for name in names:
        if not (partial / name).is_file() or not sealed(partial / name).is_file():
            raise _refused(partial / name, "server's part of the snapshot was not written to its end")
    seals = {name: json.loads(sealed(partial / name).read_text()) for name in names}
    for name, seal in seals.items():
        _check_size(partial / name, seal)
    metas = [Part(server, partial / name).meta for server, name in enumerate(names)]
    _durable_text(partial / INDEX, json.dumps(_index(partial, metas), indent=1))
    _durable_text(partial / MARKER, _marker({**seals, INDEX: fingerprint(partial / INDEX)}))
    for path in partial.iterdir():  # seals, and parts of a run with more servers that did not get this far
        if path.name not in (*names, INDEX, MARKER):
            path.unlink()
    _sync(partial)
    if folder.exists():
        shutil.rmtree(previous, ignore_errors=True)
        os.rename(folder, previous)
    os.rename(partial, folder)
    _sync(folder.parent)
    shutil.rmtree(previous, ignore_errors=True)


def read(folder: Path, verify: bool = True) -> Snapshot:
    """The complete snapshot of that folder.

    Args:
        verify: also read every file once and compare its checksum; sizes are always compared.

    Raises:
        UserError: there is none, it is incomplete or damaged, or of another format version; it names the file.
    """
    if not folder.exists() and (_previous(folder) / MARKER).is_file():
        folder = _previous(folder)
    if not folder.is_dir():
        why = "there is no such folder"
        if partial_of(folder).is_dir():
            why += f"; {partial_of(folder).name} holds parts of a snapshot that was not completed"
        raise _refused(folder, why)
    for name, seal in _files(folder).items():
        _check_size(folder / name, seal)
        if verify and fingerprint(folder / name) != seal:
            raise _refused(folder / name, "its content is not what was written: the checksum differs")
    index = json.loads((folder / INDEX).read_text())
    parts = [Part(server, folder / part_name(server)) for server in range(index["servers"])]
    try:
        for part in parts:
            part.keys()
    except SafetensorError as error:
        raise _refused(part.path, f"it cannot be read as safetensors ({error})") from None
    return Snapshot(folder, index["servers"], index["tables"], index["dense"], index["meta"], parts)


def _index(folder: Path, metas: list[dict[str, Any]]) -> dict[str, Any]:
    """What all parts hold together."""
    tables: dict[str, dict[str, Any]] = {}
    for server, meta in enumerate(metas):
        for name, table in meta.get("tables", {}).items():
            known = tables.setdefault(name, {**table, "rows": 0})
            if {**known, "rows": 0} != {**table, "rows": 0}:
                raise _refused(folder / part_name(server), f"table {name} is described otherwise than by other servers")
            known["rows"] += table["rows"]
    dense = [{**piece, "server": server} for server, meta in enumerate(metas) for piece in meta.get("dense", [])]
    meta = {key: value for key, value in metas[0].items() if key not in ("tables", "dense")} if metas else {}
    return {"format_version": FORMAT, "servers": len(metas), "tables": tables, "dense": dense, "meta": meta}


def _marker(files: dict[str, dict[str, Any]]) -> str:
    body = {"format_version": FORMAT, "files": files}
    return json.dumps({**body, "checksum": _digest(json.dumps(body, sort_keys=True).encode())}, indent=1)


def _files(folder: Path) -> dict[str, dict[str, Any]]:
    """Name -> size and checksum of each file, from a marker that is whole."""
    path = folder / MARKER
    if not path.is_file():
        raise _refused(path, "the file is missing: this is no snapshot, or one that was not completed")
    try:
        marker = json.loads(path.read_text())
        version, checksum = marker["format_version"], marker.pop("checksum")
    except (ValueError, TypeError, KeyError):
        raise _refused(path, "it is damaged") from None
    if version != FORMAT:
        raise _refused(path, f"format version {version}; this trainer reads version {FORMAT}")
    if checksum != _digest(json.dumps(marker, sort_keys=True).encode()):
        raise _refused(path, "it is damaged")
    return dict(marker["files"])


def _check_size(path: Path, seal: dict[str, Any]) -> None:
    if not path.is_file():
        raise _refused(path, "the file is missing")
    if path.stat().st_size != seal["bytes"]:
        raise _refused(path, f"{path.stat().st_size} bytes, but {seal['bytes']} were written")


def _own(folder: Path) -> None:
    """A folder with other things in it is not ours to replace."""
    if folder.exists() and not (folder / MARKER).is_file() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(str(folder), "it holds something that is not a snapshot", "a new or empty folder")


def _refused(path: Path, why: str) -> UserError:
    return UserError(str(path), why, "the folder of a complete snapshot, one that holds COMPLETE")


def part_name(server: int) -> str:
    """The file of a server."""
    return f"server-{server}.safetensors"


def partial_of(folder: Path) -> Path:
    """Where the parts are written."""
    return folder.with_name(f"{folder.name}.partial")


def _previous(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.previous")


def sealed(path: Path) -> Path:
    """Where size and checksum of a part wait for the marker."""
    return path.with_suffix(".seal")


def fingerprint(path: Path) -> dict[str, Any]:
    """Size and checksum of a file."""
    with path.open("rb") as file:
        checksum = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
    return {"bytes": path.stat().st_size, "blake2b": checksum}


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _durable_text(path: Path, text: str) -> None:
    _durable(path, lambda temporary: temporary.write_text(text))


def _durable(path: Path, write: Callable[[Path], Any]) -> None:
    """The whole file under its name, on the disk itself, or none."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    write(temporary)
    _sync(temporary)
    os.replace(temporary, path)
    _sync(path.parent)


def _sync(path: Path) -> None:
    """To the disk: a file's content, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
