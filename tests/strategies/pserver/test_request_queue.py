"""Requests that wait at a server, and answers that end others of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from trainer.host.notes_board import NoNote
from trainer.strategies.pserver.protocol.messages import SAVES, STOPS, Message, Verb
from trainer.strategies.pserver.server.answers import NotYet
from trainer.strategies.pserver.server.request_queue import MOST_WAITING, RequestQueue

PATIENCE_S = 10.0


class Server:
    """RequestQueue whose requests all wait, until a function answers them.

    Args:
        answer: called as soon as the server is open.
    """

    def __init__(self, answer: Callable[[RequestQueue, Message], Message]) -> None:
        self.open, self.now = False, 0.0
        self.answers: list[tuple[Message, Message]] = []
        self.refused: list[str] = []

        def when_open(request: Message) -> Message:
            if not self.open:
                raise NotYet([0], "its start")
            return answer(self.requests, request)

        self.requests = RequestQueue(self, when_open, 0, PATIENCE_S, lambda: self.now)  # type: ignore[arg-type]

    def answer(self, address: bytes, request: Message, answer: Message) -> None:
        self.answers.append((request, answer))

    def refuse(self, why: BaseException) -> None:
        self.refused.append(str(why))

    def waits(self, *requests: Message) -> None:
        """These requests come, and wait."""
        for request in requests:
            self.requests.take(b"", request)
            assert self.requests.waits(request)

    def told(self) -> list[tuple[Verb, Any]]:
        """Which requests were answered, and how."""
        return [(request.verb, answer.verb) for request, answer in self.answers]


def test_board_that_is_gone_is_not_the_fault_of_who_asks() -> None:
    """A server that reads a note for an answer, and gets none, ends: nothing is wrong with the request."""

    def misses(requests: RequestQueue, request: Message) -> Message:
        raise NoNote("the store of host 0 did not answer within 10 s")

    server = Server(misses)
    server.waits(Message(Verb.MEET, rank=1, number=1))
    server.open = True
    with pytest.raises(NoNote):
        server.requests.take(b"", Message(Verb.HELLO, rank=0, number=1))
    server.now = PATIENCE_S + 1
    with pytest.raises(NoNote):
        server.requests.end_overdue()
    assert not server.refused and not server.answers


def _begins_a_life(requests: RequestQueue, request: Message) -> Message:
    if request.verb == Verb.HELLO:
        requests.drop(request.rank, "started again", besides=request)
    return Message(Verb.DONE)


def _two_lives() -> list[Message]:
    return [Message(Verb.PULL, rank=1, number=7), Message(Verb.HELLO, rank=1, number=1)]


def test_hello_that_waited_ends_the_requests_of_the_life_before_and_not_itself() -> None:
    server = Server(_begins_a_life)
    pull, hello = _two_lives()
    server.waits(hello, pull)  # late, from the life before
    server.open = True
    server.requests.try_again()
    assert server.told() == [(Verb.PULL, Verb.FAILED), (Verb.HELLO, Verb.DONE)]
    assert not server.requests.waiting


def test_request_that_another_one_s_last_answer_ends_is_answered_once() -> None:
    server = Server(_begins_a_life)
    pull, hello = _two_lives()
    server.waits(hello, pull)
    server.open, server.now = True, PATIENCE_S + 1.0
    server.requests.end_overdue()
    assert server.told() == [(Verb.PULL, Verb.FAILED), (Verb.HELLO, Verb.DONE)]
    assert not server.requests.waiting


def test_request_whose_answer_answers_it_already_stays_answered() -> None:
    """A HELLO that changes who is there has all that wait tried again, itself among them."""
    tried: list[Message] = []

    def answer(requests: RequestQueue, request: Message) -> Message:
        tried.append(request)
        if len(tried) == 1:
            requests.try_again()
        return Message(Verb.DONE)

    server = Server(answer)
    server.waits(Message(Verb.HELLO, rank=1, number=1))
    server.open = True
    server.requests.try_again()
    assert set(server.told()) == {(Verb.HELLO, Verb.DONE)}
    assert not server.requests.waiting


def test_who_stands_still_for_a_checkpoint_waits_at_no_other_meeting() -> None:
    """The servers' disks may take longer than strategy.timeout_s; afterwards the wait goes on where it was."""
    server = Server(lambda requests, request: Message(Verb.DONE))
    stop = Message(Verb.MEET, rank=1, number=8, flags=STOPS | SAVES)
    server.waits(Message(Verb.MEET, rank=1, number=7), Message(Verb.MEET, rank=2, number=3))

    def passes(until: float) -> None:
        while server.now < until:
            server.now += 0.5
            server.requests.end_overdue()

    passes(PATIENCE_S / 2)
    server.waits(stop)
    passes(4 * PATIENCE_S)
    assert [request.rank for request, _ in server.answers] == [2], "it does not stand"
    server.requests.waiting = [w for w in server.requests.waiting if w.request is not stop]
    passes(4.25 * PATIENCE_S)
    assert len(server.answers) == 1
    passes(4.75 * PATIENCE_S)
    assert [request.rank for request, _ in server.answers] == [2, 1]


def test_one_request_too_many_of_a_worker_is_refused_and_the_others_wait_on() -> None:
    server = Server(lambda requests, request: Message(Verb.DONE))
    server.waits(*(Message(Verb.PULL, rank=1, number=n) for n in range(1, MOST_WAITING + 1)))
    assert MOST_WAITING == 100 and not server.answers
    server.requests.take(b"", Message(Verb.PULL, rank=1, number=101))
    [(request, answer)] = server.answers
    assert (request.number, answer.verb) == (101, Verb.FAILED)
    assert "refused PULL of worker 1: 100 of its requests wait already" in answer.mapping()["why"]
    assert server.refused == ["100 of its requests wait already"]
    server.waits(Message(Verb.PULL, rank=2, number=1))  # another worker's
    server.open = True
    server.requests.try_again()
    assert server.told()[1:] == [(Verb.PULL, Verb.DONE)] * 101
