"""A process that was stopped itself gives the others their time again before it judges."""

from __future__ import annotations

import datetime
import threading
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.stopped import StoppedClock
from trainer.errors import RunFailed
from trainer.host import notes_board
from trainer.host.notes_board import FolderBoard, NoNote, OwnBoard, SealedBoard
from trainer.host.patience import LONGEST_POLL_S, Patience
from trainer.host.patient_store import PatientStore
from trainer.launch import rendezvous, torchrun_handover
from trainer.launch.rendezvous import Rendezvous, meet
from trainer.launch.torchrun_handover import InFolder

HOUR_S = 3600.0
TIMEOUT_S = 10.0


def in_folder(folder: Path) -> OwnBoard:
    return FolderBoard(folder)


def in_store(folder: Path) -> OwnBoard:
    return SealedBoard(PatientStore(dist.HashStore(), "the store", 1000), b"s" * 32)


@pytest.fixture(params=[in_folder, in_store])
def board(request: pytest.FixtureRequest, tmp_path: Path) -> OwnBoard:
    """The board of a process."""
    return request.param(tmp_path)  # type: ignore[no-any-return]


def test_time_of_a_stop_counts_no_more_than_that_of_a_look() -> None:
    now = [0.0]
    patience = Patience(TIMEOUT_S, lambda: now[0])
    for at, left in ((1.0, 9.0), (1.0 + HOUR_S, 9.0 - LONGEST_POLL_S), (HOUR_S + 3.0, 7.0 - LONGEST_POLL_S)):
        now[0] = at
        assert patience.left() == pytest.approx(left)
    assert patience.waited == pytest.approx(3.0 + LONGEST_POLL_S)


@pytest.mark.parametrize("comes", [True, False])
def test_who_was_stopped_waits_for_a_note_as_long_as_it_may(
    board: OwnBoard, comes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = StoppedClock(HOUR_S)
    monkeypatch.setattr(notes_board, "time", clock)
    if comes:
        clock.at[TIMEOUT_S - LONGEST_POLL_S - 1.0] = lambda: board.set("key", "note")
        board.wait(["key"], datetime.timedelta(seconds=TIMEOUT_S))
    else:
        with pytest.raises(NoNote, match=f"key: not there within {TIMEOUT_S:g} s"):
            board.wait(["key"], datetime.timedelta(seconds=TIMEOUT_S))
        assert clock.slept <= TIMEOUT_S + 1.0


def test_who_was_stopped_waits_for_the_answer_of_a_store() -> None:
    answers, now = threading.Event(), [0.0]

    class Slow(dist.HashStore):
        def check(self, keys: list[str]) -> bool:
            answers.wait()
            return bool(super().check(keys))

    def clock() -> float:
        """The process was stopped before its second look, and the answer comes after that."""
        said = now[0]
        now[0] += HOUR_S if said == 0.0 else 0.0
        if said:
            answers.set()
        return said

    store = PatientStore(Slow(), "the store", TIMEOUT_S, clock)
    assert not store.check(["key"])


@pytest.mark.all
def test_host_0_that_was_stopped_waits_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    store, clock = dist.HashStore(), StoppedClock(HOUR_S)
    monkeypatch.setattr(rendezvous, "time", clock)
    clock.at[TIMEOUT_S - LONGEST_POLL_S - 1.0] = lambda: store.set("hosts/number/1", "1")
    host_0 = Rendezvous(number=0, hosts=2, timeout_s=TIMEOUT_S)
    with pytest.raises(RunFailed, match=r"host 1 .*came to .*, and left without a word"):
        meet(store, host_0)
    assert TIMEOUT_S < clock.slept < 3 * TIMEOUT_S
    with pytest.raises(RunFailed, match=f"host 1 did not come to .* within {TIMEOUT_S:g} s"):
        meet(dist.HashStore(), host_0)


def test_other_hosts_that_were_stopped_wait_for_host_0(monkeypatch: pytest.MonkeyPatch) -> None:
    store, clock = dist.HashStore(), StoppedClock(HOUR_S)
    monkeypatch.setattr(notes_board, "time", clock)
    clock.at[TIMEOUT_S - LONGEST_POLL_S - 1.0] = lambda: store.set("hosts/run", "of another run")
    with pytest.raises(RunFailed, match="knows another secret"):
        meet(store, Rendezvous(number=1, hosts=2, timeout_s=TIMEOUT_S))


def test_rank_that_was_stopped_waits_for_what_rank_0_hands_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = StoppedClock(HOUR_S)
    monkeypatch.setattr(torchrun_handover, "time", clock)
    clock.at[TIMEOUT_S - LONGEST_POLL_S - 1.0] = lambda: InFolder(tmp_path).write("{}")
    assert InFolder(tmp_path, TIMEOUT_S).read() == "{}"
