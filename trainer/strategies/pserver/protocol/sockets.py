"""ZeroMQ sockets that know who is at the other end; strangers are refused.

Over TCP, both ends have CURVE keys that follow from the run's secret, and everything is encrypted. Where all processes
of the run are on one host, Unix sockets do: the kernel lets no other user into their folder, and each worker has a
password that follows from the secret. Encrypting 4 MB a step would take a quarter of such a machine's time.
"""

# States of a worker's connection, at a server: connected -> greeted -> known | turned away.
#   connected: it may say nothing for `handshake_s`, then it is closed. greeted: ZeroMQ asks the doorkeeper (ZAP) for
#   its key or password. known: its messages carry the rank of that key.
# Who moves it: libzmq's own thread, and `receive`, which answers the doorkeeper's questions between messages.
#
# What must always hold:
# - A message with another rank than the connection's key is dropped. So nobody without a key of this run is heard, and
#   no worker speaks for another one.
# - No process waits for room in a socket: a message that does not fit is lost, and its request is sent again.
# - The last answers are sent before a socket closes (a bounded linger).
# - RESERVE descriptors are kept for files: when strangers have taken all others, nobody new is let in for a while.

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import zmq
from zmq.utils import z85

from trainer.errors import RunFailed
from trainer.host import descriptors
from trainer.host.addresses import with_port
from trainer.strategies.pserver.protocol.listener import Listener
from trainer.strategies.pserver.protocol.messages import Malformed, Message, pack, unpack
from trainer.strategies.pserver.protocol.shared_memory import Channel, Late, Pool, has_trailer, mark_of, vector

LINGER_MS = 2000
QUEUE = 1000
"""Messages that may wait in a socket in each direction. What finds no room is lost: no sender waits for another
process."""
ZAP = "inproc://zeromq.zap.01"
FRAMES = 4098
RECONNECT_MS = 50
HANDSHAKE_S = 10.0
UNIX_SOCKET = "server-{}"


def key_pair(secret: bytes, who: str) -> tuple[bytes, bytes]:
    """Public and secret CURVE key (Z85) of ``worker 0``, ``server 1``, ... in the run with that secret."""
    own = z85.encode(hashlib.blake2b(who.encode(), key=secret, digest_size=32).digest())
    return zmq.curve_public(own), own


def password(secret: bytes, who: str) -> bytes:
    """The password of ``worker 0``, ... at a Unix socket of the run with that secret."""
    return hashlib.blake2b(who.encode(), key=secret, digest_size=32, person=b"unix socket").hexdigest().encode()


class ServerSocket:
    """A server's end of all connections: one ROUTER for all workers, and the doorkeeper that knows them (ZAP, RFC
    27).

    Args:
        secret: of the run.
        server: this one's number.
        workers: how many ranks are let in.
        host: address to listen on; the port is a free one.
        most_bytes: longest frame; a longer one closes its sender's connection.
        folder: of this user alone, for a Unix socket instead of the port; empty: none.
        handshake_s: a connection that has not said by then who it is, is closed.
        port: where it listens; 0: at a free port.
        pool: memory that it shares with workers at a Unix socket; None: none.

    Raises:
        RunFailed: it cannot listen there.
    """

    def __init__(
        self,
        secret: bytes,
        server: int,
        workers: int,
        host: str,
        most_bytes: int,
        folder: str = "",
        handshake_s: float = HANDSHAKE_S,
        port: int = 0,
        pool: Pool | None = None,
    ) -> None:
        self.context = zmq.Context()
        self.sharing = Sharing(pool) if pool is not None else None
        names = {rank: f"worker {rank}" for rank in range(workers)}
        self.ranks = {key_pair(secret, name)[0]: rank for rank, name in names.items()} if not folder else {}
        self.passwords = {name.encode(): (rank, password(secret, name)) for rank, name in names.items()}
        self.turned_away = 0
        self.malformed = 0
        self.most_bytes = most_bytes
        self.bytes_in = 0
        self.bytes_out = 0
        self.door = self.context.socket(zmq.REP)
        self.door.bind(ZAP)
        self.router = self.context.socket(zmq.ROUTER)
        if folder:
            self.router.plain_server = True
        else:
            self.router.curve_server = True
            self.router.curve_publickey, self.router.curve_secretkey = key_pair(secret, f"server {server}")
        self.router.zap_domain = b"trainer"
        self.router.maxmsgsize = most_bytes
        self.router.sndhwm = self.router.rcvhwm = QUEUE
        self.router.linger = LINGER_MS
        self.router.handshake_ivl = max(1, int(1000 * handshake_s))
        self.handshake_s = handshake_s
        self.closed_until: float | None = None
        self.listener: Listener | None = None
        try:
            if folder:
                self.endpoint = f"ipc://{folder}/{UNIX_SOCKET.format(server)}"
                self.router.bind(self.endpoint)
            else:
                self.router.ipv6 = ":" in host
                self.endpoint = self._listen(server, host, port)
        except BaseException:
            self.close()
            raise
        self.poller = zmq.Poller()
        self.poller.register(self.door, zmq.POLLIN)
        self.poller.register(self.router, zmq.POLLIN)

    def _listen(self, server: int, host: str, port: int) -> str:
        """Listen at a port of this address; returns the endpoint."""
        try:
            self.listener = Listener(host, port)
        except OSError as error:
            raise RunFailed(f"server {server} cannot listen at {with_port(host, port)}: {error.strerror}") from error
        self.router.setsockopt(zmq.USE_FD, self.listener.handed_over())
        self.router.bind(self.listener.endpoint)
        return self.listener.endpoint

    def receive(self, timeout_ms: int) -> list[tuple[bytes, Message]]:
        """The next message with the address to answer to; empty when none came in time, or it was malformed."""
        ready = dict(self.poller.poll(timeout_ms))
        self._mind_the_descriptors()
        if self.door in ready:
            self._open_or_not()
        if self.router not in ready:
            return []
        address, *came = self.router.recv_multipart(copy=False)
        frames = [f.buffer for f in came]
        try:
            if len(frames) > FRAMES:
                raise Malformed(f"{len(frames)} frames")
            if self.sharing is not None and has_trailer(frames):
                frames = self.sharing.incoming(address.bytes, str(address.get("User-Id")), frames)
            self.bytes_in += sum(len(f) for f in frames)
            message = unpack(frames)
            if str(message.rank) != address.get("User-Id"):
                raise Malformed(f"worker {address.get('User-Id')} says that it is worker {message.rank}")
        except Malformed as error:
            self.refuse(error)
            return []
        except Late:
            return []
        return [(address.bytes, message)]

    def _mind_the_descriptors(self) -> None:
        """Where strangers have taken all descriptors but the reserve, nobody is let in until their connections are
        closed because they say nothing. Who is connected stays. At a Unix socket there are no strangers."""
        if self.listener is None:
            return
        now = time.monotonic()
        if self.closed_until is None:
            if descriptors.all_taken():
                self.listener.let_in(False)
                self.closed_until = now + self.handshake_s
                print(f"all descriptors are taken: nobody is let in for {self.handshake_s:g} s", flush=True)
        elif now >= self.closed_until:
            self.listener.let_in(True)
            self.closed_until = None

    @contextmanager
    def room_for_files(self) -> Iterator[None]:
        """While it lasts, descriptors are free for files, however many strangers want connections."""
        self._mind_the_descriptors()
        if self.listener is not None:
            self.listener.let_in(False)
        try:
            with descriptors.reserve():
                yield
        finally:
            if self.listener is not None and self.closed_until is None:
                self.listener.let_in(True)

    def counts(self) -> dict[str, Any]:
        """This socket's counts for the server's statistics."""
        return {
            "endpoint": self.endpoint,
            "bytes_in": self.bytes_in,
            "bytes_out": self.bytes_out,
            "refused": self.malformed,
            "turned_away": self.turned_away,
        }

    def refuse(self, why: BaseException) -> None:
        """Count a malformed message; the first ones are told in the log."""
        self.malformed += 1
        if self.malformed <= 10 or self.malformed & (self.malformed - 1) == 0:
            print(f"refused message {self.malformed}: {why}", flush=True)

    def room(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised vector (count,) of values that will be sent, in shared memory if there is room."""
        return vector(None if self.sharing is None else self.sharing.pool, count, dtype)

    def answer(self, address: bytes, request: Message, answer: Message) -> None:
        """Send the answer to a request."""
        answer.number = request.number
        frames: Sequence[Any] = pack(answer)
        self.bytes_out += sum(memoryview(f).nbytes for f in frames)
        if self.sharing is not None:
            frames = self.sharing.outgoing(address, frames)
        _send(self.router, [address, *frames])

    def _open_or_not(self) -> None:
        version, number, _, address, _, mechanism, *credentials = self.door.recv_multipart()
        rank = self._rank(mechanism, credentials)
        if rank is None:
            self.turned_away += 1
            if self.turned_away <= 10:
                print(f"turned away a peer at {address.decode(errors='replace')} without a key of this run", flush=True)
            answer = [b"400", b"no key of this run", b"", b""]
        else:
            answer = [b"200", b"OK", str(rank).encode(), b""]
        self.door.send_multipart([version, number, *answer])

    def _rank(self, mechanism: bytes, credentials: Sequence[bytes]) -> int | None:
        """Which worker this is; None: none of this run."""
        if mechanism == b"CURVE" and len(credentials) == 1:
            return self.ranks.get(z85.encode(credentials[0]))
        if mechanism == b"PLAIN" and len(credentials) == 2:
            rank, right = self.passwords.get(credentials[0], (None, b""))
            return rank if hmac.compare_digest(right, credentials[1]) else None
        return None

    def close(self) -> None:
        """Close the socket, after what was answered last is sent."""
        self.door.close(0)
        self.router.close()
        if self.listener is not None:
            self.listener.close()
        self.context.term()
        if self.sharing is not None:
            self.sharing.pool.close()


class Sharing:
    """A server's memory that it shares with workers, and theirs."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.pool.find_gone = self._forget_the_ended
        self.channels: dict[tuple[str, bytes], Channel] = {}
        self.routes: dict[bytes, Channel] = {}

    def incoming(self, address: bytes, who: str, frames: Sequence[Any]) -> list[Any]:
        """The frames of a worker's message, those in memory too.

        Raises:
            Late, Malformed: as ``Channel.incoming``.
        """
        channel = self.channels.get(key := (who, mark_of(frames)))
        if channel is None:
            self._forget_the_ended()
            channel = self.channels[key] = Channel(self.pool, writable=True)
        self.routes[address] = channel
        return channel.incoming(frames)

    def outgoing(self, address: bytes, frames: Sequence[Any]) -> Sequence[Any]:
        """The frames of an answer as they go through the socket."""
        channel = self.routes.get(address)
        return frames if channel is None else channel.outgoing(frames)

    def _forget_the_ended(self) -> None:
        for key, channel in [*self.channels.items()]:
            if channel.is_over:
                channel.end()
                del self.channels[key]
        self.routes = {address: c for address, c in self.routes.items() if c in self.channels.values()}


class WorkerSocket:
    """A worker's end of the connection to one server; used by one thread alone.

    Args:
        pool: memory that it shares with the server at a Unix socket; None: none.
    """

    def __init__(
        self, context: zmq.Context[Any], secret: bytes, rank: int, server: int, endpoint: str, pool: Pool | None = None
    ) -> None:
        self.server = server
        is_unix = endpoint.startswith("ipc:")
        self.channel = Channel(pool, writable=False) if pool is not None and is_unix else None
        self.socket = context.socket(zmq.DEALER)
        who = f"worker {rank}"
        if is_unix:
            self.socket.plain_username, self.socket.plain_password = who.encode(), password(secret, who)
        else:
            self.socket.curve_publickey, self.socket.curve_secretkey = key_pair(secret, who)
            self.socket.curve_serverkey = key_pair(secret, f"server {server}")[0]
        self.socket.sndhwm = self.socket.rcvhwm = QUEUE
        self.socket.linger = LINGER_MS
        self.socket.ipv6 = "[" in endpoint
        self.socket.reconnect_ivl = RECONNECT_MS
        self.socket.reconnect_ivl_max = 20 * RECONNECT_MS
        self.socket.connect(endpoint)
        self.bytes_in = 0
        self.bytes_out = 0

    def send(self, frames: Sequence[Any]) -> bool:
        """Hand a packed message over to ZeroMQ. False where its queue is full: the message does not go, and no memory
        is lent for it."""
        if not self.socket.poll(0, zmq.POLLOUT) or not _send(self.socket, self.as_sent(frames)):
            return False
        self.bytes_out += sum(memoryview(f).nbytes for f in frames)
        return True

    def as_sent(self, frames: Sequence[Any]) -> Sequence[Any]:
        """The frames of a message as they go through the socket."""
        return frames if self.channel is None else self.channel.outgoing(frames)

    def receive(self) -> Message | None:
        """The next answer from this server, if one is there."""
        while True:
            try:
                frames = [f.buffer for f in self.socket.recv_multipart(zmq.NOBLOCK, copy=False)]
            except zmq.Again:
                return None
            try:
                if self.channel is not None and has_trailer(frames):
                    frames = self.channel.incoming(frames)
            except Late:
                continue
            self.bytes_in += sum(len(f) for f in frames)
            return unpack(frames)

    def close(self, linger_ms: int = LINGER_MS) -> None:
        """Close the socket; what is not sent yet has so long."""
        self.socket.close(linger_ms)
        if self.channel is not None:
            self.channel.end()


def _send(socket: Any, frames: Sequence[Any]) -> bool:
    """All frames of one message, the large ones without a copy, and without waiting. False: it does not arrive."""
    last = len(frames) - 1
    for number, frame in enumerate(frames):
        view = frame if isinstance(frame, bytes) else memoryview(frame).cast("B") if frame.size else b""
        try:
            socket.send(view, zmq.NOBLOCK | (zmq.SNDMORE if number < last else 0), copy=len(view) < zmq.COPY_THRESHOLD)
        except zmq.Again:
            return False
    return True
