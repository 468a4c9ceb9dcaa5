"""A worker's signs of life go on, to a server that was started again as well, while no descriptor is free for a new
connection."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
import zmq

from trainer.host.notes_board import SealedBoard
from trainer.strategies.pserver.worker import connections

BEATS = 6
FREE_AT = 3
"""Beats before a descriptor is free."""


@pytest.mark.parametrize("fails", ["the note", "the connection"])
def test_signs_of_life_go_on_without_a_descriptor(fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    beats, sent = [0], list[str]()

    class Socket:
        def __init__(self, context: Any, secret: bytes, rank: int, server: int, endpoint: str) -> None:
            if endpoint == "new" and fails == "the connection" and beats[0] <= FREE_AT:
                raise zmq.ZMQError(24, "Too many open files")
            self.socket, self.endpoint = self, endpoint

        def send_multipart(self, frames: Any, flags: int) -> None:
            sent.append(self.endpoint)

        def close(self, linger: int) -> None:
            self.endpoint = "closed"

    def read(seat: Any, server: int) -> str:
        if beats[0] and fails == "the note" and beats[0] <= FREE_AT:
            raise OSError(24, "Too many open files")
        return "7 new"

    def wait(seconds: float) -> bool:
        beats[0] += 1
        return beats[0] > BEATS

    monkeypatch.setattr(connections, "WorkerSocket", Socket)
    monkeypatch.setattr(connections, "note_of_restart", read)
    gone: threading.Event = SimpleNamespace(wait=wait)  # type: ignore[assignment]
    seat: Any = SimpleNamespace(secret=b"", rank=0)
    connections._beat(None, seat, [connections.Address("old")], 1.0, gone)  # type: ignore[arg-type]
    assert sent == ["old"] * FREE_AT + ["new"] * (BEATS - FREE_AT)


def test_signs_of_life_come_five_times_in_the_silence_after_which_a_worker_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[float] = []
    monkeypatch.setattr(connections, "_beat", lambda context, seat, addresses, every_s, gone: told.append(every_s))
    seat: Any = SimpleNamespace(secret=bytes(32), rank=0, store=SealedBoard(dist.HashStore(), bytes(32)))
    sockets = connections.Sockets(seat, [connections.Address("tcp://127.0.0.1:9")], lost_after_s=30.0)
    sockets.close(0)
    assert told == [6.0]
