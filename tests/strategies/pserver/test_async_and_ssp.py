"""A worker of async: what its parameters contain when it computes, and what it sends while pushes are under way."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.strategies.pserver.harness import Cluster, config
from tests.strategies.pserver.test_versions import net, placed
from trainer.config.schema import PserverAsyncStrategy
from trainer.strategies.pserver.protocol.messages import Kind, Message, Verb
from trainer.strategies.pserver.worker.async_and_ssp import PserverAsync
from trainer.strategies.pserver.worker.requests import Request


def batch(last: bool = True) -> SimpleNamespace:
    return SimpleNamespace(inputs=torch.zeros(1), on_host=None, work=None, last=last)


def give(worker: PserverAsync, gradient: float) -> None:
    for p in worker.model.parameters():
        p.grad = torch.full_like(p, gradient)


def contained(run: dict[str, Any], steps: int, merged: int = 1) -> list[float]:
    """How many of its pushes are in a lone worker's parameters at each batch; the batch after it is always known.

    Args:
        merged: batches of an update.
    """
    start, found = next(net().parameters()), []
    with Cluster(run) as cluster:
        worker = placed(cluster)
        for number in range(steps * merged):
            worker.expect(batch())
            worker.prepare(batch((number + 1) % merged == 0))
            found.append((start - next(worker.model.parameters())).mean().item())  # sgd with a learning rate of 1
            if (number + 1) % merged:
                continue
            give(worker, 1.0)
            worker.step(1)
        worker.finish_pushes()
        worker.close()
    return found


@pytest.mark.parametrize(
    ("early", "updates", "expected"),
    [
        (False, 1, [0, 1, 2, 3, 4, 5, 6, 7]),
        (True, 1, [0, 0, 1, 2, 3, 4, 5, 6]),
        (False, 3, [0, 0, 0, 3, 3, 3, 6, 6]),
        (True, 3, [0, 0, 0, 2, 2, 2, 5, 5]),
        ("auto", 1, [0, 1, 2, 3, 4, 5, 6, 7]),  # a model without tables
    ],
)
def test_parameters_asked_for_early_lack_the_last_push_and_those_asked_for_after_it_contain_it(
    early: bool | str, updates: int, expected: list[int]
) -> None:
    run = config(
        "async",
        1,
        2,
        launch_barrier=False,
        slice_above=4,
        independent_recv_thread=early,
        min_send_grad_num_before_recv=updates,
    )
    assert contained(run, len(expected)) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("asked", "tables", "early"), [("auto", 0, False), ("auto", 2, True), (False, 2, False), (True, 0, True)]
)
def test_auto_asks_early_for_models_with_tables_alone(asked: bool | str, tables: int, early: bool) -> None:
    worker = PserverAsync.__new__(PserverAsync)
    worker.options, worker.remote = PserverAsyncStrategy(independent_recv_thread=asked), [None] * tables
    assert worker.early is early


@pytest.mark.parametrize(
    ("early", "expected"), [(False, [0, 0, 0, 1, 1, 1, 2, 2, 2]), (True, [0, 0, 0, 0, 0, 0, 1, 1, 1])]
)
def test_all_batches_of_an_update_see_the_same_parameters(early: bool, expected: list[int]) -> None:
    run = config("async", 1, 2, launch_barrier=False, slice_above=4, independent_recv_thread=early)
    assert contained(run, 3, merged=3) == pytest.approx(expected, abs=1e-12)


def test_gradients_are_merged_while_the_queue_is_full_and_then_the_worker_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = config("async", 1, launch_barrier=False, send_queue_size=1, max_merge_var_num=3)
    pushed: list[tuple[float, float]] = []
    under_way: list[Request] = []

    def push(messages: list[Message], then: Any = None) -> list[Request]:
        pushed.append((messages[0].need(Kind.NUMBERS)[1], float(np.mean(messages[0].need(Kind.DENSE)))))
        under_way[:] = [Request(0, message, [], 0.0, 0.0) for message in messages]
        return under_way.copy()

    def until(room: Callable[[], bool]) -> None:
        assert room() == (not any(r.answer is None for r in under_way))
        for request in under_way:
            request.answer = Message(Verb.DONE)
        assert room()

    with Cluster(run) as cluster:
        worker = placed(cluster)
        with monkeypatch.context() as patch:
            patch.setattr(worker.client, "push", push)
            patch.setattr(worker.client, "until", until)
            for number in range(4):  # nothing is answered before the worker waits for room
                give(worker, 10.0**number)
                worker.step(2)
            assert pushed == [(2, 1.0), (6, pytest.approx(1110.0))]
            under_way[0].answer = Message(Verb.DONE)
            give(worker, 7.0)
            worker.step(2)
            assert pushed[2:] == [(2, 7.0)]
            worker.pushes = []
        worker.close()


def test_io_threads_are_as_many_as_asked_for() -> None:
    run = config("async", 1, launch_barrier=False, thread_pool_size=3)
    with Cluster(run) as cluster:
        worker = placed(cluster)
        assert worker.client.connections.context.io_threads == 3
        worker.close()
