"""A launcher that starts killed servers again, and what must be so when one is back."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tests.simulation.servers import SimulatedServer
from tests.simulation.workers import step
from tests.simulation.world import Violation
from trainer.strategies.pserver.protocol.messages import AGAIN

if TYPE_CHECKING:
    from tests.simulation.run import Play

SOON_S, LATE_S = 1.0, 15.0
"""A process is there again after so long."""


class ServerReturns:
    """As trainer/launch/process_restarts.py."""

    def __init__(self, play: Play) -> None:
        self.play, self.world = play, play.world
        self.done = 0

    def died(self, server: SimulatedServer) -> None:
        """A server was killed: it is started again from its part of the newest checkpoint, or all ends."""
        play, world = self.play, self.world
        newest = play.saved.newest
        folder = None if newest is None else step(newest)
        if folder is None or self.done >= play.scenario.server_returns or not self._fits(server, folder):
            play.killed_servers += 1
            play.fails(f"{server.name} was killed")
            return
        self.done += 1
        world.injected["server started again"] += 1
        part = play.disks.parts_of(folder)[server.number]
        seconds = (LATE_S if world.random.random() < 0.1 else SOON_S) * world.random.random()
        world.after(seconds, self._begin, server, folder, max(0, server.pulse - part.version))

    def _fits(self, server: SimulatedServer, folder: Path) -> bool:
        part = self.play.disks.parts_of(folder)[server.number]
        return part.life == server.life or str(folder) == server.resume

    def _begin(self, before: SimulatedServer, folder: Path, lost: int) -> None:
        play, number, life = self.play, before.number, self.world.random.getrandbits(62) | 1
        if play.end:
            return
        self.world.say(f"{before.name} is started again from {folder.name}; {lost} updates are lost")
        pushes = before.machine.count["pushes"] - before.pushes_at[str(folder)]
        if pushes != lost:
            raise Violation(f"{before.name} has lost {pushes} updates, and its launcher says {lost}")
        server = play.servers[number] = play.make_server(number, life, str(folder), again=True)
        gone = np.flatnonzero((np.rint(before.applied()) > 0) & (np.rint(server.applied()) == 0)).tolist()
        server.dropped_before = before.dropped
        server.lost = before.lost | set(gone)
        if len(gone) > lost * MOST_PIECES:
            raise Violation(f"{server.name} lacks {len(gone)} pieces after {lost} updates")
        self.world.injected["piece lost with a server"] += len(gone)
        server.truth.pushes, server.truth.counted = before.truth.pushes, before.truth.counted
        play.board.set(AGAIN.format(number), f"{life} there")
        if play.close_deaths:
            play.close_deaths.server_is_back(server)


MOST_PIECES = 1000
