"""Deaths that come close together: a server dies with a worker, or again as it comes back, in the middle of what they
do then."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.simulation.servers import SimulatedServer
from trainer.strategies.pserver.protocol.messages import Verb

if TYPE_CHECKING:
    from tests.simulation.run import Play

AT = (Verb.HELLO, Verb.HELLO, Verb.PULL, Verb.PULL, Verb.MEET, Verb.SAVE, Verb.ADMIT, Verb.FENCE, Verb.LEASE, Verb.PUSH)
"""A server dies soon after such a message has come to it."""


class CloseDeaths:
    """What a death may be followed by.

    Attributes:
        victims: workers that were killed for it.
    """

    def __init__(self, play: Play) -> None:
        self.play, self.random = play, play.world.random
        self.victims: set[int] = set()

    def worker_died(self) -> None:
        """A server dies soon after a worker."""
        if self.random.random() < 0.7:
            server = self.random.choice(self.play.servers)
            self.play.world.after(2.0 * self.random.random() ** 2, self._kill, server)

    def server_is_back(self, server: SimulatedServer) -> None:
        """It dies again at a message, or at any time another one does, or a worker that it asks what it has."""
        chance, when = self.random.random(), 3.0 * self.random.random()
        if chance < 0.4:
            server.dies_at, server.die = self.random.choice(AT), self._kill
        elif chance < 0.55:
            self.play.world.after(when, self._kill, self.random.choice(self.play.servers))
        elif chance < 0.7:
            self.play.world.after(when, self._kill_worker)

    def _kill(self, server: SimulatedServer) -> None:
        """If it can be started again."""
        play = self.play
        if (
            play.server_returns.done < play.scenario.server_returns
            and not (server.dead or server.ended)
            and play.saved.newest is not None
        ):
            play.world.injected["kill server"] += 1
            play.kill_server(server)

    def _kill_worker(self) -> None:
        play = self.play
        worker = self.random.choice(play.workers)
        if len(play.came_back) < play.scenario.returns and not (worker.dead or worker.ended):
            play.world.injected["kill worker"] += 1
            self.victims.add(worker.rank)
            worker.kill()
