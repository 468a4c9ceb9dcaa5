"""What is told of servers while a run goes on is what they and the first worker's queue really do."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.strategies.pserver.harness import Bare, Cluster, Sum, config
from trainer.strategies.pserver.protocol.messages import Message, Verb, text
from trainer.strategies.pserver.worker import gauges
from trainer.strategies.pserver.worker.async_and_ssp import PserverAsync


def ready(cluster: Cluster, run: dict[str, Any]) -> tuple[Bare, PserverAsync]:
    """A worker on servers that hold the start, and who makes its messages and looks at the servers through its
    client."""
    bare = Bare(cluster, 0)
    bare.begin()
    bare.die()
    worker = PserverAsync(run["config"]["strategy"], cluster.seat("worker", 0))
    bare.client = worker.client
    return bare, worker


def test_queue_is_what_a_server_has_not_answered_of_this_worker_s_pushes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gauges, "GAUGES_EVERY_S", -1.0)
    run = config("async", 1, 2)
    with Cluster(run) as cluster:
        bare, worker = ready(cluster, run)
        slow, go_on = cluster.servers[1], threading.Event()
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
        found: dict[str, float] = {}

        def measured() -> bool:
            found.update(worker.gauges())
            return "server1/waiting" in found

        worker.client.until(measured)
        assert found["server1/waiting"] == 0
        vectors, _ = bare.look(Sum.IDS)
        np.testing.assert_array_equal(vectors, [total.dense] * 2)
        worker.close()


def test_a_value_that_was_not_measured_anew_is_not_told_again_and_the_end_measures(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = config("async", 1, 1)
    with Cluster(run) as cluster:
        bare, worker = ready(cluster, run)
        told: list[dict[str, float]] = []
        total = Sum(0, 1, 3)

        def look() -> bool:
            told.append(worker.gauges())
            return len(told[-1]) > 1

        worker.client.until(look)  # the first measurement: rates need a second one
        assert set(told[-1]) - {"server0/staleness"} == {"server0/queue", "server0/waiting", "server0/rows"}
        monkeypatch.setattr(gauges, "GAUGES_EVERY_S", 1000.0)
        for n in range(3):  # nobody measures again
            worker.client.wait(list(worker.client.push(total.messages(bare, n, -1.0))))
            assert set(worker.gauges()) == {"server0/queue"}
        before = worker.gauge.before[0]
        last = worker.last_gauges()
        seconds = worker.gauge.before[0]["seconds"] - before["seconds"]
        assert last["server0/pushes_per_s"] == pytest.approx(3 / seconds)
        worker.close()


def test_rates_at_the_end_are_not_those_of_its_last_milliseconds() -> None:
    """A question may be under way then, or just answered; a run that is over sooner than that has rates, too."""
    answers = iter([(10.0, 1000), (12.0, 1200), (12.01, 1200), (12.3, 1200)])

    def ask(server: int, message: Message) -> SimpleNamespace:
        seconds, count = next(answers)
        told = {"seconds": seconds, "waiting": 0, "rows": 1, "staleness": {}, **dict.fromkeys(gauges.COUNTS, count)}
        return SimpleNamespace(server=0, answer=Message(Verb.DONE, records=[text(told)]))

    client = SimpleNamespace(servers=[0], ask=ask, wait=lambda requests: None)
    counted = gauges.Gauges(client)  # type: ignore[arg-type]
    counted.requests = counted._ask()
    assert "server0/pushes_per_s" not in counted._statistics(counted.requests)
    counted.requests = counted._ask()
    assert counted.last()["server0/pushes_per_s"] == pytest.approx(200 / 2.01)
    assert "server0/pushes_per_s" not in counted.last(), "0.3 s later"

    answers = iter([(10.0, 1000), (10.1, 1010)])
    counted = gauges.Gauges(client)  # type: ignore[arg-type]
    counted.requests = counted._ask()
    assert counted.last()["server0/pushes_per_s"] == pytest.approx(100.0)
