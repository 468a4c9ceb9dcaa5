"""Persistables on disk: a folder with one file per server, an index, and a marker written last that vouches for all.

    server-<n>.safetensors   what server n keeps, and its JSON meta in the file's header
    index.json               format version, number of servers, tables, dense pieces, meta
    COMPLETE                 size and checksum of every other file, and a checksum of itself

Parts are written into ``<folder>.by-<rank>.partial``, which takes the folder's name once it is complete. An older
snapshot of that name steps aside as ``<folder>.previous`` until then, where :func:`read` finds it should the machine
stop in between.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from trainer.checkpoint import durable_folder, streamed
from trainer.checkpoint.streamed import Streamed
from trainer.errors import why
from trainer.host import json_text
from trainer.weights.server_files import ServerFile, part_name

FORMAT = 2
"""2: with mode, optimizer, dtype and the step of the schedule."""
INDEX = "index.json"
INDEXED = {"servers": int, "tables": dict, "dense": list, "meta": dict}
MOST_SERVERS = 1 << 16


@dataclass(frozen=True)
class Snapshot:
    """A complete snapshot.

    Attributes:
        tables: by name, e.g. ``{"dim": 10, "dtype": "float32", "kernel": "adagrad", "rows": 1000}``, rows of all
        servers. dense: the pieces of dense parameters, as the servers described them, each with its ``server``. meta:
        what else server 0 gave; that of each server is in its part.
    """

    folder: Path
    servers: int
    tables: dict[str, dict[str, Any]]
    dense: list[dict[str, Any]]
    meta: dict[str, Any]
    parts: list[ServerFile] = field(default_factory=list)


def begin(folder: Path, rank: int) -> Path:
    """Return the folder into which a worker has the servers write, before they do. What it has left there is
    removed."""
    return durable_folder.begin(of_worker(folder, rank))


def of_worker(folder: Path, rank: int) -> Path:
    """The folder in which a worker makes a snapshot. Each has one of its own: one that was stopped and taken for lost
    may wake while another one saves in its place."""
    return folder.with_name(f"{folder.name}.by-{rank}")


def write_part(folder: Path, server: int, tensors: Mapping[str, Streamed], meta: Mapping[str, Any]) -> None:
    """Write one server's part of a snapshot; the snapshot exists only after :func:`complete`.

    Args:
        folder: that :func:`begin` has returned.
        meta: JSON. ``tables`` (name -> dim, dtype, kernel, rows here) and ``dense`` (a list of pieces) enter the index.

    Raises:
        UserError: the folder holds something that is not a snapshot.
    """
    header = {"meta": json.dumps(meta), "format_version": str(FORMAT), "server": str(server)}
    durable_folder.write(folder, part_name(server), lambda path: streamed.write(path, tensors, header))


def complete(written: Path, servers: int, folder: Path) -> None:
    """Make the parts of servers 0..servers-1 the snapshot of a folder; called once, after all parts are written.

    Args:
        written: the folder that :func:`begin` has returned.

    Raises:
        UserError: a part is missing or damaged, or two parts describe one table differently.
    """
    durable_folder.check_own(folder)
    names = [part_name(server) for server in range(servers)]
    durable_folder.seals(written, names)
    partial = durable_folder.partial_of(written)
    metas = [ServerFile(server, partial / part_name(server)).meta for server in range(servers)]
    index = json.dumps(_index(partial, metas), indent=1)
    durable_folder.write(written, INDEX, lambda path: path.write_text(index))
    durable_folder.complete(written, [*names, INDEX], FORMAT, folder)


def read(folder: Path, verify: bool = True) -> Snapshot:
    """Open the complete snapshot of a folder.

    Args:
        verify: also read every file once and compare its checksum; sizes are always compared.

    Raises:
        UserError: there is none, it is incomplete or damaged, or of another format version; it names the file.
    """
    folder = durable_folder.whole(folder, FORMAT, verify)
    servers, tables, dense, meta = _read_index(folder)
    parts = [ServerFile(server, folder / part_name(server)) for server in range(servers)]
    try:
        for part in parts:
            part.keys()
    except SafetensorError as error:
        raise durable_folder.refused(part.path, f"it cannot be read as safetensors ({error})") from None
    return Snapshot(folder, servers, tables, dense, meta, parts)


def _read_index(folder: Path) -> tuple[int, dict[str, Any], list[Any], dict[str, Any]]:
    """What ``index.json`` tells, whoever has sealed it: the number of servers, tables, dense pieces, meta.

    Raises:
        UserError: it is damaged, or tells less than a snapshot does.
    """
    path = folder / INDEX
    try:
        index = json_text.read_object(path)
    except (OSError, ValueError) as error:
        raise durable_folder.refused(path, f"it cannot be read ({why(error)})") from None
    for key, kind in INDEXED.items():
        if type(index.get(key)) is not kind:
            raise durable_folder.refused(path, f"it tells no {key}")
    servers, tables, pieces, meta = (index[key] for key in INDEXED)
    complete = all(isinstance(one, dict) and {"num_rows", "dim", "kernel"} <= one.keys() for one in tables.values())
    complete &= all(
        isinstance(one, dict) and type(one.get("stop")) is int and isinstance(one.get("name"), str) for one in pieces
    )
    if not complete:
        raise durable_folder.refused(path, "a table or a piece of the parameters is not described")
    names = {part_name(server) for server in range(min(servers, MOST_SERVERS))}
    if servers < 1 or not names <= durable_folder.files(folder, FORMAT).keys():
        raise durable_folder.refused(path, f"the parts of {servers} servers are not there")
    return servers, tables, pieces, meta


def _index(folder: Path, metas: list[dict[str, Any]]) -> dict[str, Any]:
    """What all parts hold together."""
    tables: dict[str, dict[str, Any]] = {}
    for server, meta in enumerate(metas):
        for name, table in meta.get("tables", {}).items():
            known = tables.setdefault(name, {**table, "rows": 0})
            if {**known, "rows": 0} != {**table, "rows": 0}:
                raise durable_folder.refused(
                    folder / part_name(server), f"table {name} is described otherwise than by other servers"
                )
            known["rows"] += table["rows"]
    dense = [{**piece, "server": server} for server, meta in enumerate(metas) for piece in meta.get("dense", [])]
    meta = {key: value for key, value in metas[0].items() if key not in ("tables", "dense", "layout")} if metas else {}
    return {"format_version": FORMAT, "servers": len(metas), "tables": tables, "dense": dense, "meta": meta}
