"""A server process: one thread that takes messages from its socket, gives them to the machine, and sends its
answers."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch

from trainer.checkpoint.removal_guard import not_removed_meanwhile
from trainer.config.instantiate import call_target
from trainer.errors import RunFailed
from trainer.host import descriptors
from trainer.host.files import replace_file
from trainer.host.notes_board import FolderLost, NoNote
from trainer.host.pulse import Pulse
from trainer.strategies.builtin import PserverDeclaration
from trainer.strategies.pserver.protocol.messages import ENDPOINT
from trainer.strategies.pserver.protocol.shared_memory import opened_pool
from trainer.strategies.pserver.protocol.sockets import ServerSocket
from trainer.strategies.pserver.server.ledger import opened_ledger
from trainer.strategies.pserver.server.machine import CHECK_S, Server
from trainer.strategies.pserver.server.part_writer import Forked
from trainer.strategies.pserver.server.server_assignment import ServersRun
from trainer.strategies.seat import Seat

SMALLEST_LIMIT = 64 << 20


def serve(seat: Seat, run: ServersRun) -> dict[str, Any]:
    """Entry of the role ``server``: serve until every worker has left or is lost; returns what it has done.

    Raises:
        RunFailed: no worker is left, one is lost that the run cannot go on without, or host 0 cannot be reached.
    """
    torch.set_num_threads(1)
    descriptors.keep_reserve()
    assert seat.store is not None
    server, socket = open_server(seat, run)
    server.report_done = Pulse(seat.life.pulse).update
    try:
        seat.store.set(ENDPOINT.format(seat.rank), socket.endpoint)
        print(f"server {seat.rank} listens at {socket.endpoint}", flush=True)
        _run_to_end(server, socket)
    except FolderLost as error:
        raise RunFailed(str(error)) from error
    except NoNote as error:
        raise RunFailed(f"the other hosts cannot be reached: {error}") from error
    finally:
        socket.close()
        _leave_statistics(server, Path(run.plan.paths.run_dir))
    return server.statistics()


def open_server(seat: Seat, run: ServersRun) -> tuple[Server, ServerSocket]:
    """Open a server and the socket at which workers reach it: a Unix socket on one host, else TCP."""
    declared: PserverDeclaration = call_target(run.config.node("strategy"), "strategy", kind=PserverDeclaration)
    limit = max(SMALLEST_LIMIT, 24 * int(run.plan.model.parameters))
    transport, handshake_s = declared.options.transport, declared.options.handshake_s
    folder = "" if transport == "tcp" else seat.address.folder
    pool = opened_pool(run.plan.topology.workers) if folder and transport == "auto" else None
    socket = ServerSocket(
        seat.address.secret,
        seat.rank,
        run.plan.topology.workers,
        seat.address.host,
        limit,
        folder,
        handshake_s,
        seat.address.port,
        pool,
    )
    assert seat.store is not None
    try:
        with not_removed_meanwhile(run.resume, Path(run.plan.paths.run_dir)):
            kept = opened_ledger(seat.rank, run) if declared.options.ledger else None
            clock, life = time.monotonic, seat.life.number
            machine = Server(seat.rank, run, declared, socket, seat.store, clock, limit, kept, life, Forked())
    except BaseException:  # an open socket may keep the process from its end
        socket.close()
        raise
    return machine, socket


def _run_to_end(server: Server, socket: ServerSocket) -> None:
    """Serve until every worker has left or is lost.

    Raises:
        RunFailed: as ``serve``.
    """
    while not server.over:
        server.turn(socket.receive(int(1000 * CHECK_S)))


def _leave_statistics(server: Server, run_dir: Path) -> None:
    """Print the counts of a server that ends into its log, and write them as ``server.N.json`` if the run's folder
    exists."""
    statistics = json.dumps(server.statistics(), indent=1)
    print(statistics, flush=True)
    if run_dir.is_dir():
        replace_file(run_dir / f"server.{server.number}.json", statistics)
