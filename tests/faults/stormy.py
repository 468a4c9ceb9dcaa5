"""Parameter-server strategies whose workers live in a bad network: their messages are dropped, doubled and delayed,
their connections reset. Real processes, started by the command line with
``strategy._target_=tests.faults.stormy.Async``."""

from __future__ import annotations

import os
from typing import Any

from tests.faults.relay import RATES, at_the_door
from tests.strategies.pserver.harness import StormySocket
from tests.weather import Weather
from trainer.strategies import builtin
from trainer.strategies.pserver.protocol.messages import ENDPOINT
from trainer.strategies.pserver.worker import async_and_ssp, client, geo, sync
from trainer.strategies.pserver.worker import connections as connections_module
from trainer.strategies.pserver.worker.connections import Sockets, connect

DOOR, SEED = "STORM_DOOR", "STORM_SEED"
"""Environment variables: where the relay tells workers how to reach a server (``tests/faults/relay.py``); the weather's
seed."""


def through_a_relay(worker: Any) -> Sockets:
    """Connections as the worker's own, through a relay."""
    door, seat, told = os.environ[DOOR], worker.seat, worker.options
    client.AGAIN_S = 0.05
    resolved, endpoints = seat.store.get, {ENDPOINT.format(n) for n in range(seat.others.servers)}

    def instead(key: str) -> bytes:
        found = bytes(resolved(key))
        return at_the_door(door, seat.rank, found.decode()).encode() if key in endpoints else found

    if (
        told.transport == "tcp"
    ):  # encrypted: whole messages are dropped, doubled and held back by this end, and not on the way
        connections_module.WorkerSocket = StormySocket  # type: ignore[misc]
        StormySocket.weather = Weather(f"{os.environ[SEED]} {seat.rank}", **RATES)
    seat.store.get = instead
    try:
        made = connect(
            seat, seat.others.servers, told.timeout_s, told.lost_after_s, worker.io_threads, told.transport == "auto"
        )
    finally:
        seat.store.get = resolved
    close = made.close

    def closing(*arguments: Any, **options: Any) -> None:
        at_the_door(door, seat.rank, StormySocket.weather.counts)
        close(*arguments, **options)

    made.close = closing  # type: ignore[method-assign]
    return made


class SyncWorker(sync.PserverSync):
    """As pserver_sync."""

    connections = through_a_relay


class AsyncWorker(async_and_ssp.PserverAsync):
    """As pserver_async."""

    connections = through_a_relay


class SspWorker(async_and_ssp.PserverSsp):
    """As pserver_ssp."""

    connections = through_a_relay


class GeoWorker(geo.PserverGeo):
    """As pserver_geo."""

    connections = through_a_relay


class Sync(builtin.PserverSyncDeclaration):
    """As strategy=pserver_sync."""

    worker = "tests.faults.stormy:SyncWorker"


class Async(builtin.PserverAsyncDeclaration):
    """As strategy=pserver_async."""

    worker = "tests.faults.stormy:AsyncWorker"


class Ssp(builtin.PserverSspDeclaration):
    """As strategy=pserver_ssp."""

    worker = "tests.faults.stormy:SspWorker"


class Geo(builtin.PserverGeoDeclaration):
    """As strategy=pserver_geo."""

    worker = "tests.faults.stormy:GeoWorker"
