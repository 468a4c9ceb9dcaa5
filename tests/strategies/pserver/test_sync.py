"""The worker's side of sync: how far workers may be apart."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.pace import wait_for
from tests.strategies.pserver.harness import Bare, Cluster, config
from tests.strategies.pserver.test_versions import net
from trainer.strategies.pserver.worker.sync import PserverSync


def update(worker: PserverSync) -> None:
    worker.prepare(SimpleNamespace(inputs=torch.zeros(1), on_host=None, work=None, last=True))
    for p in worker.model.parameters():
        p.grad = torch.ones_like(p)
    worker.step(1)


def test_update_after_which_all_save_is_one_that_nobody_ends_before_the_first_worker_has_said_so() -> None:
    """The first one says it after its first update. The other one has not to wait for it before its third."""
    run, ended = config("sync", 2), []
    node = {k: v for k, v in run["config"]["strategy"].items() if k != "_target_"}
    with Cluster(run) as cluster, ThreadPoolExecutor(2) as pool:

        def placed(rank: int) -> PserverSync:
            worker = PserverSync(node, cluster.seat("worker", rank))
            worker.setup(net(), cluster.updaters)
            return worker

        def trains(worker: PserverSync) -> None:
            for number in (1, 2, 3):
                update(worker)
                ended.append(number)

        first, other = pool.map(placed, (0, 1))
        update(first)
        goes_on = pool.submit(trains, other)
        wait_for(lambda: len(ended) == 2, 60, "the other is an update ahead")
        assert first.next_meeting(1) == 3
        update(first)
        update(first)
        goes_on.result(60)
        list(pool.map(lambda worker: worker.close(), (first, other)))


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_gradients_are_added_in_the_order_of_the_ranks_whoever_comes_first(order: tuple[int, ...]) -> None:
    """So that two runs give the same numbers to the last bit."""
    ids, values = np.array([3]), {0: 3e16, 1: 3.0, 2: -3e16}  # 3e16 + 3 is 3e16 + 4 in float64
    assert (values[0] + values[1]) + values[2] == 4.0
    with Cluster(config("sync", 3, 1)) as cluster:
        workers = [Bare(cluster, rank) for rank in range(3)]
        workers[0].begin()
        for rank in order:
            [message] = workers[rank].gradient(np.full(4, values[rank]), ids, values[rank], -1.0, 1)
            workers[rank].client.wait(workers[rank].client.push([message]))
        vectors, rows = workers[0].look(ids)
        assert vectors.tolist() == [[4.0 / 3] * 4] and rows == {3: 4.0 / 3}
        for worker in workers:
            worker.die()
