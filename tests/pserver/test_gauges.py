"""What is told of servers while a run goes on is what they and the first worker's queue really do."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from tests.pserver.harness import Bare, Cluster, Sum, config
from trainer.strategies.pserver import worker as worker_module
from trainer.strategies.pserver.asynchronous import PserverAsync
from trainer.strategies.pserver.wire import Message, Verb


def test_queue_is_what_a_server_has_not_answered_of_this_worker_s_pushes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "GAUGES_EVERY_S", -1.0)
    run = config("async", 1, 2)
    with Cluster(run) as cluster:
        bare = Bare(cluster, 0)
        bare.begin()
        bare.die()
        worker = PserverAsync(run["config"]["strategy"], cluster.seat("worker", 0))
        bare.client, slow, go_on = worker.client, cluster.servers[1], threading.Event()
        push = slow.verbs[Verb.PUSH]

        def held(message: Message) -> Any:
            assert go_on.wait(20)
            return push(message)

        slow.verbs[Verb.PUSH] = held
        total = Sum(0, 1, 3)
        requests = [r for n in range(3) for r in worker.client.push(total.messages(bare, n, -1.0))]
        worker.client.wait([r for r in requests if r.server == 0])
        told = worker.gauges()
        assert (told["server0/queue"], told["server1/queue"]) == (0, 3)
        go_on.set()
        worker.client.wait(requests)
        told = worker.gauges()
        assert (told["server0/queue"], told["server1/queue"]) == (0, 0)
        worker.client.until(lambda: "server1/waiting" in worker.gauges())
        assert worker.gauges()["server1/waiting"] == 0
        vectors, _ = bare.look(Sum.IDS)
        np.testing.assert_array_equal(vectors, [total.dense] * 2)
        worker.leave()
