"""How often a worker sends signs of life."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from trainer.host.notes_board import SealedBoard
from trainer.strategies.pserver.worker import connections
from trainer.strategies.seat import Address


def test_signs_of_life_come_five_times_in_the_silence_after_which_a_worker_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    periods: list[float] = []
    monkeypatch.setattr(connections, "_beat", lambda context, seat, endpoints, every_s, gone: periods.append(every_s))
    seat: Any = SimpleNamespace(address=Address(bytes(32)), rank=0, store=SealedBoard(dist.HashStore(), bytes(32)))
    sockets = connections.Sockets(seat, ["tcp://127.0.0.1:9"], lost_after_s=30.0)
    sockets.close(0)
    assert periods == [6.0]
