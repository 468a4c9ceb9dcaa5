"""Our own time is over before NCCL's. It begins when the GPU has come to a meeting; the process raises the error."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.pace import patient
from tests.strategies.launching import BASE, composed
from trainer.config.schema import GroupStrategy
from trainer.errors import Missing, RunFailed
from trainer.host.notes_board import SealedBoard
from trainer.strategies import gpu_watch, liveness, process_group
from trainer.strategies.gpu_watch import GpuWatch
from trainer.strategies.process_group import ProcessGroup
from trainer.strategies.seat import Others, Seat
from trainer.worker.train import seated


def seat_of(board: SealedBoard, rank: int, hang_timeout_s: float = 0.0) -> Seat:
    others = Others(hang_timeout_s=hang_timeout_s)
    return Seat("worker", rank, 2, rank, 2, f"cuda:{rank}", board, group_store=dist.HashStore(), others=others)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is asked of torch, in order, and for what a worker waits on the board."""
    asked: list[Any] = []
    monkeypatch.setattr(
        dist, "init_process_group", lambda backend, timeout, **_: asked.append((backend, timeout.total_seconds()))
    )
    monkeypatch.setattr(
        dist, "new_group", lambda backend, timeout: asked.append((backend, timeout.total_seconds())) or "group"
    )
    monkeypatch.setattr(dist, "scatter_object_list", lambda *_, group: asked.append(group))
    monkeypatch.setattr(process_group, "recorded", lambda device: SimpleNamespace(query=lambda: True))
    wait = ProcessGroup._wait_until_all_have

    def noted(self: ProcessGroup, what: str) -> None:
        wait(self, what)
        asked.append(f"all have {what}")

    monkeypatch.setattr(ProcessGroup, "_wait_until_all_have", noted)
    return asked


@pytest.mark.parametrize(("hang_timeout_s", "of_nccl"), [(0.0, 120.0), (1800.0, 3600.0)])
def test_nccl_waits_twice_as_long_as_we_do_and_is_asked_when_all_have_come(
    asked: list[Any], hang_timeout_s: float, of_nccl: float
) -> None:
    board = SealedBoard(dist.HashStore(), b"run")
    for what in ("come", "joined"):
        board.under(what).set("1", "")
    group = ProcessGroup(seat_of(board, 0, hang_timeout_s), GroupStrategy(timeout_s=60.0))
    assert asked == ["all have come", ("nccl", of_nccl), "all have joined"]
    del asked[:]
    group.scatter([1, 2])
    assert asked == [("gloo", 60.0), "group"], "Gloo itself says when the time is over"
    group.close()


def test_nccl_leaves_the_launcher_its_time() -> None:
    ready = composed(*BASE, "strategy=collective", "launch.nproc=2", "launch.hang_timeout_s=700")
    config, plan = ready.assignment.config, ready.assignment.plan
    seat = seated(seat_of(SealedBoard(dist.HashStore(), b"run"), 0), config, plan)
    assert seat.others.hang_timeout_s == 700.0


def test_a_worker_that_does_not_come_to_the_start_is_named_before_nccl_waits_for_it(
    asked: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(liveness, "ANSWER_S", 0.3)
    with pytest.raises(Missing, match=r"^worker 1 did not arrive at the start of the process group"):
        ProcessGroup(seat_of(SealedBoard(dist.HashStore(), b"run"), 0), GroupStrategy(timeout_s=0.5))
    assert asked == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="Gloo is for machines without a GPU")
def test_on_a_cpu_gloos_time_is_ours_and_nothing_watches(asked: list[Any]) -> None:
    board = SealedBoard(dist.HashStore(), b"run")
    board.under("joined").set("1", "")
    seat: Any = seat_of(board, 0)
    group = ProcessGroup(SimpleNamespace(**{**vars(seat), "device": "cpu"}), GroupStrategy(timeout_s=60.0))  # type: ignore[arg-type]
    assert asked == [("gloo", 60.0), "all have joined"] and group.watch is None
    group.close()


class Ends:
    """How a watch ends: what it made an error of, what it sent, and whether it ended the process."""

    def __init__(self, limit_s: float) -> None:
        self.overdue: list[tuple[str, int]] = []
        self.sent: list[BaseException] = []
        self.left = threading.Event()
        self.watch = GpuWatch(limit_s, self.error, self.sent.append, self.left.set)

    def error(self, meeting: str, waited_s: float, number: int) -> RunFailed:
        self.overdue.append((meeting, number))
        return RunFailed(f"nobody came to {meeting}")


def wait_for(there: Any) -> None:
    until = time.monotonic() + patient(60)
    while not there():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_the_first_meeting_that_is_not_done_is_overdue() -> None:
    ends = Ends(0.2)
    ends.watch.queued(1, "one", lambda: True)
    ends.watch.queued(2, "two", lambda: False)
    ends.watch.queued(3, "three", lambda: False)
    wait_for(lambda: ends.overdue)
    assert ends.overdue == [("two", 2)]
    with pytest.raises(RunFailed, match="nobody came to two"):
        ends.watch.wait_for(SimpleNamespace(query=lambda: False))  # type: ignore[arg-type]
    with pytest.raises(RunFailed, match="nobody came to two"):
        ends.watch.check()
    assert not ends.sent and not ends.left.is_set()


def test_a_process_that_does_not_raise_the_error_sends_it_and_then_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_watch, "RAISE_S", 0.1)
    ends = Ends(0.2)
    ends.watch.queued(1, "one", lambda: False)
    assert ends.left.wait(patient(60))
    assert [str(error) for error in ends.sent] == ["nobody came to one"]


@pytest.mark.all
def test_a_process_that_leaves_meanwhile_sends_its_own_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_watch, "RAISE_S", raise_s := patient(2.0))
    ends = Ends(0.2)
    ends.watch.queued(1, "one", lambda: False)
    wait_for(lambda: ends.overdue)
    ends.watch.close()
    assert not ends.left.wait(1.5 * raise_s) and not ends.sent


@pytest.mark.all
def test_time_of_a_meeting_begins_when_the_one_before_is_done() -> None:
    limit_s = patient(1.0)
    ends, done = Ends(limit_s), set[int]()
    for number in (1, 2, 3):
        ends.watch.queued(number, str(number), lambda number=number: number in done)  # type: ignore[misc]
    for number in (1, 2, 3):
        time.sleep(0.6 * limit_s)
        assert not ends.overdue
        done.add(number)
    time.sleep(2 * limit_s)
    assert not ends.overdue, "there is nothing to wait for"
    ends.watch.close()


def test_an_error_of_the_gpu_is_left_to_the_process() -> None:
    def failed() -> bool:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    ends = Ends(0.1)
    ends.watch.queued(1, "one", failed)
    time.sleep(1.0)
    assert not ends.overdue and not ends.sent
