"""How many samples a run has trained: the servers count those behind the pushes that they have applied, whoever made
them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from tests.strategies.pserver.harness import Cluster, config
from tests.strategies.pserver.test_versions import net
from trainer.strategies.pserver.worker.async_and_ssp import PserverAsync
from trainer.strategies.pserver.worker.geo import PserverGeo
from trainer.strategies.pserver.worker.sync import PserverSync
from trainer.strategies.pserver.worker.worker import PserverWorker

KINDS: dict[str, type[PserverWorker]] = {"async": PserverAsync, "geo": PserverGeo, "sync": PserverSync}


def placed(kind: type[PserverWorker], cluster: Cluster, rank: int) -> PserverWorker:
    node = {k: v for k, v in cluster.run["config"]["strategy"].items() if k != "_target_"}
    worker = kind(node, cluster.seat("worker", rank))
    worker.setup(net(), cluster.updaters)
    return worker


def update(worker: PserverWorker, samples: int) -> None:
    worker.prepare(SimpleNamespace(inputs=torch.zeros(1), on_host=None, work=None, last=True))
    for p in worker.model.parameters():
        p.grad = torch.ones_like(p)
    worker.step(samples)


@pytest.mark.parametrize("mode", ["async", "geo", "sync"])
def test_samples_of_a_worker_that_is_gone_count(mode: str) -> None:
    run = config(
        mode, 2, 2, **({} if mode == "sync" else {"launch_barrier": False}), **({"k_steps": 2} if mode == "geo" else {})
    )
    with Cluster(run) as cluster, ThreadPoolExecutor(2) as pool:
        first, gone = pool.map(lambda rank: placed(KINDS[mode], cluster, rank), (0, 1))
        for samples in (5, 3):  # the last batch is smaller
            list(pool.map(lambda worker, samples=samples: update(worker, samples), (first, gone)))  # type: ignore[misc]
        list(pool.map(lambda worker: worker.finish_pushes(), (first, gone)))
        gone.client.close()  # and no word more
        assert first.samples_applied() == 2 * (5 + 3)
        for server in cluster.servers:
            _, numbers = server.parameters.opened()[0].state()
            assert numbers["samples"] == server.statistics()["samples"] == 2 * (5 + 3)
        first.client.close()


def test_a_run_that_goes_on_counts_on_and_a_server_that_lacks_some_of_it_takes_the_others_word() -> None:
    with Cluster(config("async", 1, 2, launch_barrier=False)) as cluster:
        worker = placed(PserverAsync, cluster, 0)
        update(worker, 4)
        worker.finish_pushes()
        shards = [server.parameters.opened()[0] for server in cluster.servers]
        saved = [shard.state() for shard in shards]
        tensors = [{name: torch.from_numpy(value.whole()) for name, value in made.items()} for made, _ in saved]
        told = [{**numbers, "samples": count} for (_, numbers), count in zip(saved, (70, 64), strict=True)]
        for shard in shards:
            shard.load([*zip(tensors, told, strict=True)])
        update(worker, 3)
        worker.finish_pushes()
        assert [shard.samples for shard in shards] == [73, 73]
        assert worker.samples_applied() == 73
        worker.client.close()
