"""A process whose peer takes nothing never waits in a socket: what finds no room there counts as lost, and is sent
again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
import zmq

from tests.strategies.pserver.harness import impatient, in_threads
from trainer.errors import Missing
from trainer.host.notes_board import SealedBoard
from trainer.strategies.pserver.protocol import sockets
from trainer.strategies.pserver.protocol.messages import ENDPOINT, Kind, Message, Record, Verb, pack
from trainer.strategies.pserver.protocol.shared_memory import Pool
from trainer.strategies.pserver.protocol.sockets import ServerSocket, WorkerSocket
from trainer.strategies.pserver.worker import client as client_module
from trainer.strategies.pserver.worker.client import Client
from trainer.strategies.pserver.worker.connections import connect
from trainer.strategies.seat import Address

SECRET = bytes(32)
NOBODY = "tcp://127.0.0.1:9"
QUEUE = 3
MANY = 60
"""Messages that two queues and what the kernel holds between them do not take."""
LARGE = Record(Kind.DENSE, np.arange(100_000, dtype=np.float64))


@pytest.fixture(autouse=True)
def short_queues(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "QUEUE", QUEUE)


def unblocked(function: Callable[[], Any]) -> Any:
    """What a function returns that must not wait for ever."""
    return in_threads({"it": function}, seconds=20)["it"]


def test_a_worker_whose_server_takes_nothing_fails_at_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "MARGIN_S", 0.0)
    board = SealedBoard(dist.HashStore(), SECRET)
    board.set(ENDPOINT.format(0), NOBODY)
    seat: Any = SimpleNamespace(store=board, address=Address(SECRET), rank=0)

    def says_hello() -> None:
        with pytest.raises(Missing, match=r"server 0 did not answer HELLO of worker 0 within 0\.5 s"):
            Client(0, connect(seat, 1, 5.0, 60.0), 0.5)

    with impatient(monkeypatch):
        unblocked(says_hello)


def test_what_found_no_room_is_whole_when_it_is_sent_again(tmp_path: Path) -> None:
    context: zmq.Context[Any] = zmq.Context()
    pool, other = Pool(), Pool()
    worker = WorkerSocket(context, SECRET, 0, 0, f"ipc://{tmp_path}/server-0", pool)
    assert worker.channel is not None
    worker.channel.is_read = True
    messages = [pack(Message(Verb.PUSH, number=n, records=[Record(Kind.DENSE, LARGE.array + n)])) for n in range(6)]
    went = unblocked(lambda: [worker.send(frames) for frames in messages])
    assert went == [True] * QUEUE + [False] * 3
    assert len(worker.channel.sent) == len(pool.segments) == QUEUE, "memory is lent to messages that went"
    server = ServerSocket(SECRET, 0, 1, "", 1 << 30, str(tmp_path), pool=other)
    left, came = messages[QUEUE:], []
    while len(came) < len(messages):
        while left and worker.send(left[0]):
            del left[0]
        came += [message for _, message in server.receive(1000)]
    for number, message in enumerate(came):
        assert message.number == number
        np.testing.assert_array_equal(message.need(Kind.DENSE), LARGE.array + number)
    worker.close(0)
    server.close()
    context.term()
    pool.close()


def test_a_server_does_not_wait_for_a_worker_that_takes_nothing(tmp_path: Path) -> None:
    context: zmq.Context[Any] = zmq.Context()
    server = ServerSocket(SECRET, 0, 2, "", 1 << 30, str(tmp_path))
    deaf, other = (WorkerSocket(context, SECRET, rank, 0, server.endpoint) for rank in range(2))
    addresses: dict[int, bytes] = {}
    for worker, rank in ((deaf, 0), (other, 1)):
        assert worker.send(pack(Message(Verb.PULL, rank=rank)))
        while rank not in addresses:
            addresses |= {message.rank: address for address, message in server.receive(10_000)}
    unblocked(
        lambda: [
            server.answer(addresses[0], Message(Verb.PULL, number=n), Message(Verb.DONE, records=[LARGE]))
            for n in range(MANY)
        ]
    )
    server.answer(addresses[1], Message(Verb.PULL, number=7), Message(Verb.DONE))
    assert other.socket.poll(10_000) and other.receive().number == 7  # type: ignore[union-attr]
    numbers = []
    while deaf.socket.poll(2000) and (answer := deaf.receive()):
        numbers.append(answer.number)
        np.testing.assert_array_equal(answer.need(Kind.DENSE), LARGE.array)
    assert numbers == sorted({*numbers}) and 0 < len(numbers) < MANY
    server.answer(addresses[0], Message(Verb.PULL, number=MANY), Message(Verb.DONE))
    assert deaf.socket.poll(10_000) and deaf.receive().number == MANY  # type: ignore[union-attr]
    for worker in (deaf, other):
        worker.close(0)
    server.close()
    context.term()
