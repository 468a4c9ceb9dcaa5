"""A server that cannot begin leaves no socket open, which may keep its process from its end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import zmq

from tests.notes import Notes
from tests.strategies.pserver.harness import config
from trainer.errors import RunFailed
from trainer.planning.launcher import Assignment
from trainer.strategies.pserver.protocol.sockets import UNIX_SOCKET
from trainer.strategies.pserver.server import server as server_module
from trainer.strategies.pserver.server.server import serve
from trainer.strategies.seat import Address, Others, Seat


def seat(folder: str, store: Any = None) -> Seat:
    board = dist.HashStore() if store is None else store
    address, others = Address(bytes(32), folder=folder), Others(servers=1)
    return Seat("server", 0, 1, 0, 1, "cpu", board, address=address, others=others)


def serves(folder: str, store: Any = None) -> None:
    serve(seat(folder, store), Assignment.of(config("async", 1)))


@pytest.fixture
def contexts(monkeypatch: pytest.MonkeyPatch) -> list[zmq.Context[Any]]:
    make, made = zmq.Context, list[zmq.Context[Any]]()

    def context() -> zmq.Context[Any]:
        made.append(make())
        return made[-1]

    monkeypatch.setattr(zmq, "Context", context)
    return made


@pytest.mark.parametrize("where", ["Server", "opened_ledger"])
def test_no_socket_stays_open_when_a_server_cannot_begin(
    contexts: list[zmq.Context[Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def fails(*told: Any) -> None:
        raise RunFailed("it cannot begin")

    monkeypatch.setattr(server_module, where, fails)
    run = config("async", 1, ledger=True)
    run["plan"]["paths"]["run_dir"] = str(tmp_path)
    with pytest.raises(RunFailed, match="it cannot begin"):
        serve(seat(str(tmp_path)), Assignment.of(run))
    assert [c.closed for c in contexts] == [True]


def test_no_socket_stays_open_when_the_other_hosts_cannot_be_told(
    contexts: list[zmq.Context[Any]], tmp_path: Path
) -> None:
    class Gone(Notes):
        def set(self, key: str, value: str) -> None:
            raise server_module.NoNote("host 0 is gone")

    with pytest.raises(RunFailed, match="the other hosts cannot be reached: host 0 is gone"):
        serves(str(tmp_path), Gone())
    assert [c.closed for c in contexts] == [True]


def test_no_socket_stays_open_where_a_server_cannot_listen(contexts: list[zmq.Context[Any]], tmp_path: Path) -> None:
    (tmp_path / UNIX_SOCKET.format(0)).mkdir()
    with pytest.raises(zmq.ZMQError):
        serves(str(tmp_path))
    assert [c.closed for c in contexts] == [True]
