"""Decides when a server writes only the changed rows into a checkpoint, beside a link to its last full part."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from trainer.checkpoint import durable_folder, store
from trainer.checkpoint.durable_folder import final_folder
from trainer.errors import UserError, why
from trainer.strategies.pserver.server.shard import Shard
from trainer.weights.server_files import ServerFile, full_name, part_name

LEAST = 1 << 26
"""Bytes of all rows; fewer are written in a moment."""
MOST = 0.5
"""The greatest share of an increment; a reader has to put both together."""


@dataclass(frozen=True)
class Full:
    """A full part that was linked into a checkpoint that is being written.

    Attributes:
        version: of the server, then. seal: its size and checksum.
    """

    version: int
    seal: Mapping[str, Any]


class Increments:
    """The last full part of a server, the checkpoints that have it, and how large the increments since then were.

    An increment has all changes since the last full part, so that it grows from checkpoint to checkpoint. A full part
    is written again as soon as an increment would be larger than the average of what was written since the last full
    part, with it: from there on each increment would raise the average.

    Args:
        wanted: False: each part is a full one.
    """

    def __init__(self, server: int, life: int, wanted: bool) -> None:
        self.server, self.life, self.wanted = server, life, wanted
        self._version = -1
        self.shares: list[float] = []
        self._homes: list[Path] = []

    def link(self, folder: Path, shard: Shard) -> Full | None:
        """Link the last full part into a checkpoint that is being written; None: write a full part, and no
        increment."""
        tables = shard.tables.values()
        if not self._homes or not all(table.since.counts for table in tables):
            return None
        share = sum(table.increment_bytes for table in tables) / _bytes_of(shard)
        if not self.pays(share):
            return None
        if (found := self._linked(folder)) is not None:
            self.shares.append(share)
            self._homes.append(final_folder(folder))
        return found

    def pays(self, share: float) -> bool:
        """Whether to write an increment of that share of a full part, and not a full part."""
        return share <= min(MOST, sum(self.shares) / len(self.shares))

    def _linked(self, folder: Path) -> Full | None:
        """Link the full part from the newest checkpoint that has it: some were given up or removed."""
        for home in reversed(self._homes):
            name = part_name(self.server) if home == self._homes[0] else full_name(self.server)
            if not (home / durable_folder.MARKER).is_file():
                continue
            try:
                part = ServerFile(self.server, home / name)
                if (part.life, part.version) != (self.life, self._version):
                    continue
                durable_folder.make_folder(durable_folder.partial_of(folder))
                os.link(home / name, durable_folder.partial_of(folder) / full_name(self.server))
                return Full(self._version, durable_folder.files(home, store.FORMAT)[name])
            except (OSError, UserError, LookupError, SafetensorError) as error:
                print(f"the part is written in full: {home / name} cannot be linked ({why(error)})", flush=True)
                return None
        return None

    def begin(self, folder: Path, shard: Shard) -> None:
        """Note that a full part is written into that checkpoint, and mark changes from now on."""
        counts = self.wanted and _bytes_of(shard) >= LEAST
        self._version, self.shares, self._homes = shard.version, [1.0], [final_folder(folder)] * counts
        for table in shard.tables.values():
            table.count_changes() if counts else table.since.end()


def _bytes_of(shard: Shard) -> int:
    """Bytes of all rows in a full part; at least 1."""
    return max(1, sum(len(table) * table.row_bytes for table in shard.tables.values()))
