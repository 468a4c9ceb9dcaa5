"""Finds a server that is gone while a worker waits for a checkpoint, with far more patience than usual.

On one host the launcher notices the end of a server. Nobody reports a host without power or network. So a worker asks
servers on other hosts for a sign of life.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from trainer.errors import Missing
from trainer.strategies.pserver.protocol.messages import MARGIN_S, SAVE_S, Verb, within
from trainer.strategies.pserver.worker.connections_contract import Connections
from trainer.strategies.pserver.worker.requests import Request

ASKED_AFTER = 0.25
"""Part of the patience after which a silent server is asked."""


class SilentServers:
    """The times at which a worker has last heard from each server.

    Args:
        rank: the worker. names: of the servers, in messages.
        timeout_s: a server may say nothing for so long (and a margin), unless it has left a note that it writes.
    """

    def __init__(self, connections: Connections, rank: int, names: Sequence[str], timeout_s: float) -> None:
        self.connections, self.rank, self.names, self.timeout_s = connections, rank, names, timeout_s
        self.patience_s = timeout_s + MARGIN_S
        self.times = [0.0] * connections.count
        self.writes_since: dict[int, float] = {}
        """By server that has said nothing since: when this worker first found the server's note that it writes."""

    def heard(self, server: int) -> None:
        """A server has answered something."""
        self.times[server] = self.connections.now()
        self.writes_since.pop(server, None)

    def begin(self) -> None:
        """Begin a wait: time before it is no silence."""
        self.times = [self.connections.now()] * len(self.times)

    def away(self, seconds: float) -> None:
        """Do not count seconds in which this worker read no answers as silence."""
        self.times = [time + seconds for time in self.times]
        self.writes_since = {server: since + seconds for server, since in self.writes_since.items()}

    def write(self, servers: Iterable[int]) -> set[int]:
        """Those of these servers that answer no requests because they write, by their notes.

        The note of a dead server stays on the board, so a note counts for :data:`SAVE_S` only.
        """
        now, found = self.connections.now(), self.connections.saving(servers)
        return {server for server in found if now - self.writes_since.setdefault(server, now) < SAVE_S}

    def check(self, under_way: Collection[Request], patience_s: float) -> list[int]:
        """In a wait that may take ``patience_s``: return the servers that are to be asked for a sign of life.

        Args:
            under_way: the requests whose answers this worker waits for.

        Raises:
            Missing: one of their servers has said nothing for too long.
        """
        if patience_s <= self.patience_s or not self.connections.far:
            return []
        now = self.connections.now()
        awaited = sorted({request.server for request in under_way})
        silent = [server for server in awaited if now - self.times[server] > self.patience_s]
        writing = self.write(silent) if silent else set()
        if gone := [self.names[server] for server in silent if server not in writing]:
            limit = within(self.patience_s, self.timeout_s)
            raise Missing(f"{', '.join(gone)} said nothing to worker {self.rank} {limit}", gone)
        for server in writing:
            self.times[server] = now
        asked = {request.server for request in under_way if request.message.verb == Verb.STATS}
        late = [server for server in awaited if now - self.times[server] > ASKED_AFTER * self.patience_s]
        return [server for server in late if server not in asked]
