"""Values that the servers report about themselves, for a worker's log lines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer.errors import RunFailed
from trainer.strategies.pserver.protocol.messages import Message, Verb
from trainer.strategies.pserver.worker.client import Client
from trainer.strategies.pserver.worker.requests import Request

GAUGES_EVERY_S = 2.0
SHORTEST_S = 0.5
"""No rates are told of less time, where some were told before: at the end of a run there may be no push in it."""
COUNTS = ("pushes", "pulls", "bytes_in", "bytes_out")


class Gauges:
    """Collects rates and sizes from all servers now and then."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.asked_at = -GAUGES_EVERY_S
        self.requests: list[Request] = []
        self.before: dict[int, dict[str, float]] = {}
        self.rated = set[int]()

    def now(self) -> dict[str, float]:
        """The servers' rates and sizes since the last call, and this worker's unanswered pushes.
        Pushes, pulls and megabytes per second, waiting requests, rows, median staleness."""
        self.client.take()
        found: dict[str, float] = {}
        if self.requests and all(r.answer is not None for r in self.requests):
            found, self.requests = self._statistics(self.requests), []
        now = self.client.connections.now()
        if not self.requests and now - self.asked_at > GAUGES_EVERY_S:
            self.requests, self.asked_at = self._ask(), now
        queued = [r.server for r in self.client.under_way.values() if r.message.verb == Verb.PUSH]
        return found | {f"server{s}/queue": float(queued.count(s)) for s in self.client.servers}

    def last(self) -> dict[str, float]:
        """The servers' values at the end; waits for them. Rates are since the values that were told last."""
        asks = self._ask()
        self.client.wait([*self.requests, *asks])
        if not self.before:
            self._statistics(self.requests)
        return self._statistics(asks)

    def _ask(self) -> list[Request]:
        return [self.client.ask(s, Message(Verb.STATS)) for s in self.client.servers]

    def _statistics(self, requests: list[Request]) -> dict[str, float]:
        """The values of the servers' answers."""
        found: dict[str, float] = {}
        for request in requests:
            assert request.answer is not None
            found |= self._rates(request.server, request.answer.text())
        return found

    def _rates(self, server: int, now: dict[str, Any]) -> dict[str, float]:
        """A server's values, with its rates since its last answer. Rates since its start would include its wait for
        workers."""
        before = self.before.get(server)
        self.before[server] = {k: float(now[k]) for k in ("seconds", *COUNTS)}
        found = {"waiting": float(now["waiting"]), "rows": float(now["rows"])}
        seconds = now["seconds"] - before["seconds"] if before is not None else 0.0
        if before is not None and seconds > (SHORTEST_S if server in self.rated else 0.0):
            self.rated.add(server)
            rate = {k: (now[k] - before[k]) / seconds for k in COUNTS}
            found |= {"pushes_per_s": rate["pushes"], "pulls_per_s": rate["pulls"]}
            found["mb_per_s"] = (rate["bytes_in"] + rate["bytes_out"]) / 1e6
        if now["staleness"]:
            found["staleness"] = _median({int(k): v for k, v in now["staleness"].items()})
        return {f"server{server}/{name}": value for name, value in found.items()}


class ReadsStatistics:
    """The part of a pserver worker that reads the statistics of the servers."""

    client: Client
    gauge: Gauges

    def gauges(self) -> dict[str, float]:
        """The servers' rates and sizes since the last call."""
        return self.gauge.now()

    def last_gauges(self) -> dict[str, float]:
        """The servers' values at the end; waits for them."""
        return self.gauge.last()

    def samples_applied(self) -> int:
        """The training samples of all pushes, over all workers and lives. A lost worker's last push may have reached
        only some servers, so the greatest count is right."""
        answers = self.client.wait([self.client.ask(s, Message(Verb.STATS)) for s in self.client.servers])
        return max(int(answer.mapping().get("samples", 0)) for answer in answers)


def _median(counts: Mapping[int, int]) -> float:
    half, seen = sum(counts.values()) / 2, 0
    for value in sorted(counts):
        seen += counts[value]
        if seen >= half:
            return float(value)
    raise RunFailed("a histogram without counts")
