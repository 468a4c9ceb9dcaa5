"""Who waits for work waits as long as others' blocks move on, and is told who has one when nothing does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.strategies.pserver.harness import Bare, Cluster, config
from trainer.errors import RunFailed
from trainer.strategies.pserver.protocol.messages import STOPS, Kind, Message, Record, Verb, text


def ask(worker: Bare, done: list[int]) -> dict[str, Any]:
    """Ask for one of two blocks of epoch 0."""
    told = text({"epoch": 0, "blocks": 2, "done": done})
    [answer] = worker.client.wait([worker.client.ask(0, Message(Verb.LEASE, records=[told]))])
    return dict(answer.text())


def test_a_slow_block_is_waited_for_while_pushes_come_and_then_its_holder_is_named() -> None:
    with Cluster(config("async", 2, 1, launch_barrier=False)) as cluster:
        [server] = cluster.servers
        slow, quick = Bare(cluster, 0), Bare(cluster, 1)
        slow.begin()
        assert ask(slow, [])["block"] == 0 and ask(quick, [])["block"] == 1
        for batch in range(3):
            server.work.moved -= 30.0  # longer than timeout_s=20
            pushed = slow.gradient(np.ones(4), np.arange(3), 1.0, 1.0, batch + 1)
            pushed[0].records.append(Record(Kind.WORK, np.array([[0, 0, batch, batch + 1]])))
            slow.client.wait(slow.client.push(pushed))
            assert ask(quick, [1] if not batch else [])["block"] == -1
        server.work.moved -= 30.0
        stop = [Message(Verb.MEET, clock=1, flags=STOPS, records=[Record(Kind.NUMBERS, np.zeros(1))]) for _ in range(2)]
        met = [w.client.ask(0, message) for w, message in zip((slow, quick), stop, strict=True)]
        for worker, request in zip((slow, quick), met, strict=True):
            worker.client.wait([request])
        assert ask(quick, [])["block"] == -1  # all stood still: nobody hangs
        server.work.moved -= 30.0
        with pytest.raises(RunFailed, match=r"^worker 0 did not arrive at the end of a block of work within 20 s"):
            ask(quick, [])
        assert ask(slow, [0])["over"] and ask(quick, [])["over"]
        slow.die()
        quick.die()
