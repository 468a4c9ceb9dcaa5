"""Parameter-server strategies whose workers live in a bad network: their messages are dropped, doubled and delayed, their
connections reset. Real processes, started by the command line with ``strategy._target_=tests.faults.stormy.Async``."""

from __future__ import annotations

import os
import random
import threading
from typing import Any

from tests.strategies.pserver.harness import Resetting, StormySocket, Weather
from trainer.strategies import builtin
from trainer.strategies.pserver.protocol.messages import ENDPOINT
from trainer.strategies.pserver.worker import async_and_ssp, client, geo
from trainer.strategies.pserver.worker import connections as connections_module
from trainer.strategies.pserver.worker.connections import Sockets, connect

SEED = "STORM"
"""Environment variable: the weather's seed."""


def through_a_relay(worker: Any) -> Sockets:
    """Connections as the worker's own, through a relay for each server and bad weather."""
    draw = random.Random(f"{os.environ[SEED]} {worker.seat.rank}")
    seat, told = worker.seat, worker.options
    client.AGAIN_S = 0.05
    connections_module.WorkerSocket = StormySocket  # type: ignore[misc]
    StormySocket.weather = Weather(draw.randrange(1 << 30), drop=0.03, double=0.05, delay=0.1)
    relays: list[Resetting] = []
    resolved = seat.store.get

    def instead(key: str) -> bytes:
        endpoint = resolved(key)
        if key not in {ENDPOINT.format(n) for n in range(seat.servers)}:
            return bytes(endpoint)
        relays.append(Resetting(endpoint.decode()))
        return relays[-1].endpoint.encode()

    seat.store.get = instead
    try:
        made = connect(seat, seat.servers, told.timeout_s, told.lost_after_s, worker.io_threads)
    finally:
        seat.store.get = resolved
    threading.Thread(target=_resets, args=(relays, draw), daemon=True).start()
    return made


def _resets(relays: list[Resetting], draw: random.Random) -> None:
    pause = threading.Event()
    while not pause.wait(0.3 + draw.random()):
        draw.choice(relays).reset()


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
