"""A worker's side of the wire: requests to all servers, sent again until they are answered, waited for with a deadline.

No thread stands between a step and the wire: sending hands buffers to ZeroMQ, whose own thread moves them while the step
computes; answers are taken when somebody asks for them. One thread of ours tells the servers that the worker lives.
"""

from __future__ import annotations

import datetime
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import zmq
from torch.profiler import record_function

from trainer.errors import RunFailed
from trainer.strategies.contract import WAITS, Seat
from trainer.strategies.pserver.protocol.messages import ENDPOINT, MOST_RECORDS, TEXT_LIMIT, Kind, Message, Verb, pack
from trainer.strategies.pserver.protocol.sockets import WorkerSocket

AGAIN_S = 2.0
"""An unanswered request is sent again after so long; each further wait is twice the last one."""
AGAIN_MOST = 8.0
"""The longest wait between two sendings, in units of the first: several losses in a row must not use up a deadline."""
MARGIN_S = 5.0
"""A server answers in time, if only to say who is missing; so much later it counts as gone."""
BYE_S = 3.0


class Fenced(RunFailed):
    """This worker was declared lost, or was started again elsewhere; the others go on without it."""

    ends_run = False


@dataclass
class Request:
    """A request under way to one server, and its answer when it is there."""

    server: int
    message: Message
    frames: list[Any]
    sent: float
    again: float
    then: Callable[[Message], None] | None = None
    every: float = field(default_factory=lambda: AGAIN_S)
    answer: Message | None = field(default=None)


class Client:
    """Connections to all servers of a run.

    Args:
        seat: the worker.
        servers: how many there are; they publish where they are in the seat's store.
        timeout_s: longest wait at a meeting point.
        lost_after_s: silence after which servers count a worker as lost.
        io_threads: ZeroMQ's threads.
    """

    def __init__(self, seat: Seat, servers: int, timeout_s: float, lost_after_s: float, io_threads: int = 1) -> None:
        assert seat.store is not None
        self.rank, self.timeout_s = seat.rank, timeout_s
        self.endpoints = []
        for server in range(servers):
            key = ENDPOINT.format(server)
            try:
                seat.store.wait([key], datetime.timedelta(seconds=timeout_s))
            except RuntimeError as error:
                raise RunFailed(f"server {server} did not say where it is within {timeout_s:g} s (strategy.timeout_s)") from error  # fmt: skip
            self.endpoints.append(seat.store.get(key).decode())
        self.context: zmq.Context[Any] = zmq.Context(io_threads)
        self.sockets = [WorkerSocket(self.context, seat.secret, seat.rank, n, e) for n, e in enumerate(self.endpoints)]
        self.poller = zmq.Poller()
        for socket in self.sockets:
            self.poller.register(socket.socket, zmq.POLLIN)
        self.incarnations = [0] * servers
        self.most_bytes = 0
        self.sequence = 0
        self.number = 0
        self.meetings = 0
        self.under_way: dict[int, Request] = {}
        self.waited = 0.0
        self._gone = threading.Event()
        self._heart = threading.Thread(
            target=_beat, args=(self.context, seat, self.endpoints, lost_after_s / 5, self._gone),
            daemon=True, name="pserver-heart",
        )  # fmt: skip
        try:
            self.hello()
        except BaseException:
            self.close()
            raise

    @property
    def servers(self) -> range:
        """Their numbers."""
        return range(len(self.sockets))

    def hello(self) -> None:
        """Begin a life: learn which of this worker's pushes are applied already; go on counting after the last that any server has."""
        life = secrets.randbits(62) | 1
        requests = [self.ask(s, Message(Verb.HELLO, sequence=life)) for s in self.servers]
        answers = self.wait(requests)
        self.incarnations = [a.incarnation for a in answers]
        self.watermarks = [a.sequence for a in answers]
        limits = [a.need(Kind.NUMBERS) for a in answers]
        self.most_bytes = int(min(n[0] for n in limits))
        self.sequence = int(max(n[1] for n in limits))
        if not self._heart.is_alive():
            self._heart.start()

    def ask(self, server: int, message: Message, then: Callable[[Message], None] | None = None) -> Request:
        """Send a request; its buffers must not change until it is answered.

        Args:
            then: called with the answer, by the next call that waits for anything.

        Raises:
            RunFailed: it is larger than servers take.
        """
        self._refuse_large(server, message)
        self.number += 1
        message.rank, message.incarnation, message.number = self.rank, self.incarnations[server], self.number
        frames = pack(message)
        now = time.monotonic()
        request = Request(server, message, frames, now, now + AGAIN_S, then)
        self.under_way[self.number] = request
        self.sockets[server].send(frames)
        return request

    def _refuse_large(self, server: int, message: Message) -> None:
        """A server would close the connection, or forget the message, without an answer."""
        what = f"{message.verb.name} of worker {self.rank} to server {server}"
        if len(message.records) > MOST_RECORDS:
            raise RunFailed(f"{what} has {len(message.records):,} records, and servers take {MOST_RECORDS:,}: a model of fewer tensors would fit")  # fmt: skip
        for record in message.records:
            size, limit = record.array.nbytes, TEXT_LIMIT if record.kind == Kind.TEXT else self.most_bytes
            if size <= limit:
                continue
            part = f"{size:,} bytes of {record.kind.name}" + (f" of table {record.table}" if record.table else "")
            instead = "a model of fewer tensors, or a larger strategy.slice_above" if record.kind == Kind.TEXT else "more launch.servers, or fewer rows at once: data.batch_size, in pserver_async strategy.max_merge_var_num, in pserver_geo strategy.k_steps"  # fmt: skip
            raise RunFailed(f"{what} has {part} in one frame, and servers take {limit:,}. What helps: {instead}")

    def push(self, messages: Sequence[Message], then: Callable[[Message], None] | None = None) -> list[Request]:
        """The next push: its part for each server, all with the same sequence number."""
        self.sequence += 1
        for message in messages:
            message.sequence = self.sequence
        return [self.ask(server, message, then) for server, message in enumerate(messages)]

    def take(self) -> None:
        """Take the answers that are there, without waiting."""
        for socket in self.sockets:
            while (message := socket.receive()) is not None:
                self._answered(message)

    def _answered(self, message: Message) -> None:
        request = self.under_way.pop(message.number, None)
        if request is None:
            return  # the answer to a request that was sent twice
        request.answer = message
        if message.verb == Verb.FAILED:
            told = message.text()
            raise (Fenced if told.get("fenced") else RunFailed)(str(told["why"]))
        if request.then is not None:
            request.then(message)

    def wait(self, requests: Iterable[Request], patience_s: float | None = None) -> list[Message]:
        """The answers of all of them.

        Raises:
            RunFailed: a server says why it cannot be, or does not answer in time.
        """
        requests = list(requests)
        self.until(lambda: all(r.answer is not None for r in requests), patience_s)
        return [r.answer for r in requests if r.answer is not None]

    def until(self, done: Callable[[], bool], patience_s: float | None = None) -> None:
        """Take answers until that is so.

        Raises:
            RunFailed: as ``wait``.
        """
        self.take()
        if done():
            return
        with record_function(WAITS):
            self._take_until(done, patience_s)

    def _take_until(self, done: Callable[[], bool], patience_s: float | None) -> None:
        began = time.monotonic()
        deadline = began + (self.timeout_s + MARGIN_S if patience_s is None else patience_s)
        while not done():
            now = time.monotonic()
            if now > deadline:
                silent = min(self.under_way.values(), key=lambda r: r.sent, default=None)
                what = f"server {silent.server} did not answer {silent.message.verb.name}" if silent else "no answer"
                raise RunFailed(f"{what} of worker {self.rank} within {deadline - began:g} s (strategy.timeout_s)")
            next_look = min([r.again for r in self.under_way.values()] + [deadline])
            self.poller.poll(max(1, int(1000 * (next_look - now))))
            self.take()
            self._send_again()
        self.waited += time.monotonic() - began

    def _send_again(self) -> None:
        now = time.monotonic()
        for request in self.under_way.values():
            if now >= request.again:
                request.every = min(2 * request.every, AGAIN_MOST * AGAIN_S)
                request.again = now + request.every
                self.sockets[request.server].send(request.frames)

    def traffic(self) -> tuple[int, int]:
        """Bytes received and sent so far."""
        return sum(s.bytes_in for s in self.sockets), sum(s.bytes_out for s in self.sockets)

    def bye(self) -> None:
        """Say goodbye to all servers; one that is gone already is not waited for long."""
        self.under_way.clear()
        try:
            self.wait([self.ask(s, Message(Verb.BYE)) for s in self.servers if self.incarnations[s]], BYE_S)
        except RunFailed:
            pass

    def close(self) -> None:
        """Close all connections; nothing is left of them."""
        self._gone.set()
        if self._heart.is_alive():
            self._heart.join()
        for socket in self.sockets:
            socket.close()
        self.context.term()


def _beat(context: zmq.Context[Any], seat: Seat, endpoints: list[str], every_s: float, gone: threading.Event) -> None:
    """Tell all servers that this worker lives, over connections of this thread's own."""
    sockets = [WorkerSocket(context, seat.secret, seat.rank, n, e) for n, e in enumerate(endpoints)]
    frames = pack(Message(Verb.BEAT, rank=seat.rank))
    while not gone.wait(every_s):
        for socket in sockets:
            try:
                socket.socket.send_multipart(frames, zmq.NOBLOCK)
            except zmq.Again:
                pass  # a server that takes nothing has other worries
    for socket in sockets:
        socket.close(0)
