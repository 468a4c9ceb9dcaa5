"""strategy=toy_server: the suite's own, whose parameters and optimizer live in another process, of role ``server``.

It proves that the contract, the launcher and the loop hold both worlds. All in one file for the reader's sake; a real
strategy keeps its Declaration apart, because the command line imports that before torch.

The protocol: a message is its length in 8 bytes and a ``torch.save`` of (verb, contents); every request has one reply.
``start``, ``step``, ``all_reduce_sum`` and ``synchronize`` are meetings: nobody gets a reply before all have come.
"""

from __future__ import annotations

import datetime
import hmac
import io
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from trainer.config.run_config import RunConfig
from trainer.config.schema import LaunchConfig
from trainer.errors import RunFailed, UserError
from trainer.optim.updater import Updater
from trainer.planning.launcher import Assignment
from trainer.strategies.contract import Declaration, MakeUpdater, Strategy, Traits
from trainer.strategies.seat import Seat

ADDRESS = "toy_server/address"
MARGIN_S = 5.0

STARTUP_S = 60.0
"""For processes to start and build their model, which no meeting's limit is about."""


class ToyServer(Declaration):
    """One server owns the optimizer; it applies the sum of all workers' gradients once, then everybody pulls."""

    worker = "tests.strategies.toy_server:ToyWorker"
    entries = {"server": "tests.strategies.toy_server:serve"}

    traits = Traits(exact=True)

    def roles(self, workers: int, launch: LaunchConfig) -> dict[str, int]:
        return {"server": 1, "worker": workers}

    def refuse(self, config: RunConfig, workers: int) -> list[UserError]:
        refused = super().refuse(config, workers)
        if config.launch.servers not in (None, 1):
            refused.append(
                UserError(f"launch.servers={config.launch.servers}", "toy_server has one server", "launch.servers=1")
            )
        if config.precision == "fp16":
            refused.append(UserError("precision=fp16", "the server knows no loss scale", "precision=bf16"))
        return refused


class ToyWorker(Strategy):
    """A worker: pulls parameters before a forward, pushes gradients weighted by what their loss was divided by."""

    def __init__(self, config: Mapping[str, Any], seat: Seat) -> None:
        super().__init__(config, seat)
        self.stale = False
        startup_s = max(config["timeout_s"], STARTUP_S)
        try:
            seat.store.wait([ADDRESS], datetime.timedelta(seconds=startup_s))
        except RuntimeError as error:
            raise RunFailed(f"server 0 did not say where it is within {startup_s:g} s") from error
        port, token = seat.store.get(ADDRESS).decode().split()
        self.socket = socket.create_connection(("127.0.0.1", int(port)), timeout=config["timeout_s"])
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.settimeout(startup_s + MARGIN_S)
        self.socket.sendall(token.encode())
        send(self.socket, "hello", seat.rank)

    def setup(self, model: nn.Module, make_updater: MakeUpdater) -> nn.Module:
        self.model = model
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        start = self.parameters if self.seat.rank == 0 else []
        self._take(self.ask("start", [p.detach().cpu() for p in start]))
        self.socket.settimeout(self.config["timeout_s"] + MARGIN_S)
        return model

    def prepare(self, batch: Any) -> None:
        if self.stale:
            self._take(self.ask("pull"))

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def weight(self, denominator: float) -> float:
        self.denominator = denominator
        return 1.0

    def step(self, samples: int) -> None:
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        self._lr = self.ask("step", (self.denominator, [g.cpu() * self.denominator for g in gradients]))
        self.model.zero_grad(set_to_none=True)
        self.stale = True

    def all_reduce_sum(self, values: torch.Tensor) -> torch.Tensor:
        return self.ask("all_reduce_sum", values.cpu()).to(values.device)

    @torch.no_grad()
    def synchronize(self) -> None:
        agreed = self.ask("synchronize", [b.cpu() for b in self.model.buffers()])
        for buffer, value in zip(self.model.buffers(), agreed["buffers"], strict=True):
            buffer.copy_(value)
        self._take(agreed)

    @property
    def lr(self) -> float:
        return self._lr

    def close(self) -> None:
        try:
            send(self.socket, "leave", None)
        except OSError:
            pass  # the server is gone already, so nobody waits for a goodbye
        self.socket.close()

    def ask(self, verb: str, contents: Any = None) -> Any:
        """Send a request and wait for the reply.

        Raises:
            RunFailed: the server says who is missing, or does not answer.
        """
        try:
            send(self.socket, verb, contents)
            answer, value = receive(self.socket)
        except TimeoutError as error:
            raise RunFailed(f"server 0 did not answer {verb!r} of worker {self.seat.rank}") from error
        except OSError as error:
            raise RunFailed(f"server 0 went away during {verb!r} of worker {self.seat.rank}: {error}") from error
        if answer == "failed":
            raise RunFailed(value)
        return value

    @torch.no_grad()
    def _take(self, agreed: dict[str, Any]) -> None:
        for parameter, value in zip(self.parameters, agreed["parameters"], strict=True):
            parameter.copy_(value)
        self._lr, self.stale = agreed["lr"], False


def serve(seat: Seat, run: Assignment) -> int:
    """Entry of the role ``server``: serve until every worker has said goodbye; returns the number of updates.

    Raises:
        RunFailed: a worker did not come, or went away without a goodbye.
    """
    timeout_s = run.config.node("strategy")["timeout_s"]
    server = Server(run, run.plan.topology.workers, timeout_s)
    token = secrets.token_hex(16)
    with socket.create_server(("127.0.0.1", 0), backlog=run.plan.topology.workers) as listening:
        seat.store.set(ADDRESS, f"{listening.getsockname()[1]} {token}")
        connections = gather(listening, token, server.size, max(timeout_s, STARTUP_S))
    threads = [threading.Thread(target=server.attend, args=(rank, c)) for rank, c in connections.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if server.lost:
        raise RunFailed(f"{_workers(server.lost)} went away without a goodbye")
    return server.updater.steps if server.updater is not None else 0


def gather(listening: socket.socket, token: str, size: int, timeout_s: float) -> dict[int, socket.socket]:
    """The connections of all workers by rank; strangers without the token are sent away."""
    connections: dict[int, socket.socket] = {}
    deadline = time.monotonic() + timeout_s
    while len(connections) < size:
        try:
            listening.settimeout(max(0.01, deadline - time.monotonic()))
            connection, _ = listening.accept()
            connection.settimeout(max(0.01, deadline - time.monotonic()))
            if not hmac.compare_digest(exactly(connection, len(token)), token.encode()):
                connection.close()
                continue
        except TimeoutError:
            raise RunFailed(
                f"{_workers(set(range(size)) - set(connections))} did not connect to server 0 within {timeout_s:g} s"
            ) from None
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _, rank = receive(connection)
        connection.settimeout(None)
        connections[rank] = connection
    return connections


class Round:
    """One meeting: what the workers have brought so far, then the common reply."""

    def __init__(self, verb: str) -> None:
        self.verb = verb
        self.brought: dict[int, Any] = {}
        self.reply: tuple[str, Any] | None = None


class Server:
    """Parameters and optimizer, and one thread for each worker."""

    def __init__(self, run: Assignment, size: int, timeout_s: float) -> None:
        self.run, self.size, self.timeout_s = run, size, timeout_s
        self.updater: Updater | None = None
        self.changed = threading.Condition()
        self.round: Round | None = None
        self.lost: set[int] = set()
        self.meetings: dict[str, Callable[[list[Any]], Any]] = {
            "start": self.start,
            "step": self.step,
            "all_reduce_sum": sum,
            "synchronize": self.synchronize,
        }

    def attend(self, rank: int, connection: socket.socket) -> None:
        """Answer one worker until it leaves."""
        with connection:
            try:
                while (request := receive(connection))[0] != "leave":
                    verb, contents = request
                    if verb in self.meetings:
                        send(connection, *self.meet(verb, rank, contents))
                    else:
                        with self.changed:
                            send(connection, "done", self.agreed())
            except OSError:
                self.lost.add(rank)

    def meet(self, verb: str, rank: int, contents: Any) -> tuple[str, Any]:
        """Wait for all workers; the last one does what the meeting is for. A meeting that failed stays failed."""
        with self.changed:
            if self.round is None:
                self.round = Round(verb)
            current = self.round
            current.brought[rank] = contents
            if current.verb != verb:
                current.reply = "failed", f"worker {rank} came to {verb!r} while the others meet for {current.verb!r}"
            elif current.reply is None and len(current.brought) == self.size:
                current.reply = "done", self.meetings[verb]([current.brought[r] for r in range(self.size)])
                self.round = None
            self.changed.notify_all()
            patience_s = max(self.timeout_s, STARTUP_S) if verb == "start" else self.timeout_s
            if not self.changed.wait_for(lambda: current.reply is not None, patience_s):
                missing = _workers(set(range(self.size)) - set(current.brought))
                current.reply = "failed", f"{missing} did not arrive at {verb!r} within {patience_s:g} s"
                self.changed.notify_all()
            assert current.reply is not None
            return current.reply

    def start(self, brought: list[list[torch.Tensor]]) -> dict[str, Any]:
        from trainer.worker.model import Updaters

        self.parameters = nn.ParameterList(brought[0])
        self.updater = Updaters(self.run.config, self.run.plan)(self.parameters)
        return self.agreed()

    def agreed(self) -> dict[str, Any]:
        return {"parameters": [p.detach() for p in self.parameters], "lr": self.updater.lr}

    def step(self, brought: list[tuple[int, list[torch.Tensor]]]) -> float:
        """One step with the mean gradient over all workers' samples; returns the next learning rate."""
        samples = sum(count for count, _ in brought)
        for number, parameter in enumerate(self.parameters):
            parameter.grad = sum(gradients[number] for _, gradients in brought) / (samples or 1.0)
        self.updater.step()
        return self.updater.lr

    def synchronize(self, brought: list[list[torch.Tensor]]) -> dict[str, Any]:
        return {**self.agreed(), "buffers": brought[0]}


def send(connection: socket.socket, verb: str, contents: Any) -> None:
    """One message."""
    buffer = io.BytesIO()
    torch.save((verb, contents), buffer)
    connection.sendall(struct.pack("!Q", buffer.tell()) + buffer.getbuffer())


def receive(connection: socket.socket) -> tuple[str, Any]:
    """The next message; ConnectionError when the other side is gone."""
    (length,) = struct.unpack("!Q", exactly(connection, 8))
    return torch.load(io.BytesIO(exactly(connection, length)), weights_only=True)


def exactly(connection: socket.socket, length: int) -> bytes:
    """So many bytes."""
    data = bytearray()
    while len(data) < length:
        part = connection.recv(length - len(data))
        if not part:
            raise ConnectionError("the connection was closed")
        data += part
    return bytes(data)


def _workers(ranks: set[int]) -> str:
    return ", ".join(f"worker {rank}" for rank in sorted(ranks))
