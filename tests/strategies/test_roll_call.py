"""A roll call finds the workers that are not where the others wait, whoever they are and whoever calls."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch.distributed as dist

from tests.pace import patient
from trainer.host.notes_board import SealedBoard
from trainer.strategies import liveness
from trainer.strategies.liveness import ANSWER, CALL, RollCall


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "ANSWER_S", patient(0.5))


@contextmanager
def workers(reached: Sequence[int], stopped: Collection[int] = ()) -> Iterator[list[RollCall]]:
    """The roll call of each worker, which has come so far. Stopped ones have no thread that answers."""
    store, there = dist.HashStore(), []
    for rank, far in enumerate(reached):
        one = RollCall(SealedBoard(store, b"run"), rank, len(reached))
        one.reached = far
        if rank in stopped:
            one.end()
        there.append(one)
    yield there
    for one in there:
        one.end()


@pytest.mark.parametrize(
    ("reached", "stopped", "missing"),
    [
        ([1, 1, 0, 1], [], [2]),
        ([1, 1, 0, 1], [3], [2, 3]),
        ([1, 1, 1, 1], [], []),
        ([0, 1, 1, 1], [0], [0]),  # which would have collected the answers
        ([1, 1, 1, 1], [0, 1, 2], [0, 1, 2]),
    ],
)
def test_who_does_not_answer_or_is_elsewhere_is_missing(
    reached: list[int], stopped: list[int], missing: list[int]
) -> None:
    with workers(reached, stopped) as there, ThreadPoolExecutor() as pool:
        callers = [one for one in there if one.rank not in missing]
        assert [*pool.map(RollCall.missing, callers)] == [missing] * len(callers)


def test_a_worker_that_is_not_as_far_as_the_caller_is_missing() -> None:
    """On GPUs workers go on while they wait, so that none is in a meeting."""
    with workers([1000, 1003, 999]) as there:
        assert there[0].missing(1000) == [2]


def test_a_worker_that_waits_for_the_missing_one_elsewhere_is_not_missing() -> None:
    """Where worker 0 has sent its parameters, it is not held up by a worker that does not receive them."""
    with workers([1000, 998, 999]) as there:
        assert there[0].missing(1000) == [1]


def test_a_worker_that_came_late_is_not_missing() -> None:
    with workers([1, 0, 0]) as there:
        there[2].reached = 1  # before the call
        assert there[0].missing() == [1]


def test_where_all_are_there_nobody_waits_for_more_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "ANSWER_S", 600.0)
    monkeypatch.setattr(liveness, "STORE_S", 0.0)
    began = time.monotonic()
    with workers([1, 1, 0]) as there:
        assert there[1].missing() == [2]
        assert time.monotonic() - began < patient(5)


def test_where_the_collector_has_gone_each_caller_collects_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "NOTED_S", 0.1)
    with workers([1, 1, 0], stopped=[0]) as there:
        board = SealedBoard(there[0].store.store, b"run")
        board.set(ANSWER.format(0), "1")
        board.set(CALL, "1")  # it has answered, and no more came from it
        assert there[1].missing() == [2]


def test_no_answer_of_the_store_is_no_missing_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "STORE_S", 0.2)

    class Silent(SealedBoard):
        def clone(self) -> SealedBoard:
            time.sleep(patient(3))
            raise RuntimeError("gone")

    with pytest.raises(TimeoutError, match="the store does not answer"):
        RollCall(Silent(dist.HashStore(), b"run"), 0, 2).missing()
