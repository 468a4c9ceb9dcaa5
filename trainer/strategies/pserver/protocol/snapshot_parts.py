"""Parts of a snapshot that are written by servers and completed by a worker, also where the two do not share the
folder."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from trainer.checkpoint import durable_folder, writer
from trainer.errors import RunFailed
from trainer.host import json_text
from trainer.weights.server_files import full_name, part_name

PIECE = 8 << 20
"""Bytes of a file that travel at once."""
DONE_WITH = -1
"""Asked for instead of a position: the part is where it belongs, and can be removed."""
MARK = re.compile(r"shared\.\d+\.tmp")


def mark(folder: Path) -> str:
    """Leave a file of a random name where the parts go, by which a server sees that it shares the folder. Returns the
    name."""
    partial = durable_folder.partial_of(folder)
    partial.mkdir(parents=True, exist_ok=True)
    name = f"shared.{secrets.randbelow(10**12)}.tmp"
    (partial / name).touch()
    return name


def is_shared(folder: Path, name: str) -> bool:
    """Whether this server sees the file that :func:`mark` left in the folder."""
    return MARK.fullmatch(name) is not None and (durable_folder.partial_of(folder) / name).is_file()


def piece(folder: Path, server: int, first: int) -> tuple[dict[str, Any], np.ndarray]:
    """Size and checksum of a snapshot part, and its bytes from ``first`` on, at most :data:`PIECE`."""
    path = durable_folder.partial_of(folder) / part_name(server)
    seal = dict(json_text.read(durable_folder.seal_of(path)))
    with path.open("rb") as file:
        file.seek(first)
        return seal, np.frombuffer(file.read(PIECE), dtype=np.uint8)


def forget(folder: Path, server: int) -> None:
    """Remove a snapshot part that is elsewhere now, and its folders if nothing else is in them."""
    path = durable_folder.partial_of(folder) / part_name(server)
    for file in (path, durable_folder.seal_of(path)):
        file.unlink(missing_ok=True)
    with suppress(OSError):
        path.parent.rmdir()
        folder.parent.rmdir()


def receive(folder: Path, server: int, ask: Callable[[int], tuple[Mapping[str, Any], np.ndarray]]) -> None:
    """Fetch a snapshot part from another host piece by piece, and write it with its seal.

    Args:
        ask: for the part's seal and its bytes from a position on; none after its end.

    Raises:
        RunFailed: what came is not what was written there.
    """
    path, seal = durable_folder.partial_of(folder) / part_name(server), dict[str, Any]()

    def fetch(temporary: Path) -> None:
        with temporary.open("wb") as file:
            while True:
                sealed, some = ask(file.tell())
                seal.update(sealed)
                if not some.size:
                    break
                file.write(some.data)
        if durable_folder.fingerprint(temporary) != seal:
            raise RunFailed(f"the part of server {server} has come damaged from its host: {path}")

    durable_folder.durable(path, fetch)
    durable_folder.durable_text(durable_folder.seal_of(path), json.dumps(seal))


def leave_failure(folder: Path, server: int, why: str) -> bool:
    """Tell the worker that completes a snapshot that a server's part will not come; returns False if that cannot be
    told now."""
    return writer.leave_failure(folder, part_name(server), failure(server, why))


def failure(server: int, why: str) -> str:
    """The sentence about a part of a snapshot that its server could not write."""
    return f"{part_name(server)} cannot be written: {why}"


def begin_anew(folder: Path, server: int) -> None:
    """The part is about to be written, perhaps not for the first time: who completes the checkpoint takes neither what
    was there nor what :func:`leave_failure` has left."""
    path, full = (durable_folder.partial_of(folder) / name for name in (part_name(server), full_name(server)))
    seals = durable_folder.seal_of(path), durable_folder.seal_of(full)
    for file in (*seals, full, writer.failure_of(folder, path.name)):
        file.unlink(missing_ok=True)
