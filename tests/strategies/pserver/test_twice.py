"""A request that comes a second time, at once or after others, changes nothing and is answered as before."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.strategies.pserver.harness import Bare, Cluster, config
from trainer.optim.schedules import Plateau
from trainer.strategies.pserver.protocol.messages import Kind, Message, Record, Verb, text
from trainer.strategies.pserver.worker.requests import Request

NONE = np.empty(0, dtype=np.int64)


class Play:
    """Two workers at one server.

    Args:
        meanwhile: something is done between a request's answer and its copy.
    """

    def __init__(self, cluster: Cluster, meanwhile: bool) -> None:
        self.meanwhile = meanwhile
        [self.server] = cluster.servers
        self.first, self.second = Bare(cluster, 0), Bare(cluster, 1)

    def ask(self, worker: Bare, verb: Verb, *records: Record, clock: int = 0) -> Message:
        [answer] = worker.client.wait([worker.client.ask(0, Message(verb, clock=clock, records=list(records)))])
        return answer

    def again(self, worker: Bare, request: Request) -> Message:
        """The answer to a copy of a request that was answered."""
        copy = Request(0, request.message, request.frames, time.monotonic(), time.monotonic() + 100)
        worker.client.under_way[request.message.number] = copy
        worker.client.connections.send(0, request.frames)
        [answer] = worker.client.wait([copy])
        return answer

    def twice(
        self, worker: Bare, verb: Verb, *records: Record, clock: int = 0, then: Callable[[], Any] = lambda: None
    ) -> tuple[Message, Message]:
        """The answers to a request and to its copy; ``then`` is what is done meanwhile."""
        request = worker.client.ask(0, Message(verb, clock=clock, records=list(records)))
        worker.client.wait([request])
        if self.meanwhile:
            then()
        return request.answer, self.again(worker, request)  # type: ignore[return-value]

    def push(self, worker: Bare, value: float) -> Message:
        """An update of the dense parameters by so much."""
        clock = worker.client.sequence + 1
        [answer] = worker.client.wait(worker.client.push(worker.gradient(np.full(4, value), NONE, 0.0, -1.0, clock)))
        return answer

    def dense(self) -> list[float]:
        return list(self.first.look(NONE)[0][0])


def commit(play: Play) -> None:
    play.first.begin()
    play.second.close()

    def next_step() -> None:
        assert play.push(play.first, 8.0).need(Kind.NUMBERS).tolist() == [4 * 64.0]

    assert play.push(play.first, 2.0).need(Kind.NUMBERS).tolist() == [4 * 4.0]
    norm = Record(Kind.NUMBERS, np.array([4.0]))
    one, other = play.twice(play.first, Verb.COMMIT, norm, clock=0, then=next_step)
    assert (one.clock, other.clock) == (1, 1)
    if play.meanwhile:
        assert play.ask(play.first, Verb.COMMIT, Record(Kind.NUMBERS, np.array([16.0])), clock=1).clock == 2
    assert play.dense() == pytest.approx([2.0 + 8.0 * play.meanwhile] * 4)


def rate(play: Play) -> None:
    play.first.begin()
    assert play.server.parameters.shard is not None
    schedule = Plateau(10, 10)
    play.server.parameters.shard.schedule = schedule
    half, quarter = (text({"scale": s}) for s in (0.5, 0.25))
    play.twice(play.first, Verb.RATE, half, then=lambda: play.ask(play.first, Verb.RATE, quarter))
    assert schedule.scale == (0.25 if play.meanwhile else 0.5)


@pytest.mark.parametrize("meanwhile", [False, True], ids=["at once", "late"])
@pytest.mark.parametrize("request_", [commit, rate], ids=lambda f: f.__name__)
def test_request_that_comes_twice_is_done_once(request_: Callable[[Play], None], meanwhile: bool) -> None:
    """The simulator plays copies of all others, and has no schedule whose rate is told."""
    with Cluster(config("sync", 2, 1, clip_norm=100.0)) as cluster:
        play = Play(cluster, meanwhile)
        try:
            request_(play)
        finally:
            for worker in (play.first, play.second):
                worker.die()
