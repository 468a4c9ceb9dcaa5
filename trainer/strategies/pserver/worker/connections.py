"""A worker's connections to all servers by ZeroMQ, the thread that sends signs of life, and its clock."""

from __future__ import annotations

import datetime
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import zmq

from trainer.errors import Missing
from trainer.host.notes_board import NoNote, OwnBoard, SealedBoard
from trainer.strategies.pserver.protocol.messages import ENDPOINT, SAVING, Message, Verb, pack
from trainer.strategies.pserver.protocol.shared_memory import opened_pool, vector
from trainer.strategies.pserver.protocol.sockets import LINGER_MS, WorkerSocket
from trainer.strategies.seat import Seat

ASK_S = 5.0
"""Longest wait for a note after a timeout: the board may be cut off as well."""


def saving(board: OwnBoard, servers: Iterable[int]) -> set[int]:
    """Those of these servers that have a note on the board that they write. Without an answer of the board: none."""
    asked, found = board.within(ASK_S), set()
    try:
        for server in servers:
            note = SAVING.format(server)
            if asked.check([note]) and asked.get(note):
                found.add(server)
    except NoNote:
        pass
    return found


class Sockets:
    """The connections to all servers by ZeroMQ, with a thread that sends signs of life.

    Args:
        seat: the worker. endpoints: where the servers listen.
        lost_after_s: silence after which servers have a worker ended.
        io_threads: ZeroMQ's threads.
    """

    def __init__(
        self, seat: Seat, endpoints: Sequence[str], lost_after_s: float, io_threads: int = 1, shares: bool = False
    ) -> None:
        self.pool = opened_pool(len(endpoints)) if shares and endpoints[0].startswith("ipc:") else None
        self.seat, self.count = seat, len(endpoints)
        self.far = isinstance(seat.store, SealedBoard)
        self.context: zmq.Context[Any] = zmq.Context(io_threads)
        self.poller = zmq.Poller()
        self.sockets = [
            WorkerSocket(self.context, seat.address.secret, seat.rank, server, endpoint, self.pool)
            for server, endpoint in enumerate(endpoints)
        ]
        for socket in self.sockets:
            self.poller.register(socket.socket, zmq.POLLIN)
        self._gone = threading.Event()
        self._heart = threading.Thread(
            target=_beat,
            args=(self.context, seat, endpoints, lost_after_s / 5, self._gone),
            daemon=True,
            name="pserver-heart",
        )
        self._heart.start()

    def saving(self, servers: Iterable[int]) -> set[int]:
        return saving(self.seat.store, servers)

    def now(self) -> float:
        return time.monotonic()

    def room(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        return vector(self.pool, count, dtype)

    def send(self, server: int, frames: Sequence[Any]) -> bool:
        return self.sockets[server].send(frames)

    def receive(self) -> list[Message]:
        found = []
        for socket in self.sockets:
            while (message := socket.receive()) is not None:
                found.append(message)
        return found

    def wait(self, seconds: float) -> None:
        self.poller.poll(max(1, int(1000 * seconds)))

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def traffic(self) -> tuple[int, int]:
        """The bytes received and sent so far."""
        return sum(s.bytes_in for s in self.sockets), sum(s.bytes_out for s in self.sockets)

    def close(self, linger_ms: int = LINGER_MS) -> None:
        self._gone.set()
        self._heart.join()
        for socket in self.sockets:
            socket.close(linger_ms)
        self.context.term()
        if self.pool is not None:
            self.pool.close()


def connect(
    seat: Seat, servers: int, timeout_s: float, lost_after_s: float, io_threads: int = 1, shares: bool = False
) -> Sockets:
    """Connect to all servers of a run, once they have published their addresses.

    Args:
        shares: large values go through memory that this worker and a server at a Unix socket share.

    Raises:
        Missing: one of them did not within ``timeout_s``.
    """
    assert seat.store is not None
    endpoints = []
    for server in range(servers):
        key = ENDPOINT.format(server)
        try:
            seat.store.wait([key], datetime.timedelta(seconds=timeout_s))
        except RuntimeError as error:
            who = seat.others.server_name(server)
            raise Missing(
                f"{who} did not say where it is within {timeout_s:g} s (strategy.timeout_s)", [who]
            ) from error
        endpoints.append(seat.store.get(key).decode())
    return Sockets(seat, endpoints, lost_after_s, io_threads, shares)


def _beat(
    context: zmq.Context[Any], seat: Seat, endpoints: Sequence[str], every_s: float, gone: threading.Event
) -> None:
    """Tell all servers that this worker lives, over connections of this thread's own."""
    sockets = [
        WorkerSocket(context, seat.address.secret, seat.rank, n, endpoint) for n, endpoint in enumerate(endpoints)
    ]
    frames = pack(Message(Verb.BEAT, rank=seat.rank))
    while not gone.wait(every_s):
        for socket in sockets:
            try:
                socket.socket.send_multipart(frames, zmq.NOBLOCK)
            except zmq.Again:
                pass  # the server's queue is full
    for socket in sockets:
        socket.close(0)
