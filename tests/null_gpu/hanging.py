"""``python -m tests.null_gpu.hanging``: worker 0 of two exchanges on a null GPU that hangs; prints how that ends.

The question is what it does then: ``reads`` numbers, ``meets`` again, is ``stuck`` in CUDA, or reads numbers that come
``late``. NCCL is torch's fake process group. The events are torch's own.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import threading
import time
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from trainer.config.schema import GroupStrategy
from trainer.errors import Missing
from trainer.host.notes_board import SealedBoard
from trainer.host.transfers import Arriving
from trainer.strategies import gpu_watch
from trainer.strategies.liveness import RollCall
from trainer.strategies.process_group import ProcessGroup
from trainer.strategies.seat import Seat

TIMEOUT_S = 1.5
ONES = torch.ones(4, dtype=torch.float64)


def member(board: SealedBoard) -> ProcessGroup:
    """Worker 0, in the group with worker 1."""
    for what in ("come", "joined"):
        board.under(what).set("1", "")
    seat = Seat("worker", 0, 2, 0, 2, "cuda:0", board, group_store=dist.HashStore(), send_failure=sent)
    begin = dist.init_process_group

    def start(backend: str, timeout: Any, **options: Any) -> None:
        assert (backend, timeout.total_seconds()) == ("nccl", 2 * TIMEOUT_S)
        begin("fake", store=FakeStore(), rank=0, world_size=2)

    with patch.object(dist, "init_process_group", start):
        return ProcessGroup(seat, GroupStrategy(timeout_s=TIMEOUT_S))


def answer(how: str, error: BaseException | None) -> None:
    """Print how it ended."""
    who = error.who if isinstance(error, Missing) else ()
    print(json.dumps({"how": how, "error": str(error or ""), "who": who}), flush=True)


def sent(error: BaseException) -> None:
    """The launcher gets the error, after which the process ends."""
    answer("sent", error)
    os._exit(0)


def main(what: str) -> None:
    hangs = ctypes.CDLL(None).null_gpu_hangs
    board = SealedBoard(dist.HashStore(), b"run")
    group, other = member(board), RollCall(board.under("roll-call"), 1, 2)
    numbers = Arriving([group.all_reduce_sum(ONES)])
    numbers.read(group.wait_for)
    other.reached = 2  # the start, and the sum
    while group.watch is not None and group.watch._queue:  # the GPU of this test comes to all events or to none
        time.sleep(0.01)
    hangs(1)
    numbers = Arriving([group.all_reduce_sum(ONES)])
    if what == "late":
        threading.Timer(TIMEOUT_S / 3, hangs, [0]).start()
    try:
        if what == "stuck":
            gpu_watch.RAISE_S = 1.0
            time.sleep(600)
        if what == "meets":
            while True:
                time.sleep(0.1)
                group.all_reduce_sum(ONES)
        numbers.read(group.wait_for)
        time.sleep(2 * TIMEOUT_S)  # no later error
        group.all_reduce_sum(ONES)
        answer("done", None)
    except Missing as error:
        answer("raised", error)
    os._exit(0)  # the group would wait for the GPU


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
