"""A worker finds a server that was started again, whenever in the worker's own start that was."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from trainer.host.notes_board import FolderBoard
from trainer.strategies.pserver.protocol.messages import AGAIN, ENDPOINT
from trainer.strategies.pserver.worker import connections
from trainer.strategies.pserver.worker.connections import Sockets, connect

DEAD, THERE, OTHER = "tcp://127.0.0.1:9", "tcp://127.0.0.1:11", "tcp://127.0.0.1:13"
LIFE = 77


class Watched(FolderBoard):
    """A board on which something happens just before a note is waited for, or just after one was read."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.before_wait: dict[str, Callable[[], None]] = {}
        self.after_read: dict[str, Callable[[], None]] = {}

    def wait(self, keys: Sequence[str], *timeout: Any) -> None:
        self.before_wait.pop(keys[0], lambda: None)()
        super().wait(keys, *timeout)

    def get(self, key: str) -> bytes:
        found = super().get(key)
        self.after_read.pop(key, lambda: None)()
        return found

    def tell(self, endpoint: str) -> None:
        """Server 0 is started again: the second of its notes."""
        self.set(AGAIN.format(0), f"{LIFE} {endpoint}")


@pytest.fixture
def board(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Watched:
    monkeypatch.setattr(connections, "LOOK_S", 0.0)
    made = Watched(tmp_path)
    made.set(ENDPOINT.format(0), DEAD)
    made.set(ENDPOINT.format(1), OTHER)
    return made


def found_by_a_worker(board: Watched) -> tuple[list[str], dict[int, int], list[str]]:
    """The addresses that a worker connects to, the servers that it then finds started again, and the addresses after
    that."""
    seat: Any = SimpleNamespace(secret=bytes(32), rank=0, store=board)
    sockets = connect(seat, 2, 1.0, 60.0)
    try:
        found = _endpoints(sockets), sockets.started_again(), _endpoints(sockets)
        assert not sockets.started_again(), "a restart is news once"
    finally:
        sockets.close(0)
    return found


def _endpoints(sockets: Sockets) -> list[str]:
    return [s.socket.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode() for s in sockets.sockets]


def test_server_that_returns_while_another_one_still_loads_is_found(board: Watched) -> None:
    def returns() -> None:
        board.set(ENDPOINT.format(0), THERE)
        board.tell(THERE)

    board.before_wait[ENDPOINT.format(1)] = returns
    assert found_by_a_worker(board) == ([DEAD, OTHER], {0: LIFE}, [THERE, OTHER])


def test_server_of_whose_return_the_first_note_alone_is_there_is_found_by_the_second(board: Watched) -> None:
    board.set(ENDPOINT.format(0), THERE)
    board.after_read[ENDPOINT.format(0)] = lambda: board.tell(THERE)
    assert found_by_a_worker(board) == ([THERE, OTHER], {0: LIFE}, [THERE, OTHER])


def test_server_that_returned_before_is_no_news(board: Watched) -> None:
    board.tell(THERE)
    assert found_by_a_worker(board) == ([THERE, OTHER], {}, [THERE, OTHER])
