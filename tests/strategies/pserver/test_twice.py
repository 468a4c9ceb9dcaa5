"""A request that comes a second time, at once or after others, changes nothing and is answered as before."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.strategies.pserver.harness import Bare, Cluster, config
from tests.strategies.pserver.states import whole
from trainer.optim.schedules import Plateau
from trainer.strategies.pserver.protocol.messages import CREATES, WANTS_DENSE, Kind, Message, Record, Verb, text
from trainer.strategies.pserver.worker.requests import Request

NONE = np.empty(0, dtype=np.int64)


class Play:
    """Two workers at one server.

    Args:
        meanwhile: something is done between a request's answer and its copy.
    """

    def __init__(self, cluster: Cluster, folder: Path, meanwhile: bool) -> None:
        self.cluster, self.folder, self.meanwhile = cluster, folder, meanwhile
        [self.server] = cluster.servers
        self.first, self.second = Bare(cluster, 0), Bare(cluster, 1)

    def begin(self) -> None:
        self.first.begin()

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


def start(play: Play) -> None:
    layout = {"dtype": "float64", "last": True, "pieces": [["p", 0, 4]], "tables": []}
    records = text(layout), Record(Kind.DENSE, np.ones(4))
    one, other = play.twice(play.first, Verb.START, *records, then=lambda: play.push(play.second, 5.0))
    assert one.verb == other.verb == Verb.DONE
    assert play.ask(play.first, Verb.PULL, clock=0).verb == Verb.DONE
    pulled = Message(Verb.PULL, flags=WANTS_DENSE | CREATES)
    [answer] = play.first.client.wait([play.first.client.ask(0, pulled)])
    assert answer.need(Kind.DENSE).tolist() == [1.0 + 5.0 * play.meanwhile] * 4


def meet(play: Play) -> None:
    play.begin()
    numbers = [Record(Kind.NUMBERS, np.array([n])) for n in (1.0, 20.0, 300.0, 4000.0)]
    waiting = play.first.client.ask(0, Message(Verb.MEET, clock=1, records=[numbers[0]]))
    play.first.client.connections.send(0, waiting.frames)  # a copy while the other is awaited

    def next_one() -> None:
        later = play.first.client.ask(0, Message(Verb.MEET, clock=2, records=[numbers[2]]))
        assert play.ask(play.second, Verb.MEET, numbers[3], clock=2).need(Kind.NUMBERS).tolist() == [4300.0]
        assert play.first.client.wait([later])[0].need(Kind.NUMBERS).tolist() == [4300.0]

    one, other = play.twice(play.second, Verb.MEET, numbers[1], clock=1, then=next_one)
    [mine] = play.first.client.wait([waiting])
    for answer in (one, other, mine, play.again(play.first, waiting)):
        assert answer.need(Kind.NUMBERS).tolist() == [21.0] and answer.need(Kind.IDS).tolist() == [0, 1]


def commit(play: Play) -> None:
    play.begin()
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


def fence(play: Play) -> None:
    play.begin()
    work = Record(Kind.WORK, np.array([[0, 7, 0, 3]]))
    [message] = play.second.gradient(np.ones(4), NONE, 0.0, -1.0, 1)
    message.records.append(work)
    play.second.client.wait(play.second.client.push([message]))
    lives: list[Bare] = []

    def new_life() -> None:
        lives.append(Bare(play.cluster, 1))
        play.push(lives[0], 10.0)

    body = text({"rank": 1, "life": play.second.client.life, "epoch": 0, "block": 7})
    one, other = play.twice(play.first, Verb.FENCE, body, then=new_life)
    assert one.need(Kind.WORK).tolist() == other.need(Kind.WORK).tolist() == [[0, 7, 0, 3]]
    for life in lives:  # is not the one that was fenced
        play.push(life, 100.0)
        life.die()
    assert play.dense() == [1.0 + 110.0 * play.meanwhile] * 4
    assert play.server.members.present() == ([0, 1] if play.meanwhile else [0])


def rate(play: Play) -> None:
    play.begin()
    assert play.server.parameters.shard is not None
    schedule = Plateau(10, 10)
    play.server.parameters.shard.schedule = schedule
    half, quarter = (text({"scale": s}) for s in (0.5, 0.25))
    play.twice(play.first, Verb.RATE, half, then=lambda: play.ask(play.first, Verb.RATE, quarter))
    assert schedule.scale == (0.25 if play.meanwhile else 0.5)


def shrink(play: Play) -> None:
    """What was old when the request came first is dropped, and nothing that was not."""
    play.begin()

    def push(row: int, age: int) -> None:
        play.first.client.wait(play.first.client.push(play.first.gradient(np.ones(4), np.array([row]), 1.0, -1.0, age)))

    push(1, 500)
    push(2, 1000)
    play.twice(play.first, Verb.SHRINK, text({"age": 400}), then=lambda: push(3, 1500))
    play.first.client.wait([play.first.client.ask(0, Message(Verb.STATS))])  # the copy is done
    assert play.server.parameters.shard is not None
    kept = whole(play.server.parameters.shard.tables[1].state())["ids"].tolist()
    assert kept == ([2, 3] if play.meanwhile else [2])


def _holders(play: Play) -> dict[int, int]:
    return {block: holder.rank for block, holder in play.server.leases.epoch.out.items()}


def lease(play: Play) -> None:
    play.begin()
    body = text({"epoch": 0, "blocks": 2, "done": []})
    one, other = play.twice(play.first, Verb.LEASE, body, then=lambda: play.ask(play.second, Verb.LEASE, body))
    assert one.text()["block"] == other.text()["block"] == 0
    asked = [play.ask(play.first, Verb.LEASE, body).text()["block"] for _ in range(1 - play.meanwhile)]
    assert asked == [1] * len(asked)
    out = {0: 0, 1: 1} if play.meanwhile else {0: 0, 1: 0}
    assert _holders(play) == out


def lease_that_had_to_wait(play: Play) -> None:
    play.begin()
    body = text({"epoch": 0, "blocks": 1, "done": []})
    assert play.ask(play.second, Verb.LEASE, body).text()["block"] == 0
    gone = text({"rank": 1, "life": play.second.client.life, "epoch": 0, "block": 0})
    one, other = play.twice(play.first, Verb.LEASE, body, then=lambda: play.ask(play.first, Verb.FENCE, gone))
    assert one.text()["block"] == other.text()["block"] == -1, "a block that nobody would work on"
    assert play.ask(play.first, Verb.LEASE, body).text()["block"] == (0 if play.meanwhile else -1)


def lease_of_long_ago(play: Play) -> None:
    play.begin()
    bodies = [text({"epoch": 0, "blocks": 3, "done": done}) for done in ([], [0])]
    play.twice(play.first, Verb.LEASE, bodies[0], then=lambda: play.ask(play.first, Verb.LEASE, bodies[1]))
    assert _holders(play) == ({1: 0} if play.meanwhile else {0: 0})


def save(play: Play) -> None:
    play.begin()
    play.server.saving.run_dir = play.folder
    body = text({"folder": str(play.folder / "persistables")})

    def saved() -> list[tuple[str, int, bytes]]:
        files = sorted(p for p in play.folder.rglob("*") if p.is_file())
        return [(p.name, p.stat().st_mtime_ns, p.read_bytes()) for p in files]

    before: list[Any] = []

    def go_on() -> None:
        before[:] = saved()
        play.push(play.first, 1.0)

    play.twice(play.first, Verb.SAVE, body, then=go_on)
    assert [name for name, *_ in saved()] == ["server-0.safetensors", "server-0.seal"]
    assert not play.meanwhile or saved() == before


MODES: dict[Callable[[Play], None], str] = {
    start: "async",
    meet: "async",
    commit: "sync",
    fence: "async",
    shrink: "async",
    rate: "sync",
    lease: "async",
    lease_that_had_to_wait: "async",
    lease_of_long_ago: "async",
    save: "async",
}


@pytest.mark.parametrize("meanwhile", [False, True], ids=["at once", "late"])
@pytest.mark.parametrize("request_", MODES, ids=lambda f: f.__name__)
def test_request_that_comes_twice_is_done_once(
    tmp_path: Path, request_: Callable[[Play], None], meanwhile: bool
) -> None:
    own = {"clip_norm": 100.0} if request_ is commit else {}
    with Cluster(config(MODES[request_], 2, 1, **own)) as cluster:
        play = Play(cluster, tmp_path, meanwhile)
        try:
            request_(play)
        finally:
            for worker in (play.first, play.second):
                worker.die()
