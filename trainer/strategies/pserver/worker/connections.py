"""A worker's connections to all servers by ZeroMQ, the thread that sends signs of life, and its clock."""

from __future__ import annotations

import datetime
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import zmq

from trainer.errors import Missing
from trainer.host.notes_board import FolderBoard, NoNote, OwnBoard, SealedBoard
from trainer.strategies.contract import Seat
from trainer.strategies.pserver.protocol.messages import AGAIN, ENDPOINT, SAVING, Message, Verb, pack
from trainer.strategies.pserver.protocol.shared_memory import opened_pool, vector
from trainer.strategies.pserver.protocol.sockets import LINGER_MS, WorkerSocket

ASK_S = 5.0
"""So long a worker whose timeout is over waits for what the board says of it: the way to the board may be cut as
well."""
LOOK_S = 1.0
"""So often a worker that waits looks whether a server was started again."""


def saving(board: OwnBoard, servers: Iterable[int]) -> set[int]:
    """Those of these servers that have left a note that they write; those of which the board says nothing in time are
    not among them."""
    asked, found = board.within(ASK_S), set()
    try:
        for server in servers:
            note = SAVING.format(server)
            if asked.check([note]) and asked.get(note):
                found.add(server)
    except NoNote:
        pass
    return found


class Address(NamedTuple):
    """Where a server listens, and the note of its restart that was there when its address was read; '': there was
    none."""

    endpoint: str
    note: str = ""


def note_of_restart(seat: Seat, server: int) -> str:
    """The note that a server was restarted (only possible on one host): its life and its address; '': there is none."""
    note = AGAIN.format(server)
    if not isinstance(seat.store, FolderBoard):
        return ""
    return seat.store.get(note).decode() if seat.store.check([note]) else ""


class Restarted:
    """Finds out that a server was restarted.

    Args:
        known: the note of its restart that is no news.
    """

    def __init__(self, seat: Seat, server: int, known: str) -> None:
        self.seat, self.server, self.known = seat, server, known

    def news(self) -> str:
        """The address of the server if it was restarted since the last call, else ''."""
        told = note_of_restart(self.seat, self.server)
        if told == self.known:
            return ""
        self.known = told
        return told.partition(" ")[2]


class Sockets:
    """The connections to all servers by ZeroMQ, with a thread that sends signs of life.

    Args:
        seat: the worker. addresses: of the servers.
        lost_after_s: silence after which servers have a worker ended.
        io_threads: ZeroMQ's threads.
    """

    look_s = LOOK_S

    def __init__(
        self, seat: Seat, addresses: Sequence[Address], lost_after_s: float, io_threads: int = 1, shares: bool = False
    ) -> None:
        self.pool = opened_pool(len(addresses)) if shares and addresses[0].endpoint.startswith("ipc:") else None
        self.seat, self.count = seat, len(addresses)
        self.far = isinstance(seat.store, SealedBoard)
        self.context: zmq.Context[Any] = zmq.Context(io_threads)
        self.poller = zmq.Poller()
        self.sockets = [self._connected(server, found.endpoint) for server, found in enumerate(addresses)]
        self.notes = [Restarted(seat, server, found.note) for server, found in enumerate(addresses)]
        self.looked = time.monotonic()
        self.closed = 0, 0
        self._gone = threading.Event()
        self._heart = threading.Thread(
            target=_beat,
            args=(self.context, seat, addresses, lost_after_s / 5, self._gone),
            daemon=True,
            name="pserver-heart",
        )
        self._heart.start()

    def _connected(self, server: int, endpoint: str) -> WorkerSocket:
        socket = WorkerSocket(self.context, self.seat.secret, self.seat.rank, server, endpoint, self.pool)
        self.poller.register(socket.socket, zmq.POLLIN)
        return socket

    def started_again(self) -> dict[int, int]:
        if (now := time.monotonic()) - self.looked < LOOK_S:
            return {}
        self.looked, found = now, {}
        for note in self.notes:
            if endpoint := note.news():
                before = self.sockets[note.server]
                self.closed = self.closed[0] + before.bytes_in, self.closed[1] + before.bytes_out
                self.poller.unregister(before.socket)
                before.close(0)
                self.sockets[note.server] = self._connected(note.server, endpoint)
                found[note.server] = int(note.known.partition(" ")[0])
        return found

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
        came, went = self.closed
        return came + sum(s.bytes_in for s in self.sockets), went + sum(s.bytes_out for s in self.sockets)

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
    addresses = []
    for server in range(servers):
        key = ENDPOINT.format(server)
        try:
            seat.store.wait([key], datetime.timedelta(seconds=timeout_s))
        except RuntimeError as error:
            who = seat.server_name(server)
            raise Missing(
                f"{who} did not say where it is within {timeout_s:g} s (strategy.timeout_s)", [who]
            ) from error
        again = note_of_restart(seat, server)  # before the address: a later restart must be news
        addresses.append(Address(again.partition(" ")[2] or seat.store.get(key).decode(), again))
    return Sockets(seat, addresses, lost_after_s, io_threads, shares)


def _beat(
    context: zmq.Context[Any], seat: Seat, addresses: Sequence[Address], every_s: float, gone: threading.Event
) -> None:
    """Tell all servers that this worker lives, over connections of this thread's own."""
    sockets = [WorkerSocket(context, seat.secret, seat.rank, n, found.endpoint) for n, found in enumerate(addresses)]
    notes = [Restarted(seat, server, found.note) for server, found in enumerate(addresses)]
    frames = pack(Message(Verb.BEAT, rank=seat.rank))
    while not gone.wait(every_s):
        for note in notes:
            known = note.known
            try:
                if endpoint := note.news():
                    before = sockets[note.server]
                    sockets[note.server] = WorkerSocket(context, seat.secret, seat.rank, note.server, endpoint)
                    before.close(0)
            except (OSError, zmq.ZMQError):  # no descriptor is free: this thread has to live on, and tries it again
                note.known = known
        for socket in sockets:
            try:
                socket.socket.send_multipart(frames, zmq.NOBLOCK)
            except zmq.Again:
                pass  # a server that takes nothing has other worries
    for socket in sockets:
        socket.close(0)
