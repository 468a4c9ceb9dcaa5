"""Who is silent, and how servers end when nobody is left."""

from __future__ import annotations

import pytest

from tests.pace import patient, wait_for
from tests.strategies.pserver.harness import Bare, Cluster, Sum, config, push_all
from trainer.errors import Missing
from trainer.strategies.pserver.protocol.messages import WANTS_DENSE, Malformed, Message, Verb, text
from trainer.strategies.pserver.server import members as members_module
from trainer.strategies.pserver.server.members import MOST_LIVES, Members
from trainer.strategies.pserver.worker.requests import Fenced


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
