"""A server that is started again, message by message: what it has of its snapshot, what workers tell it, and what is
lost."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.notes import Notes
from tests.simulation.scenario import Scenario
from tests.simulation.servers import Run, declared
from trainer.checkpoint import durable_folder
from trainer.host import pulse
from trainer.strategies.lost_workers import ADMITTED
from trainer.strategies.pserver.protocol.messages import (
    COMES,
    FINISHED,
    STOPS,
    TELLS,
    WANTS_DENSE,
    Kind,
    Message,
    Record,
    Verb,
    text,
)
from trainer.strategies.pserver.server.machine import LOOK_S, Server
from trainer.strategies.pserver.server.part_writer import PartWriter
from trainer.strategies.pserver.server.turns import MOST_WAITING
from trainer.weights.server_files import ServerFile

OPTIONS = {"timeout_s": 100.0, "lost_after_s": 10.0, "slice_above": None, "persistables": False}
LIVES = 7, 8
"""Of the two workers."""


class Played:
    """A server and its two workers, without sockets, clocks and processes.

    Args:
        writer: of parts. options: of the strategy.
    """

    def __init__(
        self,
        folder: Path,
        board: Notes,
        life: int = 1,
        resume: str = "",
        writer: PartWriter | None = None,
        **options: float,
    ) -> None:
        told = OPTIONS | options
        scenario = replace(Scenario.drawn(12), mode="async", workers=2, servers=1, options=told, table=False)
        run = Run(scenario, resume)
        run.plan.run_dir = str(folder)  # type: ignore[misc]
        self.now, self.number, self.answers = 0.0, 0, dict[int, Message]()
        self.server = Server(
            0, run, declared(scenario), self, board, lambda: self.now, 1 << 26, None, life, bool(resume), writer
        )
        self.incarnations = {0: 0, 1: 0}

    # --- the outlet

    def answer(self, address: bytes, request: Message, answer: Message) -> None:
        self.answers[request.number] = answer
        self.answered()

    def answered(self) -> None:
        """An answer has left."""

    def refuse(self, why: BaseException) -> None:
        raise AssertionError(why)

    def room(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(count, dtype=dtype)

    def room_for_files(self) -> Any:
        return nullcontext()

    def counts(self) -> dict[str, Any]:
        return {}

    # --- workers

    def sends(self, rank: int, verb: Verb, *records: Record, **header: int) -> int:
        """A message comes; returns its number."""
        self.number += 1
        incarnation = header.pop("incarnation", self.incarnations[rank])
        message = Message(verb, rank, incarnation, self.number, records=list(records), **header)
        self.server.turn([(b"", message)])
        return self.number

    def asks(self, rank: int, verb: Verb, *records: Record, **header: int) -> Message:
        return self.answers[self.sends(rank, verb, *records, **header)]

    def hello(self, rank: int, *records: Record, begins: int = 0) -> None:
        flags = TELLS if records else 0
        answer = self.asks(rank, Verb.HELLO, *records, sequence=LIVES[rank], clock=begins, flags=flags)
        self.incarnations[rank] = answer.incarnation

    def starts(self) -> None:
        """Both workers come, and the first one makes the start."""
        for rank in (0, 1):
            self.hello(rank)
        layout = {"dtype": "float64", "last": True, "pieces": [["p", 0, 6]], "tables": []}
        self.asks(0, Verb.START, text(layout), Record(Kind.DENSE, np.zeros(6)))

    def pushes(self, rank: int, sequence: int, first: int, after_last: int) -> Message:
        """Batches of block 0, each of which adds 1 to its own element."""
        gradient = np.zeros(6)
        gradient[first:after_last] = -1.0
        work = Record(Kind.WORK, np.array([[0, 0, first, after_last]]))
        numbers = Record(Kind.NUMBERS, np.array([0.0, 1.0, 1.0]))
        return self.asks(
            rank, Verb.PUSH, numbers, Record(Kind.DENSE, gradient), work, sequence=sequence, clock=sequence
        )

    def values(self, rank: int = 0) -> list[float]:
        return list(self.asks(rank, Verb.PULL, flags=WANTS_DENSE).need(Kind.DENSE))

    def later(self) -> None:
        """Some time later it looks around."""
        self.now += 2 * LOOK_S
        self.server.turn([])


@pytest.fixture
def board() -> Notes:
    return Notes()


@pytest.fixture
def first(tmp_path: Path, board: Notes) -> Played:
    """A server that has started, with a snapshot after batch 0, and with batches 1 and 2 after it."""
    played = Played(tmp_path, board)
    played.starts()
    played.pushes(0, 1, 0, 1)
    played.asks(0, Verb.SAVE, text({"folder": "checkpoints/step-1", "checkpoint": True}))
    played.pushes(0, 2, 1, 3)
    assert played.values() == [1, 1, 1, 0, 0, 0]
    return played


def again(folder: Path, board: Notes) -> Played:
    part = durable_folder.partial_of(folder / "checkpoints" / "step-1")
    return Played(folder, board, 2, str(part))


def told(version: int, **more: Any) -> Record:
    return text({"version": version, "sums": [0, 0], **more})


def test_it_has_its_snapshot_and_waits_until_all_workers_have_told(first: Played, tmp_path: Path, board: Notes) -> None:
    second = again(tmp_path, board)
    second.hello(0, told(2), begins=2)
    number = second.sends(0, Verb.PULL, flags=WANTS_DENSE)
    second.later()
    assert number not in second.answers
    second.hello(1, told(2))
    answer = second.answers[number]
    assert list(answer.need(Kind.DENSE)) == [1, 0, 0, 0, 0, 0]
    assert answer.clock == 2, "no number means two versions of the parameters"
    second.pushes(0, 3, 3, 4)
    assert second.values() == [1, 0, 0, 1, 0, 0]
    parameters = second.server.parameters
    assert (parameters.version, parameters.applied) == (3, 2)


@pytest.mark.parametrize("verb", [Verb.PULL, Verb.PUSH])
def test_it_takes_as_much_of_a_worker_as_is_under_way_until_all_have_told(
    verb: Verb, first: Played, tmp_path: Path, board: Notes
) -> None:
    """A worker of geo pulls all that it has a base of in parts; one of async may have strategy.send_queue_size pushes
    under way."""
    second = again(tmp_path, board)
    second.hello(0, told(2), begins=2)
    numbers = Record(Kind.NUMBERS, np.array([0.0, 1.0, 1.0]))
    asked = [
        second.sends(0, verb, numbers, Record(Kind.DENSE, np.full(6, -1.0)), sequence=3 + n, clock=3 + n)
        if verb == Verb.PUSH
        else second.sends(0, verb, flags=WANTS_DENSE)
        for n in range(2 * MOST_WAITING)
    ]
    assert not second.answers.keys() & {*asked}
    second.hello(1, told(2))
    assert {second.answers[number].verb for number in asked} == {Verb.DONE}
    assert second.values() == [1 + 200 * (verb == Verb.PUSH), *[200 * (verb == Verb.PUSH)] * 5]


def test_who_does_not_tell_is_lost_after_a_while_and_not_waited_for(
    first: Played, tmp_path: Path, board: Notes
) -> None:
    second = again(tmp_path, board)
    second.hello(0, told(2), begins=2)
    number = second.sends(0, Verb.PULL, flags=WANTS_DENSE)
    for _ in range(60):
        second.server.take(b"", Message(Verb.BEAT, 0))
        second.later()
    assert second.server.members.all[1].lost
    assert number in second.answers
    late = second.asks(1, Verb.HELLO, told(2), sequence=LIVES[1], flags=TELLS, incarnation=0)
    assert late.text()["fenced"], "a life that is over does not come back"


def test_who_is_alive_and_does_not_tell_is_waited_for_until_the_timeout(
    first: Played, tmp_path: Path, board: Notes
) -> None:
    second = again(tmp_path, board)
    second.hello(0, told(2), begins=2)
    began, number = second.now, second.sends(0, Verb.PULL, flags=WANTS_DENSE)
    while number not in second.answers:
        for rank in (0, 1):  # the second one computes a long batch
            second.server.take(b"", Message(Verb.BEAT, rank))
        second.later()
        assert second.now - began < 2 * OPTIONS["timeout_s"]
    assert second.now - began > OPTIONS["timeout_s"]
    assert second.answers[number].verb == Verb.FAILED and second.answers[number].text()["missing"] == [1]
    assert not second.server.members.all[1].lost
    second.hello(1, told(2))
    assert second.values() == [1, 0, 0, 0, 0, 0]


def test_push_that_comes_again_is_applied_once(first: Played, tmp_path: Path, board: Notes) -> None:
    second = again(tmp_path, board)
    second.hello(0, told(2), begins=1)  # the answer to push 2 has not come
    second.hello(1, told(2))
    second.pushes(0, 2, 1, 3)
    second.pushes(0, 2, 1, 3)
    assert second.values() == [1, 1, 1, 0, 0, 0]


def test_of_a_push_of_which_the_snapshot_has_a_part_the_rest_is_lost(
    first: Played, tmp_path: Path, board: Notes
) -> None:
    second = again(tmp_path, board)
    second.hello(0, told(2), begins=2)
    second.hello(1, told(2))
    # worker 1 has taken the block over, and the life before of the server had all of its push
    assert second.pushes(1, 1, 0, 3).verb == Verb.DONE
    assert second.values() == [1, 0, 0, 0, 0, 0]


def test_message_to_the_life_before_is_not_answered(first: Played, tmp_path: Path, board: Notes) -> None:
    second = again(tmp_path, board)
    second.hello(0, told(2), begins=2)
    second.hello(1, told(2))
    number = second.sends(0, Verb.PULL, flags=WANTS_DENSE, incarnation=first.incarnations[0])
    assert number not in second.answers
    assert second.server.count["late"] == 1


def test_blocks_go_to_nobody_who_asks_while_others_hold_them(first: Played, tmp_path: Path, board: Notes) -> None:
    finished = Record(Kind.IDS, np.array([1]), 2)
    second = again(tmp_path, board)
    second.hello(0, told(2, epoch=0, blocks=4, held=[0]), finished, begins=2)
    second.hello(1, told(2, epoch=0, blocks=4, held=[2]))
    lease = text({"epoch": 0, "blocks": 4, "done": []})
    answer = second.asks(1, Verb.LEASE, lease).mapping()
    assert (answer["block"], answer["again"]) == (3, True), "others may have had it: what servers have of it counts"
    assert second.asks(1, Verb.LEASE, lease).mapping()["block"] == -1


def test_blocks_of_the_life_before_go_to_anybody_when_the_next_life_was_let_in(tmp_path: Path, board: Notes) -> None:
    """It may have heard that the epoch is over, from the server's life before, and asks for none of them any more."""
    first = Played(tmp_path, board)
    first.starts()
    lease = text({"epoch": 0, "blocks": 2, "done": []})
    assert [first.asks(rank, Verb.LEASE, lease).mapping()["block"] for rank in (1, 0)] == [0, 1]
    first.asks(0, Verb.SAVE, text({"folder": "checkpoints/step-1", "checkpoint": True}))
    second = again(tmp_path, board)
    board.set(ADMITTED.format(1, 9), "0")
    finished = Record(Kind.IDS, np.array([1]), FINISHED)
    second.hello(0, told(0, epoch=0, blocks=2, held=[]), finished)
    back = told(0, epoch=0, blocks=2, held=[])
    second.incarnations[1] = second.asks(1, Verb.HELLO, back, sequence=9, flags=TELLS | COMES).incarnation
    answer = second.asks(0, Verb.LEASE, lease).mapping()
    assert (answer["block"], answer["again"]) == (0, True)


def test_sums_that_are_over_stay_so(first: Played, tmp_path: Path, board: Notes) -> None:
    known = Record(Kind.NUMBERS, np.array([5.0])), Record(Kind.IDS, np.array([0, 1]), 3)
    second = again(tmp_path, board)
    second.hello(0, text({"version": 2, "sums": [4, 0]}), *known, begins=2)
    second.hello(1, text({"version": 2, "sums": [3, 0]}))  # the answer to its fourth has not come
    answer = second.asks(1, Verb.MEET, Record(Kind.NUMBERS, np.array([3.0])), clock=4)
    assert (list(answer.need(Kind.NUMBERS)), list(answer.need(Kind.IDS))) == ([5.0], [0, 1])
    number = second.sends(1, Verb.MEET, Record(Kind.NUMBERS, np.array([1.0])), clock=5)
    assert number not in second.answers
    answer = second.asks(0, Verb.MEET, Record(Kind.NUMBERS, np.array([2.0])), clock=5)
    assert list(answer.need(Kind.NUMBERS)) == list(second.answers[number].need(Kind.NUMBERS)) == [3.0]


def test_stop_of_which_only_lost_workers_knew_is_the_next_one(first: Played, tmp_path: Path, board: Notes) -> None:
    """Worker 1 has said HELLO before it was let in, and learned the number of the last stop from worker 0, which is
    lost."""
    second = again(tmp_path, board)
    second.hello(1, told(2))
    stops = [second.sends(1, Verb.MEET, Record(Kind.NUMBERS, np.array([-1.0])), clock=3, flags=STOPS)]
    assert stops[0] not in second.answers, "worker 0 may come yet"
    board.set("lost/worker/0", "its process ended")
    second.later()
    stops.append(second.sends(1, Verb.MEET, Record(Kind.NUMBERS, np.array([-1.0])), clock=4, flags=STOPS))
    for number in stops:
        answer = second.answers[number]
        assert (list(answer.need(Kind.NUMBERS)), list(answer.need(Kind.IDS))) == ([-1.0], [1])


def test_block_of_which_nobody_tells_ends_the_lives_that_are_lost_as_the_notes_tell(
    first: Played, board: Notes
) -> None:
    board.set(f"lost/worker/1/{LIVES[1]}", "its process ended")
    first.asks(0, Verb.FENCE, text({"rank": -1, "life": 0, "epoch": 0, "block": 0}))
    assert first.pushes(1, 1, 3, 4).text()["fenced"], "what it had sent before comes too late"
    assert first.values() == [1, 1, 1, 0, 0, 0]


class Killed(BaseException):
    """The process is gone: whatever would follow never is."""


def kill(*_: Any) -> None:
    raise Killed


@pytest.mark.parametrize("death", ["before the launcher can know", "before the answer", "after the answer"])
def test_what_a_worker_takes_for_done_the_launcher_counts_as_lost(first: Played, tmp_path: Path, death: str) -> None:
    path = pulse.make(tmp_path / "pulse")
    shown = pulse.Pulse(str(path))
    first.server.tell_done = shown.update
    first.pushes(0, 3, 3, 4)
    if death == "before the launcher can know":
        first.server.tell_done = kill
    elif death == "before the answer":
        first.answer = kill  # type: ignore[method-assign]
    else:
        first.answered = kill  # type: ignore[method-assign]
    answered = len(first.answers)
    with pytest.raises(Killed):
        first.pushes(0, 4, 4, 5)
    acknowledged = 3 + len(first.answers) - answered
    part = durable_folder.partial_of(tmp_path / "checkpoints" / "step-1") / "server-0.safetensors"
    assert ServerFile(0, part).version == 1
    assert acknowledged <= pulse.read(path).update <= 4, "of these the snapshot has one, and the others are told"
    assert acknowledged == (4 if death == "after the answer" else 3)
