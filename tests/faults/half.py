"""Parameter-server strategies of which worker 1 is killed when one server has its push, and the other one is sent
nothing of it. Real processes, started by the command line with ``strategy._target_=tests.faults.half.Geo``."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from tests.pace import wait_for
from trainer.strategies import builtin
from trainer.strategies.pserver.protocol.messages import Message, Verb
from trainer.strategies.pserver.worker import async_and_ssp, geo

LAST = 6
"""The push after whose first half it dies."""


def dies_halfway(worker: Any) -> None:
    """In its first life worker 1 dies between the two messages of its push."""
    client, ask = worker.client, worker.client.ask
    if worker.seat.rank != 1 or worker.seat.life.returns:
        return

    def instead(server: int, message: Message, *more: Any, **named: Any) -> Any:
        if (message.verb, message.sequence, server) == (Verb.PUSH, LAST, 1):
            line = f"\n{worker.seat.rank}\t{LAST}\t"
            wait_for(lambda: line in Path("run/ledger.0.tsv").read_text(), 60, "server 0 has its half")
            os.kill(os.getpid(), signal.SIGKILL)
        return ask(server, message, *more, **named)

    client.ask = instead


class SspWorker(async_and_ssp.PserverSsp):
    """As pserver_ssp."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        dies_halfway(self)


class GeoWorker(geo.PserverGeo):
    """As pserver_geo."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        dies_halfway(self)


class Ssp(builtin.PserverSspDeclaration):
    """As strategy=pserver_ssp."""

    worker = "tests.faults.half:SspWorker"


class Geo(builtin.PserverGeoDeclaration):
    """As strategy=pserver_geo."""

    worker = "tests.faults.half:GeoWorker"
