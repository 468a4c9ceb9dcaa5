"""Parameter-server strategies whose workers live in a bad network: their messages are dropped, doubled and delayed, their
connections reset. Real processes, started by the command line with ``strategy._target_=tests.faults.stormy.Async``."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

from tests.strategies.pserver.harness import Resetting, StormySocket, Weather
from trainer.strategies import builtin
from trainer.strategies.pserver.protocol.messages import ENDPOINT
from trainer.strategies.pserver.worker import async_and_ssp, client, geo
from trainer.strategies.pserver.worker import connections as connections_module
from trainer.strategies.pserver.worker.connections import Sockets, connect

SEED = "STORM"
"""Environment variable: the weather's seed."""
NOTES = "STORM_NOTES"
"""Environment variable: a folder, where each worker N that ends by itself leaves ``storm.N``: what has happened to its messages."""


class Storm(Weather):
    """Bad weather that resets the connections of a relay now and then: after a number of messages, however fast they come."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__(draw.randrange(1 << 30), drop=0.03, double=0.05, delay=0.1)
        self.draw = draw
        self.relays: list[Resetting] = []
        self.calm = self._until_the_next_reset()

    def _until_the_next_reset(self) -> int:
        return self.draw.randint(10, 60)

    def copies(self) -> list[float]:
        self.calm -= 1
        if self.calm < 0:
            self.calm = self._until_the_next_reset()
            self.draw.choice(self.relays).reset()
        return super().copies()

    def note(self, rank: int) -> None:
        """Leave word of what has happened to the messages of that worker."""
        told = {**self.counts, "reset": sum(relay.resets for relay in self.relays)}
        Path(os.environ[NOTES], f"storm.{rank}").write_text(json.dumps(told))


def through_a_relay(worker: Any) -> Sockets:
    """Connections as the worker's own, through a relay for each server and bad weather."""
    draw = random.Random(f"{os.environ[SEED]} {worker.seat.rank}")
    seat, told = worker.seat, worker.options
    client.AGAIN_S = 0.05
    connections_module.WorkerSocket = StormySocket  # type: ignore[misc]
    StormySocket.weather = storm = Storm(draw)
    resolved = seat.store.get

    def instead(key: str) -> bytes:
        endpoint = resolved(key)
        if key not in {ENDPOINT.format(n) for n in range(seat.servers)}:
            return bytes(endpoint)
        storm.relays.append(Resetting(endpoint.decode()))
        return storm.relays[-1].endpoint.encode()

    seat.store.get = instead
    try:
        made = connect(seat, seat.servers, told.timeout_s, told.lost_after_s, worker.io_threads)
    finally:
        seat.store.get = resolved
    close = made.close

    def closing(*arguments: Any, **options: Any) -> None:
        storm.note(seat.rank)
        close(*arguments, **options)

    made.close = closing  # type: ignore[method-assign]
    return made


class AsyncWorker(async_and_ssp.PserverAsync):
    """As pserver_async."""

    connections = through_a_relay


class SspWorker(async_and_ssp.PserverSsp):
    """As pserver_ssp."""

    connections = through_a_relay


class GeoWorker(geo.PserverGeo):
    """As pserver_geo."""

    connections = through_a_relay


class Async(builtin.PserverAsyncDeclaration):
    """As strategy=pserver_async."""

    worker = "tests.faults.stormy:AsyncWorker"


class Ssp(builtin.PserverSspDeclaration):
    """As strategy=pserver_ssp."""

    worker = "tests.faults.stormy:SspWorker"


class Geo(builtin.PserverGeoDeclaration):
    """As strategy=pserver_geo."""

    worker = "tests.faults.stormy:GeoWorker"
