"""Deaths that come close together: a server dies with a worker, or again when all have gone back to a checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.simulation.servers import SimulatedServer
from trainer.strategies.pserver.protocol.messages import Verb

if TYPE_CHECKING:
    from tests.simulation.run import Play

AT = (Verb.HELLO, Verb.PULL, Verb.MEET, Verb.SAVE, Verb.ADMIT, Verb.FENCE, Verb.LEASE, Verb.PUSH)
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

    def all_are_back(self) -> None:
        """A server dies again at a message, or at any time, or a worker does."""
        chance, when, server = self.random.random(), 3.0 * self.random.random(), self.random.choice(self.play.servers)
        if chance < 0.4:
            server.dies_at, server.die = self.random.choice(AT), self._kill
        elif chance < 0.55:
            self.play.world.after(when, self._kill, server)
        elif chance < 0.7:
            self.play.world.after(when, self._kill_worker)

    def _kill(self, server: SimulatedServer) -> None:
        """If all can go back."""
        play = self.play
        if play.scenario.goes_back and not (server.dead or server.ended):
            play.world.injected["kill server"] += 1
            play.kill_server(server)

    def _kill_worker(self) -> None:
        play = self.play
        worker = self.random.choice(play.workers)
        if len(play.came_back) < play.scenario.returns and not (worker.dead or worker.ended):
            play.world.injected["kill worker"] += 1
            self.victims.add(worker.rank)
            worker.kill()
