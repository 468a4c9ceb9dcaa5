"""A copy of a server that writes its part while the server goes on, and what must be so of a part: it is of the moment
of its SAVE."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.simulation.world import Violation

if TYPE_CHECKING:
    from tests.simulation.disks import SavedPart
    from tests.simulation.servers import SimulatedServer

FULL = 0.05
"""So often the disk is full."""


class SlowWriter:
    """As trainer/strategies/pserver/server/part_writer.py: the copy has the server as it was when it began, writes for
    a while, and dies with the server."""

    def __init__(self, server: SimulatedServer) -> None:
        self.server, self.writes, self.count = server, False, 0

    def begin(self, write: Callable[[], None], failed: Callable[[str], bool]) -> None:
        """As :class:`PartWriter`."""
        if self.writes:
            raise Violation(f"{self.server.name} begins a part while it writes one")
        self.writes, self.count = True, self.count + 1
        world, seconds = self.server.world, self.server.scenario.disk_s * (0.2 + self.server.draw.random())
        world.injected["part written by a copy"] += 1
        world.after(seconds, self._ends, self._copied(write), failed)

    def _copied(self, write: Callable[[], None]) -> Callable[[], None]:
        """What a copy will have written."""
        disks = self.server.disks
        disks.held = []
        write()
        held, disks.held = disks.held, None

        def put() -> None:
            for one in held:
                one()

        return put

    def _ends(self, put: Callable[[], None], failed: Callable[[str], bool]) -> None:
        server = self.server
        if server.dead or server.ended:
            server.world.injected["copy killed with its server"] += 1
            return
        self.writes = False
        if server.draw.random() < FULL:
            failed("the disk is full")
        else:
            server.disks.here = server.host
            put()

    def busy(self) -> bool:
        """As :class:`PartWriter`."""
        return self.writes


@dataclass(frozen=True)
class Moment:
    """What a server had when it was to save: counted by the simulator, from the parameters themselves."""

    version: int
    vector: np.ndarray
    rows: dict[int, float]

    @staticmethod
    def of(server: SimulatedServer) -> Moment:
        """Now."""
        shard = server.machine.parameters.shard
        assert shard is not None
        rows: dict[int, float] = {}
        for table in shard.tables.values():
            ids = np.sort(table._index.ids())
            rows |= dict(zip(ids.tolist(), table._rows.numpy()[table._index.find(ids), 0].tolist(), strict=True))
        return Moment(shard.version, shard.vector.numpy().copy(), rows)

    def check(self, part: SavedPart, server: int) -> None:
        """A part has that and nothing else.

        Raises:
            Violation: it has not.
        """
        found = np.concatenate([np.zeros(0), *(part[name].numpy() for name in _in_order(part))])
        rows: dict[int, float] = {}
        for name in [name for name in part if name.startswith("table|") and name.endswith("|ids")]:
            values = part[name.removesuffix("ids") + "rows"][:, 0]
            rows |= dict(zip(part[name].tolist(), values.tolist(), strict=True))
        told = int(part.meta["version"])
        if told != self.version or not np.array_equal(found, self.vector) or rows != self.rows:
            raise Violation(
                f"the part of server {server} has version {told}, {found.tolist()} and rows {rows}; when it "
                f"was saved it was {self}"
            )


def _in_order(part: Any) -> list[str]:
    names = [(int(n.rpartition("|")[2]), n) for n in part if n.startswith("dense|")]
    return [name for _, name in sorted(names)]
