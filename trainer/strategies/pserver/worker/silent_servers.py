"""Finds a server that is gone while a worker waits for a checkpoint, for which it has far more patience than usual.

On one host the launcher sees that a server has ended. Of a host that is cut off, or has no power, nobody tells. So
servers on other hosts are asked for a sign of life.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from trainer.errors import Missing
from trainer.strategies.pserver.protocol.messages import SAVE_S, Message, Verb, within

if TYPE_CHECKING:
    from trainer.strategies.pserver.worker.client import Client

ASKED_AFTER = 0.25
"""A server that says nothing is asked after this part of the patience with it."""


class SilentServers:
    """When a worker has last heard of each server.

    Args:
        patience_s: so long a server may say nothing, unless it has left a note that it writes.
    """

    def __init__(self, client: Client, patience_s: float) -> None:
        self.client, self.patience_s = client, patience_s
        self.times = [0.0] * client.connections.count
        self.writes_since: dict[int, float] = {}
        """When this worker first found a server's note that it writes, of those of which it has heard nothing since."""

    def heard(self, server: int) -> None:
        """A server has answered something."""
        self.times[server] = self.client.connections.now()
        self.writes_since.pop(server, None)

    def begin(self) -> None:
        """This worker begins to wait: what was before is no silence."""
        self.times = [self.client.connections.now()] * len(self.times)

    def away(self, seconds: float) -> None:
        """Add the seconds in which this worker took nothing; those are no server's silence."""
        self.times = [time + seconds for time in self.times]
        self.writes_since = {server: since + seconds for server, since in self.writes_since.items()}

    def write(self, servers: Iterable[int]) -> set[int]:
        """Those of these servers that answer nobody because they write, according to their notes. The note of one that
        is gone stays:
        it counts for :data:`SAVE_S`, however many requests wait for that server meanwhile."""
        now, found = self.client.connections.now(), self.client.connections.saving(servers)
        return {server for server in found if now - self.writes_since.setdefault(server, now) < SAVE_S}

    def check(self, patience_s: float) -> None:
        """In a wait that may take so long: ask servers that say nothing, among those that this worker waits for.

        Raises:
            Missing: one has said nothing for too long.
        """
        client = self.client
        if patience_s <= self.patience_s or not client.connections.far:
            return
        now = client.connections.now()
        awaited = sorted({request.server for request in client.under_way.values()})
        silent = [server for server in awaited if now - self.times[server] > self.patience_s]
        writing = self.write(silent) if silent else set()
        if gone := [client.names[server] for server in silent if server not in writing]:
            who = ", ".join(gone)
            raise Missing(
                f"{who} said nothing to worker {client.rank} {within(self.patience_s, client.timeout_s)}", gone
            )
        for server in writing:
            self.times[server] = now
        for server in awaited:
            if now - self.times[server] > ASKED_AFTER * self.patience_s and not self._is_asked(server):
                client.ask(server, Message(Verb.STATS))

    def _is_asked(self, server: int) -> bool:
        asked = [r for r in self.client.under_way.values() if r.server == server and r.message.verb == Verb.STATS]
        return bool(asked)
