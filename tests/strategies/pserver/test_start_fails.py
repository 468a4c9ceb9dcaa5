"""A server that cannot begin leaves no socket open, which may keep its process from its end."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import zmq

from tests.notes import Notes
from tests.strategies.pserver.harness import config
from trainer.errors import RunFailed
from trainer.launch.process import Failure
from trainer.planning.assignment import Assignment
from trainer.strategies.contract import Seat
from trainer.strategies.pserver.protocol.sockets import UNIX_SOCKET
from trainer.strategies.pserver.server import server as server_module
from trainer.strategies.pserver.server.server import serve
from trainer.weights.server_files import part_name


def seat(folder: str, store: Any = None) -> Seat:
    return Seat(
        "server",
        0,
        1,
        0,
        1,
        "cpu",
        dist.HashStore() if store is None else store,
        secret=bytes(32),
        servers=1,
        folder=folder,
    )


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


def test_server_that_is_started_again_without_its_part_says_so_and_leaves_its_ledger(tmp_path: Path) -> None:
    """The checkpoint was removed since: an older one than the two that stay."""
    run = config("async", 1, ledger=True)
    run["plan"]["paths"]["run_dir"], run["resume"] = str(tmp_path), str(tmp_path / "checkpoints" / "step-000000007")
    (ledger := tmp_path / "ledger.0.tsv").write_text("what the life before has applied\n")
    with pytest.raises(RunFailed, match="its part of step-000000007 is not there any more") as gone:
        server_module.open_server(replace(seat(str(tmp_path)), returns=True), Assignment.of(run))
    assert ledger.read_text() == "what the life before has applied\n"
    assert Failure.of(gone.value).again, "it has died once more: all go on from the newer checkpoint"


@pytest.mark.parametrize("where", ["Server", "opened_ledger"])
def test_server_whose_part_is_removed_while_it_starts_says_so(
    contexts: list[zmq.Context[Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """A worker that was stopped has completed a newer checkpoint just now, of one that stays."""
    run = config("async", 1, ledger=True)
    run["plan"]["paths"]["run_dir"], run["resume"] = str(tmp_path), str(tmp_path / "checkpoints" / "step-000000007")
    (folder := Path(run["resume"])).mkdir(parents=True)
    (folder / part_name(0)).touch()
    go_on = getattr(server_module, where)

    def removed_before(*told: Any) -> Any:
        shutil.rmtree(folder)
        return go_on(*told)

    monkeypatch.setattr(server_module, where, removed_before)
    if where == "Server":
        monkeypatch.setattr(server_module, "opened_ledger", lambda *told: None)
    with pytest.raises(server_module.PartGone, match="its part of step-000000007 is not there any more"):
        server_module.open_server(replace(seat(str(tmp_path)), returns=True), Assignment.of(run))
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
