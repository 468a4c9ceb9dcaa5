"""Disks of the simulated hosts: the parts of a snapshot, written by servers and fetched by a worker on another host."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.simulation.part_writer import Moment
from tests.simulation.world import Violation, World
from trainer.checkpoint.streamed import Streamed
from trainer.errors import RunFailed
from trainer.strategies.pserver.protocol import snapshot
from trainer.weights.server_files import part_name

WORKERS = 0
"""The host of the workers. A server is there, or on a host of its own."""
PIECE = 400
"""Bytes of a part that travel at once: a part has a few of them, and no more than ``MOST_PIECES``."""
MOST_PIECES = 64
MOST_SERVERS = 4


class Disks:
    """What the product's ``snapshot`` and ``snapshot_parts`` do, in memory, and what must hold of it.

    A snapshot that is complete has every server's part as that server has written it last. A server that is told that
    its part is elsewhere keeps none of it.

    Attributes:
        here: the host of the server whose turn it is. written: what each server has written last into a folder. parts:
        the same, as a server reads it. moments: what each server had when it was to save there. held: of a copy of a
        server that writes slowly: what it will have written. failures: of parts that will not come. may_fail: a save
        may fail because a host is out of reach. form: how what is no tensor is written: ``json``, or what has its
        ``dumps`` and ``loads``.
    """

    def __init__(self, world: World, form: Any) -> None:
        self.world, self.form = world, form
        self.here = WORKERS
        self.files: dict[tuple[int, str, str], bytes] = {}
        self.written: dict[tuple[str, int], bytes] = {}
        self.parts: dict[str, dict[int, SavedPart]] = {}
        self.held: list[Callable[[], None]] | None = None
        self.failures: dict[tuple[str, int], str] = {}
        self.complete_folders: set[str] = set()
        self.moments: dict[tuple[str, int], Moment] = {}
        self.may_fail = False

    # --- a server's ------------------------------------------------------------------------------------------------

    def write_part(self, folder: Path, server: int, tensors: Mapping[str, Streamed], meta: Mapping[str, Any]) -> None:
        """As :func:`snapshot.write_part`."""
        told = self.form.dumps(meta)
        kept = {name: torch.from_numpy(tensors[name].whole()) for name in sorted(tensors)}
        content = told.encode() + b"".join(tensor.numpy().tobytes() for tensor in kept.values())
        part = SavedPart(server, self.form.loads(told), kept)
        put = partial(self._put, self.here, str(folder), server, content, part)
        if self.held is None:
            put()
        else:
            self.held.append(put)

    def _put(self, host: int, folder: str, server: int, content: bytes, part: SavedPart) -> None:
        self.files[host, folder, part_name(server)] = self.written[folder, server] = content
        self.parts.setdefault(folder, {})[server] = part

    def leave_failure(self, folder: Path, server: int, why: str) -> bool:
        """As :func:`snapshot_parts.leave_failure`."""
        self.failures[str(folder), server] = why
        return True

    def begin_anew(self, folder: Path, server: int) -> None:
        """As :func:`snapshot_parts.begin_anew`."""
        self.failures.pop((str(folder), server), None)
        self.files.pop((self.here, str(folder), part_name(server)), None)

    def is_shared(self, folder: Path, name: str) -> bool:
        """As :func:`snapshot_parts.is_shared`."""
        return (self.here, str(folder), name) in self.files

    def piece(self, folder: Path, server: int, first: int) -> tuple[dict[str, Any], np.ndarray]:
        """As :func:`snapshot_parts.piece`."""
        content = self.files.get((self.here, str(folder), part_name(server)))
        if content is None:
            raise FileNotFoundError(f"{folder} has no part of server {server}")
        return _seal(content), np.frombuffer(
            content[first : first + max(PIECE, len(content) // MOST_PIECES)], dtype=np.uint8
        )

    def parts_of(self, folder: Path) -> list[SavedPart]:
        """As :func:`server_files.parts_of`."""
        return [part for _, part in sorted(self.parts[str(folder)].items())]

    def forget(self, folder: Path, server: int) -> None:
        """As :func:`snapshot_parts.forget`."""
        self.files.pop((self.here, str(folder), part_name(server)), None)

    # --- a worker's ------------------------------------------------------------------------------------------------

    def begin(self, folder: Path, rank: int) -> Path:
        """As :func:`snapshot.begin`."""
        own = snapshot.of_worker(folder, rank)
        for host, of, name in [*self.files]:
            if (host, of) == (WORKERS, str(own)):
                del self.files[host, of, name]
        return own

    def mark(self, folder: Path) -> str:
        """As :func:`snapshot_parts.mark`."""
        name = f"shared.{len(self.files)}.tmp"
        self.files[WORKERS, str(folder), name] = b""
        return name

    def receive(self, folder: Path, server: int, ask: Callable[[int], tuple[Mapping[str, Any], np.ndarray]]) -> None:
        """As :func:`snapshot_parts.receive`."""
        content = b""
        while True:
            seal, some = ask(len(content))
            if not some.size:
                break
            content += some.tobytes()
            self.world.moved = self.world.now
        if _seal(content) != dict(seal):
            raise RunFailed(f"the part of server {server} has come damaged from its host")
        self.world.injected["part fetched"] += 1
        self.files[WORKERS, str(folder), part_name(server)] = content

    def is_written(self, folder: Path, server: int) -> bool:
        """Whether a server's part is there."""
        return (WORKERS, str(folder), part_name(server)) in self.files

    def complete(self, folder: Path, servers: int, place: Path | None = None) -> None:
        """As :func:`snapshot.complete`, and what completes a checkpoint: the snapshot is complete now.

        Raises:
            Violation: it has not what the servers have written.
        """
        self.world.say(f"    the snapshot {place or folder} is complete")
        for server in range(servers):
            if self.files.get((WORKERS, str(folder), part_name(server))) != self.written.get((str(folder), server)):
                raise Violation(f"the snapshot {folder} has not what server {server} has written")
            self.moments[str(folder), server].check(self.parts[str(folder)][server], server)
        self.complete_folders.add(str(folder))

    def save_failed(self, folder: Path, name: str, why: str) -> None:
        """As :func:`trainer.checkpoint.writer.leave_failure` of a worker.

        Raises:
            Violation: no host was out of reach for longer than anybody waits; nothing else takes as long as a save may.
        """
        if not self.may_fail:
            raise Violation(f"there is no snapshot {folder}: {why}")
        for server in range(MOST_SERVERS):
            if part_name(server) == name:
                self.failures[str(folder), server] = why

    def check_end(self) -> None:
        """What must be so when a run has ended well and no worker was lost.

        Raises:
            Violation: it is not.
        """
        if left := [f"{folder} on host {host}" for host, folder, _ in self.files if host != WORKERS]:
            raise Violation(f"parts are left that were fetched: {left[0]}")


class SavedPart(dict[str, torch.Tensor]):
    """A server's part, as :class:`server_files.ServerFile`."""

    def __init__(self, server: int, meta: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        super().__init__(tensors)
        self.server, self.meta = server, meta
        self.version, self.life, self.layout = meta["version"], meta.get("life", 0), meta.get("layout", {})


def _seal(content: bytes) -> dict[str, Any]:
    return {"bytes": len(content), "checksum": hashlib.blake2b(content, digest_size=8).hexdigest()}
