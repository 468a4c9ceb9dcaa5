"""A store that does not answer holds nobody up for longer than its patience."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch.distributed as dist

from tests.store_elsewhere import stop, store_elsewhere
from trainer.host.notes_board import NoNote, SealedBoard
from trainer.host.patient_store import PatientStore


class Cut(dist.HashStore):
    """A store whose answers come when the way is open."""

    def __init__(self) -> None:
        super().__init__()
        self.open = threading.Event()

    def check(self, keys: list[str]) -> bool:
        self.open.wait()
        return bool(super().check(keys))


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_store_that_does_not_answer_is_named_in_time_and_answers_count_when_the_way_is_open_again() -> None:
    store = Cut()
    patient = PatientStore(store, "the store of host 0", 1000)
    patient.set("a", "1")
    patient.patience_s = 0.1
    for _ in range(2):
        with pytest.raises(NoNote, match=r"the store of host 0 did not answer within 0.1 s \(strategy.timeout_s\)"):
            patient.check(["a"])
    store.open.set()
    patient.patience_s = 1000
    slow = PatientStore(store, "the store of host 0", 1000)
    assert slow.check(["a"]) and slow.get("a") == b"1" and slow.add("n", 2) == 2
    assert patient.get("a") == b"1", "what is asked later is answered later"


def test_question_does_not_wait_for_a_connection_that_another_thread_opens() -> None:
    """Host 0 is gone: torch tries for minutes to connect, and the launcher looks meanwhile."""

    class Unreachable(dist.HashStore):
        def __init__(self) -> None:
            super().__init__()
            self.asked, self.open = threading.Event(), threading.Event()

        def clone(self) -> dist.HashStore:
            self.asked.set()
            self.open.wait()
            return self

    store = Unreachable()
    patient = PatientStore(store, "the store", 1000)
    other = threading.Thread(target=patient.clone)
    other.start()
    assert store.asked.wait(20)
    patient.patience_s = 20
    assert not patient.check(["a"])
    store.open.set()
    other.join()


def test_who_has_less_time_asks_the_same_board_with_less_patience() -> None:
    store, secret = Cut(), b"s" * 32
    board = SealedBoard(PatientStore(store, "the store", 1000), secret).under("part")
    soon = board.within(0.1)
    with pytest.raises(NoNote, match=r"the store did not answer within 0.1 s"):
        soon.check(["key"])
    store.open.set()
    board.set("key", "note")
    assert board.within(1000).get("key") == b"note"
    assert board.within(2000).store.patience_s == 1000, "never with more"


def test_questions_that_are_asked_together_share_one_patience() -> None:
    time, store = Clock(), Cut()
    soon = SealedBoard(PatientStore(store, "the store", 1000, time), b"s" * 32).within(5.0)
    store.open.set()
    for _ in range(2):
        time.now += 2.0
        assert not soon.check(["key"])
    store.open.clear()
    threading.Timer(0.2, lambda: setattr(time, "now", time.now + 2.0)).start()
    with pytest.raises(NoNote, match=r"the store did not answer within 5 s"):
        soon.check(["key"])
    store.open.set()
    with pytest.raises(NoNote):
        soon.check(["key"])


def test_error_of_the_store_is_told_with_its_name() -> None:
    class Gone(dist.HashStore):
        def get(self, key: str) -> bytes:
            raise dist.DistNetworkError("Connection was likely closed")

    with pytest.raises(NoNote, match="the store of host 0: Connection was likely closed"):
        PatientStore(Gone(), "the store of host 0", 1000).get("a")


def test_board_in_it_is_a_board() -> None:
    board = SealedBoard(PatientStore(dist.HashStore(), "the store", 1000), b"s" * 32)
    board.set("key", "note")
    assert board.check(["key"]) and board.get("key") == b"note" and not board.check(["another"])


def test_note_is_there_when_it_has_been_written_and_otherwise_that_is_an_error() -> None:
    """A TCPStore alone sends what is set, and does not hear whether it has come."""
    with store_elsewhere() as (store, serves):
        board = SealedBoard(PatientStore(store, "the store", 1000), b"s" * 32)
        board.set("key", "first")
        stop(serves)
        board.store.patience_s = 0.2
        with pytest.raises(NoNote, match="the store did not answer"):
            board.set("key", "second")


@pytest.mark.all
def test_nothing_is_kept_of_a_store_that_nobody_needs() -> None:
    class Held(dist.HashStore):
        pass

    store = Held()
    patient = PatientStore(store, "the store", 1000)
    patient.set("a", "1")
    held, thread = weakref.ref(store), patient._thread
    del store, patient
    gc.collect()
    assert thread is not None
    thread.join(60)
    assert not thread.is_alive() and held() is None
