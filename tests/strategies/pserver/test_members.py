"""Who is silent, and how servers end when nobody is left."""

from __future__ import annotations

import time

import numpy as np
import pytest

from tests.pace import patient, wait_for
from tests.strategies.pserver.harness import Bare, Cluster, Sum, config, push_all
from trainer.errors import Missing
from trainer.strategies.pserver.protocol.messages import (
    STOPS,
    WANTS_DENSE,
    Kind,
    Malformed,
    Message,
    Record,
    Verb,
    text,
)
from trainer.strategies.pserver.server import members as members_module
from trainer.strategies.pserver.server.answers import NotYet
from trainer.strategies.pserver.server.machine import Server
from trainer.strategies.pserver.server.members import MOST_LIVES, Members, Watermark
from trainer.strategies.pserver.server.totals import Meetings
from trainer.strategies.pserver.worker.requests import Fenced


def test_time_in_which_the_server_is_busy_is_nobodys_silence() -> None:
    clock = [0.0]
    members = Members(2, 10.0, lambda: clock[0])
    members.hello(0, 7)
    members.hello(1, 8)
    clock[0] = 30.0  # of which it took 25 to load tables
    members.away(25.0)
    assert members.silent() == []
    clock[0] = 36.0
    members.heard(1)
    assert members.silent() == [0]


def test_busy_server_loses_nobody() -> None:
    silence = patient(0.6)
    with Cluster(config("async", 1, 1, lost_after_s=silence)) as cluster:
        worker, [server] = Bare(cluster, 0), cluster.servers
        stats = server.verbs[Verb.STATS]
        server.verbs[Verb.STATS] = lambda message: (time.sleep(2.5 * silence), stats(message))[1]
        worker.begin()
        worker.client.wait([worker.client.ask(0, Message(Verb.STATS))])
        time.sleep(silence / 2)
        assert server.members.present() == [0]
        worker.close()


def test_servers_without_any_worker_left_end_with_an_error() -> None:
    said = r"no worker is left \(worker 0: nothing was heard of it for 0.3 s"
    with pytest.raises(Missing, match=said) as ended, Cluster(config("async", 1, 1)) as cluster:
        worker = Bare(cluster, 0)
        worker.begin()
        worker.die()
        cluster.servers[0].members.lost_after_s = 0.3
        cluster.threads[0].join(600)
        assert cluster.store.get("fenced/worker/0")
    assert ended.value.who == ("worker 0",)


def test_run_ends_at_once_when_the_first_worker_is_lost_before_the_start() -> None:
    with (
        pytest.raises(Missing, match=r"worker 0 was lost: its process ended \(the start was its to make\)"),
        Cluster(config("async", 2, 1)) as cluster,
    ):
        other = Bare(cluster, 1)
        waits = other.client.ask(0, Message(Verb.PULL))
        cluster.store.set("lost/worker/0", "its process ended")
        with pytest.raises(Missing, match="worker 0 was lost") as told:
            other.client.wait([waits])
        assert told.value.follows and told.value.who == ("worker 0",), "from the end of worker 0"
        cluster.threads[0].join(600)
        other.die()


def test_worker_whose_goodbye_was_lost_has_left_when_its_process_has_ended_well() -> None:
    with Cluster(config("async", 2, 1)) as cluster:
        workers, [server] = [Bare(cluster, rank) for rank in (0, 1)], cluster.servers
        workers[0].begin()
        workers[1].die()
        cluster.store.set("done/worker/1", "its process has done its work")
        wait_for(lambda: server.members.present() == [0], 60, "worker 1 leaves")
        assert server.members.all[1].left and not server.members.all[1].lost
        workers[0].close()


def test_worker_that_one_server_has_lost_is_lost_at_all() -> None:
    with Cluster(config("async", 2, 2)) as cluster:
        workers, [one, other] = [Bare(cluster, rank) for rank in (0, 1)], cluster.servers
        workers[0].begin()
        cluster.store.set(f"fenced/worker/1/{workers[1].client.life}", "nothing was heard of it for 3 s")
        wait_for(lambda: one.members.present() == other.members.present() == [0], 60, "both lose worker 1")
        with pytest.raises(Fenced):
            workers[1].client.wait([workers[1].client.ask(0, Message(Verb.STATS))])
        again = Bare(cluster, 1)  # another life is another worker
        assert one.members.present() == other.members.present() == [0, 1]
        workers[1].die()
        again.close()
        workers[0].close()


def test_late_hello_of_a_life_that_is_over_does_not_end_the_next_one() -> None:
    """A server that was stopped may read what a dead process has sent after what its successor has sent."""
    with Cluster(config("async", 2, 1)) as cluster:
        workers, [server] = [Bare(cluster, rank) for rank in (0, 1)], cluster.servers
        workers[0].begin()
        for note in ("lost/worker/1/4711", "fenced/worker/1/4713"):  # the launcher, and another server, know more
            cluster.store.set(note, "its process ended")
            late = workers[1].client.ask(0, Message(Verb.HELLO, sequence=int(note.rpartition("/")[2])))
            with pytest.raises(Fenced, match="was started again, or declared lost"):
                workers[1].client.wait([late])
        assert server.members.all[1].lives == [workers[1].client.life]
        workers[1].client.wait([workers[1].client.ask(0, Message(Verb.STATS))])
        for worker in workers:
            worker.close()


def test_first_cause_of_a_loss_is_told_whoever_declares_the_worker_lost_next() -> None:
    silence = "nothing was heard of it for 3 s"
    with Cluster(config("async", 2, 2)) as cluster:
        workers, [one, other] = [Bare(cluster, rank) for rank in (0, 1)], cluster.servers
        workers[0].begin()
        other.liveness.check_workers = lambda: None  # type: ignore[method-assign]  # it hears of the loss by FENCE first
        life = workers[1].client.life
        cluster.store.set(f"fenced/worker/1/{life}", silence)
        wait_for(lambda: one.members.present() == [0], 60, "one loses worker 1")
        body = text({"rank": 1, "life": life, "epoch": 0, "block": 0})
        workers[0].client.wait([workers[0].client.ask(1, Message(Verb.FENCE, records=[body]))])
        assert other.members.present() == [0] and other.members.all[1].lost == silence
        assert cluster.store.get("fenced/worker/1").decode() == silence
        workers[1].die()
        workers[0].close()


def by_clock(workers: int) -> tuple[Server, list[float]]:
    """A server of async whose workers, with lives from 5 on, have begun; its members go by that clock."""
    with Cluster(config("async", workers, 1, lost_after_s=10.0)) as cluster:
        [server] = cluster.servers
    clock = [100.0]
    server.members.now = lambda: clock[0]
    for rank in range(workers):
        server.members.hello(rank, rank + 5)
    server.parameters.ready = True
    return server, clock


def test_silent_worker_is_ended_before_it_is_lost_where_the_run_goes_on_without_it() -> None:
    """If its launcher does not end it, the others wait no longer; where nobody is left, or the run ends with it, nobody
    waits at all."""
    server, clock = by_clock(3)
    board, members = server.liveness.board, server.members
    clock[0] += 8.0
    members.heard(0)
    clock[0] += 2.5
    server.liveness.check_workers()
    notes = [f"silent/worker/{rank}/{rank + 5}" for rank in range(3)]
    assert [board.check([note]) for note in notes] == [False, True, True] and members.present() == [0, 1, 2]
    members.heard(2)
    server.liveness.check_workers()
    assert board.get(notes[2]) == b"", "it was heard again"
    members.all[2].heard -= 10.5
    server.liveness.check_workers()
    assert board.get(notes[2]) and members.present() == [0, 1, 2]
    board.set("lost/worker/1/6", "its process ended")
    server.liveness.check_workers()
    assert (
        members.present() == [0, 2]
        and members.all[1].lost == "nothing was heard of it for 10 s (strategy.lost_after_s)"
    )
    clock[0] += 3.0
    members.heard(0)
    server.liveness.check_workers()
    assert (
        members.present() == [0] and members.all[2].lost == "nothing was heard of it for 10 s (strategy.lost_after_s)"
    )
    clock[0] += 10.5
    server.liveness.check_workers()
    assert members.present() == [] and not board.check([notes[0]])


def test_server_that_looks_late_gives_the_launcher_of_a_silent_worker_its_time() -> None:
    """The simulator found it, seed 2205896: silent and lost at one look, and it might wake."""
    server, clock = by_clock(2)
    clock[0] += 13.5
    server.members.heard(0)
    for late, present in ((0.0, [0, 1]), (0.3, [0, 1]), (1.5, [0])):
        clock[0] += late
        server.liveness.check_workers()
        assert server.members.present() == present


def test_server_that_was_stopped_gives_everybody_its_time_again() -> None:
    """Whether it was stopped while it waited for messages or while it worked."""
    with Cluster(config("sync", 2, 1, lost_after_s=10.0)) as cluster:
        [server] = cluster.servers
    clock = [100.0]
    for part in (server, server.members, server.requests, server.work):
        part.now = lambda: clock[0]
    server.ended_turn = server.checked_at = server.work.moved = clock[0]
    for rank in (0, 1):
        server.members.hello(rank, rank + 1)
    clock[0] += 25.0  # stopped in poll
    server.turn([])
    assert server.members.present() == [0, 1] and server.members.silent() == []
    check_workers = server.liveness.check_workers

    def slow() -> None:
        """What has waited for a worker that is lost now, such as a SAVE, takes its time."""
        clock[0] += 25.0

    server.liveness.check_workers = slow  # type: ignore[method-assign]
    clock[0] += 0.2
    server.turn([])
    server.liveness.check_workers = check_workers  # type: ignore[method-assign]
    assert server.members.silent() == []
    for _ in range(60):  # 12 s in which it listened, and heard of one
        clock[0] += 0.2
        server.members.heard(0)
        if server.members.silent():
            break
    assert server.members.silent() == [1]


def test_pull_that_the_staleness_bound_holds_back_ends_with_the_name_of_the_slowest() -> None:
    timeout_s = patient(1)
    with Cluster(config("ssp", 3, 1, staleness=1, timeout_s=timeout_s)) as cluster:
        workers = [Bare(cluster, rank) for rank in range(3)]
        workers[0].begin()
        for worker, steps in zip(workers, (2, 0, 1), strict=True):
            push_all(worker, Sum(0, 3, steps), -1.0)
        ahead, _, near = (w.client for w in workers)
        near.wait([near.ask(0, Message(Verb.PULL, clock=1, flags=WANTS_DENSE))])  # as far as it may be
        with pytest.raises(
            Missing, match=rf"^worker 1 did not arrive at the update of the parameters within {timeout_s:g} s"
        ) as told:
            ahead.wait([ahead.ask(0, Message(Verb.PULL, clock=2, flags=WANTS_DENSE))])
        assert told.value.who == ("worker 1",)
        push_all(workers[1], Sum(0, 3, 1), -1.0)
        ahead.wait([ahead.ask(0, Message(Verb.PULL, clock=2, flags=WANTS_DENSE))])
        for worker in workers:
            worker.die()


def test_life_that_begins_later_leaves_no_gap() -> None:
    mark = Watermark(3, above=[5, 9])
    mark.begin(8)  # 4, 6, 7 and 8 are of a life that is over, and never come
    assert (mark.done, mark.above) == (9, set())
    mark.begin(2)  # a late copy of the first hello
    assert mark.done == 9
    with pytest.raises(Malformed):
        mark.begin(10**9)


def test_worker_has_so_many_lives_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server keeps the number of each: what a worker can make it keep has an end."""
    assert MOST_LIVES == 10_000
    monkeypatch.setattr(members_module, "MOST_LIVES", 3)
    members = Members(2, 10.0, lambda: 0.0)
    for life in (7, 8, 9, 9, 7):  # hellos may come twice
        members.hello(0, life)
    with pytest.raises(Malformed, match="worker 0 in its life number 4"):
        members.hello(0, 10)
    assert members.all[0].lives == [7, 8, 9]
    members.hello(1, 10)
    for life in (7, 8, 11):
        members.fence(0, life)
    with pytest.raises(Malformed, match="worker 0 has 3 lives that are over"):
        members.fence(0, 12)
    assert members.all[0].fenced == {7, 8, 11}


def test_worker_that_comes_back_takes_part_when_it_is_let_in_and_not_before() -> None:
    members = Members(2, 10.0, lambda: 0.0)
    members.hello(0, 7)
    members.hello(1, 8)
    members.lose(1, "its process ended")
    members.hello(1, 9, coming=True)
    assert members.present() == [0] and not members.admit(1, 2), "it may pull, and nobody waits for it"
    assert members.admit(1, 1), "its life before is over"


def test_what_a_life_brought_to_a_stop_does_not_count_for_the_next_life() -> None:
    members = Members(2, 10.0, lambda: 0.0)
    steps = [np.array([0.0, 21.0]), np.array([0.0, -1.0]), np.array([20.0, 0.0])]
    for rank in range(2):
        members.hello(rank, 7 + rank)
    stops = list[int]()
    meetings = Meetings(members, lambda: stops.append(1))

    def bring(rank: int, values: np.ndarray) -> list[float] | None:
        message = Message(Verb.MEET, rank=rank, clock=1, flags=STOPS, records=[Record(Kind.NUMBERS, values)])
        try:
            return list(meetings.meet(message).need(Kind.NUMBERS))
        except NotYet:
            return None

    assert bring(1, steps[0]) is None
    members.lose(1, "its process ended")
    members.hello(1, 9, coming=True)
    members.all[1].coming = False
    meetings.forget(1)
    assert bring(0, steps[2]) is None, "the stop is not complete before the new life stands still, too"
    assert not stops
    assert bring(1, steps[1]) == [20.0, -1.0]
    assert stops == [1], "it is told once all stand still"
