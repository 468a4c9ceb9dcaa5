"""Who is silent, and how servers end when nobody is left."""

from __future__ import annotations

import time

import pytest

from tests.pace import patient
from tests.strategies.pserver.harness import Bare, Cluster, Sum, config, push_all
from trainer.errors import RunFailed
from trainer.strategies.pserver.protocol.messages import WANTS_DENSE, Message, Verb
from trainer.strategies.pserver.server.members import Members


def test_time_in_which_the_server_is_busy_is_nobodys_silence() -> None:
    clock = [0.0]
    members = Members(2, 10.0, lambda: clock[0])
    members.hello(0, 7)
    members.hello(1, 8)
    clock[0] = 30.0  # of which it took 25 to load tables
    members.deaf(25.0)
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
    with pytest.raises(RunFailed, match=said), Cluster(config("async", 1, 1, lost_after_s=0.3)) as cluster:
        Bare(cluster, 0).die()
        cluster.threads[0].join(600)
        assert cluster.store.get("fenced/worker/0")


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
            RunFailed, match=rf"^worker 1 did not arrive at the update of the parameters within {timeout_s:g} s"
        ):
            ahead.wait([ahead.ask(0, Message(Verb.PULL, clock=2, flags=WANTS_DENSE))])
        push_all(workers[1], Sum(0, 3, 1), -1.0)
        ahead.wait([ahead.ask(0, Message(Verb.PULL, clock=2, flags=WANTS_DENSE))])
        for worker in workers:
            worker.die()
