"""Servers as threads or processes, and bare workers that push numbers whose sum shows every lost or doubled push."""

from __future__ import annotations

import copy
import gc
import secrets
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch.distributed as dist

from tests.pace import wait_for
from tests.strategies.launching import payload
from tests.weather import Weather
from trainer.host.notes_board import SealedBoard
from trainer.planning.launcher import Assignment
from trainer.strategies.pserver.protocol.messages import (
    CREATES,
    ENDPOINT,
    WANTS_DENSE,
    Kind,
    Message,
    Record,
    Verb,
    text,
)
from trainer.strategies.pserver.protocol.sharding import bucket_key, buckets_of, server_of_bucket
from trainer.strategies.pserver.protocol.sockets import ServerSocket, WorkerSocket
from trainer.strategies.pserver.server import machine
from trainer.strategies.pserver.server.machine import Server
from trainer.strategies.pserver.server.server import open_server
from trainer.strategies.pserver.worker import client as client_module
from trainer.strategies.pserver.worker import connections as connections_module
from trainer.strategies.pserver.worker.client import Client
from trainer.strategies.pserver.worker.connections import connect
from trainer.strategies.seat import Address, Others, Seat
from trainer.worker.model import Updaters

DIM = 3
TABLE = "rows"
PLAIN = (
    "optimizer=sgd",
    "optimizer.lr=1",
    "optimizer.weight_decay=0",
    "scheduler.warmup_steps=0",
    "scheduler.final=1",
    "data.global_batch_size=12",
)
"""Adds what is pushed, with its sign turned: small integers in float64 add up exactly in any order."""


def config(mode: str, workers: int, servers: int = 1, **strategy: Any) -> dict[str, Any]:
    """The payload of a run of that mode, with these keys of its strategy."""
    made = copy.deepcopy(payload(f"pserver_{mode}", 2, PLAIN))  # composed once per mode
    made["plan"]["topology"]["roles"] |= {"worker": workers, "server": servers}
    made["config"]["strategy"] |= {"timeout_s": 20.0, "lost_after_s": 60.0, **strategy}
    return made


class Cluster:
    """Servers in threads of this process, until the block ends.

    Args:
        run: a payload, see :func:`config`.
        folder: of Unix sockets; empty: TCP.
    """

    def __init__(self, run: dict[str, Any], folder: str = "") -> None:
        self.run, self.folder = run, folder
        given = Assignment.of(run)
        self.updaters = Updaters(given.config, given.plan)
        self.workers = run["plan"]["topology"]["roles"]["worker"]
        self.size = run["plan"]["topology"]["roles"]["server"]
        self.secret = secrets.token_bytes(32)
        self.store = SealedBoard(dist.HashStore(), self.secret)
        opened = [open_server(self.seat("server", n), given) for n in range(self.size)]
        self.servers = [server for server, _ in opened]
        self.sockets = [socket for _, socket in opened]
        self.ended = threading.Event()
        for number, opened_socket in enumerate(self.sockets):
            self.store.set(ENDPOINT.format(number), opened_socket.endpoint)
        self.errors: list[BaseException] = []
        self.threads = [threading.Thread(target=self._serve, args=o, daemon=True) for o in opened]

    def seat(self, role: str, rank: int) -> Seat:
        """Where a process of that role sits."""
        size = self.workers if role == "worker" else self.size
        address, others = Address(self.secret, folder=self.folder), Others(servers=self.size)
        return Seat(role, rank, size, rank, size, "cpu", self.store, address=address, others=others)

    def _serve(self, server: Server, socket: ServerSocket) -> None:
        try:
            while not server.over and not self.ended.is_set():
                server.turn(socket.receive(int(1000 * machine.CHECK_S)))
        except BaseException as error:
            self.errors.append(error)
        finally:
            socket.close()

    def __enter__(self) -> Cluster:
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        self.ended.set()
        for thread in self.threads:
            thread.join(20)
            assert not thread.is_alive(), "a server does not end"
        if self.folder:
            gc.collect()  # in the garbage of dead workers lie arrays, and with each the descriptor of its memory
        if kind is None and self.errors:
            raise self.errors[0]


class StormySocket(WorkerSocket):
    """A worker's end of a connection that loses, doubles and reorders whole messages, both ways."""

    weather = Weather(0)

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.going: list[tuple[float, Any]] = []
        self.coming: list[tuple[float, Message]] = []

    def send(self, frames: Sequence[Any]) -> bool:
        now, frames = time.monotonic(), self.as_sent(frames)
        for late in self.weather.copies():
            self.going.append((now + late, [bytes(memoryview(f).cast("B")) if np.size(f) else b"" for f in frames]))
        self._flush(now)
        return True

    def _flush(self, now: float) -> None:
        due = [f for at, f in self.going if at <= now]
        self.going = [(at, f) for at, f in self.going if at > now]
        for frames in due:
            self.socket.send_multipart(frames)

    def receive(self) -> Message | None:
        now = time.monotonic()
        self._flush(now)
        while (message := super().receive()) is not None:
            self.coming += [(now + late, message) for late in self.weather.copies()]
        for place, (at, message) in enumerate(self.coming):
            if at <= now:
                del self.coming[place]
                return message
        return None


@contextmanager
def impatient(monkeypatch: Any, weather: Weather | None = None, again_s: float = 0.01) -> Iterator[None]:
    """Clients that send again soon, through that weather."""
    with monkeypatch.context() as patch:
        patch.setattr(client_module, "AGAIN_S", again_s)
        patch.setattr(machine, "CHECK_S", 0.02)
        if weather is not None:
            patch.setattr(connections_module, "WorkerSocket", StormySocket)
            patch.setattr(StormySocket, "weather", weather)
        yield


class Bare:
    """A worker without a model: one dense vector per server, and one table of rows that start at zero.

    Args:
        dense: elements that each server keeps.
    """

    def __init__(self, cluster: Any, rank: int, dense: int = 4) -> None:
        self.cluster, self.rank, self.dense = cluster, rank, dense
        strategy = cluster.run["config"]["strategy"]
        timeout_s, lost_after_s = strategy["timeout_s"], strategy["lost_after_s"]
        self.connections = connect(cluster.seat("worker", rank), cluster.size, timeout_s, lost_after_s, shares=True)
        self.client = Client(rank, self.connections, timeout_s)
        self.key, self.home = bucket_key(TABLE), server_of_bucket(cluster.size)

    def begin(self) -> None:
        """As worker 0: tell all servers the start."""
        told = {
            "dtype": "float64",
            "last": True,
            "tables": [{"number": 1, "name": TABLE, "dim": DIM, "rows": 1000, "init": "zeros", "scale": 0.0}],
        }
        for server in self.client.servers:
            layout = {**told, "pieces": [[f"p{server}", 0, self.dense]]}
            start = Record(Kind.DENSE, np.zeros(self.dense))
            self.client.wait([self.client.ask(server, Message(Verb.START, records=[text(layout), start]))])

    def _own(self, server: int, ids: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(ids[self.home[buckets_of(self.key, ids)] == server])

    def gradient(self, dense: np.ndarray, ids: np.ndarray, value: float, sign: float, clock: int) -> list[Message]:
        """A push's messages that add ``dense`` to every server's vector and ``value`` to each of these rows."""
        messages = []
        numbers = Record(Kind.NUMBERS, np.array([0.0, 1.0, float(clock)]))
        for server in self.client.servers:
            own = self._own(server, ids)
            records = [numbers, Record(Kind.DENSE, sign * dense)]
            if len(own):
                records += [Record(Kind.IDS, own, 1), Record(Kind.ROWS, np.full((len(own), DIM), sign * value), 1)]
            messages.append(Message(Verb.PUSH, clock=clock, records=records))
        return messages

    def look(self, ids: np.ndarray) -> tuple[np.ndarray, dict[int, float]]:
        """(servers, n) the dense vectors, and each row's value, all columns of which are equal."""
        vectors, rows = [], {}
        for server in self.client.servers:
            own = self._own(server, ids)
            asked = Message(Verb.PULL, flags=WANTS_DENSE | CREATES, records=[Record(Kind.IDS, own, 1)])
            [answer] = self.client.wait([self.client.ask(server, asked)])
            vectors.append(np.array(answer.need(Kind.DENSE)))
            values = answer.need(Kind.ROWS, 1)
            assert (values == values[:, :1]).all()
            rows |= dict(zip(own.tolist(), values[:, 0].tolist(), strict=True))
        return np.array(vectors), rows

    def close(self) -> None:
        """Say goodbye and close."""
        self.client.bye()
        self.client.close()

    def die(self) -> None:
        """Vanish without a word, with all that is not sent yet."""
        self.connections.close(linger_ms=0)


class Sum:
    """Which pushes there are: the same ones for whoever asks, and what they add up to."""

    IDS = np.arange(0, 40, dtype=np.int64)

    def __init__(self, seed: int, workers: int, pushes: int, dense: int = 4) -> None:
        generator = np.random.default_rng(seed)
        self.pushes = pushes
        self.vectors = generator.integers(1, 1000, size=(workers, pushes, dense)).astype(np.float64)
        self.values = generator.integers(1, 1000, size=(workers, pushes)).astype(np.float64)
        self.picked = generator.random((workers, pushes, len(self.IDS))) < 0.2

    def messages(self, worker: Bare, number: int, sign: float) -> list[Message]:
        """Push ``number`` (from 0) of that worker."""
        r = worker.rank
        return worker.gradient(
            self.vectors[r, number], self.IDS[self.picked[r, number]], self.values[r, number], sign, number + 1
        )

    @property
    def dense(self) -> np.ndarray:
        """What every server's vector comes to."""
        total: np.ndarray = self.vectors.sum((0, 1))
        return total

    @property
    def rows(self) -> dict[int, float]:
        """What each row comes to."""
        totals = (self.picked * self.values[:, :, None]).sum((0, 1))
        return dict(zip(self.IDS.tolist(), totals.tolist(), strict=True))


def push_all(
    worker: Bare, total: Sum, sign: float, stop: int | None = None, under_way: int = 4, in_step: bool = False
) -> None:
    """Give servers what they lack of the pushes of the life before, then go on after the last of these to the end.

    Args:
        in_step: after each push the parameters of the next step are waited for, as workers in sync and ssp do.
    """
    client = worker.client
    waiting: list[Any] = []

    def room() -> bool:
        return sum(r.answer is None for r in waiting) < under_way

    for server, done in enumerate(client.watermarks):
        for number in range(done, client.sequence):
            message = total.messages(worker, number, sign)[server]
            message.sequence = number + 1
            waiting.append(client.ask(server, message))
            client.until(room)
    client.watermarks = [client.sequence] * len(client.watermarks)
    while client.sequence < (total.pushes if stop is None else stop):
        waiting += client.push(total.messages(worker, client.sequence, sign))
        if in_step:
            pull = {"clock": client.sequence, "flags": WANTS_DENSE | CREATES}
            client.wait([*waiting, *(client.ask(s, Message(Verb.PULL, **pull)) for s in client.servers)])
        client.until(room)
    if stop is None:
        client.wait(waiting)


def in_threads(functions: Mapping[str, Any], seconds: float = 60) -> dict[str, Any]:
    """Run functions side by side; what each returned. The first error of any is raised."""
    done: dict[str, Any] = {}
    errors: list[BaseException] = []

    def call(name: str, function: Any) -> None:
        try:
            done[name] = function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=call, args=item, daemon=True) for item in functions.items()]
    for thread in threads:
        thread.start()
    wait_for(lambda: errors or not any(t.is_alive() for t in threads), seconds, f"{set(functions) - set(done)}")
    if errors:
        for thread in threads:
            thread.join(5)
        raise errors[0]
    return done
